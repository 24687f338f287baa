// The block pool's memory: keys and values of every layer, in blocks of kKvBlockTokens (ops/kv_layout.h).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/kv_layout.h"
#include "platform/memory.h"

namespace gapless {

struct KVShape {
  std::vector<KvDtype> dtypes;  // of the layers
  int num_kv_heads;
  int head_dim;

  int num_layers() const { return int(dtypes.size()); }
};

// The layers of a block lie side by side, so that memory fills in the order of the blocks whatever the number of layers
// is, and huge pages don't waste any.
class KVCache {
 public:
  // Memory is taken from the system as blocks are first written.
  KVCache(const KVShape& shape, int num_blocks) : head_dim_(shape.head_dim), dtypes_(shape.dtypes) {
    for (KvDtype dtype : dtypes_) {
      offsets_.push_back(block_bytes_);
      block_bytes_ += shape.num_kv_heads * kv_head_bytes(dtype, head_dim_);
    }
    memory_ = MappedMemory(size_t(block_bytes_) * size_t(num_blocks), /*huge_pages=*/true);
  }

  KvLayer layer(int index) const {
    return {memory_.data() + offsets_[size_t(index)], block_bytes_, dtypes_[size_t(index)], head_dim_};
  }
  size_t size_bytes() const { return memory_.size(); }

 private:
  int head_dim_;
  std::vector<KvDtype> dtypes_;
  std::vector<int64_t> offsets_;  // of the layers in a block
  int64_t block_bytes_ = 0;
  MappedMemory memory_;
};

}  // namespace gapless
