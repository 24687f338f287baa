// Integer weights times int8 activations.
//
// A few rows (decode) take the weights straight from memory: each group is unpacked in registers for all rows at once.
// More rows (prefill, many streams) share an unpacked copy of a block of groups in L1; not so with AVX-512, whose eight
// rows at a time hide the unpacking behind the multiplications. All give the same bits: per row and output, in the
// order of the groups,
//   total = fma(integer dot of the group with the weights less their zero point, weight scale * activation scale,
//   total) total = fma(min, activation offset, total), for weights that have a minimum instead of a zero point
#pragma once

#include "ops/linear_input.h"

namespace gapless::GAPLESS_ISA {

// Rows that are computed together, so that their sums fit the registers. AVX2: found by trying 1...6.
constexpr int a8_rows([[maybe_unused]] int bits) {
#if defined(GAPLESS_ISA_AVX512)
  return 8;
#elif defined(GAPLESS_ISA_AVX2)
  return bits == 8 ? 3 : 4;
#elif defined(GAPLESS_ISA_NEON)
  return 4;
#else
  return 1;
#endif
}

#if defined(GAPLESS_ISA_AVX512)
constexpr bool kUnpacksOnce = false;
#else
constexpr bool kUnpacksOnce = true;
#endif
constexpr int kBlockGroups = 8;  // 4 KB unpacked (8 KB for int8 on AVX2)

// Kept as bytes and floats: loaded as vectors, where copies of vector structs would be split into smaller moves.
template <int bits, bool has_min>
struct UnpackedGroup {
  alignas(64) std::byte steps[8][sizeof(Operand<bits>)];
  float group_scale[kTileRows], group_min[has_min ? kTileRows : 1];
  std::byte group_subs[bits == 6 ? sizeof(SubScales<bits>) : 1];

  GAPLESS_INLINE void assign(const PackedGroup<bits, has_min>& group) {
    unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE { store_operand(steps[step], group.template operand<step>()); });
    store(group_scale, group.scale());
    if constexpr (has_min) store(group_min, group.min());
    if constexpr (bits == 6) store_sub_scales(group_subs, group.subs());
  }

  template <int step>
  GAPLESS_INLINE Operand<bits> operand() const {
    return load_operand<bits>(steps[step]);
  }
  GAPLESS_INLINE F32x16 scale() const { return load(group_scale); }
  GAPLESS_INLINE F32x16 min() const { return load(group_min); }
  GAPLESS_INLINE SubScales<bits> subs() const { return reload_sub_scales<bits>(group_subs); }
};

// Adds `num_groups` groups of one tile to the sums of `rows` rows. `cursor` is a pointer to unpacked groups or a
// PackedGroup.
template <int bits, bool has_min, int rows, typename Cursor>
GAPLESS_INLINE void add_groups(Cursor cursor, int num_groups, const A8Group* x, int64_t x_stride,
                               float (*sums)[kTileRows]) {
  F32x16 totals[rows];
  unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { totals[r] = load(sums[r]); });
  for (int g = 0; g < num_groups; ++g, ++cursor, ++x) {
    const auto& group = *cursor;
    const SubScales<bits> subs = group.subs();
    const auto row = [&](int r) GAPLESS_LAMBDA_INLINE {
      return reinterpret_cast<const A8Group*>(reinterpret_cast<const std::byte*>(x) + r * x_stride);
    };
    Dot<bits, !has_min> dots[rows];
    unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE {
      const Operand<bits> w = group.template operand<step>();
      unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { dots[r].template add<step>(w, row(r), subs); });
    });
    const F32x16 scale = group.scale();
    unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE {
      const F32x16 dot = dots[r].finish(row(r), subs);
      totals[r] = fma(dot, mul(scale, set1(row(r)->scale)), totals[r]);
    });
    if constexpr (has_min) {
      const F32x16 min = group.min();
      unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { totals[r] = fma(min, set1(row(r)->offset), totals[r]); });
    }
  }
  unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { store(sums[r], totals[r]); });
}

// As many rows at a time as the registers allow. The rest goes in one piece where that is worth the larger code (with
// AVX-512 seven rows are a fifth to a third faster than four, two and one), else in powers of two.
template <int bits, bool has_min, int rows, typename Cursor>
GAPLESS_INLINE void add_groups_to_rows(const Cursor& cursor, int num_groups, const InputRows& input, int first_group,
                                       int row, TileSums& sums) {
  for (; row + rows <= input.num_rows; row += rows)
    add_groups<bits, has_min, rows>(cursor, num_groups, input.groups(row) + first_group, input.xq_stride, sums + row);
  constexpr int fewer = kUnpacksOnce ? rows / 2 : rows - 1;
  if constexpr (rows > 1) add_groups_to_rows<bits, has_min, fewer>(cursor, num_groups, input, first_group, row, sums);
}

template <int bits, bool has_min>
void a8_tile(const PackedWeight& w, int tile, const InputRows& input, TileSums& sums) {
  constexpr int rows = a8_rows(bits);
  for (int row = 0; row < input.num_rows; ++row) store(sums[row], zero());
  PackedGroup<bits, has_min> packed(w, tile, 0);
  if (input.num_rows <= rows) {
    add_groups_to_rows<bits, has_min, rows>(packed, w.num_groups, input, 0, 0, sums);
    return;
  }
  if constexpr (!kUnpacksOnce) {
    add_groups<bits, has_min, rows>(packed, w.num_groups, input.groups(0), input.xq_stride, sums);
    const int passes_left = (input.num_rows - 1) / rows;
    Ahead ahead = {packed.quants + w.tile_quant_bytes, (bits + passes_left - 1) / passes_left};
    const RepeatedGroup<bits, has_min> again(packed, ahead);
    add_groups_to_rows<bits, has_min, rows>(again, w.num_groups, input, 0, rows, sums);
  } else {
    UnpackedGroup<bits, has_min> block[kBlockGroups];
    for (int first = 0; first < w.num_groups; first += kBlockGroups) {
      const int n = w.num_groups - first < kBlockGroups ? w.num_groups - first : kBlockGroups;
      for (int g = 0; g < n; ++g, ++packed) block[g].assign(packed);
      const UnpackedGroup<bits, has_min>* cursor = block;
      add_groups_to_rows<bits, has_min, rows>(cursor, n, input, first, 0, sums);
    }
  }
}

inline TileFunction a8_tile_function(const PackedFormat& format) {
  switch (format.type) {
    case PackedType::int4:
      return format.has_min ? a8_tile<4, true> : a8_tile<4, false>;
    case PackedType::int5:
      return format.has_min ? a8_tile<5, true> : a8_tile<5, false>;
    case PackedType::int6:
      return a8_tile<6, false>;
    default:
      return a8_tile<8, false>;
  }
}

}  // namespace gapless::GAPLESS_ISA
