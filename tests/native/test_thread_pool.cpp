// Every item runs exactly once, whether the workers spin, sleep, or outnumber the CPUs.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "platform/thread_pool.h"

using namespace gapless;

namespace {

void test_each_item_once(int num_threads, int rounds, bool pause) {
  ThreadPool pool(num_threads);
  for (int round = 0; round < rounds; ++round) {
    const int num_items = round % 67;
    std::vector<std::atomic<int>> counts(size_t(num_items) + 1);
    std::vector<int> plain(size_t(num_items) + 1);  // unsynchronised: TSan sees a missing happens-before
    std::atomic<bool> worker_in_range{true};
    pool.run(num_items, [&](int item, int worker) {
      counts[size_t(item)].fetch_add(1);
      plain[size_t(item)] = round;
      if (worker < 0 || worker >= num_threads) worker_in_range = false;
    });
    for (int i = 0; i < num_items; ++i) CHECK(counts[size_t(i)].load() == 1 && plain[size_t(i)] == round);
    CHECK(worker_in_range);
    if (pause && round % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than the spin
  }
}

void test_no_threads_is_an_error() {
  bool threw = false;
  try {
    ThreadPool pool(0);
  } catch (const std::invalid_argument&) {
    threw = true;
  }
  CHECK(threw);
}

}  // namespace

int main() {
  test_each_item_once(1, 200, false);
  test_each_item_once(2, 5000, false);
  test_each_item_once(2, 400, true);
  test_each_item_once(9, 300, true);                // more than this machine has, most likely
  for (int i = 0; i < 50; ++i) ThreadPool pool(3);  // made and ended without work
  test_no_threads_is_an_error();
  return check::finish("thread_pool");
}
