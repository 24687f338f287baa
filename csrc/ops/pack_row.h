// The numbers of one output feature on their way into a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/pack.h"

namespace gapless {

// q is staged per row, one byte per input; scales go straight to their places in the weight (one lane of each row of
// 16).
struct RowSink {
  uint8_t* q;        // [num_groups * 32]
  uint16_t* scales;  // lane of the first scale of the tile
  int8_t* subs;      // lane of the first sub-scale of the tile, or null
  int scales_per_entry;
  int subs_per_group;

  void set_scale(int index, uint16_t f16) { scales[size_t(index) * scales_per_entry * kTileRows] = f16; }
  void set_min(int index, uint16_t f16) { scales[(size_t(index) * scales_per_entry + 1) * kTileRows] = f16; }
  void set_sub(int group, int which, int8_t value) {
    subs[(size_t(group) * subs_per_group + which) * kTileRows] = value;
  }
};

// Splits a row of GGUF blocks into numbers without loss (Q2_K: requantized to int8 groups of 32).
void split_ggml_row(GgmlType type, const std::byte* row, int cols, RowSink sink);

// Quantizes a row of floats to int8 (symmetric) or int4 (with minimum), with one scale per `group_cols` inputs. Both
// are multiples of 32, save that the last group may be shorter.
void quantize_row_int8(const float* row, int cols, int group_cols, RowSink sink);
void quantize_row_int4(const float* row, int cols, int group_cols, RowSink sink);

}  // namespace gapless
