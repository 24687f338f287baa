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

constexpr int kGroupsAtOnce = 4;  // what becomes of a group is a long chain; four of them fill the waiting

// x[4 * 32] as four groups of int8 with one scale each.
//
// For given integers q the scale that leaves the smallest squared error is <x, q> / <q, q>, and what it leaves is
// <x, x> - <x, q>^2 / <q, q>. So of a few roundings the one with the largest <x, q>^2 / <q, q> is taken.
// Multiplications and additions are not fused: every ISA must choose alike.
GAPLESS_INLINE void quantize_groups(const float* x, A8Group* out) {
  constexpr int n = kGroupsAtOnce;
  F32x16 low[n], high[n], largest[n], smallest[n];
  unroll<n>([&](auto g) GAPLESS_LAMBDA_INLINE {
    low[g] = load(x + g * kGroupCols), high[g] = load(x + g * kGroupCols + kTileRows);
    largest[g] = max(low[g], high[g]), smallest[g] = max(sub(zero(), low[g]), sub(zero(), high[g]));
  });
  const Four tops = reduce_max(largest), bottoms = reduce_max(smallest);
  float extremes[n], inverses[n];
  for (int g = 0; g < n; ++g) {
    extremes[g] = tops.v[g] > bottoms.v[g] ? tops.v[g] : -bottoms.v[g];
    inverses[g] = -1.0f / extremes[g];
  }
  float levels[n], scales[n], qualities[n];
  unroll<3>([&](auto candidate) GAPLESS_LAMBDA_INLINE {
    constexpr float level = kTopLevels[candidate];
    F32x16 xq[n], qq[n];
    unroll<n>([&](auto g) GAPLESS_LAMBDA_INLINE {
      const Rounded q = rounded(low[g], high[g], level * inverses[g]);
      xq[g] = add(mul(low[g], q.low), mul(high[g], q.high));
      qq[g] = add(mul(q.low, q.low), mul(q.high, q.high));
    });
    const Four xq_sums = reduce_add(xq), qq_sums = reduce_add(qq);
    for (int g = 0; g < n; ++g) {
      const float scale = xq_sums.v[g] / qq_sums.v[g], quality = scale * xq_sums.v[g];
      const bool better = candidate == 0 || quality > qualities[g];
      levels[g] = better ? level : levels[g];
      scales[g] = better ? scale : scales[g];
      qualities[g] = better ? quality : qualities[g];
    }
  });
  F32x16 q_low[n], q_high[n];
  unroll<n>([&](auto g) GAPLESS_LAMBDA_INLINE {
    const Rounded q = rounded(low[g], high[g], levels[g] * inverses[g]);
    q_low[g] = q.low, q_high[g] = q.high;
    store_i8(out[g].q, q.low, q.high);
  });
  const Four low_sums = reduce_add(q_low), high_sums = reduce_add(q_high);  // of integers: exact
  for (int g = 0; g < n; ++g) {
    A8Group& group = out[g];
    if (std::fabs(extremes[g]) < 1e-30f) {  // its inverse has overflown
      std::memset(&group, 0, sizeof group);
      continue;
    }
    const int halves[2] = {int(low_sums.v[g]), int(high_sums.v[g])}, sum = halves[0] + halves[1];
    group.scale = scales[g];
    group.offset = -scales[g] * float(sum);
    group.zero_dot[0] = -8 * sum;
    group.zero_dot[1] = -16 * sum;
    group.zero_dot[2] = -128 * sum;
    for (int i = 0; i < 2; ++i) {
      group.half_zero[i] = -32 * halves[i];
      group.half_sum[i] = int16_t(halves[i]);
    }
  }
}

void quantize_row(const float* x, int k, std::byte* out) {
  constexpr int width = kGroupsAtOnce * kGroupCols;
  auto* groups = reinterpret_cast<A8Group*>(out);
  int first = 0;
  for (; first + width <= k; first += width, groups += kGroupsAtOnce) quantize_groups(x + first, groups);
  if (first == k) return;
  float tail[width] = {};
  A8Group tail_groups[kGroupsAtOnce];
  std::memcpy(tail, x + first, size_t(k - first) * sizeof(float));
  quantize_groups(tail, tail_groups);
  std::memcpy(groups, tail_groups, size_t((k - first + kGroupCols - 1) / kGroupCols) * sizeof(A8Group));
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
