// The block pool's memory: keys and values of every layer, in blocks of kKvBlockTokens (ops/kv_layout.h).
#pragma once

#include <cstdint>

#include "ops/kv_layout.h"
#include "platform/memory.h"

namespace gapless {

struct KVShape {
  int num_layers;
  int num_kv_heads;
  int head_dim;
};

class KVCache {
 public:
  // Memory is taken from the system as blocks are first written.
  KVCache(const KVShape& shape, int num_blocks)
      : layer_elements_(kv_block_size(shape.num_kv_heads, shape.head_dim) * num_blocks),
        memory_(size_t(layer_elements_) * 2 * size_t(shape.num_layers), false) {}

  uint16_t* layer(int index) const { return reinterpret_cast<uint16_t*>(memory_.data()) + layer_elements_ * index; }
  size_t size_bytes() const { return memory_.size(); }

 private:
  int64_t layer_elements_;
  MappedMemory memory_;
};

}  // namespace gapless
