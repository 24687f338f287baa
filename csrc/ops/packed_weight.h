// A matrix of weights in the order in which the linear kernels read it.
//
// A weight has `rows` output features and `cols` input features. Sixteen outputs form a tile (the last one is padded
// with zero weights), so one vector of a kernel holds sixteen outputs and needs no reduction across lanes.
//
// Plain types
//   f32, f16   quants = [tile][k][16]
//   bf16       quants = [tile][k / 2][16][2]      (pairs of k: the operand of a bf16 dot product)
//
// Integer types are cut into groups of 32 inputs (cols padded to 32 with zero weights). Every number q is unsigned and
//   value = scale * (q - zero_point)              without minimum
//   value = scale * q - min                       with minimum (int4 and int5 only; zero_point is 0)
// Sixteen outputs x four inputs fill a line of 64 bytes: byte 4 * output + input. A group is made of steps s = 0..7 of
// four inputs each, and quants = [tile][group][lines][64]:
//   int4       4 lines: step 2l in the low nibbles of line l, step 2l + 1 in the high ones
//   int5       the int4 lines, then 1 line whose bit s is the fifth bit of step s
//   int6       the int4 lines, then 2 lines: bits 2(s % 4) and 2(s % 4) + 1 of line s / 4 are the upper bits of step s
//   int8       8 lines, one per step
// The scales are f16, shared by `groups_per_scale` groups of one output: scales = [tile][scale][1 or 2][16], the scale
// and then, if there is one, the minimum. With `has_sub` each group multiplies them by integers of its own, as the
// K-quants of GGUF do: subs = [tile][group][1 or 2][16], for the scale and then the minimum. int6 always has two
// integers per group: one for its first and one for its last 16 inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/memory.h"

namespace gapless {

constexpr int kTileRows = 16;   // outputs of a tile
constexpr int kGroupCols = 32;  // inputs of a group
constexpr int kLineBytes = 64;

enum class PackedType : uint8_t { f32, bf16, f16, int4, int5, int6, int8 };

const char* name_of(PackedType type);

// How the numbers of a weight are stored, apart from its size.
struct PackedFormat {
  PackedType type = PackedType::f32;
  bool has_min = false;
  bool has_sub = false;
  int groups_per_scale = 1;

  bool is_integer() const;
  int bits() const;              // of one q; integer types only
  int zero_point() const;        // integer types only
  int group_bytes() const;       // of quants; integer types only
  int scales_per_entry() const;  // f16 rows of 16 per scale: 1, or 2 with a minimum
  int subs_per_group() const;    // int8 rows of 16 per group: 0, 1 or 2
};

struct PackedWeight {
  PackedFormat format;
  int rows = 0;        // output features
  int cols = 0;        // input features
  int num_tiles = 0;   // ceil(rows / 16)
  int num_groups = 0;  // ceil(cols / 32)
  int num_scales = 0;  // ceil(num_groups / groups_per_scale); 0 for plain types

  // Views into `memory`, 64-byte aligned. The kernels read them directly.
  std::byte* quants = nullptr;
  uint16_t* scales = nullptr;
  int8_t* subs = nullptr;
  size_t tile_quant_bytes = 0;

  MappedMemory memory;

  // Memory for a weight of this size, all zero until it is packed. Throws std::invalid_argument for sizes below 1 or
  // above what 31 bits count, std::bad_alloc when there is no memory.
  static PackedWeight allocate(int rows, int cols, const PackedFormat& format);

  size_t num_bytes() const { return memory.size(); }

  // Writes the `cols` values of output feature `row` to `out`: exactly what the kernels compute with.
  void dequantize_row(int row, float* out) const;
};

}  // namespace gapless
