// Products with weights that were laid out once (pack.h): y = x W^T for a few rows x, in bf16, int8 or int4.
//
// Columns (outputs) come in blocks of kBlock, and a block's weights lie in the order in which they are read:
//
//     bf16  [blocks][K / 2][kVectors][16 columns][2]      vdpbf16ps: a pair of products, float32 sums
//     int8  [blocks][K / 4][kVectors][16 columns][4]      vpdpbusd: four products, int32 sums
//     int4  [blocks][K / 64] of Int4Record                unpacked in registers, then as int8
//
// A result depends on its row and column alone: K runs in the same order whatever the number of rows and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "simd.h"
#include "team.h"

namespace vlmfast {

constexpr int kVectors = 3;
constexpr int kBlock = 16 * kVectors;
constexpr int kRows = 8;    // rows at a time: kRows * kVectors sums stay in registers
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
inline int64_t depth(int64_t inputs, int32_t format) { return round_up(inputs, format == kInt8 ? 4 : 2); }
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

// work(0) .. work(N - 1), written out: indices of an array must be constants for it to live in registers.
template <class Work, int... I>
inline __attribute__((always_inline)) void repeat(const Work& work, std::integer_sequence<int, I...>) {
    (work(std::integral_constant<int, I>()), ...);
}
template <int N, class Work>
inline __attribute__((always_inline)) void repeat(const Work& work) {
    repeat(work, std::make_integer_sequence<int, N>());
}

template <int R>
inline void multiply_bf16(const bf16* weight, const bf16* x, int64_t stride, int64_t depth, float (*sums)[kBlock]) {
    __m512 sum[R * kVectors];
    repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_setzero_ps(); });
    for (int64_t k = 0; k < depth; k += 2, weight += 2 * kBlock) {
        __m512bh w[kVectors];
        repeat<kVectors>([&](auto v) {
            w[v] = (__m512bh)_mm512_loadu_si512(weight + 32 * v);
            _mm_prefetch((const char*)(weight + 32 * v) + kPrefetchBytes, _MM_HINT_T0);
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
                w[v] = _mm512_loadu_si512(weight + 64 * v);
                _mm_prefetch((const char*)(weight + 64 * v) + kPrefetchBytes, _MM_HINT_T0);
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
                    const uint8_t* const from = record->codes[half][step][v];
                    both[v] = _mm512_loadu_si512(from);
                    _mm_prefetch((const char*)from + kPrefetchBytes, _MM_HINT_T0);
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

// Calls multiply with a compile-time number of rows, 1 .. kRows.
template <int R>
inline void multiply_rows(const Linear& linear, const void* weight, const Activations& x, int64_t row, int64_t rows,
                          float (*sums)[kBlock]) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1>(linear, weight, x, row, rows, sums);
    }
    const int64_t k = depth(linear.inputs, linear.format);
    if (linear.format == kInt4) multiply_int4<R>(static_cast<const Int4Record*>(weight), x, row, sums);
    else if (linear.format == kInt8) multiply_int8<R>(static_cast<const uint8_t*>(weight), x, row, k, sums);
    else multiply_bf16<R>(static_cast<const bf16*>(weight), x.wide + row * x.stride, x.stride, k, sums);
}

// out [rows, stride] = x W^T + bias, or added to what is there: blocks begin .. end - 1 of the columns.
inline void apply_blocks(const Linear& linear, const Activations& x, int64_t rows, float* out, int64_t stride, bool add,
                         int64_t begin, int64_t end) {
    alignas(64) float sums[kRows][kBlock];
    const int64_t block_bytes = packed_bytes(linear.inputs, kBlock, linear.format);
    for (int64_t block = begin; block < end; block++) {
        const char* const weight = static_cast<const char*>(linear.weight) + block * block_bytes;
        for (int64_t row = 0; row < rows; row += kRows) {
            const int64_t count = std::min<int64_t>(kRows, rows - row);
            multiply_rows<kRows>(linear, weight, x, row, count, sums);
            for (int v = 0; v < kVectors; v++) {
                const int64_t column = block * kBlock + 16 * v;
                if (column >= linear.outputs) break;
                const __mmask16 lanes = first_lanes(linear.outputs - column);
                const __m512 bias =
                    linear.bias ? _mm512_maskz_loadu_ps(lanes, linear.bias + column) : _mm512_setzero_ps();
                const __m512 scale =
                    linear.format == kInt8 ? _mm512_maskz_loadu_ps(lanes, linear.scale + column) : _mm512_set1_ps(1.0f);
                for (int64_t r = 0; r < count; r++) {
                    float* const to = out + (row + r) * stride + column;
                    __m512 y = _mm512_fmadd_ps(_mm512_load_ps(sums[r] + 16 * v), scale, bias);
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
        apply_blocks(linear, x, rows, out, stride, add, begin, end);
    });
}

}  // namespace vlmfast
