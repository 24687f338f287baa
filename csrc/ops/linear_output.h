// What becomes of a row of a tile once it is summed.
#pragma once

#include "ops/linear.h"
#include "simd/math.h"

namespace gapless::GAPLESS_ISA {

inline F32x16 activate(F32x16 x, Activation act) {
  switch (act) {
    case Activation::silu:
      return silu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::gelu:
      return gelu(x);
    case Activation::relu:
      return relu(x);
  }
  return x;
}

// Sixteen sums on their way to y, or fewer where the weight ends. `up_sums` is read for gated weights only.
GAPLESS_INLINE void write_row(const LinearArgs& args, int row, int tile, const float* sums, const float* up_sums) {
  const int column = tile * kTileRows, left = args.weight->rows - column;
  float* y = args.y + row * args.y_stride + column;
  F32x16 value = load(sums);
  if (args.up) value = mul(activate(value, args.act), load(up_sums));
  if (left >= kTileRows) {
    if (args.bias) value = add(value, load(args.bias + column));
    if (args.accumulate) value = add(load(y), value);
    store(y, value);
    return;
  }
  float lanes[kTileRows];
  to_array(lanes, value);
  for (int i = 0; i < left; ++i) {
    if (args.bias) lanes[i] += args.bias[column + i];
    y[i] = args.accumulate ? y[i] + lanes[i] : lanes[i];
  }
}

}  // namespace gapless::GAPLESS_ISA
