// Large zeroed memory that costs nothing until it is touched.
#pragma once

#include <cstddef>
#include <memory>

namespace gapless {

// Page-aligned anonymous memory, zeroed by the kernel, asked to use huge pages where that pays. Movable, never resized.
// What asks for huge pages lies in slabs together with others that do: the weights of a small model are smaller than
// such a page. A slab goes back to the system with the last of those that lie in it.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Throws std::bad_alloc when the system refuses. `bytes` 0 gives an empty one.
  explicit MappedMemory(size_t bytes, bool huge_pages);
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<std::byte> data_;  // keeps the mapping that it lies in
  size_t size_ = 0;
};

// Gives back the whole pages within [data, data + bytes) of a read-only file mapping: they are read again if touched
// again. Never for other memory, which would turn into zeros.
void release_file_pages(const std::byte* data, size_t bytes);

}  // namespace gapless
