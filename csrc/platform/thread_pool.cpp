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
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : workers_) thread.join();
}

void ThreadPool::dispatch(Job job) {
  job_ = job;
  next_item_.store(0, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  // A worker announces its sleep before it looks at the epoch a last time (see worker_loop), so either it sees this
  // epoch or we see it asleep.
  if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard lock(mutex_);
    }
    wake_.notify_all();
  }
  claim_items(job, 0);
  for (int spin = 0; num_done_.load(std::memory_order_acquire) < num_threads_ - 1; ++spin) {
    if (spin < spins_) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::claim_items(const Job& job, int worker) {
  for (int item; (item = next_item_.fetch_add(1, std::memory_order_relaxed)) < job.num_items;)
    job.call(job.fn, item, worker);
}

void ThreadPool::worker_loop(int worker) {
  uint64_t seen = 0;
  for (;;) {
    int spin = 0;
    while (epoch_.load(std::memory_order_acquire) == seen && spin < spins_) {
      relax();
      ++spin;
    }
    if (epoch_.load(std::memory_order_acquire) == seen) {
      std::unique_lock lock(mutex_);
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
      num_asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
    ++seen;  // dispatch waits for every worker, so epochs can't be skipped
    if (stop_.load()) return;
    claim_items(job_, worker);
    num_done_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace gapless
