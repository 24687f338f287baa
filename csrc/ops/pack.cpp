#include "ops/pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/pack_row.h"
#include "simd/f32x16.h"

namespace gapless {
namespace {

struct BlockSize {
  int values, bytes;
};

BlockSize block_size(GgmlType type) {
  switch (type) {
    case GgmlType::f32:
      return {1, 4};
    case GgmlType::f16:
    case GgmlType::bf16:
      return {1, 2};
    case GgmlType::q4_0:
      return {32, 18};
    case GgmlType::q4_1:
      return {32, 20};
    case GgmlType::q5_0:
      return {32, 22};
    case GgmlType::q5_1:
      return {32, 24};
    case GgmlType::q8_0:
      return {32, 34};
    case GgmlType::q2_k:
      return {256, 84};
    case GgmlType::q3_k:
      return {256, 110};
    case GgmlType::q4_k:
      return {256, 144};
    case GgmlType::q5_k:
      return {256, 176};
    case GgmlType::q6_k:
      return {256, 210};
    case GgmlType::iq4_nl:
      return {32, 18};
    case GgmlType::iq4_xs:
      return {256, 136};
  }
  throw std::invalid_argument("GGUF tensor type " + std::to_string(uint32_t(type)) + " cannot be packed");
}

bool is_plain(GgmlType type) { return block_size(type).values == 1; }

const std::byte* source_row(const PackSource& source, size_t row_bytes, int packed_row) {
  const size_t row = source.row_map ? size_t(source.row_map[packed_row]) : size_t(packed_row);
  return source.data + row * row_bytes;
}

void read_floats(GgmlType type, const std::byte* row, int n, float* out) {
  if (type == GgmlType::f32) {
    std::memcpy(out, row, size_t(n) * 4);
    return;
  }
  for (int k = 0; k < n; ++k) {
    uint16_t h;
    std::memcpy(&h, row + size_t(k) * 2, 2);
    out[k] = type == GgmlType::f16 ? generic::f16_to_f32(h) : generic::bf16_to_f32(h);
  }
}

// Eight bytes q of one output are one step in the low half of the word and the next in the high half.
uint64_t load_steps(const uint8_t* q) {
  uint64_t v;
  std::memcpy(&v, q, 8);
  return v;
}
void store_word(std::byte* p, uint32_t word) { std::memcpy(p, &word, 4); }

// Lays the 32 numbers of one group of one output (lane) into the lines of the group.
void store_group(const uint8_t* q, int bits, int lane, std::byte* group) {
  std::byte* const at = group + lane * 4;
  if (bits == 8) {
    for (int step = 0; step < 8; ++step) std::memcpy(at + step * kLineBytes, q + step * 4, 4);
    return;
  }
  uint32_t plane[2] = {0, 0};
  for (int line = 0; line < 4; ++line) {
    const uint64_t v = load_steps(q + line * 8);
    const uint32_t low = uint32_t(v), high = uint32_t(v >> 32);
    store_word(at + line * kLineBytes, (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4);
    if (bits == 5)
      plane[0] |= ((low >> 4) & 0x01010101) << (2 * line) | ((high >> 4) & 0x01010101) << (2 * line + 1);
    else
      plane[line / 2] |= ((low >> 4) & 0x03030303) << (line % 2 * 4) | ((high >> 4) & 0x03030303) << (line % 2 * 4 + 2);
  }
  for (int i = 0; i < bits - 4; ++i) store_word(at + (4 + i) * kLineBytes, plane[i]);
}

// Copies items of `Item` (one input, or a pair of bf16) from rows to lanes, in blocks of inputs that stay in L1.
template <typename Item>
void transpose_rows(const std::byte* const* rows, int num_lanes, size_t num_items, std::byte* out) {
  constexpr size_t kBlock = 128;
  for (size_t begin = 0; begin < num_items; begin += kBlock)
    for (int lane = 0; lane < num_lanes; ++lane)
      for (size_t i = begin; i < std::min(begin + kBlock, num_items); ++i) {
        Item item;
        std::memcpy(&item, rows[lane] + i * sizeof item, sizeof item);
        std::memcpy(out + (i * kTileRows + size_t(lane)) * sizeof item, &item, sizeof item);
      }
}

void pack_plain_tile(PackedWeight& w, const PackSource& source, int tile) {
  std::byte* const out = w.quants + size_t(tile) * w.tile_quant_bytes;
  const size_t row_bytes = (w.format.type == PackedType::f32 ? 4 : 2) * size_t(w.cols);
  const int num_lanes = std::min(kTileRows, w.rows - tile * kTileRows);
  const std::byte* rows[kTileRows];
  for (int lane = 0; lane < num_lanes; ++lane) rows[lane] = source_row(source, row_bytes, tile * kTileRows + lane);
  const size_t cols = size_t(w.cols);
  if (w.format.type == PackedType::f32) return transpose_rows<uint32_t>(rows, num_lanes, cols, out);
  if (w.format.type == PackedType::f16) return transpose_rows<uint16_t>(rows, num_lanes, cols, out);
  transpose_rows<uint32_t>(rows, num_lanes, cols / 2, out);
  if (cols % 2 == 1)
    for (int lane = 0; lane < num_lanes; ++lane)
      std::memcpy(out + (cols / 2 * kTileRows + size_t(lane)) * 4, rows[lane] + (cols - 1) * 2, 2);
}

// Buffers for one tile, reused by all tiles of a call.
struct TileStaging {
  std::vector<uint8_t> q;     // [16][num_groups * 32]
  std::vector<float> values;  // [num_groups * 32], for InstantQuant
};

void pack_integer_tile(PackedWeight& w, const PackSource& source, int tile, TileStaging& staging) {
  const PackedFormat& format = w.format;
  const size_t row_bytes = ggml_row_bytes(source.type, w.cols), padded_cols = size_t(w.num_groups) * kGroupCols;
  const int entry = format.scales_per_entry(), num_subs = format.subs_per_group();
  for (int lane = 0; lane < kTileRows; ++lane) {
    uint8_t* q = staging.q.data() + lane * padded_cols;
    const int row = tile * kTileRows + lane;
    if (row >= w.rows) {  // scales stay 0
      std::memset(q, format.zero_point(), padded_cols);
      continue;
    }
    std::memset(q + w.cols, format.zero_point(), padded_cols - w.cols);
    const RowSink sink = {q, w.scales + size_t(tile) * w.num_scales * entry * kTileRows + lane,
                          w.subs ? w.subs + size_t(tile) * w.num_groups * num_subs * kTileRows + lane : nullptr, entry,
                          num_subs};
    const std::byte* data = source_row(source, row_bytes, row);
    if (!is_plain(source.type)) {
      split_ggml_row(source.type, data, w.cols, sink);
      continue;
    }
    read_floats(source.type, data, w.cols, staging.values.data());
    // The padding is never multiplied with anything but zero: any value that does not widen the last group will do.
    std::fill(staging.values.begin() + w.cols, staging.values.end(), staging.values[size_t(w.cols) - 1]);
    const int group_cols = format.groups_per_scale * kGroupCols;
    if (format.type == PackedType::int4)
      quantize_row_int4(staging.values.data(), int(padded_cols), group_cols, sink);
    else
      quantize_row_int8(staging.values.data(), int(padded_cols), group_cols, sink);
  }
  std::byte* const out = w.quants + size_t(tile) * w.tile_quant_bytes;
  for (int g = 0; g < w.num_groups; ++g)
    for (int lane = 0; lane < kTileRows; ++lane)
      store_group(staging.q.data() + lane * padded_cols + g * kGroupCols, format.bits(), lane,
                  out + size_t(g) * format.group_bytes());
}

}  // namespace

size_t ggml_row_bytes(GgmlType type, int cols) {
  const BlockSize block = block_size(type);
  if (cols % block.values != 0)
    throw std::invalid_argument("rows of " + std::to_string(cols) + " values are no multiple of the block of " +
                                std::to_string(block.values) + " of GGUF type " + std::to_string(uint32_t(type)));
  return size_t(cols / block.values) * block.bytes;
}

PackedFormat packed_format(GgmlType type, int cols, InstantQuant quant, int group_size) {
  ggml_row_bytes(type, cols);  // validates
  if (quant != InstantQuant::none) {
    if (!is_plain(type)) throw std::invalid_argument("InstantQuant needs an f32, f16 or bf16 source");
    if (group_size != -1 && (group_size < kGroupCols || group_size % kGroupCols != 0))
      throw std::invalid_argument("group_size " + std::to_string(group_size) + ": use -1 or a multiple of 32");
    const int num_groups = (cols + kGroupCols - 1) / kGroupCols;
    const int groups_per_scale = group_size == -1 ? num_groups : std::min(group_size / kGroupCols, num_groups);
    if (quant == InstantQuant::int8) return {PackedType::int8, false, false, groups_per_scale};
    return {PackedType::int4, true, false, groups_per_scale};
  }
  switch (type) {
    case GgmlType::f32:
      return {PackedType::f32};
    case GgmlType::f16:
      return {PackedType::f16};
    case GgmlType::bf16:
      return {PackedType::bf16};
    case GgmlType::q4_0:
      return {PackedType::int4};
    case GgmlType::q4_1:
      return {PackedType::int4, true};
    case GgmlType::q4_k:
      return {PackedType::int4, true, true, 8};
    case GgmlType::q5_0:
      return {PackedType::int5};
    case GgmlType::q5_1:
      return {PackedType::int5, true};
    case GgmlType::q5_k:
      return {PackedType::int5, true, true, 8};
    case GgmlType::q3_k:
    case GgmlType::q6_k:
      return {PackedType::int6, false, true, 8};
    case GgmlType::q2_k:
    case GgmlType::q8_0:
    case GgmlType::iq4_nl:
      return {PackedType::int8};
    case GgmlType::iq4_xs:
      return {PackedType::int8, false, true, 8};
  }
  throw std::invalid_argument("GGUF tensor type " + std::to_string(uint32_t(type)) + " cannot be packed");
}

void pack_tiles(PackedWeight& weight, const PackSource& source, int tile_begin, int tile_end) {
  if (!weight.format.is_integer()) {
    for (int tile = tile_begin; tile < tile_end; ++tile) pack_plain_tile(weight, source, tile);
    return;
  }
  TileStaging staging;
  staging.q.resize(size_t(kTileRows) * weight.num_groups * kGroupCols);
  if (is_plain(source.type)) staging.values.resize(size_t(weight.num_groups) * kGroupCols);
  for (int tile = tile_begin; tile < tile_end; ++tile) pack_integer_tile(weight, source, tile, staging);
}

}  // namespace gapless
