// The linear layers of one ISA.
#include "ops/linear_a8.h"
#include "ops/linear_f32.h"
#include "ops/linear_output.h"
#include "simd/to_int8.h"

namespace gapless::GAPLESS_ISA {
namespace {

// Round-to-nearest candidates that are tried for a group: the element of largest magnitude becomes -128, -126 or -124.
// One more candidate would lower the error by 1%, these lower it by 6%.
constexpr float kTopLevels[] = {128.0f, 126.0f, 124.0f};

struct Rounded {
  F32x16 low, high;
};

// Four groups at a time: what is one number for each group is computed for all four.
constexpr int kQuadGroups = 4, kQuadCols = kQuadGroups * kGroupCols;

struct Quad {
  F32x16 low[kQuadGroups], high[kQuadGroups];

  GAPLESS_INLINE explicit Quad(const float* x) {
    unroll<kQuadGroups>([&](auto g) GAPLESS_LAMBDA_INLINE {
      low[g] = load(x + g * kGroupCols), high[g] = load(x + g * kGroupCols + kTileRows);
    });
  }

  // The element of largest magnitude.
  GAPLESS_INLINE F32x4 extreme() const {
    F32x16 largest[kQuadGroups], smallest[kQuadGroups];
    unroll<kQuadGroups>([&](auto g) GAPLESS_LAMBDA_INLINE {
      largest[g] = max(low[g], high[g]), smallest[g] = max(sub(zero(), low[g]), sub(zero(), high[g]));
    });
    const F32x4 top = reduce_max(largest), bottom = reduce_max(smallest);
    return top > bottom ? top : -bottom;
  }

  GAPLESS_INLINE Rounded rounded(F32x4 factor, int g) const {
    const F32x16 its_factor = set1(factor[g]), most = set1(127.0f);
    return {min(round_even(mul(low[g], its_factor)), most), min(round_even(mul(high[g], its_factor)), most)};
  }
};

// How the groups of a quad are rounded: q = x * factor, x = q * scale.
struct Rounding {
  F32x4 extreme, factor, scale;

  // For given integers q the scale that leaves the smallest squared error is <x, q> / <q, q>, and what it leaves is
  // <x, x> - <x, q>^2 / <q, q>. So of a few roundings the one with the largest <x, q>^2 / <q, q> is taken.
  // Multiplications and additions are not fused: every ISA must choose alike.
  GAPLESS_INLINE void choose(const Quad& x) {
    const F32x4 inverse = -1.0f / extreme;
    F32x4 level{}, quality = F32x4{} - 1;
    unroll<3>([&](auto candidate) GAPLESS_LAMBDA_INLINE {
      const F32x4 its_level = F32x4{} + kTopLevels[candidate];
      F32x16 xq[kQuadGroups], qq[kQuadGroups];
      unroll<kQuadGroups>([&](auto g) GAPLESS_LAMBDA_INLINE {
        const Rounded q = x.rounded(its_level * inverse, g);
        xq[g] = add(mul(x.low[g], q.low), mul(x.high[g], q.high));
        qq[g] = add(mul(q.low, q.low), mul(q.high, q.high));
      });
      const F32x4 xq_sum = reduce_add(xq), its_scale = xq_sum / reduce_add(qq), its_quality = its_scale * xq_sum;
      const I32x4 better = its_quality > quality;
      level = better ? its_level : level;
      scale = better ? its_scale : scale;
      quality = better ? its_quality : quality;
    });
    factor = level * inverse;
  }

  GAPLESS_INLINE void apply(const Quad& x, A8Group* out) const {
    F32x16 low[kQuadGroups], high[kQuadGroups];
    unroll<kQuadGroups>([&](auto g) GAPLESS_LAMBDA_INLINE {
      const Rounded q = x.rounded(factor, g);
      low[g] = q.low, high[g] = q.high;
      store_i8(out[g].q, q.low, q.high);
    });
    const F32x4 low_sum = reduce_add(low), high_sum = reduce_add(high), sum = low_sum + high_sum;  // exact: integers
    const F32x4 offset = -scale * sum;
    const I32x4 halves[2] = {__builtin_convertvector(low_sum, I32x4), __builtin_convertvector(high_sum, I32x4)};
    for (int g = 0; g < kQuadGroups; ++g) {
      A8Group& group = out[g];
      if (std::fabs(extreme[g]) < 1e-30f) {  // its inverse has overflown
        std::memset(&group, 0, sizeof group);
        continue;
      }
      const int whole = halves[0][g] + halves[1][g];
      group.scale = scale[g];
      group.offset = offset[g];
      group.zero_dot[0] = -8 * whole;
      group.zero_dot[1] = -16 * whole;
      group.zero_dot[2] = -128 * whole;
      for (int i = 0; i < 2; ++i) {
        group.half_zero[i] = -32 * halves[i][g];
        group.half_sum[i] = int16_t(halves[i][g]);
      }
    }
  }
};

// One thing at a time for several quads, because all of it for one is a long chain: nothing would fill the waiting.
void quantize_quads(const float* x, int num_quads, A8Group* out) {
  constexpr int kMaxQuads = 8;
  for (; num_quads > 0; num_quads -= kMaxQuads, x += kMaxQuads * kQuadCols, out += kMaxQuads * kQuadGroups) {
    const int n = num_quads < kMaxQuads ? num_quads : kMaxQuads;
    Rounding roundings[kMaxQuads];
    for (int i = 0; i < n; ++i) roundings[i].extreme = Quad(x + i * kQuadCols).extreme();
    for (int i = 0; i < n; ++i) roundings[i].choose(Quad(x + i * kQuadCols));
    for (int i = 0; i < n; ++i) roundings[i].apply(Quad(x + i * kQuadCols), out + i * kQuadGroups);
  }
}

void quantize_row(const float* x, int k, std::byte* out) {
  auto* groups = reinterpret_cast<A8Group*>(out);
  const int num_quads = k / kQuadCols, rest = k - num_quads * kQuadCols;
  quantize_quads(x, num_quads, groups);
  if (rest == 0) return;
  float tail[kQuadCols] = {};
  A8Group tail_groups[kQuadGroups];
  std::memcpy(tail, x + num_quads * kQuadCols, size_t(rest) * sizeof(float));
  quantize_quads(tail, 1, tail_groups);
  std::memcpy(groups + num_quads * kQuadGroups, tail_groups,
              size_t((rest + kGroupCols - 1) / kGroupCols) * sizeof(A8Group));
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
