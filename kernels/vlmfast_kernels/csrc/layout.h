// Weights that were laid out once (pack.h), and activations as the products read them.
//
// Columns (outputs) come in blocks of kBlock, and a block's weights lie in the order in which they are read:
//
//     bf16  [blocks][K / 2][kVectors][16 columns][2]      vdpbf16ps, tdpbf16ps: pairs of products, float32 sums
//     int8  [blocks][K / 4][kVectors][16 columns][4]      vpdpbusd: four products, int32 sums
//     int4  [blocks][K / 64] of Int4Record                unpacked in registers, then as int8
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace vlmfast {

constexpr int kVectors = 3;
constexpr int kBlock = 16 * kVectors;
constexpr int kGroup = 64;  // quantised activations: inputs that share a scale
constexpr int kHalf = 32;   // int4 weights: inputs that share a scale
constexpr int kPrefetchBytes = 4096;

enum Format : int32_t { kBf16 = 0, kInt8 = 1, kInt4 = 2 };

// 64 inputs of a block, 27 cache lines. A byte holds the codes of inputs k and k + 4, in its low and its high half.
struct Int4Record {
    bf16 scale[2][kBlock];              // for each half of the inputs
    uint8_t codes[2][4][kVectors][64];  // [half][8 inputs][vectors][16 columns * 4]
};

struct Linear {
    const void* weight;  // laid out by pack_bf16, pack_int8 or pack_int4
    const float* scale;  // int8: [N]
    const float* bias;   // [N] or null
    int64_t inputs, outputs;
    int32_t format;
};

inline int64_t num_blocks(int64_t outputs) { return round_up(outputs, kBlock) / kBlock; }
inline int64_t num_groups(int64_t inputs) { return round_up(inputs, kGroup) / kGroup; }
// Inputs of a packed weight, the last of them zeros: what one instruction sums over is full (32 in tiles.h).
inline int64_t depth(int64_t inputs, int32_t format) { return round_up(inputs, format == kInt8 ? 4 : 32); }
inline int64_t packed_bytes(int64_t inputs, int64_t outputs, int32_t format) {
    if (format == kInt4) return num_blocks(outputs) * num_groups(inputs) * int64_t(sizeof(Int4Record));
    return num_blocks(outputs) * kBlock * depth(inputs, format) * (format == kInt8 ? 1 : 2);
}

// Rows of inputs as the products read them. Quantised: x = scale * q. The instruction multiplies unsigned by signed
// bytes, so weights are stored as w + 128 (int8) or w + 8 (int4), and sums start from -128 or -8 times sum(q).
struct Activations {
    bf16* wide;       // [rows, stride]
    int8_t* bytes;    // [rows, stride]
    float* scale;     // [rows, groups]
    int32_t* offset;  // [rows, groups, 2]: int8 the group's in the first, int4 one for each half
    int64_t stride, groups;

    static int64_t bytes_for(int64_t rows, int64_t inputs) {
        return rows * (round_up(inputs, 64) * 2 + num_groups(inputs) * 12) + 256;
    }
    Activations(void* memory, int64_t rows, int64_t inputs) : stride(round_up(inputs, 64)), groups(num_groups(inputs)) {
        wide = static_cast<bf16*>(memory);
        bytes = static_cast<int8_t*>(memory);
        scale = reinterpret_cast<float*>(wide + rows * stride);
        offset = reinterpret_cast<int32_t*>(scale + rows * groups);
    }

    // Stores 64 or fewer values (zeros beyond), the inputs kGroup * group and on of a row.
    void put(int32_t format, int64_t row, int64_t group, const __m512 values[4]) {
        if (format == kBf16) {
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_si256((__m256i*)(wide + row * stride + group * kGroup + 16 * i), narrow(values[i]));
            }
            return;
        }
        __m512 largest = _mm512_setzero_ps();
        int odd = 0;  // infinities and NaN, which bytes can not hold
        for (int i = 0; i < 4; i++) {
            largest = _mm512_max_ps(largest, _mm512_abs_ps(values[i]));
            odd |= _mm512_fpclass_ps_mask(values[i], 0x99);
        }
        const float reach = _mm512_reduce_max_ps(largest);
        const __m512 factor = _mm512_set1_ps(reach > 0 ? 127.0f / reach : 0.0f);
        __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int i = 0; i < 4; i++) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], factor));
            sums[i / 2] = _mm512_add_epi32(sums[i / 2], whole);
            _mm_storeu_si128((__m128i*)(bytes + row * stride + group * kGroup + 16 * i), _mm512_cvtsepi32_epi8(whole));
        }
        scale[row * groups + group] = odd ? NAN : reach / 127.0f;
        int32_t* const to = offset + 2 * (row * groups + group);
        if (format == kInt8) {
            to[0] = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(sums[0], sums[1]));
        } else {
            for (int half = 0; half < 2; half++) to[half] = -8 * _mm512_reduce_add_epi32(sums[half]);
        }
    }
};

}  // namespace vlmfast
