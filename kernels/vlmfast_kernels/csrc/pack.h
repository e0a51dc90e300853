// Weights to the layouts of linear.h, by way of codes and scales (ops/quant.py says what those are) where quantised.
// Every function does some of the work: rows begin .. end - 1, or blocks.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "linear.h"

namespace vlmfast {

inline float widen(bf16 value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

// weight [outputs, inputs] to codes [outputs, inputs] in -127 .. 127, scale [outputs]; NaN where a row is not finite.
inline void quantize_int8(const bf16* weight, int64_t inputs, int8_t* codes, float* scale, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const bf16* const from = weight + row * inputs;
        float reach = 0;
        bool finite = true;  // fmax passes over NaN
        for (int64_t k = 0; k < inputs; k++) {
            reach = std::fmax(reach, std::fabs(widen(from[k])));
            finite = finite && std::isfinite(widen(from[k]));
        }
        scale[row] = finite ? reach / 127.0f : std::numeric_limits<float>::quiet_NaN();
        const float factor = finite && reach > 0 ? 127.0f / reach : 0.0f;
        for (int64_t k = 0; k < inputs; k++) {
            codes[row * inputs + k] = finite ? int8_t(std::nearbyint(widen(from[k]) * factor)) : 0;
        }
    }
}

// 32 values to whole numbers -8 .. 7 and the scale of the least squared error; the search of quantize_int4 in quant.py.
inline float quantize_group(const __m512 values[2], __m512 best[2]) {
    const __m512 a = values[0], b = values[1];
    best[0] = best[1] = _mm512_setzero_ps();
    if (_mm512_fpclass_ps_mask(a, 0x99) | _mm512_fpclass_ps_mask(b, 0x99)) {
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float highest = _mm512_reduce_max_ps(_mm512_max_ps(a, b)), lowest = _mm512_reduce_min_ps(_mm512_min_ps(a, b));
    const float extreme = highest > -lowest ? highest : lowest;
    if (extreme == 0) return 0;
    const __m512 least = _mm512_set1_ps(-8.0f), most = _mm512_set1_ps(7.0f);
    float scale = 0, best_gain = -1;
    for (float reach : {8.0f, 7.0f, 7.4f, 8.5f, 9.0f, 9.6f}) {
        const __m512 factor = _mm512_set1_ps(-reach / extreme);
        __m512 whole[2];
        for (int i = 0; i < 2; i++) {
            const __m512 near = _mm512_roundscale_ps(_mm512_mul_ps(values[i], factor), _MM_FROUND_TO_NEAREST_INT);
            whole[i] = _mm512_min_ps(_mm512_max_ps(near, least), most);
        }
        const float product = _mm512_reduce_add_ps(_mm512_fmadd_ps(a, whole[0], _mm512_mul_ps(b, whole[1])));
        const float norm =
            _mm512_reduce_add_ps(_mm512_fmadd_ps(whole[0], whole[0], _mm512_mul_ps(whole[1], whole[1])));
        if (norm == 0 || product * product / norm <= best_gain) continue;
        best_gain = product * product / norm;
        scale = product / norm;
        best[0] = whole[0], best[1] = whole[1];
    }
    return scale;
}

// weight [outputs, inputs] to codes [outputs, 32 * groups] and scale [outputs, 2 * groups].
inline void quantize_int4(const bf16* weight, int64_t inputs, uint8_t* codes, bf16* scale, int64_t begin, int64_t end) {
    const int64_t halves = 2 * num_groups(inputs);
    for (int64_t row = begin; row < end; row++) {
        for (int64_t half = 0; half < halves; half++) {
            __m512 values[2], best[2];
            for (int i = 0; i < 2; i++) {
                const int64_t k = half * kHalf + 16 * i;
                const __mmask16 lanes = k < inputs ? first_lanes(inputs - k) : 0;
                values[i] = widen(_mm256_maskz_loadu_epi16(lanes, weight + row * inputs + k));
            }
            const __m512 found = _mm512_set1_ps(quantize_group(values, best));
            alignas(32) bf16 rounded[16];
            _mm256_store_si256((__m256i*)rounded, narrow(found));
            scale[row * halves + half] = rounded[0];
            alignas(64) int32_t whole[32];
            for (int i = 0; i < 2; i++) _mm512_store_si512(whole + 16 * i, _mm512_cvtps_epi32(best[i]));
            uint8_t* const to = codes + (row * halves + half) * 16;
            for (int j = 0; j < 16; j++) to[j] = uint8_t((whole[2 * j] + 8) | (whole[2 * j + 1] + 8) << 4);
        }
    }
}

// weight [outputs, inputs], row-major, to packed; columns and inputs beyond are zeros.
inline void pack_bf16(const bf16* weight, int64_t inputs, int64_t outputs, bf16* packed, int64_t begin, int64_t end) {
    const int64_t k_end = depth(inputs, kBf16);
    for (int64_t block = begin; block < end; block++) {
        for (int64_t i = 0; i < kBlock; i++) {
            const int64_t column = block * kBlock + i;
            bf16* const to = packed + block * kBlock * k_end + 2 * i;
            const bf16* const from = weight + column * inputs;
            for (int64_t k = 0; k < k_end; k++) {
                to[k / 2 * 2 * kBlock + k % 2] = column < outputs && k < inputs ? from[k] : 0;
            }
        }
    }
}

// The same for int8 codes, which are stored as q + 128.
inline void pack_int8(const int8_t* codes, int64_t inputs, int64_t outputs, uint8_t* packed, int64_t begin,
                      int64_t end) {
    const int64_t k_end = depth(inputs, kInt8);
    for (int64_t block = begin; block < end; block++) {
        for (int64_t i = 0; i < kBlock; i++) {
            const int64_t column = block * kBlock + i;
            uint8_t* const to = packed + block * kBlock * k_end + 4 * i;
            const int8_t* const from = codes + column * inputs;
            for (int64_t k = 0; k < k_end; k++) {
                to[k / 4 * 4 * kBlock + k % 4] = uint8_t((column < outputs && k < inputs ? from[k] : 0) + 128);
            }
        }
    }
}

// The same for int4 codes, with their scales; a column beyond has the scale 0.
inline void pack_int4(const uint8_t* codes, const bf16* scale, int64_t inputs, int64_t outputs, Int4Record* packed,
                      int64_t begin, int64_t end) {
    const int64_t groups = num_groups(inputs);
    for (int64_t block = begin; block < end; block++) {
        for (int64_t group = 0; group < groups; group++) {
            Int4Record& to = packed[block * groups + group];
            std::memset(&to, 0, sizeof to);
            for (int64_t i = 0; i < kBlock && block * kBlock + i < outputs; i++) {
                const int64_t half_row = 2 * ((block * kBlock + i) * groups + group);
                for (int half = 0; half < 2; half++) {
                    to.scale[half][i] = scale[half_row + half];
                    const uint8_t* const from = codes + (half_row + half) * 16;
                    auto code = [&](int k) { return from[k / 2] >> 4 * (k % 2) & 15; };
                    for (int k = 0; k < 32; k++) {
                        const int step = k / 8, byte = k % 4, shift = k % 8 / 4 * 4;
                        to.codes[half][step][i / 16][i % 16 * 4 + byte] |= uint8_t(code(k) << shift);
                    }
                }
            }
        }
    }
}

}  // namespace vlmfast
