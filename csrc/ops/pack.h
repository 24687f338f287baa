// From the rows of a checkpoint to a PackedWeight: losslessly, or quantized on the way (InstantQuant).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/packed_weight.h"

namespace gapless {

// Type numbers of GGUF, for the types that can be packed.
enum class GgmlType : uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  iq4_xs = 23,
  bf16 = 30,
};

enum class InstantQuant { none, int8, int4 };

// Rows of one tensor as they lie in the file.
struct PackSource {
  const std::byte* data = nullptr;
  GgmlType type = GgmlType::f32;
  int cols = 0;
  // Source row of each packed row, or null for the identity.
  const int32_t* row_map = nullptr;
};

// Bytes of a row of `cols` values. Throws std::invalid_argument for an unknown type or a row that is no whole number of
// blocks.
size_t ggml_row_bytes(GgmlType type, int cols);

// The format that a tensor of this type is packed into. `quant` other than none needs an f32, f16 or bf16 source and
// a group_size of -1 (one scale per output) or a multiple of 32; else std::invalid_argument.
PackedFormat packed_format(GgmlType type, int cols, InstantQuant quant, int group_size);

// Fills the tiles [tile_begin, tile_end) of `weight`, which was allocated in the format of packed_format. Calls for
// disjoint ranges may run at the same time.
void pack_tiles(PackedWeight& weight, const PackSource& source, int tile_begin, int tile_end);

}  // namespace gapless
