#include "platform/thread_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "platform/cpu.h"

namespace gapless {

namespace {

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// About 100 us of pauses: longer than any serial op between two parallel ones in a decode step, short enough that an
// idle engine costs nothing. A pool larger than the CPUs it may use must not spin: the spinner would hold the CPU that
// the thread it waits for needs.
int bounded_spins(int num_threads) {
  const double cpus = std::min<double>(double(affinity_cpus().size()), cgroup_cpu_quota());
  return num_threads <= cpus ? 4000 : 0;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), spins_(bounded_spins(num_threads)) {
  if (num_threads < 1) throw std::invalid_argument("num_threads is " + std::to_string(num_threads) + "; at least 1");
  for (int worker = 1; worker < num_threads; ++worker) workers_.emplace_back([this, worker] { worker_loop(worker); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  {
    std::lock_guard lock(mutex_);
    claims_.store((epoch_of(claims_.load()) + 1) << (2 * kItemBits));
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::dispatch(Job job) {
  job_ = job;
  num_done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = epoch_of(claims_.load(std::memory_order_relaxed)) + 1;
  claims_.store(epoch << (2 * kItemBits) | uint64_t(job.num_items) << kItemBits, std::memory_order_seq_cst);
  // A worker announces its sleep before it looks at the epoch a last time (see worker_loop), so either it sees this
  // epoch or we see it asleep.
  if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }
    wake_.notify_all();
  }
  claim_items(0);
  for (int spin = 0; num_done_.load(std::memory_order_acquire) < job.num_items; ++spin) {
    if (spin < spins_) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

// Works until nothing is left to claim; returns the epoch that it found exhausted.
uint64_t ThreadPool::claim_items(int worker) {
  int num_done = 0;  // all of one job, which cannot end before they are told
  for (;;) {
    const uint64_t word = claims_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t item = word & kItemMask;
    if (item >= (word >> kItemBits & kItemMask)) {
      if (num_done > 0) num_done_.fetch_add(num_done, std::memory_order_release);
      return epoch_of(word);
    }
    job_.call(job_.fn, int(item), worker);
    ++num_done;
  }
}

void ThreadPool::worker_loop(int worker) {
  uint64_t seen = 0;
  const auto is_new = [&](std::memory_order order) { return epoch_of(claims_.load(order)) != seen; };
  for (;;) {
    for (int spin = 0; spin < spins_ && !is_new(std::memory_order_acquire); ++spin) relax();
    if (!is_new(std::memory_order_acquire)) {
      std::unique_lock lock(mutex_);
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return is_new(std::memory_order_seq_cst); });
      num_asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (stop_.load()) return;
    seen = claim_items(worker);
  }
}

}  // namespace gapless
