// The linear layers of one ISA.
#include "ops/linear_a8.h"
#include "ops/linear_f32.h"
#include "simd/math.h"

namespace gapless::GAPLESS_ISA {
namespace {

// Round-to-nearest candidates that quantize_group tries: the element of largest magnitude becomes -128, -126 or -124.
// One more candidate would lower the error by 1%, these lower it by 6%.
constexpr float kTopLevels[] = {128.0f, 126.0f, 124.0f};

// x[32] (fewer at the end of a row: `n`) as int8 with one scale.
//
// For given integers q the scale that leaves the smallest squared error is <x, q> / <q, q>, and what it leaves is
// <x, x> - <x, q>^2 / <q, q>. So of a few roundings the one with the largest <x, q>^2 / <q, q> is taken. Multiplications and
// additions are not fused: every ISA must choose alike.
void quantize_group(const float* x, int n, A8Group* out) {
  alignas(64) float values[kGroupCols] = {};
  std::memcpy(values, x, size_t(n) * sizeof(float));
  const F32x16 low = load(values), high = load(values + 16);
  const float top = reduce_max(max(low, high)), bottom = -reduce_max(max(sub(zero(), low), sub(zero(), high)));
  const float extreme = top > -bottom ? top : bottom;
  std::memset(out, 0, sizeof *out);
  if (std::fabs(extreme) < 1e-30f) return;  // 128 / extreme would overflow

  float best = -1.0f;
  F32x16 q_low = zero(), q_high = zero();
  for (const float level : kTopLevels) {
    const F32x16 inverse = set1(-level / extreme), most = set1(127.0f);
    const F32x16 a = min(round_even(mul(low, inverse)), most), b = min(round_even(mul(high, inverse)), most);
    const float xq = reduce_add(add(mul(low, a), mul(high, b))), qq = reduce_add(add(mul(a, a), mul(b, b)));
    const float quality = xq / qq * xq;
    if (quality > best) {
      best = quality;
      out->scale = xq / qq;
      q_low = a;
      q_high = b;
    }
  }
  store(values, q_low);
  store(values + 16, q_high);
  int half_sum[2] = {0, 0};
  for (int i = 0; i < kGroupCols; ++i) {
    out->q[i] = int8_t(int(values[i]));
    half_sum[i / 16] += out->q[i];
  }
  out->half_sum[0] = int16_t(half_sum[0]);
  out->half_sum[1] = int16_t(half_sum[1]);
  out->offset = -out->scale * float(half_sum[0] + half_sum[1]);
}

void quantize_row(const float* x, int k, std::byte* out) {
  auto* groups = reinterpret_cast<A8Group*>(out);
  for (int first = 0; first < k; first += kGroupCols)
    quantize_group(x + first, k - first < kGroupCols ? k - first : kGroupCols, groups++);
}

F32x16 activate(F32x16 x, Activation act) {
  switch (act) {
    case Activation::silu: return silu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    case Activation::gelu: return gelu(x);
    case Activation::relu: return relu(x);
  }
  return x;
}

// One row of a tile on its way out: columns [column, column + n) of y, n <= 16.
GAPLESS_INLINE void write_row(const LinearArgs& args, int row, int column, int n, F32x16 value) {
  float* y = args.y + row * args.y_stride + column;
  if (n == kTileRows) {
    if (args.bias) value = add(value, load(args.bias + column));
    if (args.accumulate) value = add(load(y), value);
    store(y, value);
    return;
  }
  float lanes[kTileRows];
  to_array(lanes, value);
  for (int i = 0; i < n; ++i) {
    if (args.bias) lanes[i] += args.bias[column + i];
    y[i] = args.accumulate ? y[i] + lanes[i] : lanes[i];
  }
}

TileFunction tile_function(const LinearArgs& args, const PackedWeight& w) {
  return args.xq && w.format.type >= PackedType::int4 ? a8_tile_function(w.format) : f32_tile_function(w.format);
}

void linear(const LinearArgs& args) {
  const PackedWeight& w = *args.weight;
  const TileFunction compute = tile_function(args, w);
  const TileFunction compute_up = args.up ? tile_function(args, *args.up) : nullptr;
  alignas(64) TileSums sums, up_sums;
  for (int first = 0; first < args.num_rows; first += kMaxRows) {
    const int num_rows = args.num_rows - first < kMaxRows ? args.num_rows - first : kMaxRows;
    const InputRows input = {args.x + first * args.x_stride, args.x_stride, args.xq + first * args.xq_stride, args.xq_stride,
                             num_rows};
    for (int tile = args.tile_begin; tile < args.tile_end; ++tile) {
      const int column = tile * kTileRows;
      const int n = w.rows - column < kTileRows ? w.rows - column : kTileRows;
      compute(w, tile, input, sums);
      if (compute_up) compute_up(*args.up, tile, input, up_sums);
      for (int row = 0; row < num_rows; ++row) {
        F32x16 value = load(sums[row]);
        if (compute_up) value = mul(activate(value, args.act), load(up_sums[row]));
        write_row(args, first + row, column, n, value);
      }
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels() {
  static constexpr LinearKernels kernels = {quantize_row, linear};
  return kernels;
}

}  // namespace gapless::GAPLESS_ISA
