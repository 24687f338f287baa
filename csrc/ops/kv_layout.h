// Where keys and values lie in the cache of one layer.
//
// The cache of a layer is f16: [block][kv_head] of a K tile [head_dim][16 tokens] followed by a V tile [16
// tokens][head_dim]. Scores of 16 tokens are then sums of (broadcast q) x (16 keys), outputs sums of (broadcast p) x
// (16 dimensions): neither needs a shuffle.
//
// What lies beyond a sequence's last token, stale or never written, is read but has no effect, NaN included.
#pragma once

#include <cstdint>

namespace gapless {

inline constexpr int kKvBlockTokens = 16;

// In f16 elements. Always inlined, as everything that is compiled once per ISA must be.
[[gnu::always_inline]] constexpr int64_t kv_tile_size(int head_dim) { return int64_t(2) * head_dim * kKvBlockTokens; }
[[gnu::always_inline]] constexpr int64_t kv_block_size(int num_kv_heads, int head_dim) {
  return num_kv_heads * kv_tile_size(head_dim);
}
[[gnu::always_inline]] constexpr int64_t kv_key_offset(int64_t block, int kv_head, int num_kv_heads, int head_dim) {
  return block * kv_block_size(num_kv_heads, head_dim) + kv_head * kv_tile_size(head_dim);
}
[[gnu::always_inline]] constexpr int64_t kv_value_offset(int64_t block, int kv_head, int num_kv_heads, int head_dim) {
  return kv_key_offset(block, kv_head, num_kv_heads, head_dim) + int64_t(head_dim) * kKvBlockTokens;
}

}  // namespace gapless
