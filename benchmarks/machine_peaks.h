// What this machine can do at most, measured: the yardstick of the kernel benchmarks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "platform/memory.h"
#include "platform/thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gapless {

struct Peaks {
  double read_bandwidth;  // bytes/s
  double int8_ops;        // multiplications and additions per second of the widest int8 dot product (0: not known)
  double f32_flops;
};

// Seconds; of this thread's CPU time when it works alone, so that other programs count less.
inline double now_s(bool alone) {
  timespec t;
  clock_gettime(alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

template <typename Work>
double fastest_s(int runs, bool alone, Work&& work) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double start = now_s(alone);
    work();
    best = std::min(best, now_s(alone) - start);
  }
  return best;
}

inline uint64_t sum_words(const uint64_t* p, size_t n) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i < n; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += p[i + j];
  return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

#if defined(__x86_64__)
constexpr long kPeakRounds = 4'000'000;

// Ten independent chains hide the latency; the empty asm keeps the compiler from merging rounds.
__attribute__((target("avx2"))) inline void maddubs_rounds() {
  __m256i sums[12], w = _mm256_set1_epi8(3), x = _mm256_set1_epi8(5);
  for (auto& s : sums) s = _mm256_setzero_si256();
  for (long i = 0; i < kPeakRounds; ++i)
    for (auto& s : sums) {
      s = _mm256_maddubs_epi16(w, x);
      asm volatile("" : "+x"(s), "+x"(x));
    }
}
__attribute__((target("avx2,fma"))) inline void fma_rounds() {
  __m256 sums[12], w = _mm256_set1_ps(3), x = _mm256_set1_ps(5);
  for (auto& s : sums) s = _mm256_setzero_ps();
  for (long i = 0; i < kPeakRounds; ++i)
    for (auto& s : sums) {
      s = _mm256_fmadd_ps(w, x, s);
      asm volatile("" : "+x"(s));
    }
}
#endif

inline Peaks measure_peaks(ThreadPool& pool) {
  Peaks peaks = {};
  const int n = pool.num_threads();
  const size_t bytes = size_t(512) << 20;
  const MappedMemory memory(bytes, true);
  std::memset(memory.data(), 1, bytes);
  volatile uint64_t sink = 0;
  const int parts = 16 * n;
  const double read_s = fastest_s(12, n == 1, [&] {
    pool.run(parts, [&](int part, int) {
      sink = sum_words(reinterpret_cast<const uint64_t*>(memory.data() + bytes / parts / 64 * 64 * part),
                       bytes / parts / 64 * 8);
    });
  });
  peaks.read_bandwidth = double(bytes) / read_s;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    peaks.int8_ops =
        n * kPeakRounds * 12.0 * 64 / fastest_s(6, n == 1, [&] { pool.run(n, [](int, int) { maddubs_rounds(); }); });
    peaks.f32_flops =
        n * kPeakRounds * 12.0 * 16 / fastest_s(6, n == 1, [&] { pool.run(n, [](int, int) { fma_rounds(); }); });
  }
#endif
  return peaks;
}

}  // namespace gapless
