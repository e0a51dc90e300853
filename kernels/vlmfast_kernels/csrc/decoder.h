// A Llama-type decoder's layers over a few tokens of several sequences. Hidden states stay float32 between them.
//
// The threads go stage by stage; a stage shares out the rows, the columns of a weight, or the heads. Every
// number of a row is computed by the same operations in the same order whatever else is in the call.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "tile_attention.h"

namespace vlmfast {

constexpr int64_t kTile = 512;  // rows that pass all layers together; bounds the workspace

struct Layer {
    const float *attn_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm, k_norm [dim] or null
    Linear qkv, out, gate_up, down;
};

struct Decoder {
    int64_t num_layers, hidden, heads, groups, dim, intermediate;
    float eps;
    const Layer* layers;
    const float *cos, *sin;  // [positions, dim / 2]
    const float* norm;
    Linear head;

    int64_t repeat() const { return heads / groups; }
    bool attends_by_tiles() const { return vlmfast::attends_by_tiles(dim, repeat()); }
    int64_t block_rows() const { return attends_by_tiles() ? kQueries / repeat() : 1; }
};

// Rows of one call. A part is a sequence: consecutive rows that continue one page.
struct Batch {
    int64_t rows;
    float* hidden;              // [rows, hidden], updated
    const int64_t* positions;   // [rows]
    const int32_t* part;        // [rows]
    const int32_t* index;       // [rows]: place in its part
    bf16* const* pages;         // [parts] -> [layers, 2, groups, capacity, dim]
    const int64_t* capacities;  // [parts]
    const int32_t* lengths;     // [parts, layers]: tokens that the page holds already
};

// Rows whose attention is computed together: consecutive ones of one part.
struct Blocks {
    int64_t count;
    int32_t first[kTile + 1];  // and, behind the last, where it ends

    Blocks(const Batch& batch, int64_t first_row, int64_t rows, int64_t most) : count(0) {
        for (int64_t row = 0; row < rows; row++) {
            const bool joins = row && row - first[count - 1] < most &&
                               batch.part[first_row + row] == batch.part[first_row + row - 1];
            if (!joins) first[count++] = int32_t(row);
        }
        first[count] = int32_t(rows);
    }
};

struct Workspace {
    float* wide;   // [rows, wide_stride]: fused projections
    float* found;  // [rows, heads, slots, dim + 2]: attention, (values, max, sum) of a chunk
    bf16* query;   // [rows, heads, dim]
    void* inputs;  // Activations of the widest linear layer
    int64_t wide_stride, slots, bytes;

    Workspace(const Decoder& d, int64_t rows, int64_t slots, char* memory) : slots(slots) {
        auto take = [&](int64_t size) {
            char* const from = memory + bytes;
            bytes += round_up(size, 64);
            return from;
        };
        bytes = 0;
        const int64_t qkv = (d.heads + 2 * d.groups) * d.dim, mixed = d.heads * d.dim;
        wide_stride = round_up(std::max(qkv, 2 * d.intermediate), 16);
        wide = reinterpret_cast<float*>(take(rows * wide_stride * 4));
        found = reinterpret_cast<float*>(take(rows * d.heads * slots * (d.dim + 2) * 4));
        query = reinterpret_cast<bf16*>(take(rows * mixed * 2));
        inputs = take(Activations::bytes_for(rows, std::max({d.hidden, d.intermediate, mixed})));
    }
};

// Slots a row and head needs: few rows share out a long context, many have work enough without.
inline int64_t num_slots(const Decoder& d, int64_t rows, int64_t longest, int num_threads) {
    const int64_t blocks = round_up(rows, d.block_rows()) / d.block_rows();
    return blocks * d.groups < 8 * num_threads ? round_up(longest, kChunk) / kChunk : 1;
}

inline float inverse_rms(const float* x, int64_t width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(first_lanes(width - i), x + i);
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps);
}

// Writes value(i, lanes), 16 at a time, as a row of inputs.
template <class Value>
inline void put_row(Activations& to, int32_t format, int64_t row, int64_t width, const Value& value) {
    for (int64_t group = 0; group * kGroup < width; group++) {
        __m512 values[4];
        for (int v = 0; v < 4; v++) {
            const int64_t i = group * kGroup + 16 * v;
            values[v] = i < width ? value(i, first_lanes(width - i)) : _mm512_setzero_ps();
        }
        to.put(format, row, group, values);
    }
}

inline void put_normed(Activations& to, int32_t format, int64_t row, const float* x, const float* weight, int64_t width,
                float eps) {
    const __m512 factor = _mm512_set1_ps(inverse_rms(x, width, eps));
    put_row(to, format, row, width, [&](int64_t i, __mmask16 lanes) {
        const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), factor);
        return _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(lanes, weight + i));
    });
}

// One head of a query or key: norm (where there is one), rotation of the halves, rounding.
inline void turn(const Decoder& d, float* x, const float* norm, int64_t position, bf16* out) {
    if (norm) {
        const float factor = inverse_rms(x, d.dim, d.eps);
        for (int64_t i = 0; i < d.dim; i++) x[i] = x[i] * factor * norm[i];
    }
    const int64_t half = d.dim / 2;
    const float *const cos = d.cos + position * half, *const sin = d.sin + position * half;
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 a = _mm512_maskz_loadu_ps(lanes, x + i), b = _mm512_maskz_loadu_ps(lanes, x + half + i);
        const __m512 c = _mm512_maskz_loadu_ps(lanes, cos + i), s = _mm512_maskz_loadu_ps(lanes, sin + i);
        _mm256_mask_storeu_epi16(out + i, lanes, narrow(_mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s))));
        _mm256_mask_storeu_epi16(out + half + i, lanes, narrow(_mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s))));
    }
}

// The rows first_row .. first_row + rows - 1 of a batch in one layer.
struct LayerRun {
    const Decoder& d;
    const Batch& batch;
    const Workspace& work;
    const Blocks& blocks;
    int64_t first_row, rows, index;

    const Layer& layer() const { return d.layers[index]; }
    float* hidden(int64_t row) const { return batch.hidden + (first_row + row) * d.hidden; }
    int64_t num_keys(int64_t row) const {
        const int64_t at = first_row + row;
        return batch.lengths[batch.part[at] * d.num_layers + index] + batch.index[at] + 1;
    }
    bf16* page(int64_t row, int64_t kind, int64_t group) const {  // kind 0: keys, 1: values
        const int32_t part = batch.part[first_row + row];
        return batch.pages[part] + ((index * 2 + kind) * d.groups + group) * batch.capacities[part] * d.dim;
    }
    Partial partial(int64_t row, int64_t head, int64_t slot) const {
        float* const at = work.found + ((row * d.heads + head) * work.slots + slot) * (d.dim + 2);
        return {at[d.dim], at[d.dim + 1], at};
    }
    void keep(const Partial& partial) const {
        partial.values[d.dim] = partial.max;
        partial.values[d.dim + 1] = partial.sum;
    }

    void store_heads(int64_t row) const {
        float* const x = work.wide + row * work.wide_stride;
        const int64_t position = batch.positions[first_row + row], place = (num_keys(row) - 1) * d.dim;
        for (int64_t head = 0; head < d.heads; head++) {
            turn(d, x + head * d.dim, layer().q_norm, position, work.query + (row * d.heads + head) * d.dim);
        }
        for (int64_t group = 0; group < d.groups; group++) {
            turn(d, x + (d.heads + group) * d.dim, layer().k_norm, position, page(row, 0, group) + place);
            const float* const value = x + (d.heads + d.groups + group) * d.dim;
            bf16* const to = page(row, 1, group) + place;
            for (int64_t i = 0; i < d.dim; i += 16) {
                const __mmask16 lanes = first_lanes(d.dim - i);
                _mm256_mask_storeu_epi16(to + i, lanes, narrow(_mm512_maskz_loadu_ps(lanes, value + i)));
            }
        }
    }

    // Whether the values that the first row does not see, and the last does, are numbers: a weight of 0 hides no other.
    bool can_share(int64_t begin, int64_t end, int64_t group) const {
        const bf16* const values = page(begin, 1, group) + num_keys(begin) * d.dim;
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        for (int64_t i = 0; i < (end - 1 - begin) * d.dim; i += kKeyStep) {  // whole steps, where there are tiles
            const __m512i value = _mm512_and_si512(_mm512_loadu_si512(values + i), exponent);
            if (_mm512_cmpeq_epi16_mask(value, exponent)) return false;
        }
        return true;
    }

    void attend_block(int64_t block, int64_t group, int64_t chunk, int64_t slot, Tiles& tiles) const {
        const int64_t begin = blocks.first[block], end = blocks.first[block + 1];
        if (can_share(begin, end, group)) return attend_rows(begin, end, group, chunk, slot, tiles);
        for (int64_t row = begin; row < end; row++) {
            if (chunk * kChunk < num_keys(row)) attend_rows(row, row + 1, group, chunk, slot, tiles);
        }
    }

    // One chunk of keys for the heads of one group, into its slot; merged with what the slot holds of earlier chunks.
    void attend_rows(int64_t begin, int64_t end, int64_t group, int64_t chunk, int64_t slot, Tiles& tiles) const {
        const int64_t start = chunk * kChunk;
        const bf16* const keys = page(begin, 0, group) + start * d.dim;
        const bf16* const values = page(begin, 1, group) + start * d.dim;
        alignas(64) float more[kQueries][kMaxDim];
        Partial targets[kQueries];
        TileAttention tile;
        tile.num_queries = 0, tile.dim = d.dim, tile.scale = 1.0f / std::sqrt(float(d.dim));
        auto finish = [&](int i) {
            if (chunk != slot) merge(targets[i], tile.out[i], d.dim);
            else targets[i] = tile.out[i];
            keep(targets[i]);
        };
        for (int64_t row = begin; row < end; row++) {
            const int64_t count = std::clamp<int64_t>(num_keys(row) - start, 0, kChunk);
            for (int64_t head = group * d.repeat(); head < (group + 1) * d.repeat(); head++) {
                const int i = d.attends_by_tiles() ? tile.num_queries++ : 0;
                tile.query[i] = work.query + (row * d.heads + head) * d.dim;
                tile.count[i] = count;
                targets[i] = tile.out[i] = partial(row, head, slot);
                if (chunk != slot) tile.out[i].values = more[i];
                if (d.attends_by_tiles() || !count) continue;
                attend_chunk(tile.query[i], keys, values, count, d.dim, tile.scale, tile.out[i]);
                finish(i);
            }
        }
        if (!tile.num_queries) return;
        tile.run(keys, values, tiles);
        for (int i = 0; i < tile.num_queries; i++) {
            if (tile.count[i]) finish(i);
        }
    }

    void attend(Team& team) const {
        const int64_t slots = work.slots, count = blocks.count;  // one slot: a task goes through all chunks
        team.run(count * d.groups * slots, [&](int64_t begin, int64_t end) {
            for (int64_t task = begin; task < end; task++) {  // blocks innermost: they may share a page
                const int64_t block = task % count, group = task / count % d.groups, slot = task / count / d.groups;
                const int64_t most = num_keys(blocks.first[block + 1] - 1);
                if (slots > 1) {
                    if (slot * kChunk < most) attend_block(block, group, slot, slot, team.tiles);
                    continue;
                }
                for (int64_t chunk = 0; chunk * kChunk < most; chunk++) attend_block(block, group, chunk, 0, team.tiles);
            }
        });
    }

    void put_mixed(Activations& to, int64_t row) const {
        float* const mixed = work.wide + row * work.wide_stride;
        for (int64_t head = 0; head < d.heads; head++) {
            Partial all = partial(row, head, 0);
            for (int64_t slot = 1; slot < work.slots && slot * kChunk < num_keys(row); slot++) {
                merge(all, partial(row, head, slot), d.dim);
            }
            for (int64_t i = 0; i < d.dim; i++) mixed[head * d.dim + i] = all.values[i] / all.sum;
        }
        put_row(to, layer().out.format, row, d.heads * d.dim,
                [&](int64_t i, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, mixed + i); });
    }

    void put_gated(Activations& to, int64_t row) const {
        const float *const gate = work.wide + row * work.wide_stride, *const up = gate + d.intermediate;
        put_row(to, layer().down.format, row, d.intermediate, [&](int64_t i, __mmask16 lanes) {
            return _mm512_mul_ps(silu(_mm512_maskz_loadu_ps(lanes, gate + i)), _mm512_maskz_loadu_ps(lanes, up + i));
        });
    }

    void run(Team& team) const {
        auto each_row = [&](auto&& stage) {
            team.run(rows, [&](int64_t begin, int64_t end) {
                for (int64_t row = begin; row < end; row++) stage(row);
            });
        };
        auto product = [&](const Linear& linear, const Activations& inputs, float* to, int64_t stride, bool add) {
            apply(linear, inputs, rows, to, stride, add, team);
        };
        Activations narrow(work.inputs, rows, d.hidden), mixed(work.inputs, rows, d.heads * d.dim);
        Activations gated(work.inputs, rows, d.intermediate);

        each_row([&](int64_t row) {
            put_normed(narrow, layer().qkv.format, row, hidden(row), layer().attn_norm, d.hidden, d.eps);
        });
        product(layer().qkv, narrow, work.wide, work.wide_stride, false);
        each_row([&](int64_t row) { store_heads(row); });
        attend(team);
        each_row([&](int64_t row) { put_mixed(mixed, row); });
        product(layer().out, mixed, hidden(0), d.hidden, true);
        each_row([&](int64_t row) {
            put_normed(narrow, layer().gate_up.format, row, hidden(row), layer().mlp_norm, d.hidden, d.eps);
        });
        product(layer().gate_up, narrow, work.wide, work.wide_stride, false);
        each_row([&](int64_t row) { put_gated(gated, row); });
        product(layer().down, gated, hidden(0), d.hidden, true);
    }
};

inline void run_layers(const Decoder& d, const Batch& batch, int64_t first, int64_t last, int64_t longest, char* memory,
                int num_threads, Team& team) {
    // As many slots for every tile as the workspace was sized for: the last one may be short.
    const int64_t slots = num_slots(d, std::min(kTile, batch.rows), longest, num_threads);
    for (int64_t row = 0; row < batch.rows; row += kTile) {
        const int64_t rows = std::min(kTile, batch.rows - row);
        const Workspace work(d, rows, slots, memory);
        const Blocks blocks(batch, row, rows, d.block_rows());  // each thread its own: they may be stages apart
        for (int64_t index = first; index < last; index++) LayerRun{d, batch, work, blocks, row, rows, index}.run(team);
    }
}

inline void score(const Decoder& d, const float* hidden, int64_t rows, float* logits, char* memory, Team& team) {
    for (int64_t first = 0; first < rows; first += kTile) {
        const int64_t count = std::min(kTile, rows - first);
        const Workspace work(d, count, 1, memory);
        Activations inputs(work.inputs, count, d.hidden);
        team.run(count, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                put_normed(inputs, d.head.format, row, hidden + (first + row) * d.hidden, d.norm, d.hidden, d.eps);
            }
        });
        apply(d.head, inputs, count, logits + first * d.head.outputs, d.head.outputs, false, team);
    }
}

}  // namespace vlmfast
