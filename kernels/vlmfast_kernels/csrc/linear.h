// y = x W^T for a few rows x, in bf16, int8 or int4 (layout.h), by tiles (tiles.h) or vectors (vectors.h).
//
// A result depends on its row and column alone: K runs in the same order whatever the number of rows and threads.
#pragma once

#include "team.h"
#include "vectors.h"

namespace vlmfast {

constexpr int kLeastTileRows = 3;  // for fewer, tiles are slower

// Calls multiply with a compile-time number of rows, 1 .. kRows.
template <int R>
inline void multiply_rows(const Linear& linear, const void* weight, const Activations& x, int64_t row, int64_t rows,
                          float (*sums)[kBlock]) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1>(linear, weight, x, row, rows, sums);
    }
    const int64_t k = depth(linear.inputs, linear.format);
    if (linear.format == kInt4) return multiply_int4<R>(static_cast<const Int4Record*>(weight), x, row, sums);
    if (linear.format == kInt8) return multiply_int8<R>(static_cast<const uint8_t*>(weight), x, row, k, sums);
    const bf16 *const from = static_cast<const bf16*>(weight), *const inputs = x.wide + row * x.stride;
    if constexpr (R < kLeastTileRows) {
        if (have_tiles()) return multiply_bf16_as_tiles<R>(from, inputs, x.stride, k, sums);
    }
    multiply_bf16<R>(from, inputs, x.stride, k, sums);
}

// out [rows, stride] = x W^T + bias, or added to what is there: blocks begin .. end - 1 of the columns.
inline void apply_blocks(const Linear& linear, const Activations& x, int64_t rows, float* out, int64_t stride, bool add,
                         int64_t begin, int64_t end, Tiles& tiles) {
    alignas(64) float sums[kTileRows][kBlock];
    const int64_t block_bytes = packed_bytes(linear.inputs, kBlock, linear.format);
    const bool tiled = linear.format == kBf16 && rows >= kLeastTileRows && have_tiles();
    const int64_t most = std::min<int64_t>(rows, tiled ? kTileRows : kRows);
    if (tiled) tiles.shape(int(most));
    for (int64_t block = begin; block < end; block++) {
        const char* const weight = static_cast<const char*>(linear.weight) + block * block_bytes;
        for (int64_t done = 0; done < rows; done += most) {
            const int64_t count = std::min(most, rows - done);
            const int64_t row = tiled ? std::min(done, rows - most) : done;  // tiles keep their height: some rows again
            if (tiled) {
                const bf16* const from = reinterpret_cast<const bf16*>(weight);
                tile_bf16(from, x.wide + row * x.stride, x.stride, depth(linear.inputs, kBf16), sums);
            } else {
                multiply_rows<kRows>(linear, weight, x, row, count, sums);
            }
            for (int v = 0; v < kVectors; v++) {
                const int64_t column = block * kBlock + 16 * v;
                if (column >= linear.outputs) break;
                const __mmask16 lanes = first_lanes(linear.outputs - column);
                const __m512 bias =
                    linear.bias ? _mm512_maskz_loadu_ps(lanes, linear.bias + column) : _mm512_setzero_ps();
                const __m512 scale =
                    linear.format == kInt8 ? _mm512_maskz_loadu_ps(lanes, linear.scale + column) : _mm512_set1_ps(1.0f);
                for (int64_t r = done; r < done + count; r++) {
                    float* const to = out + r * stride + column;
                    __m512 y = _mm512_fmadd_ps(_mm512_load_ps(sums[r - row] + 16 * v), scale, bias);
                    if (add) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(lanes, to));
                    _mm512_mask_storeu_ps(to, lanes, y);
                }
            }
        }
    }
}

inline void apply(const Linear& linear, const Activations& x, int64_t rows, float* out, int64_t stride, bool add,
                  Team& team) {
    team.run(num_blocks(linear.outputs), [&](int64_t begin, int64_t end) {
        apply_blocks(linear, x, rows, out, stride, add, begin, end, team.tiles);
    });
}

}  // namespace vlmfast
