// Large zeroed memory that costs nothing until it is touched.
#pragma once

#include <cstddef>

namespace gapless {

// Page-aligned anonymous memory, zeroed by the kernel, asked to use huge pages where that pays. Movable, never resized.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Throws std::bad_alloc when the system refuses. `bytes` 0 gives an empty one.
  explicit MappedMemory(size_t bytes, bool huge_pages);
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Gives back the whole pages within [data, data + bytes) of a read-only file mapping: they are read again if touched
// again. Never for other memory, which would turn into zeros.
void release_file_pages(const std::byte* data, size_t bytes);

}  // namespace gapless
