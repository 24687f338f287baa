// What every way to compute a tile has in common.
#pragma once

#include "ops/linear.h"
#include "simd/int8_dot.h"

namespace gapless::GAPLESS_ISA {

// Rows that are computed together: their sums for one tile are 4 KB and stay in L1.
constexpr int kMaxRows = 64;

// Weights are asked for this far ahead. Reading them from memory that way is 10% (int4) to 50% (int6, int5) faster than
// to leave it to the hardware (Zen 3, one row); 1, 2 and 4 KB differ little.
constexpr int kPrefetchBytes = 2048;

static_assert(sizeof(A8Group) == kA8GroupBytes);

struct InputRows {
  const float* x;
  int64_t x_stride;
  const std::byte* xq;
  int64_t xq_stride;
  int num_rows;  // <= kMaxRows

  GAPLESS_INLINE const float* floats(int row) const { return x + row * x_stride; }
  GAPLESS_INLINE const A8Group* groups(int row) const { return reinterpret_cast<const A8Group*>(xq + row * xq_stride); }
};

// sums[row][output] of one tile.
using TileSums = float[kMaxRows][kTileRows];
using TileFunction = void (*)(const PackedWeight&, int tile, const InputRows&, TileSums& sums);

// Scale and minimum per group of a tile, in order. Cheap to advance, because it is done for every group.
template <bool has_min, bool has_two_subs>
struct ScaleReader {
  const uint16_t* entry;
  const int8_t* subs;  // null when the format has none
  int groups_per_scale;
  int left;  // groups that still use `entry`

  GAPLESS_INLINE ScaleReader(const PackedWeight& w, int tile, int group) {
    groups_per_scale = w.format.groups_per_scale;
    const int index = group / groups_per_scale;
    entry = w.scales + (int64_t(tile) * w.num_scales + index) * kEntry;
    left = groups_per_scale - (group - index * groups_per_scale);
    subs = w.subs ? w.subs + (int64_t(tile) * w.num_groups + group) * kSubs : nullptr;
  }
  GAPLESS_INLINE F32x16 scale() const {
    const F32x16 s = load_f16(entry);
    return has_two_subs || !subs ? s : mul(s, load_i8(subs));
  }
  GAPLESS_INLINE F32x16 min() const {
    const F32x16 m = load_f16(entry + kTileRows);
    return subs ? mul(m, load_i8(subs + kTileRows)) : m;
  }
  GAPLESS_INLINE void advance() {
    if (subs) subs += kSubs;
    if (--left == 0) {
      left = groups_per_scale;
      entry += kEntry;
    }
  }

  // Asks for what the next `num_groups` groups need.
  GAPLESS_INLINE void prefetch(int num_groups) const {
    const int num_scales = groups_per_scale < num_groups ? num_groups : 1;
    for (int i = 0; i < num_scales * kEntry; i += kLineBytes / int(sizeof *entry)) __builtin_prefetch(entry + i);
    for (int i = 0; subs && i < num_groups * kSubs; i += kLineBytes) __builtin_prefetch(subs + i);
  }

 private:
  static constexpr int kEntry = has_min ? 2 * kTileRows : kTileRows;
  static constexpr int kSubs = has_min || has_two_subs ? 2 * kTileRows : kTileRows;
};

// Step `step` of a group: 16 outputs x 4 inputs as bytes.
template <int bits, int step>
GAPLESS_INLINE Line unpack_step(const std::byte* group) {
  if constexpr (bits == 8) return load_line(group + step * kLineBytes);
  const Line low = shift_right<step % 2 * 4>(load_line(group + step / 2 * kLineBytes)) & 15;
  if constexpr (bits == 5) return low | (shift_right<step - 4>(load_line(group + 4 * kLineBytes)) & 0x10);
  if constexpr (bits == 6)
    return low | (shift_right<step % 4 * 2 - 4>(load_line(group + (4 + step / 4) * kLineBytes)) & 0x30);
  return low;
}

constexpr int zero_point_of(int bits, bool has_min) { return has_min ? 0 : 1 << (bits - 1); }

// Weights that are asked for while others are computed with: some lines with each group of each block of rows. A core
// waits for few lines at a time on its own (16); more come once its hardware sees a stream, and that stops at the end
// of a page. So one line in four is asked for a page earlier, into L2.
struct Ahead {
  const std::byte* at;
  int lines_per_group;

  GAPLESS_INLINE void prefetch() {
    constexpr int page = 4096;
    for (int i = 0; i < lines_per_group; ++i, at += kLineBytes) {
      __builtin_prefetch(at);
      if (reinterpret_cast<uintptr_t>(at) % (4 * kLineBytes) == 0) __builtin_prefetch(at + page, 0, 2);
    }
  }
};

// One group of a tile after the other, straight from the weight.
template <int bits, bool has_min>
struct PackedGroup {
  const std::byte* quants;
  ScaleReader<has_min, bits == 6> scales;

  GAPLESS_INLINE PackedGroup(const PackedWeight& w, int tile, int group)
      : quants(w.quants + tile * int64_t(w.tile_quant_bytes) + int64_t(group) * bits * kLineBytes),
        scales(w, tile, group) {}
  GAPLESS_INLINE const PackedGroup& operator*() const { return *this; }
  GAPLESS_INLINE PackedGroup& operator++() {
    advance();
    unroll<bits>([&](auto line)
                     GAPLESS_LAMBDA_INLINE { __builtin_prefetch(quants + kPrefetchBytes + line * kLineBytes); });
    return *this;
  }
  GAPLESS_INLINE void advance() {
    quants += bits * kLineBytes;
    scales.advance();
  }

  template <int step>
  GAPLESS_INLINE Operand<bits> operand() const {
    return make_operand<bits>(unpack_step<bits, step>(quants));
  }
  GAPLESS_INLINE F32x16 scale() const { return scales.scale(); }
  GAPLESS_INLINE F32x16 min() const { return scales.min(); }
  GAPLESS_INLINE SubScales<bits> subs() const { return load_sub_scales<bits>(scales.subs); }
};

// The same for rows that are not the first to go over a tile, while its successor is asked for.
template <int bits, bool has_min>
struct RepeatedGroup : PackedGroup<bits, has_min> {
  Ahead* ahead;

  GAPLESS_INLINE RepeatedGroup(const PackedGroup<bits, has_min>& group, Ahead& next)
      : PackedGroup<bits, has_min>(group), ahead(&next) {}
  GAPLESS_INLINE const RepeatedGroup& operator*() const { return *this; }
  GAPLESS_INLINE RepeatedGroup& operator++() {
    this->advance();
    ahead->prefetch();
    return *this;
  }
};

}  // namespace gapless::GAPLESS_ISA
