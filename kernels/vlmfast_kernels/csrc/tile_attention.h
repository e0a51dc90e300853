// Attention of up to 16 queries that share keys and values, by AMX tiles: a chunk's results as in attention.h.
//
// Weights are rounded to bf16 before they meet the values, and summed as rounded. A query's numbers do not depend on
// the other queries: what those see beyond its own last key has the weight 0.
#pragma once

#include <algorithm>

#include "attention.h"
#include "tiles.h"

namespace vlmfast {

constexpr int kQueries = 16;
constexpr int64_t kKeyStep = 32;  // keys, or dimensions, that one instruction sums over

inline bool attends_by_tiles(int64_t dim, int64_t repeat) {
    return have_tiles() && dim % kKeyStep == 0 && repeat <= kQueries;
}

// rows[i] lane j to rows[j] lane i.
inline void transpose(__m512i rows[16]) {
    __m512i other[16];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // rows[i + j]: column j of every block of four lanes, of rows i .. i + 3
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    }
    for (int j = 0; j < 4; j++) {  // blocks 0 and 2, then 1 and 3, of rows 0 .. 7 and 8 .. 15
        other[j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
        other[4 + j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
        other[8 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
        other[12 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        rows[j] = _mm512_shuffle_i32x4(other[j], other[8 + j], 0x88);
        rows[4 + j] = _mm512_shuffle_i32x4(other[4 + j], other[12 + j], 0x88);
        rows[8 + j] = _mm512_shuffle_i32x4(other[j], other[8 + j], 0xdd);
        rows[12 + j] = _mm512_shuffle_i32x4(other[4 + j], other[12 + j], 0xdd);
    }
}

// Queries over one chunk of a page.
struct TileAttention {
    int num_queries;
    const bf16* query[kQueries];
    int64_t count[kQueries];  // keys of the chunk that each sees, perhaps 0
    Partial out[kQueries];    // set where count is not 0
    int64_t dim;
    float scale;

    void run(const bf16* keys, const bf16* values, Tiles& tiles) {
        const int64_t most = *std::max_element(count, count + num_queries);
        tiles.shape(num_queries);
        score(keys, most);
        const int64_t padded = round_up(most, kKeyStep);
        for (int i = 0; i < num_queries; i++) weigh(i, padded);
        for (int64_t at = 0; at < dim; at += kKeyStep) mix(values + at, at, most);
    }

  private:
    alignas(64) float scores_[kQueries][kChunk];
    alignas(64) bf16 weights_[kQueries][kChunk];

    // scores_ of keys 0 .. most - 1; what lies beyond is not defined.
    void score(const bf16* keys, int64_t most) {
        alignas(64) bf16 turned[kQueries * kMaxDim];  // [dim / 2][queries][2]
        alignas(64) bf16 last[16 * kMaxDim];
        alignas(64) float products[16][16];  // [keys][queries]
        for (int64_t at = 0; at < dim; at += kKeyStep) {
            __m512i rows[16];
            for (int i = 0; i < 16; i++) {
                rows[i] = i < num_queries ? _mm512_loadu_si512(query[i] + at) : _mm512_setzero_si512();
            }
            transpose(rows);
            for (int i = 0; i < 16; i++) _mm512_store_si512(turned + (at / 2 + i) * 2 * kQueries, rows[i]);
        }
        for (int64_t key = 0; key < most; key += 16) {
            const bf16* from = keys + key * dim;
            if (key + 16 > most) {  // a tile must not reach beyond the page
                std::memcpy(last, from, size_t((most - key) * dim) * sizeof(bf16));
                from = last;
            }
            fence();
            _tile_zero(4);
            for (int64_t at = 0; at < dim; at += kKeyStep) {
                _tile_loadd(5, from + at, 2 * dim);
                _tile_loadd(6, turned + at * kQueries, 64);
                _tile_dpbf16ps(4, 5, 6);
            }
            _tile_stored(4, products, 64);
            fence();
            __m512i rows[16];
            for (int i = 0; i < 16; i++) rows[i] = _mm512_load_si512(products[i]);
            transpose(rows);
            for (int i = 0; i < num_queries; i++) _mm512_store_si512(scores_[i] + key, rows[i]);
        }
    }

    // weights_ of one query from its scores_, its max and its sum; 0 from its last key to `padded`.
    void weigh(int i, int64_t padded) {
        auto lanes = [&](int64_t key) { return key < count[i] ? first_lanes(count[i] - key) : __mmask16(0); };
        const __m512 none = _mm512_set1_ps(-INFINITY);
        __m512 largest = none;
        for (int64_t key = 0; key < padded; key += 16) {
            const __m512 score = _mm512_load_ps(scores_[i] + key);
            const __m512 scaled = _mm512_mask_mul_ps(none, lanes(key), score, _mm512_set1_ps(scale));
            largest = _mm512_max_ps(largest, scaled);
            _mm512_store_ps(scores_[i] + key, scaled);
        }
        const float max = count[i] ? _mm512_reduce_max_ps(largest) : 0;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t key = 0; key < padded; key += 16) {
            const __m512 below = _mm512_sub_ps(_mm512_load_ps(scores_[i] + key), _mm512_set1_ps(max));
            const __m256i weight = narrow(exp_of_negative(below));
            sum = _mm512_add_ps(sum, widen(weight));
            _mm256_store_si256((__m256i*)(weights_[i] + key), weight);
        }
        out[i].max = max;
        out[i].sum = _mm512_reduce_add_ps(sum);
    }

    // The dimensions at .. at + 31 of the weighted values.
    void mix(const bf16* values, int64_t at, int64_t most) {
        alignas(64) bf16 pairs[16][2][32];       // [pair of keys][16 dimensions][dimension, key]
        alignas(64) float mixed[kQueries][32];
        alignas(64) static constexpr uint16_t kFirst[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                           8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const __m512i first = _mm512_load_si512(kFirst), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
        fence();
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t key = 0; key < most; key += kKeyStep) {
            for (int i = 0; i < 16; i++) {
                auto row = [&](int64_t k) {  // never written memory may hold anything
                    return k < most ? _mm512_loadu_si512(values + k * dim) : _mm512_setzero_si512();
                };
                const __m512i a = row(key + 2 * i), b = row(key + 2 * i + 1);
                _mm512_store_si512(pairs[i][0], _mm512_permutex2var_epi16(a, first, b));
                _mm512_store_si512(pairs[i][1], _mm512_permutex2var_epi16(a, second, b));
            }
            fence();
            _tile_loadd(3, weights_[0] + key, 2 * kChunk);
            _tile_loadd(4, pairs[0][0], 128);
            _tile_dpbf16ps(0, 3, 4);
            _tile_loadd(5, pairs[0][1], 128);
            _tile_dpbf16ps(1, 3, 5);
        }
        _tile_stored(0, mixed[0], 128);
        _tile_stored(1, mixed[0] + 16, 128);
        fence();
        for (int i = 0; i < num_queries; i++) {
            if (count[i]) std::memcpy(out[i].values + at, mixed[i], sizeof mixed[i]);
        }
    }
};

}  // namespace vlmfast
