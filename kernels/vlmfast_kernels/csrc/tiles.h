// Products of a block of bf16 columns for up to kTileRows rows by AMX: one instruction multiplies 16 rows by 16 columns.
//
// Its sums are taken in an order of their own, which vectors.h follows for one or two rows: a row's result must not
// depend on how many there are. Bytes gain nothing: with scales for 64 inputs, a tile's sums are read after each product.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>

#include <cstdlib>
#include <cstring>

#include "layout.h"

namespace vlmfast {

constexpr int kTileRows = 16;
constexpr int64_t kTileInputs = 32;  // that one instruction sums over

// Whether the processor has tiles, the system lets this process use them, and VLMFAST_TILES is not 0.
inline bool have_tiles() {
    static const bool found = [] {
        const char* const wish = std::getenv("VLMFAST_TILES");
        if (wish && std::strcmp(wish, "0") == 0) return false;
        unsigned a, b, c, d;
        constexpr unsigned kNeeded = 1u << 22 | 1u << 24;  // bf16, tiles
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
        constexpr long kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
    }();
    return found;
}

// The compiler does not know that tile instructions read and write memory.
inline void fence() { asm volatile("" ::: "memory"); }

// A thread's tile registers: 0 .. 2 sums of three vectors of columns, 3 inputs, 4 .. 6 weights.
class Tiles {
  public:
    ~Tiles() {
        if (rows_) _tile_release();
    }

    // Makes 0 .. 3 so many rows high, at most kTileRows.
    void shape(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        struct {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 7; tile++) {
            config.row_bytes[tile] = 64;
            config.rows[tile] = uint8_t(tile < 4 ? rows : kTileRows);
        }
        fence();
        _tile_loadconfig(&config);
    }

  private:
    int rows_ = 0;
};

static_assert(kVectors == 3, "three tiles of sums and of weights");

// sums [rows of the shape][kBlock] = x W^T; x points at the first row.
inline void tile_bf16(const bf16* weight, const bf16* x, int64_t stride, int64_t depth, float (*sums)[kBlock]) {
    constexpr int64_t kWeightStride = 64 * kVectors;
    fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t k = 0; k < depth; k += kTileInputs, weight += kTileInputs * kBlock) {
        _tile_loadd(3, x + k, 2 * stride);
        for (int64_t at = 0; at < kTileInputs * kBlock; at += 32) {
            _mm_prefetch((const char*)(weight + at) + kPrefetchBytes, _MM_HINT_T0);
        }
        _tile_loadd(4, weight, kWeightStride);
        _tile_dpbf16ps(0, 3, 4);
        _tile_loadd(5, weight + 32, kWeightStride);
        _tile_dpbf16ps(1, 3, 5);
        _tile_loadd(6, weight + 64, kWeightStride);
        _tile_dpbf16ps(2, 3, 6);
    }
    _tile_stored(0, sums[0], kBlock * 4);
    _tile_stored(1, sums[0] + 16, kBlock * 4);
    _tile_stored(2, sums[0] + 32, kBlock * 4);
    fence();
}

}  // namespace vlmfast
