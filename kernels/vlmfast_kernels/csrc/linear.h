// Products with weights that were laid out once: y = x W^T for a few rows x, in bf16 or int8.
//
// Columns (outputs) come in blocks of kBlock, and a block's weights lie in the order in which they are read:
//
//     bf16  [blocks][K / 2][kVectors][16 columns][2]      vdpbf16ps: a pair of products, float32 sums
//     int8  [blocks][K / 4][kVectors][16 columns][4]      vpdpbusd: four products, int32 sums
//
// A result depends on its row and column alone: K runs in the same order whatever the number of rows and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "simd.h"
#include "team.h"

namespace vlmfast {

constexpr int kVectors = 3;
constexpr int kBlock = 16 * kVectors;
constexpr int kRows = 8;    // rows at a time: kRows * kVectors sums stay in registers
constexpr int kGroup = 64;  // int8 activations: inputs that share a scale
constexpr int kPrefetchBytes = 4096;

enum Format : int32_t { kBf16 = 0, kInt8 = 1 };

struct Linear {
    const void* weight;  // laid out by pack_bf16 or pack_int8
    const float* scale;  // int8: [N]
    const float* bias;   // [N] or null
    int64_t inputs, outputs;
    int32_t format;
};

inline int64_t num_blocks(int64_t outputs) { return round_up(outputs, kBlock) / kBlock; }
inline int64_t num_groups(int64_t inputs) { return round_up(inputs, kGroup) / kGroup; }
inline int64_t depth(int64_t inputs, int32_t format) { return round_up(inputs, format == kInt8 ? 4 : 2); }
inline int64_t packed_bytes(int64_t inputs, int64_t outputs, int32_t format) {
    return num_blocks(outputs) * kBlock * depth(inputs, format) * (format == kInt8 ? 1 : 2);
}

// Rows of inputs as the products read them. int8: x = scale * q, and weights are stored as w + 128 (the instruction
// multiplies unsigned by signed bytes), so that each group starts from -128 * sum(q).
struct Activations {
    bf16* wide;       // [rows, stride]
    int8_t* bytes;    // [rows, stride]
    float* scale;     // [rows, groups]
    int32_t* offset;  // [rows, groups]
    int64_t stride, groups;

    static int64_t bytes_for(int64_t rows, int64_t inputs) {
        return rows * (round_up(inputs, 64) * 2 + num_groups(inputs) * 8) + 256;
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
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], factor));
            sum = _mm512_add_epi32(sum, whole);
            _mm_storeu_si128((__m128i*)(bytes + row * stride + group * kGroup + 16 * i), _mm512_cvtsepi32_epi8(whole));
        }
        scale[row * groups + group] = odd ? NAN : reach / 127.0f;
        offset[row * groups + group] = -128 * _mm512_reduce_add_epi32(sum);
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
        repeat<R * kVectors>([&](auto i) { sum[i] = _mm512_set1_epi32(x.offset[first + i / kVectors * x.groups]); });
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

// Calls multiply with a compile-time number of rows, 1 .. kRows.
template <int R>
inline void multiply_rows(const Linear& linear, const void* weight, const Activations& x, int64_t row, int64_t rows,
                          float (*sums)[kBlock]) {
    if constexpr (R > 1) {
        if (rows < R) return multiply_rows<R - 1>(linear, weight, x, row, rows, sums);
    }
    const int64_t k = depth(linear.inputs, linear.format);
    if (linear.format == kInt8) multiply_int8<R>(static_cast<const uint8_t*>(weight), x, row, k, sums);
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

// weight [outputs, inputs], row-major bf16, to packed; columns and inputs beyond are zeros. Blocks begin .. end - 1.
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

// The same to int8 with a scale for each output: w = scale * q, q in -127 .. 127, stored as q + 128.
inline void pack_int8(const bf16* weight, int64_t inputs, int64_t outputs, uint8_t* packed, float* scale, int64_t begin,
                      int64_t end) {
    const int64_t k_end = depth(inputs, kInt8);
    for (int64_t block = begin; block < end; block++) {
        for (int64_t i = 0; i < kBlock; i++) {
            const int64_t column = block * kBlock + i;
            uint8_t* const to = packed + block * kBlock * k_end + 4 * i;
            const bf16* const from = weight + column * inputs;
            const bool real = column < outputs;
            auto at = [&](int64_t k) {
                const uint32_t bits = uint32_t(from[k]) << 16;
                float value;
                std::memcpy(&value, &bits, 4);
                return value;
            };
            float reach = 0;
            bool finite = true;  // fmax passes over NaN
            for (int64_t k = 0; real && k < inputs; k++) {
                reach = std::fmax(reach, std::fabs(at(k)));
                finite = finite && std::isfinite(at(k));
            }
            if (real) scale[column] = finite ? reach / 127.0f : std::numeric_limits<float>::quiet_NaN();
            const float factor = finite && reach > 0 ? 127.0f / reach : 0.0f;
            for (int64_t k = 0; k < k_end; k++) {
                const int whole = real && finite && k < inputs ? int(std::nearbyint(at(k) * factor)) : 0;
                to[k / 4 * 4 * kBlock + k % 4] = uint8_t(whole + 128);
            }
        }
    }
}

}  // namespace vlmfast
