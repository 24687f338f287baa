// Integer weights times int8 activations.
//
// A few rows (decode) take the weights straight from memory: each group is unpacked in registers for all rows at once.
// More rows (prefill, many streams) share an unpacked copy of a block of groups in L1. Both give the same bits: per row
// and output, total = fma(integer dot of the group, weight scale * activation scale, total) in the order of the groups.
#pragma once

#include "ops/linear_input.h"

namespace gapless::GAPLESS_ISA {

#if defined(GAPLESS_ISA_AVX512)
constexpr int kA8Rows = 8;  // rows in registers
#elif defined(GAPLESS_ISA_AVX2) || defined(GAPLESS_ISA_NEON)
constexpr int kA8Rows = 4;
#else
constexpr int kA8Rows = 1;
#endif

constexpr int kBlockGroups = 8;  // 4 KB unpacked (8 KB for int8 on AVX2)

template <int bits, bool has_min>
struct UnpackedGroup {
  alignas(64) Operand<bits> steps[8];
  F32x16 group_scale, group_min;
  SubScales<bits> group_subs;

  template <typename Group>
  GAPLESS_INLINE void assign(const Group& group) {
    unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE { steps[step] = group.template operand<step>(); });
    group_scale = group.scale();
    if constexpr (has_min) group_min = group.min();
    group_subs = group.subs();
  }

  template <int step>
  GAPLESS_INLINE Operand<bits> operand() const { return steps[step]; }
  GAPLESS_INLINE F32x16 scale() const { return group_scale; }
  GAPLESS_INLINE F32x16 min() const { return group_min; }
  GAPLESS_INLINE const SubScales<bits>& subs() const { return group_subs; }
};

template <int bits, bool has_min>
struct PackedGroup {
  const std::byte* quants;
  ScaleReader<has_min, bits == 6> scales;

  GAPLESS_INLINE PackedGroup(const PackedWeight& w, int tile, int group)
      : quants(w.quants + tile * int64_t(w.tile_quant_bytes) + int64_t(group) * bits * kLineBytes), scales(w, tile, group) {}
  GAPLESS_INLINE const PackedGroup& operator*() const { return *this; }
  GAPLESS_INLINE PackedGroup& operator++() {
    quants += bits * kLineBytes;
    scales.advance();
    return *this;
  }

  template <int step>
  GAPLESS_INLINE Operand<bits> operand() const { return make_operand<bits>(unpack_step<bits, step>(quants)); }
  GAPLESS_INLINE F32x16 scale() const { return scales.scale(); }
  GAPLESS_INLINE F32x16 min() const { return scales.min(); }
  GAPLESS_INLINE SubScales<bits> subs() const {
    if constexpr (bits == 6) return load_sub_scales(scales.subs);
    else return {};
  }
};

// Adds `num_groups` groups of one tile to the sums of `rows` rows. `cursor` is a pointer to unpacked groups or a PackedGroup.
template <int bits, bool has_min, int rows, typename Cursor>
GAPLESS_INLINE void add_groups(Cursor cursor, int num_groups, const A8Group* x, int64_t x_stride, float (*sums)[kTileRows]) {
  constexpr int zero_point = zero_point_of(bits, has_min);
  F32x16 totals[rows];
  for (int r = 0; r < rows; ++r) totals[r] = load(sums[r]);
  for (int g = 0; g < num_groups; ++g, ++cursor, ++x) {
    const auto& group = *cursor;
    const SubScales<bits> subs = group.subs();
    const auto row = [&](int r) GAPLESS_LAMBDA_INLINE {
      return reinterpret_cast<const A8Group*>(reinterpret_cast<const std::byte*>(x) + r * x_stride);
    };
    Dot<bits> dots[rows];
    for (int r = 0; r < rows; ++r) dots[r].template begin<zero_point>(row(r));
    unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE {
      const Operand<bits> w = group.template operand<step>();
      for (int r = 0; r < rows; ++r) dots[r].template add<step>(w, row(r), subs);
    });
    const F32x16 scale = group.scale();
    for (int r = 0; r < rows; ++r)
      totals[r] = fma(dots[r].template finish<zero_point>(row(r), subs), mul(scale, set1(row(r)->scale)), totals[r]);
    if constexpr (has_min) {
      const F32x16 min = group.min();
      for (int r = 0; r < rows; ++r) totals[r] = fma(min, set1(-row(r)->scaled_sum), totals[r]);
    }
  }
  for (int r = 0; r < rows; ++r) store(sums[r], totals[r]);
}

// The largest powers of two first, so that few sizes of the kernel are needed.
template <int bits, bool has_min, int rows, typename Cursor>
GAPLESS_INLINE void add_groups_to_rows(const Cursor& cursor, int num_groups, const InputRows& input, int first_group, int row,
                                       TileSums& sums) {
  for (; row + rows <= input.num_rows; row += rows)
    add_groups<bits, has_min, rows>(cursor, num_groups, input.groups(row) + first_group, input.xq_stride, sums + row);
  if constexpr (rows > 1)
    add_groups_to_rows<bits, has_min, rows / 2>(cursor, num_groups, input, first_group, row, sums);
}

template <int bits, bool has_min>
void a8_tile(const PackedWeight& w, int tile, const InputRows& input, TileSums& sums) {
  for (int row = 0; row < input.num_rows; ++row) store(sums[row], zero());
  PackedGroup<bits, has_min> packed(w, tile, 0);
  if (input.num_rows <= kA8Rows) {
    add_groups_to_rows<bits, has_min, kA8Rows>(packed, w.num_groups, input, 0, 0, sums);
    return;
  }
  UnpackedGroup<bits, has_min> block[kBlockGroups];
  for (int first = 0; first < w.num_groups; first += kBlockGroups) {
    const int n = w.num_groups - first < kBlockGroups ? w.num_groups - first : kBlockGroups;
    for (int g = 0; g < n; ++g, ++packed) block[g].assign(packed);
    const UnpackedGroup<bits, has_min>* cursor = block;
    add_groups_to_rows<bits, has_min, kA8Rows>(cursor, n, input, first, 0, sums);
  }
}

inline TileFunction a8_tile_function(const PackedFormat& format) {
  switch (format.type) {
    case PackedType::int4: return format.has_min ? a8_tile<4, true> : a8_tile<4, false>;
    case PackedType::int5: return format.has_min ? a8_tile<5, true> : a8_tile<5, false>;
    case PackedType::int6: return a8_tile<6, false>;
    default: return a8_tile<8, false>;
  }
}

}  // namespace gapless::GAPLESS_ISA
