#include "ops/packed_weight.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "simd/f32x16.h"

namespace gapless {

using generic::bf16_to_f32;
using generic::f16_to_f32;

namespace {

constexpr int kMaxDimension = 1 << 24;

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

size_t plain_tile_bytes(PackedType type, int cols) {
  const size_t item = type == PackedType::f32 ? 4 : 2;
  return round_up(size_t(cols), type == PackedType::bf16 ? 2 : 1) * kTileRows * item;
}

// The sixteen low and high nibbles, planes or bytes of one group of one output, in the order of the inputs.
void unpack_group(const std::byte* group, int bits, int lane, uint8_t* q) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(group) + lane * 4;
  for (int step = 0; step < 8; ++step) {
    const uint8_t* line = bytes + (bits == 8 ? step : step / 2) * kLineBytes;
    for (int j = 0; j < 4; ++j) q[step * 4 + j] = bits == 8 ? line[j] : (line[j] >> (step % 2 * 4)) & 15;
    if (bits == 5) {
      const uint8_t* plane = bytes + 4 * kLineBytes;
      for (int j = 0; j < 4; ++j) q[step * 4 + j] |= ((plane[j] >> step) & 1) << 4;
    } else if (bits == 6) {
      const uint8_t* plane = bytes + (4 + step / 4) * kLineBytes;
      for (int j = 0; j < 4; ++j) q[step * 4 + j] |= ((plane[j] >> (step % 4 * 2)) & 3) << 4;
    }
  }
}

}  // namespace

const char* name_of(PackedType type) {
  switch (type) {
    case PackedType::f32:
      return "f32";
    case PackedType::bf16:
      return "bf16";
    case PackedType::f16:
      return "f16";
    case PackedType::int4:
      return "int4";
    case PackedType::int5:
      return "int5";
    case PackedType::int6:
      return "int6";
    case PackedType::int8:
      return "int8";
  }
  return "unknown";
}

bool PackedFormat::is_integer() const { return type >= PackedType::int4; }

int PackedFormat::bits() const {
  switch (type) {
    case PackedType::int4:
      return 4;
    case PackedType::int5:
      return 5;
    case PackedType::int6:
      return 6;
    default:
      return 8;
  }
}

int PackedFormat::zero_point() const { return has_min ? 0 : 1 << (bits() - 1); }
int PackedFormat::group_bytes() const { return bits() * kLineBytes; }
int PackedFormat::scales_per_entry() const { return has_min ? 2 : 1; }

int PackedFormat::subs_per_group() const {
  if (type == PackedType::int6) return 2;
  if (!has_sub) return 0;
  return has_min ? 2 : 1;
}

PackedWeight PackedWeight::allocate(int rows, int cols, const PackedFormat& format) {
  if (rows < 1 || cols < 1 || rows > kMaxDimension || cols > kMaxDimension)
    throw std::invalid_argument("weight of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                ": both sizes must be between 1 and " + std::to_string(kMaxDimension));
  if (format.is_integer() && format.groups_per_scale < 1)
    throw std::invalid_argument("groups_per_scale must be positive");
  PackedWeight w;
  w.format = format;
  w.rows = rows;
  w.cols = cols;
  w.num_tiles = (rows + kTileRows - 1) / kTileRows;
  w.num_groups = (cols + kGroupCols - 1) / kGroupCols;
  size_t scale_bytes = 0, sub_bytes = 0;
  if (format.is_integer()) {
    w.num_scales = (w.num_groups + format.groups_per_scale - 1) / format.groups_per_scale;
    w.tile_quant_bytes = size_t(w.num_groups) * format.group_bytes();
    scale_bytes = size_t(w.num_tiles) * w.num_scales * format.scales_per_entry() * kTileRows * sizeof(uint16_t);
    sub_bytes = size_t(w.num_tiles) * w.num_groups * format.subs_per_group() * kTileRows;
  } else {
    w.tile_quant_bytes = plain_tile_bytes(format.type, cols);
  }
  const size_t scales_at = round_up(size_t(w.num_tiles) * w.tile_quant_bytes, kLineBytes);
  const size_t subs_at = round_up(scales_at + scale_bytes, kLineBytes);
  w.memory = MappedMemory(subs_at + sub_bytes, /*huge_pages=*/true);
  w.quants = w.memory.data();
  if (scale_bytes) w.scales = reinterpret_cast<uint16_t*>(w.memory.data() + scales_at);
  if (sub_bytes) w.subs = reinterpret_cast<int8_t*>(w.memory.data() + subs_at);
  return w;
}

void PackedWeight::dequantize_row(int row, float* out) const {
  const int tile = row / kTileRows, lane = row % kTileRows;
  const std::byte* data = quants + size_t(tile) * tile_quant_bytes;
  if (!format.is_integer()) {
    const auto* halves = reinterpret_cast<const uint16_t*>(data);
    for (int k = 0; k < cols; ++k) {
      if (format.type == PackedType::f32)
        std::memcpy(out + k, data + (size_t(k) * kTileRows + lane) * 4, 4);
      else if (format.type == PackedType::f16)
        out[k] = f16_to_f32(halves[size_t(k) * kTileRows + lane]);
      else
        out[k] = bf16_to_f32(halves[(size_t(k / 2) * kTileRows + lane) * 2 + k % 2]);
    }
    return;
  }
  const int bits = format.bits(), zero_point = format.zero_point(), entry = format.scales_per_entry() * kTileRows;
  const int num_subs = format.subs_per_group();
  float scale = 0, min = 0;
  for (int g = 0; g < num_groups; ++g) {
    uint8_t q[kGroupCols];
    unpack_group(data + size_t(g) * format.group_bytes(), bits, lane, q);
    if (g % format.groups_per_scale == 0) {
      const uint16_t* s = scales + (size_t(tile) * num_scales + g / format.groups_per_scale) * entry + lane;
      scale = f16_to_f32(s[0]);
      min = format.has_min ? f16_to_f32(s[kTileRows]) : 0.0f;
    }
    const int8_t* sub = num_subs ? subs + (size_t(tile) * num_groups + g) * num_subs * kTileRows + lane : nullptr;
    const int num_values = cols - g * kGroupCols < kGroupCols ? cols - g * kGroupCols : kGroupCols;
    for (int j = 0; j < num_values; ++j) {
      float group_scale = scale;
      if (num_subs) group_scale *= float(format.type == PackedType::int6 && j >= 16 ? sub[kTileRows] : sub[0]);
      float value = group_scale * float(q[j] - zero_point);
      if (format.has_min) value -= num_subs ? min * float(sub[kTileRows]) : min;
      out[g * kGroupCols + j] = value;
    }
  }
}

}  // namespace gapless
