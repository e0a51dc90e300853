// Resampling of 8-bit RGB pictures and their tiles as floats, behind a C interface (see cpu/resize.py for the other
// side). All sums are of integers, so that the pixels depend on no instruction set.

#include <algorithm>
#include <cstdint>

// One function in several forms, of which the loader takes the one for this processor.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VLMFAST_CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define VLMFAST_CLONES
#endif
#define VLMFAST_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kPrecision = 22;    // bits of a weight behind the point
constexpr int64_t kChannels = 3;
constexpr int64_t kRows = 16;     // rows that are resampled across together
constexpr int64_t kBlock = kRows * kChannels;
constexpr int64_t kSpan = 64;     // bytes of a row that are resampled down together

// N sums of `count` weighted bytes each, `stride` bytes from one to the next; rounded and clipped.
template <int64_t N>
VLMFAST_INLINE void weigh(const uint8_t* in, int64_t stride, const int32_t* weights, int64_t count, uint8_t* out) {
    int32_t sums[N];
    for (int64_t lane = 0; lane < N; ++lane) sums[lane] = 1 << (kPrecision - 1);
    for (int64_t tap = 0; tap < count; ++tap, in += stride) {
        const int32_t weight = weights[tap];
        for (int64_t lane = 0; lane < N; ++lane) sums[lane] += weight * in[lane];
    }
    for (int64_t lane = 0; lane < N; ++lane) {
        out[lane] = uint8_t(std::min(std::max(sums[lane] >> kPrecision, 0), 255));
    }
}

}  // namespace

extern "C" {

int vlmfast_resize_abi() { return 2; }

// Bytes that vlmfast_resize_across needs besides. The caller has them, and is told where there are none.
int64_t vlmfast_resize_scratch(int64_t columns) { return columns * kBlock; }

// Pixels [rows, columns, 3] to [rows, width, 3]: column x is the sum of counts[x] columns from firsts[x] on, weighted by
// weights[x, :]. Sixteen rows go together, turned so that a column's bytes lie side by side: in `turned`, which has room
// for vlmfast_resize_scratch(columns) bytes.
VLMFAST_CLONES void vlmfast_resize_across(const uint8_t* in, int64_t in_stride, int64_t rows, int64_t columns,
                                          const int32_t* firsts, const int32_t* counts, const int32_t* weights,
                                          int64_t taps, int64_t width, uint8_t* out, int64_t out_stride,
                                          uint8_t* turned) {
    for (int64_t top = 0; top < rows; top += kRows) {
        const int64_t height = std::min(kRows, rows - top);
        for (int64_t row = 0; row < height; ++row) {
            const uint8_t* source = in + (top + row) * in_stride;
            for (int64_t byte = 0; byte < columns * kChannels; ++byte) turned[byte * kRows + row] = source[byte];
        }
        for (int64_t x = 0; x < width; ++x) {
            uint8_t column[kBlock];
            weigh<kBlock>(turned + firsts[x] * kBlock, kBlock, weights + x * taps, counts[x], column);
            for (int64_t row = 0; row < height; ++row) {
                uint8_t* pixel = out + (top + row) * out_stride + x * kChannels;
                for (int64_t channel = 0; channel < kChannels; ++channel) pixel[channel] = column[channel * kRows + row];
            }
        }
    }
}

// Bytes [.., width] to [height, width]: row y is the sum of counts[y] rows from firsts[y] on, weighted likewise.
VLMFAST_CLONES void vlmfast_resize_down(const uint8_t* in, int64_t in_stride, int64_t width, const int32_t* firsts,
                                        const int32_t* counts, const int32_t* weights, int64_t taps, int64_t height,
                                        uint8_t* out, int64_t out_stride) {
    for (int64_t y = 0; y < height; ++y) {
        const uint8_t* rows = in + firsts[y] * in_stride;
        uint8_t* target = out + y * out_stride;
        int64_t x = 0;
        for (; x + kSpan <= width; x += kSpan) {
            weigh<kSpan>(rows + x, in_stride, weights + y * taps, counts[y], target + x);
        }
        for (; x < width; ++x) weigh<1>(rows + x, in_stride, weights + y * taps, counts[y], target + x);
    }
}

// Pixels [side, side, 3] to floats [3, side, side], each channel by its own table of 256.
VLMFAST_CLONES void vlmfast_look_up(const uint8_t* in, int64_t in_stride, int64_t side, const float* table,
                                    float* out) {
    for (int64_t channel = 0; channel < kChannels; ++channel, table += 256) {
        for (int64_t y = 0; y < side; ++y, out += side) {
            const uint8_t* row = in + y * in_stride + channel;
            for (int64_t x = 0; x < side; ++x) out[x] = table[row[x * kChannels]];
        }
    }
}

}  // extern "C"
