#include "platform/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <utility>

namespace gapless {

namespace {

constexpr size_t kHugePage = size_t(2) << 20, kSlabBytes = size_t(32) << 20;

size_t rounded_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// `bytes` must be a multiple of the page size, and of huge pages when it asks for them.
std::shared_ptr<std::byte> map(size_t bytes, bool huge_pages) {
  const size_t more = huge_pages ? kHugePage : 0;  // for a begin at a huge page, wherever the system puts it
  void* p = mmap(nullptr, bytes + more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(p);
  if (!huge_pages) return {begin, [bytes](std::byte* data) { munmap(data, bytes); }};
  auto* const aligned = reinterpret_cast<std::byte*>(rounded_up(uintptr_t(p), kHugePage));
  madvise(aligned, bytes, MADV_HUGEPAGE);  // a hint: a refusal changes speed, not results
  return {aligned, [begin, size = bytes + more](std::byte*) { munmap(begin, size); }};
}

// A piece of the slab that is being filled, or a slab of its own. Slabs only grow: memory that was in use is never
// given out again, so that all is zero.
std::shared_ptr<std::byte> take_from_slab(size_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<std::byte> current;  // so that nothing is kept when the last piece is gone
  static size_t used = 0;
  if (bytes > kSlabBytes / 2) return map(rounded_up(bytes, kHugePage), true);
  const std::lock_guard lock(mutex);
  std::shared_ptr<std::byte> slab = current.lock();
  if (!slab || used + bytes > kSlabBytes) {
    slab = map(kSlabBytes, true);
    current = slab;
    used = 0;
  }
  std::byte* const piece = slab.get() + used;
  used += bytes;
  return {std::move(slab), piece};
}

}  // namespace

MappedMemory::MappedMemory(size_t bytes, bool huge_pages) {
  if (bytes == 0) return;
  const size_t pages = rounded_up(bytes, size_t(sysconf(_SC_PAGESIZE)));
  data_ = huge_pages ? take_from_slab(pages) : map(pages, false);
  size_ = bytes;
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void release_file_pages(const std::byte* data, size_t bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page, end = (uintptr_t(data) + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace gapless
