// Mapped memory: zero, apart, and given back; many small ones share huge pages.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "platform/memory.h"

using namespace gapless;

namespace {

constexpr size_t kPage = 4096;

bool is_all(const MappedMemory& memory, std::byte value) {
  return std::all_of(memory.data(), memory.data() + memory.size(), [&](std::byte b) { return b == value; });
}

bool is_mapped(const std::byte* page) {
  unsigned char resident;
  return mincore(const_cast<std::byte*>(page), kPage, &resident) == 0;
}

void test_zero_and_apart() {
  std::vector<MappedMemory> pieces;
  for (int i = 0; i < 200; ++i) {
    pieces.emplace_back(size_t(1 + i * 7919 % 400'000), i % 3 != 0);
    CHECK(uintptr_t(pieces.back().data()) % kPage == 0);
    CHECK(is_all(pieces.back(), std::byte(0)));  // although what was before is full
    std::memset(pieces.back().data(), i + 1, pieces.back().size());
  }
  for (int i = 0; i < 200; ++i) CHECK(is_all(pieces[size_t(i)], std::byte(i + 1)));
}

void test_what_was_in_use_is_not_given_out_again() {
  MappedMemory keeps_the_slab(1000, true);
  for (int i = 0; i < 100; ++i) {
    const MappedMemory memory(100'000, true);
    CHECK(is_all(memory, std::byte(0)));
    std::memset(memory.data(), 255, memory.size());
  }
}

void test_small_ones_are_neighbours() {
  const MappedMemory a(300'000, true), b(300'000, true), c(300'000, true);
  const auto [least, most] = std::minmax({a.data(), b.data(), c.data()});
  CHECK(most - least < 2 << 20);  // so that a huge page can hold them
}

void test_given_back() {
  for (const size_t bytes : {size_t(5000), size_t(300'000), size_t(70) << 20})
    for (const bool huge : {false, true}) {
      const std::byte* data;
      {
        MappedMemory memory(bytes, huge);
        data = memory.data();
        MappedMemory moved = std::move(memory);
        CHECK(memory.data() == nullptr && memory.size() == 0);
        CHECK(moved.data() == data && moved.size() == bytes);
        CHECK(is_mapped(data));
      }
      CHECK(!is_mapped(data));  // it was the only piece
    }
}

void test_threads() {
  std::vector<std::thread> threads;
  std::vector<std::vector<MappedMemory>> pieces(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&mine = pieces[size_t(t)], t] {
      for (int i = 0; i < 50; ++i) {
        mine.emplace_back(200'000, true);
        std::memset(mine.back().data(), t + 1, mine.back().size());
        if (i % 5 == 4) mine.erase(mine.begin());
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (int t = 0; t < 4; ++t)
    for (const MappedMemory& memory : pieces[size_t(t)]) CHECK(is_all(memory, std::byte(t + 1)));
}

}  // namespace

int main() {
  test_given_back();
  test_zero_and_apart();
  test_what_was_in_use_is_not_given_out_again();
  test_small_ones_are_neighbours();
  test_threads();
  CHECK(MappedMemory(0, true).data() == nullptr);
  return check::finish("memory");
}
