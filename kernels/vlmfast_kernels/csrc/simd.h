// Sixteen floats at a time: conversions, sums and the exponential that all stages share.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <initializer_list>

namespace vlmfast {

using bf16 = uint16_t;

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Lanes 0 .. count - 1 of a vector of 16; all of them from 16 on.
inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }

inline __m512 widen(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// Rounds to nearest even.
inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

// e^x for x <= 0, within 2 units of the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial for e^r.
inline __m512 exp_of_negative(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // below that the result is 0; NaN stays, as the second operand
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    for (float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(term));
    }
    return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-x), through e^-|x| so that nothing overflows.
inline __m512 silu(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 decay = exp_of_negative(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_div_ps(_mm512_mul_ps(x, _mm512_mask_mov_ps(one, negative, decay)), _mm512_add_ps(one, decay));
}

// Lane i of the result is the sum of the lanes of rows[i], all added in the same order. Overwrites rows.
inline __m512 sums_of_rows(__m512 rows[16]) {
    for (int i = 0; i < 8; i++) {  // [2i, 2i + 1] side by side in each block of four lanes
        const __m512 a = rows[2 * i], b = rows[2 * i + 1];
        rows[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    for (int i = 0; i < 4; i++) {  // four rows in each block
        const __m512 a = rows[2 * i], b = rows[2 * i + 1];
        rows[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    for (int count = 2; count; count /= 2) {  // add the four blocks
        for (int i = 0; i < count; i++) {
            const __m512 a = rows[2 * i], b = rows[2 * i + 1];
            rows[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        }
    }
    return rows[0];
}

}  // namespace vlmfast
