// GGUF's block formats, taken apart. Each is read eight bytes at a time: one 64-bit word holds eight numbers.
#include <cmath>
#include <cstring>

#include "ops/pack_row.h"
#include "simd/f32x16.h"

namespace gapless {
namespace {

using generic::f16_to_f32;
using generic::f32_to_f16;
using Bytes = const uint8_t*;

constexpr uint64_t kOnes = 0x0101010101010101;
constexpr uint64_t kNibbles = 0x0f * kOnes;

uint64_t load8(Bytes p) {
  uint64_t v;
  std::memcpy(&v, p, 8);
  return v;
}
void store8(uint8_t* p, uint64_t v) { std::memcpy(p, &v, 8); }
uint16_t load_u16(Bytes p) { return uint16_t(p[0] | p[1] << 8); }
uint16_t negated(uint16_t f16) { return f16 ^ 0x8000; }

// Bit i of `bits` as byte i, 0 or 1.
uint64_t spread_bits(uint8_t bits) {
  const uint64_t selected = (bits * kOnes) & 0x8040201008040201;
  return ((selected + 0x7f * kOnes) >> 7) & kOnes;
}

// 16 bytes of nibbles: the low ones are the first half of a group, the high ones the second.
void split_nibbles(Bytes p, uint8_t* q) {
  for (int i = 0; i < 16; i += 8) {
    const uint64_t v = load8(p + i);
    store8(q + i, v & kNibbles);
    store8(q + 16 + i, (v >> 4) & kNibbles);
  }
}

void add_fifth_bits(Bytes plane, uint8_t* q) {
  for (int i = 0; i < 4; ++i) store8(q + 8 * i, load8(q + 8 * i) | spread_bits(plane[i]) << 4);
}

void split_q4_0(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 18) {
    sink.set_scale(g, load_u16(row));
    split_nibbles(row + 2, sink.q + g * 32);
  }
}

void split_q4_1(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 20) {
    sink.set_scale(g, load_u16(row));
    sink.set_min(g, negated(load_u16(row + 2)));
    split_nibbles(row + 4, sink.q + g * 32);
  }
}

void split_q5_0(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 22) {
    sink.set_scale(g, load_u16(row));
    split_nibbles(row + 6, sink.q + g * 32);
    add_fifth_bits(row + 2, sink.q + g * 32);
  }
}

void split_q5_1(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 24) {
    sink.set_scale(g, load_u16(row));
    sink.set_min(g, negated(load_u16(row + 2)));
    split_nibbles(row + 8, sink.q + g * 32);
    add_fifth_bits(row + 4, sink.q + g * 32);
  }
}

void split_q8_0(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 34) {
    sink.set_scale(g, load_u16(row));
    for (int i = 0; i < 32; i += 8) store8(sink.q + g * 32 + i, load8(row + 2 + i) ^ 0x80 * kOnes);
  }
}

// Values of IQ4 codes, as u8 with zero point 128.
constexpr uint8_t kIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

void split_iq4_codes(Bytes codes, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = kIq4[codes[i] & 15];
    q[16 + i] = kIq4[codes[i] >> 4];
  }
}

void split_iq4_nl(Bytes row, int num_groups, RowSink sink) {
  for (int g = 0; g < num_groups; ++g, row += 18) {
    sink.set_scale(g, load_u16(row));
    split_iq4_codes(row + 2, sink.q + g * 32);
  }
}

void split_iq4_xs(Bytes row, int num_groups, RowSink sink) {
  for (int block = 0; block < num_groups / 8; ++block, row += 136) {
    sink.set_scale(block, load_u16(row));
    const int high = load_u16(row + 2);
    for (int i = 0; i < 8; ++i) {
      const int scale = ((row[4 + i / 2] >> (i % 2 * 4)) & 15) | ((high >> (2 * i)) & 3) << 4;
      sink.set_sub(block * 8 + i, 0, int8_t(scale - 32));
      split_iq4_codes(row + 8 + 16 * i, sink.q + (block * 8 + i) * 32);
    }
  }
}

// The twelve bytes that hold eight 6-bit scales and eight 6-bit minimums.
void split_k_scales(Bytes packed, int first_group, RowSink sink) {
  for (int i = 0; i < 4; ++i) {
    sink.set_sub(first_group + i, 0, int8_t(packed[i] & 63));
    sink.set_sub(first_group + i, 1, int8_t(packed[i + 4] & 63));
    sink.set_sub(first_group + 4 + i, 0, int8_t((packed[i + 8] & 15) | (packed[i] >> 6) << 4));
    sink.set_sub(first_group + 4 + i, 1, int8_t((packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4));
  }
}

void split_q4_k(Bytes row, int num_groups, RowSink sink) {
  for (int block = 0; block < num_groups / 8; ++block, row += 144) {
    sink.set_scale(block, load_u16(row));
    sink.set_min(block, load_u16(row + 2));
    split_k_scales(row + 4, block * 8, sink);
    uint8_t* q = sink.q + block * 256;
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; i += 8) {
        const uint64_t v = load8(row + 16 + pair * 32 + i);
        store8(q + pair * 64 + i, v & kNibbles);
        store8(q + pair * 64 + 32 + i, (v >> 4) & kNibbles);
      }
  }
}

void split_q5_k(Bytes row, int num_groups, RowSink sink) {
  for (int block = 0; block < num_groups / 8; ++block, row += 176) {
    sink.set_scale(block, load_u16(row));
    sink.set_min(block, load_u16(row + 2));
    split_k_scales(row + 4, block * 8, sink);
    uint8_t* q = sink.q + block * 256;
    for (int pair = 0; pair < 4; ++pair)
      for (int i = 0; i < 32; i += 8) {
        const uint64_t v = load8(row + 48 + pair * 32 + i), high = load8(row + 16 + i) >> (2 * pair);
        store8(q + pair * 64 + i, (v & kNibbles) | (high & kOnes) << 4);
        store8(q + pair * 64 + 32 + i, ((v >> 4) & kNibbles) | ((high >> 1) & kOnes) << 4);
      }
  }
}

void split_q6_k(Bytes row, int num_groups, RowSink sink) {
  constexpr uint64_t kTwoBits = 3 * kOnes;
  for (int block = 0; block < num_groups / 8; ++block, row += 210) {
    sink.set_scale(block, load_u16(row + 208));
    for (int i = 0; i < 16; ++i) sink.set_sub(block * 8 + i / 2, i % 2, int8_t(row[192 + i]));
    for (int half = 0; half < 2; ++half) {
      uint8_t* q = sink.q + block * 256 + half * 128;
      for (int i = 0; i < 32; i += 8) {
        const uint64_t a = load8(row + half * 64 + i), b = load8(row + half * 64 + 32 + i);
        const uint64_t high = load8(row + 128 + half * 32 + i);
        store8(q + i, (a & kNibbles) | (high & kTwoBits) << 4);
        store8(q + 32 + i, (b & kNibbles) | ((high >> 2) & kTwoBits) << 4);
        store8(q + 64 + i, ((a >> 4) & kNibbles) | ((high >> 4) & kTwoBits) << 4);
        store8(q + 96 + i, ((b >> 4) & kNibbles) | ((high >> 6) & kTwoBits) << 4);
      }
    }
  }
}

void split_q3_k(Bytes row, int num_groups, RowSink sink) {
  for (int block = 0; block < num_groups / 8; ++block, row += 110) {
    sink.set_scale(block, load_u16(row + 108));
    Bytes packed = row + 96;  // sixteen 6-bit scales: low nibbles in 8 bytes, upper bits in the last 4
    for (int i = 0; i < 16; ++i) {
      const int low = (packed[i % 8] >> (i / 8 * 4)) & 15;
      const int high = (packed[8 + i % 4] >> (i / 4 * 2)) & 3;
      sink.set_sub(block * 8 + i / 2, i % 2, int8_t((low | high << 4) - 32));
    }
    for (int g = 0; g < 8; ++g)
      for (int i = 0; i < 32; i += 8) {
        const uint64_t low = (load8(row + 32 + g / 4 * 32 + i) >> (g % 4 * 2)) & (3 * kOnes);
        const uint64_t high = (load8(row + i) >> g) & kOnes;
        store8(sink.q + block * 256 + g * 32 + i, low + (high << 2) + 28 * kOnes);  // (low - 4 + 4 high) + 32
      }
  }
}

void split_q2_k(Bytes row, int num_groups, RowSink sink) {
  for (int block = 0; block < num_groups / 8; ++block, row += 84) {
    const float d = f16_to_f32(load_u16(row + 80)), dmin = f16_to_f32(load_u16(row + 82));
    for (int g = 0; g < 8; ++g) {
      float values[32];
      for (int i = 0; i < 32; ++i) {
        const int scales = row[g * 2 + i / 16];
        const int q = (row[16 + g / 4 * 32 + i] >> (g % 4 * 2)) & 3;
        values[i] = d * float(scales & 15) * float(q) - dmin * float(scales >> 4);
      }
      RowSink group = sink;
      group.q += block * 256 + g * 32;
      group.scales += size_t(block * 8 + g) * kTileRows;
      quantize_row_int8(values, 32, 32, group);
    }
  }
}

}  // namespace

void split_ggml_row(GgmlType type, const std::byte* row, int cols, RowSink sink) {
  const Bytes bytes = reinterpret_cast<Bytes>(row);
  const int num_groups = cols / kGroupCols;
  switch (type) {
    case GgmlType::q4_0:
      return split_q4_0(bytes, num_groups, sink);
    case GgmlType::q4_1:
      return split_q4_1(bytes, num_groups, sink);
    case GgmlType::q5_0:
      return split_q5_0(bytes, num_groups, sink);
    case GgmlType::q5_1:
      return split_q5_1(bytes, num_groups, sink);
    case GgmlType::q8_0:
      return split_q8_0(bytes, num_groups, sink);
    case GgmlType::q2_k:
      return split_q2_k(bytes, num_groups, sink);
    case GgmlType::q3_k:
      return split_q3_k(bytes, num_groups, sink);
    case GgmlType::q4_k:
      return split_q4_k(bytes, num_groups, sink);
    case GgmlType::q5_k:
      return split_q5_k(bytes, num_groups, sink);
    case GgmlType::q6_k:
      return split_q6_k(bytes, num_groups, sink);
    case GgmlType::iq4_nl:
      return split_iq4_nl(bytes, num_groups, sink);
    case GgmlType::iq4_xs:
      return split_iq4_xs(bytes, num_groups, sink);
    case GgmlType::f32:
    case GgmlType::f16:
    case GgmlType::bf16:
      return;  // plain types have no numbers to split
  }
}

}  // namespace gapless
