// Where keys and values lie in the cache of one layer.
//
// A block holds 16 tokens of all layers. A layer's part of it is, for each kv head, a K tile [head_dim][16 tokens]
// followed by a V tile [16 tokens][head_dim]. Scores of 16 tokens are then sums of (broadcast q) x (16 keys), outputs
// sums of (broadcast p) x (16 dimensions): neither needs a shuffle.
//
// int8 tiles are followed by one f32 scale per token for the keys and one for the values. Both are rotated
// (simd/hadamard.h) before they are rounded, which spreads a channel that is far larger than the others over all of
// them; queries are rotated too, and the outputs of attention are rotated back.
//
// What lies beyond a sequence's last token, stale or never written, is read but has no effect, NaN included.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gapless {

inline constexpr int kKvBlockTokens = 16;

enum class KvDtype : uint8_t { f16, bf16, int8 };

// Bytes that the keys and values of one block and kv head take. Always inlined, as everything that is compiled once per
// ISA must be.
[[gnu::always_inline]] constexpr int64_t kv_head_bytes(KvDtype dtype, int head_dim) {
  const int64_t values = int64_t(2) * head_dim * kKvBlockTokens;
  if (dtype == KvDtype::int8) return values + 2 * kKvBlockTokens * int64_t(sizeof(float));
  return values * int64_t(sizeof(uint16_t));
}

// The cache as one layer sees it.
struct KvLayer {
  std::byte* data;       // the layer's part of block 0
  int64_t block_stride;  // bytes from one block to the next
  KvDtype dtype;
  int head_dim;

  [[gnu::always_inline]] int64_t tile_bytes() const {
    return int64_t(head_dim) * kKvBlockTokens * (dtype == KvDtype::int8 ? 1 : 2);
  }
  [[gnu::always_inline]] std::byte* keys(int64_t block, int kv_head) const {
    return data + block * block_stride + kv_head * kv_head_bytes(dtype, head_dim);
  }
  [[gnu::always_inline]] std::byte* values(int64_t block, int kv_head) const {
    return keys(block, kv_head) + tile_bytes();
  }
  // [16] of the keys, then [16] of the values; int8 only.
  [[gnu::always_inline]] float* scales(int64_t block, int kv_head) const {
    return reinterpret_cast<float*>(keys(block, kv_head) + 2 * tile_bytes());
  }
};

}  // namespace gapless
