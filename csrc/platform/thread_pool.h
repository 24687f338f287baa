// One pool of compute threads for the whole process step: the caller is worker 0.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace gapless {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread. Throws std::invalid_argument below 1.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls fn(item, worker) once for every item in [0, num_items) and returns when all are done. Items are claimed from
  // a counter in ascending order. Only one thread may call run at a time; fn must not throw.
  template <typename Fn>
  void run(int num_items, Fn&& fn) {
    if (num_items <= 0) return;
    if (num_items == 1 || num_threads_ == 1) {
      for (int i = 0; i < num_items; ++i) fn(i, 0);
      return;
    }
    using Plain = std::remove_reference_t<Fn>;
    dispatch({[](void* f, int item, int worker) { (*static_cast<Plain*>(f))(item, worker); },
              const_cast<void*>(static_cast<const void*>(&fn)), num_items});
  }

 private:
  struct Job {
    void (*call)(void*, int item, int worker) = nullptr;
    void* fn = nullptr;
    int num_items = 0;
  };

  void dispatch(Job job);
  void claim_items(const Job& job, int worker);
  void worker_loop(int worker);

  const int num_threads_;
  const int spins_;
  std::vector<std::thread> workers_;

  // A job is published by raising `epoch_`; the workers that have finished it are counted in `num_done_`. A worker that
  // has not yet seen an epoch has not counted itself, so job_ is never overwritten under one.
  Job job_;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int> next_item_{0};
  alignas(64) std::atomic<int> num_done_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace gapless
