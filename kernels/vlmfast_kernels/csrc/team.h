// The threads of one call. They are torch's own: a second OpenMP runtime beside it would fight for the cores.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "tiles.h"

namespace vlmfast {

// Entry points of the OpenMP runtime that torch has loaded, in libgomp's binary interface.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned num_threads, unsigned flags);
    int (*num_threads)();
};

// One thread's view of the team. All threads pass the same stages in the same order.
//
// A stage ends when its work is done, not when all threads have come: on a busy machine, one that the system has put
// aside delays the others only if it holds a piece of work, and catches up later.
class Team {
  public:
    struct Shared {
        std::atomic<uint64_t> next{0};  // stage << 32 | piece to take next
        std::atomic<uint32_t> done{0};  // pieces of this stage
    };

    // Tile instructions take denormal numbers for 0; all else in a call must, too, to give the same numbers.
    Team(Shared& shared, int size) : shared_(shared), size_(size), control_(_mm_getcsr()) {
        constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
        _mm_setcsr(control_ | kFlushToZero | kDenormalsAreZero);
    }
    ~Team() { _mm_setcsr(control_); }
    Team(const Team&) = delete;

    Tiles tiles;  // this thread's

    // Runs work(begin, end) over 0 .. count - 1 in pieces that the threads take in turn; returns when all is done.
    template <class Work>
    void run(int64_t count, const Work& work) {
        if (size_ == 1 || count == 0) {
            if (count) work(int64_t(0), count);
            return;
        }
        const uint64_t stage = stage_++;
        const uint32_t pieces = uint32_t(std::min<int64_t>(count, kPieces * size_));
        for (int spins = 0;;) {
            uint64_t next = shared_.next.load(std::memory_order_acquire);
            if (next >> 32 != stage) return;
            const uint32_t piece = uint32_t(next);
            if (piece == pieces) {  // others are still at it
                if (spins++ < kSpins) _mm_pause();
                else sched_yield();
                continue;
            }
            if (!shared_.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
            work(count * piece / pieces, count * (piece + 1) / pieces);
            if (shared_.done.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) {
                shared_.done.store(0, std::memory_order_relaxed);
                shared_.next.store((stage + 1) << 32, std::memory_order_release);
                return;
            }
        }
    }

  private:
    static constexpr int64_t kPieces = 4;  // for each thread: few enough for long reads, enough to even out
    static constexpr int kSpins = 2000;    // some 20 microseconds, longer than most stages

    Shared& shared_;
    const int size_;
    const unsigned control_;
    uint64_t stage_ = 0;
};

// Runs work(team) on up to num_threads threads and returns when all are done.
template <class Work>
void run_team(const Runtime& runtime, int num_threads, const Work& work) {
    struct Job {
        const Runtime& runtime;
        const Work& work;
        Team::Shared shared;
    } job{runtime, work, {}};
    auto enter = [](void* argument) {
        Job& job = *static_cast<Job*>(argument);
        Team team(job.shared, job.runtime.num_threads());
        job.work(team);
    };
    if (num_threads == 1) {
        Team alone(job.shared, 1);
        work(alone);
    } else {
        runtime.parallel(enter, &job, unsigned(num_threads), 0);
    }
}

}  // namespace vlmfast
