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
  // a counter in ascending order; at most 2^24 - 2^16. Only one thread may call run at a time; fn must not throw.
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
  uint64_t claim_items(int worker);
  void worker_loop(int worker);

  const int num_threads_;
  const int spins_;
  std::vector<std::thread> workers_;

  // A job is over when its items are done, whoever did them: a worker whose CPU is busy with something else holds
  // nobody up. Epoch of the job, number of items and next item share one word, so that a worker that comes late claims
  // from the job that runs by then, or nothing. job_ is read after a successful claim only: until that item is done it
  // cannot be overwritten.
  static constexpr int kItemBits = 24;
  static constexpr uint64_t kItemMask = (uint64_t(1) << kItemBits) - 1;
  static constexpr uint64_t epoch_of(uint64_t word) { return word >> (2 * kItemBits); }

  Job job_;
  alignas(64) std::atomic<uint64_t> claims_{0};  // epoch (16 bits) | num_items (24) | next item (24)
  alignas(64) std::atomic<int> num_done_{0};
  alignas(64) std::atomic<int> num_asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace gapless
