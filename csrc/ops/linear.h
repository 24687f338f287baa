// y = x W^T for packed weights, by tiles of sixteen outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/packed_weight.h"

namespace gapless {

enum class Activation : uint8_t { silu, gelu_tanh, gelu, relu };

// Rows [0, num_rows) of the outputs of the tiles [tile_begin, tile_end). A row's result does not depend on the other
// rows or on how the tiles are divided among calls: not a bit.
struct LinearArgs {
  const PackedWeight* weight = nullptr;
  const PackedWeight* up = nullptr;  // gated: y = act(x weight^T) * (x up^T), same shape as `weight`; else null
  Activation act = Activation::silu;
  const float* x = nullptr;  // [num_rows][x_stride]; needed by plain types and when xq is null
  int64_t x_stride = 0;
  const std::byte* xq = nullptr;  // rows made by quantize_row, 4-byte aligned, xq_stride bytes apart; or null
  int64_t xq_stride = 0;
  int num_rows = 0;
  int tile_begin = 0, tile_end = 0;
  const float* bias = nullptr;  // [weight->rows] or null; not with `up`
  float* y = nullptr;           // [num_rows][y_stride]; only columns of the given tiles are written
  int64_t y_stride = 0;
  bool accumulate = false;  // y += instead of y =
};

// A row of int8 activations: groups of 44 bytes (A8Group in simd/int8_dot.h).
inline constexpr int kA8GroupBytes = 64;
constexpr int64_t a8_row_bytes(int k) { return int64_t(k + 31) / 32 * kA8GroupBytes; }

struct LinearKernels {
  // Quantizes x[k] to int8 with one scale per 32 values, into a8_row_bytes(k) bytes. Same bytes on every ISA.
  void (*quantize_row)(const float* x, int k, std::byte* out);
  // Uses xq when it is given and the weight is of an integer type, else x.
  void (*linear)(const LinearArgs&);
};

}  // namespace gapless
