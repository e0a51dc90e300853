// Attention of single rows over a sequence's page of keys and values, a chunk of keys at a time.
//
// A chunk's result is (max, sum, values): the largest score, the sum of e^(score - max), and the values weighted so.
// Chunks lie at fixed keys and are merged in their order, so a row's result does not depend on who computed which.
#pragma once

#include <cmath>

#include "simd.h"

namespace vlmfast {

constexpr int kChunk = 256;  // keys
constexpr int kMaxDim = 256;

// What attention over some keys has found for one head; values [dim] are not yet divided by sum.
struct Partial {
    float max, sum;
    float* values;
};

// first = first and then second.
inline void merge(Partial& first, const Partial& second, int64_t dim) {
    const float max = first.max > second.max ? first.max : second.max;
    alignas(64) float factors[16];
    const __m512 differences =
        _mm512_mask_blend_ps(1, _mm512_set1_ps(second.max - max), _mm512_set1_ps(first.max - max));
    _mm512_store_ps(factors, exp_of_negative(differences));
    first.max = max;
    first.sum = first.sum * factors[0] + second.sum * factors[1];
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 lanes = first_lanes(dim - i);
        const __m512 kept = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, first.values + i), _mm512_set1_ps(factors[0]));
        const __m512 added = _mm512_maskz_loadu_ps(lanes, second.values + i);
        _mm512_mask_storeu_ps(first.values + i, lanes, _mm512_fmadd_ps(added, _mm512_set1_ps(factors[1]), kept));
    }
}

// One query head over keys and values [count, dim], count <= kChunk. Pairs: ceil(dim / 32).
template <int Pairs>
inline void attend_chunk(const bf16* query, const bf16* keys, const bf16* values, int64_t count, int64_t dim,
                         float scale, Partial& out) {
    alignas(64) float weights[kChunk];
    __mmask32 lanes[Pairs];
    __m512bh q[Pairs];
    for (int p = 0; p < Pairs; p++) {
        const int64_t left = dim - 32 * p;
        lanes[p] = left >= 32 ? 0xffffffffu : left > 0 ? (1u << left) - 1 : 0;
        q[p] = (__m512bh)_mm512_maskz_loadu_epi16(lanes[p], query + 32 * p);
    }
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t key = 0; key < count; key += 16) {
        __m512 rows[16];
        for (int i = 0; i < 16; i++) {
            const bf16* const k = keys + (key + i < count ? key + i : count - 1) * dim;
            rows[i] = _mm512_setzero_ps();
            for (int p = 0; p < Pairs; p++) {
                rows[i] = _mm512_dpbf16_ps(rows[i], q[p], (__m512bh)_mm512_maskz_loadu_epi16(lanes[p], k + 32 * p));
            }
        }
        const __m512 none = _mm512_set1_ps(-INFINITY);
        const __m512 scores =
            _mm512_mask_mul_ps(none, first_lanes(count - key), sums_of_rows(rows), _mm512_set1_ps(scale));
        largest = _mm512_max_ps(largest, scores);
        _mm512_store_ps(weights + key, scores);
    }
    out.max = _mm512_reduce_max_ps(largest);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < count; key += 16) {
        const __m512 weight = exp_of_negative(_mm512_sub_ps(_mm512_load_ps(weights + key), _mm512_set1_ps(out.max)));
        sum = _mm512_add_ps(sum, weight);  // e^-inf is 0 beyond the last key
        _mm512_store_ps(weights + key, weight);
    }
    out.sum = _mm512_reduce_add_ps(sum);
    __m512 mixed[2][2 * Pairs];  // even and odd keys, so that one sum need not wait for the other
    for (auto& half : mixed)
        for (auto& part : half) part = _mm512_setzero_ps();
    auto add = [&](__m512* to, int64_t key) {
        const __m512 weight = _mm512_set1_ps(weights[key]);
        const bf16* const v = values + key * dim;
        for (int p = 0; p < Pairs; p++) {
            const __m512i both = _mm512_maskz_loadu_epi16(lanes[p], v + 32 * p);
            to[2 * p] = _mm512_fmadd_ps(weight, widen(_mm512_castsi512_si256(both)), to[2 * p]);
            to[2 * p + 1] = _mm512_fmadd_ps(weight, widen(_mm512_extracti64x4_epi64(both, 1)), to[2 * p + 1]);
        }
    };
    int64_t key = 0;
    for (; key + 1 < count; key += 2) add(mixed[0], key), add(mixed[1], key + 1);
    if (key < count) add(mixed[0], key);
    for (int i = 0; i < 2 * Pairs; i++) {
        if (16 * i >= dim) break;
        _mm512_mask_storeu_ps(out.values + 16 * i, first_lanes(dim - 16 * i), _mm512_add_ps(mixed[0][i], mixed[1][i]));
    }
}

inline void attend_chunk(const bf16* query, const bf16* keys, const bf16* values, int64_t count, int64_t dim,
                         float scale, Partial& out) {
    if (dim <= 32) attend_chunk<1>(query, keys, values, count, dim, scale, out);
    else if (dim <= 64) attend_chunk<2>(query, keys, values, count, dim, scale, out);
    else if (dim <= 96) attend_chunk<3>(query, keys, values, count, dim, scale, out);
    else if (dim <= 128) attend_chunk<4>(query, keys, values, count, dim, scale, out);
    else attend_chunk<8>(query, keys, values, count, dim, scale, out);
}

}  // namespace vlmfast
