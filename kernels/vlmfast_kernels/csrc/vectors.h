// Products of a block of columns for up to kRows rows in AVX-512, sums in registers.
#pragma once

#include <cstring>
#include <utility>

#include "tiles.h"

namespace vlmfast {

constexpr int kRows = 8;  // kRows * kVectors sums stay in registers

// work(0) .. work(N - 1), written out: indices of an array must be constants for it to live in registers.
template <class Work, int... I>
inline __attribute__((always_inline)) void repeat(const Work& work, std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>()), ...);
}
template <int N, class Work>
inline __attribute__((always_inline)) void repeat(const Work& work) {
    repeat(work, std::make_integer_sequence<int, N>());
}

// 64 bytes of weights, and those further on into the cache.
inline __m512i load_ahead(const void* from) {
    _mm_prefetch(static_cast<const char*>(from) + kPrefetchBytes, _MM_HINT_T0);
    return _mm512_loadu_si512(from);
}

template <int R>
inline void multiply_bf16(const bf16* weight, const bf16* x, int64_t stride, int64_t depth, float (*sums)[kBlock]) {
    __m512 sum[R * kVectors];
    repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_setzero_ps(); });
    for (int64_t k = 0; k < depth; k += 2, weight += 2 * kBlock) {
        __m512bh w[kVectors];
        repeat<kVectors>([&](auto v) {
            w[v] = (__m512bh)load_ahead(weight + 32 * v);
        });
        repeat<R>([&](auto r) {
            int32_t pair;
            std::memcpy(&pair, x + r * stride + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            repeat<kVectors>([&](auto v) {
                constexpr int i = r * kVectors + v;
                sum[i] = _mm512_dpbf16_ps(sum[i], w[v], both);
            });
        });
    }
    repeat<R * kVectors>([&](auto i) { _mm512_store_ps(sums[0] + 16 * i, sum[i]); });
}

// The same numbers as tdpbf16ps gives, to the last bit, for rows so few that a tile would hold little: of each kTileInputs inputs
// the even and the odd ones are summed apart, then added to each other and to the rest.
template <int R>
inline void multiply_bf16_as_tiles(const bf16* weight, const bf16* x, int64_t stride, int64_t depth,
                                   float (*sums)[kBlock]) {
    const __m512i odd_half = _mm512_set1_epi32(int32_t(0xffff0000));
    __m512 sum[R * kVectors];
    repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_setzero_ps(); });
    for (int64_t k = 0; k < depth; k += kTileInputs) {
        __m512 even[R * kVectors], odd[R * kVectors];
        repeat<R * kVectors>([&](auto i) { even[i] = odd[i] = _mm512_setzero_ps(); });
        for (int64_t end = k + kTileInputs, at = k; at < end; at += 2, weight += 2 * kBlock) {
            __m512i w[kVectors];
            repeat<kVectors>([&](auto v) {
                w[v] = load_ahead(weight + 32 * v);
            });
            repeat<R>([&](auto r) {
                uint32_t pair;
                std::memcpy(&pair, x + r * stride + at, 4);
                const __m512 first = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(pair << 16)));
                const __m512 second = _mm512_castsi512_ps(_mm512_set1_epi32(int32_t(pair & 0xffff0000)));
                repeat<kVectors>([&](auto v) {
                    constexpr int i = r * kVectors + v;
                    even[i] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w[v], 16)), first, even[i]);
                    odd[i] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w[v], odd_half)), second, odd[i]);
                });
            });
        }
        repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_add_ps(sum[i], _mm512_add_ps(even[i], odd[i])); });
    }
    repeat<R * kVectors>([&](auto i) { _mm512_store_ps(sums[0] + 16 * i, sum[i]); });
}

// vpdpbusd in place. GCC 12 copies the sums of its intrinsic, and then spills them.
inline __attribute__((always_inline)) __m512i dot(__m512i sum, __m512i unsigned_bytes, __m512i signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sum;
}

template <int R>
inline void multiply_int8(const uint8_t* weight, const Activations& x, int64_t row, int64_t depth,
                          float (*sums)[kBlock]) {
    repeat<R * kVectors>([&](auto i) { _mm512_store_ps(sums[0] + 16 * i, _mm512_setzero_ps()); });
    const int8_t* bytes = x.bytes + row * x.stride;
    for (int64_t group = 0, k = 0; k < depth; group++) {
        const int64_t end = k + kGroup < depth ? k + kGroup : depth;
        const int64_t first = row * x.groups + group;
        __m512i sum[R * kVectors];
        repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_set1_epi32(x.offset[2 * (first + i / kVectors * x.groups)]); });
        for (; k < end; k += 4, weight += 4 * kBlock) {
            __m512i w[kVectors];
            repeat<kVectors>([&](auto v) {
                w[v] = load_ahead(weight + 64 * v);
            });
            repeat<R>([&](auto r) {
                int32_t four;
                std::memcpy(&four, bytes + r * x.stride + k, 4);
                const __m512i all = _mm512_set1_epi32(four);
                repeat<kVectors>([&](auto v) {
                    constexpr int i = r * kVectors + v;
                    sum[i] = dot(sum[i], w[v], all);
                });
            });
        }
        repeat<R * kVectors>([&](auto i) {
            const __m512 scale = _mm512_set1_ps(x.scale[first + i / kVectors * x.groups]);
            float* const to = sums[0] + 16 * i;
            _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[i]), scale, _mm512_load_ps(to)));
        });
    }
}

template <int R>
inline void multiply_int4(const Int4Record* record, const Activations& x, int64_t row, float (*sums)[kBlock]) {
    repeat<R * kVectors>([&](auto i) { _mm512_store_ps(sums[0] + 16 * i, _mm512_setzero_ps()); });
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int64_t group = 0; group < x.groups; group++, record++) {
        const int64_t first = row * x.groups + group;
        for (int half = 0; half < 2; half++) {
            const int8_t* const bytes = x.bytes + row * x.stride + group * kGroup + half * kHalf;
            const int32_t* const offset = x.offset + 2 * first + half;
            __m512i sum[R * kVectors];
            repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_set1_epi32(offset[2 * (i / kVectors * x.groups)]); });
            for (int step = 0; step < 4; step++) {
                __m512i both[kVectors], w[kVectors];
                repeat<kVectors>([&](auto v) {
                    both[v] = load_ahead(record->codes[half][step][v]);
                });
                auto add = [&](int64_t k) {
                    repeat<R>([&](auto r) {
                        int32_t four;
                        std::memcpy(&four, bytes + r * x.stride + k, 4);
                        const __m512i all = _mm512_set1_epi32(four);
                        repeat<kVectors>([&](auto v) {
                            constexpr int i = r * kVectors + v;
                            sum[i] = dot(sum[i], w[v], all);
                        });
                    });
                };
                repeat<kVectors>([&](auto v) { w[v] = _mm512_and_si512(both[v], low_half); });
                add(8 * step);
                repeat<kVectors>([&](auto v) { w[v] = _mm512_and_si512(_mm512_srli_epi16(both[v], 4), low_half); });
                add(8 * step + 4);
            }
            repeat<kVectors>([&](auto v) {
                const __m512 scale = widen(_mm256_loadu_si256((const __m256i*)(record->scale[half] + 16 * v)));
                repeat<R>([&](auto r) {
                    constexpr int i = r * kVectors + v;
                    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[i]), scale);
                    float* const to = sums[0] + 16 * i;
                    const __m512 factor = _mm512_set1_ps(x.scale[first + r * x.groups]);
                    _mm512_store_ps(to, _mm512_fmadd_ps(scaled, factor, _mm512_load_ps(to)));
                });
            });
        }
    }
}

}  // namespace vlmfast
