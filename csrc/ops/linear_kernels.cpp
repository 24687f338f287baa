// The linear layers of one ISA.
#include "ops/linear_a8.h"
#include "ops/linear_f32.h"
#include "ops/linear_output.h"
#include "simd/to_int8.h"

namespace gapless::GAPLESS_ISA {
namespace {

// Round-to-nearest candidates that quantize_group tries: the element of largest magnitude becomes -128, -126 or -124.
// One more candidate would lower the error by 1%, these lower it by 6%.
constexpr float kTopLevels[] = {128.0f, 126.0f, 124.0f};

struct Rounded {
  F32x16 low, high;
};
GAPLESS_INLINE Rounded rounded(F32x16 low, F32x16 high, float inverse) {
  const F32x16 factor = set1(inverse), most = set1(127.0f);
  return {min(round_even(mul(low, factor)), most), min(round_even(mul(high, factor)), most)};
}

// x[32] as int8 with one scale.
//
// For given integers q the scale that leaves the smallest squared error is <x, q> / <q, q>, and what it leaves is
// <x, x> - <x, q>^2 / <q, q>. So of a few roundings the one with the largest <x, q>^2 / <q, q> is taken.
// Multiplications and additions are not fused: every ISA must choose alike.
GAPLESS_INLINE void quantize_group(F32x16 low, F32x16 high, A8Group* out) {
  const float top = reduce_max(max(low, high)), bottom = -reduce_max(max(sub(zero(), low), sub(zero(), high)));
  const float extreme = top > -bottom ? top : bottom;
  if (std::fabs(extreme) < 1e-30f) {  // 1 / extreme would overflow
    std::memset(out, 0, sizeof *out);
    return;
  }
  const float inverse = -1.0f / extreme;
  F32x16 xq[3], qq[3];
  unroll<3>([&](auto i) GAPLESS_LAMBDA_INLINE {
    const Rounded q = rounded(low, high, kTopLevels[i] * inverse);
    xq[i] = add(mul(low, q.low), mul(high, q.high));
    qq[i] = add(mul(q.low, q.low), mul(q.high, q.high));
  });
  const FourSums first = reduce_add(xq[0], xq[1], qq[0], qq[1]), last = reduce_add(xq[2], qq[2], xq[2], qq[2]);
  float level = kTopLevels[0], scale = first.v[0] / first.v[2], quality = scale * first.v[0];
  const auto consider = [&](float candidate, float xq_sum, float qq_sum) GAPLESS_LAMBDA_INLINE {
    const float its_scale = xq_sum / qq_sum, its_quality = its_scale * xq_sum;
    level = its_quality > quality ? candidate : level;
    scale = its_quality > quality ? its_scale : scale;
    quality = its_quality > quality ? its_quality : quality;
  };
  consider(kTopLevels[1], first.v[1], first.v[3]);
  consider(kTopLevels[2], last.v[0], last.v[1]);

  const Rounded q = rounded(low, high, level * inverse);
  const FourSums sums = reduce_add(q.low, q.high, q.low, q.high);  // of integers: exact
  store_i8(out->q, q.low, q.high);
  const int halves[2] = {int(sums.v[0]), int(sums.v[1])}, sum = halves[0] + halves[1];
  out->scale = scale;
  out->offset = -scale * float(sum);
  out->zero_dot[0] = -8 * sum;
  out->zero_dot[1] = -16 * sum;
  out->zero_dot[2] = -128 * sum;
  for (int i = 0; i < 2; ++i) {
    out->half_zero[i] = -32 * halves[i];
    out->half_sum[i] = int16_t(halves[i]);
  }
}

void quantize_row(const float* x, int k, std::byte* out) {
  auto* groups = reinterpret_cast<A8Group*>(out);
  int first = 0;
  for (; first + kGroupCols <= k; first += kGroupCols) quantize_group(load(x + first), load(x + first + 16), groups++);
  if (first == k) return;
  float tail[kGroupCols] = {};
  std::memcpy(tail, x + first, size_t(k - first) * sizeof(float));
  quantize_group(load(tail), load(tail + 16), groups);
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
    const InputRows input = {args.x + first * args.x_stride, args.x_stride, args.xq + first * args.xq_stride,
                             args.xq_stride, num_rows};
    for (int tile = args.tile_begin; tile < args.tile_end; ++tile) {
      compute(w, tile, input, sums);
      if (compute_up) compute_up(*args.up, tile, input, up_sums);
      for (int row = 0; row < num_rows; ++row) write_row(args, first + row, tile, sums[row], up_sums[row]);
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels() {
  static constexpr LinearKernels kernels = {quantize_row, linear};
  return kernels;
}

}  // namespace gapless::GAPLESS_ISA
