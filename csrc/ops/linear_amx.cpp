// The linear layers of CPUs with AMX: of many rows the integer products are the tile unit's, all else is AVX-512's.
//
// A tile instruction multiplies the 32 activations of a group of up to 16 rows with the 32 x 16 weights of one group;
// the integers come back through L1 and are scaled and added as everywhere else: in the same order, with the same
// operations (see linear_a8.h). The integers being exact, a row gets the same bits as from AVX-512.
#include <immintrin.h>

#include <algorithm>

#include "ops/linear_input.h"
#include "ops/linear_output.h"

namespace gapless::avx512 {
const LinearKernels& linear_kernels();
}

namespace gapless::amx {
namespace {

constexpr int kBlockRows = 16;     // rows of a tile
constexpr int kRestRows = 10;      // so many rows more pay for a block that is not full
constexpr int kBlockGroups = 8;    // unpacked at a time, for all rows: 5 KB
constexpr int kAheadBytes = 1024;  // what is asked for last must not be needed at once

// The weights of a group less their zero point, in the order of a tile: four inputs x sixteen outputs per line.
template <int bits, bool has_min>
struct TileGroup {
  static constexpr int kParts = bits == 6 ? 2 : 1;  // each with an integer scale of its own
  alignas(64) std::byte lines[8][kLineBytes];
  alignas(64) float scale[kTileRows], min[kTileRows], subs[kParts][kTileRows];

  GAPLESS_INLINE void assign(const PackedGroup<bits, has_min>& group) {
    const __m512i zero_point = _mm512_set1_epi8(char(zero_point_of(bits, has_min)));
    unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE {
      const Line w = unpack_step<bits, step>(group.quants);
      store_line(lines[step], {_mm512_sub_epi8(w.v, zero_point)});
    });
    store(scale, group.scale());
    if constexpr (has_min) store(min, group.min());
    if constexpr (bits == 6)
      unroll<2>([&](auto i) GAPLESS_LAMBDA_INLINE { store(subs[i], load_i8(group.scales.subs + i * kTileRows)); });
  }
};

// Integer products of a group: [part][row][output].
template <int bits>
struct Products {
  alignas(64) int32_t sums[bits == 6 ? 2 : 1][kBlockRows][kTileRows];
};

// The tiles: 0 and 1 products, 2 and 3 activations and weights of a whole group, 4 to 7 those of its halves.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 32, 64, 16, 64, 16, 64};
  uint8_t num_rows[16] = {16, 16, 16, 8, 16, 4, 16, 4};
};

template <int bits, bool has_min>
GAPLESS_INLINE void multiply(const TileGroup<bits, has_min>& group, const A8Group* x, int64_t x_stride) {
  _tile_zero(0);
  if constexpr (bits == 6) {
    _tile_loadd(4, x->q, x_stride);
    _tile_loadd(5, group.lines[0], kLineBytes);
    _tile_dpbssd(0, 4, 5);
    _tile_zero(1);
    _tile_loadd(6, x->q + 16, x_stride);
    _tile_loadd(7, group.lines[4], kLineBytes);
    _tile_dpbssd(1, 6, 7);
  } else {
    _tile_loadd(2, x->q, x_stride);
    _tile_loadd(3, group.lines, kLineBytes);
    _tile_dpbssd(0, 2, 3);
  }
}

template <int bits>
GAPLESS_INLINE void store_products(Products<bits>& products) {
  _tile_stored(0, products.sums[0], kLineBytes);
  if constexpr (bits == 6) _tile_stored(1, products.sums[1], kLineBytes);
}

template <int bits, bool has_min>
GAPLESS_INLINE F32x16 dot(const TileGroup<bits, has_min>& group, const Products<bits>& products, int row) {
  const auto part = [&](int i) GAPLESS_LAMBDA_INLINE { return to_f32({_mm512_load_si512(products.sums[i][row])}); };
  if constexpr (bits == 6) return fma(part(1), load(group.subs[1]), mul(part(0), load(group.subs[0])));
  return part(0);
}

// Adds `num_groups` groups of one tile to the sums of a block of rows. While the tile unit multiplies a group, the one
// before it is scaled.
template <int bits, bool has_min>
void add_groups(const TileGroup<bits, has_min>* group, int num_groups, const A8Group* x, int64_t x_stride, Ahead& ahead,
                float (*sums)[kTileRows]) {
  Products<bits> products[2];
  F32x16 totals[kBlockRows];
  unroll<kBlockRows>([&](auto r) GAPLESS_LAMBDA_INLINE { totals[r] = load(sums[r]); });
  multiply(group[0], x, x_stride);
  store_products(products[0]);
  for (int g = 0; g < num_groups; ++g, ++group, ++x) {
    const bool more = g + 1 < num_groups;
    ahead.prefetch();
    if (more) multiply(group[1], x + 1, x_stride);
    const Products<bits>& done = products[g % 2];
    const F32x16 scale = load(group->scale), min = load(group->min);
    const std::byte* rows = reinterpret_cast<const std::byte*>(x);
    unroll<kBlockRows>([&](auto r) GAPLESS_LAMBDA_INLINE {
      const A8Group& row = *reinterpret_cast<const A8Group*>(rows);
      totals[r] = fma(dot(*group, done, r), mul(scale, set1(row.scale)), totals[r]);
      if constexpr (has_min) totals[r] = fma(min, set1(row.offset), totals[r]);
      rows += x_stride;
      asm("" : "+r"(rows));  // sixteen offsets from one pointer would not stay in registers
    });
    if (more) store_products(products[(g + 1) % 2]);
  }
  unroll<kBlockRows>([&](auto r) GAPLESS_LAMBDA_INLINE { store(sums[r], totals[r]); });
}

// Rows in blocks of sixteen; the last one ends with the last row and shares rows with the one before it.
struct Blocks {
  int num_rows;

  int count() const { return (num_rows + kBlockRows - 1) / kBlockRows; }
  int first(int block) const { return std::min(block * kBlockRows, num_rows - kBlockRows); }
};

// The sums of a row are at `sum_of(row)`: blocks that share rows have sums of their own.
int sum_of(int row, const Blocks& blocks) {
  const int block = row / kBlockRows;
  return block * kBlockRows + row - blocks.first(block);
}

template <int bits, bool has_min>
void amx_tile(const PackedWeight& w, int tile, const InputRows& input, TileSums& sums) {
  const Blocks blocks = {input.num_rows};
  for (int row = 0; row < blocks.count() * kBlockRows; ++row) store(sums[row], zero());
  PackedGroup<bits, has_min> packed(w, tile, 0);
  TileGroup<bits, has_min> unpacked[kBlockGroups];
  for (int first = 0; first < w.num_groups; first += kBlockGroups) {
    const int n = std::min(kBlockGroups, w.num_groups - first);
    for (int g = 0; g < n; ++g, packed.advance()) unpacked[g].assign(packed);
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
    packed.scales.prefetch(kBlockGroups);
    Ahead ahead = {packed.quants + kAheadBytes, (bits + blocks.count() - 1) / blocks.count()};
    for (int block = 0; block < blocks.count(); ++block)
      add_groups<bits, has_min>(unpacked, n, input.groups(blocks.first(block)) + first, input.xq_stride, ahead,
                                sums + block * kBlockRows);
  }
}

TileFunction tile_function(const PackedFormat& format) {
  switch (format.type) {
    case PackedType::int4:
      return format.has_min ? amx_tile<4, true> : amx_tile<4, false>;
    case PackedType::int5:
      return format.has_min ? amx_tile<5, true> : amx_tile<5, false>;
    case PackedType::int6:
      return amx_tile<6, false>;
    default:
      return amx_tile<8, false>;
  }
}

// Of rows [first, first + num_rows): at least kBlockRows, kMaxRows at most. The tiles are in use here only: a thread
// that is interrupted has 8 KB more to save while they are.
void linear_tiles(const LinearArgs& args, int first, int num_rows) {
  const TileFunction compute = tile_function(args.weight->format);
  const TileFunction compute_up = args.up ? tile_function(args.up->format) : nullptr;
  const InputRows input = {nullptr, 0, args.xq + first * args.xq_stride, args.xq_stride, num_rows};
  const Blocks blocks = {num_rows};
  alignas(64) TileSums sums, up_sums;
  const TileConfig config;
  _tile_loadconfig(&config);
  for (int tile = args.tile_begin; tile < args.tile_end; ++tile) {
    compute(*args.weight, tile, input, sums);
    if (compute_up) compute_up(*args.up, tile, input, up_sums);
    for (int row = 0; row < num_rows; ++row) {
      const int sum = sum_of(row, blocks);
      write_row(args, first + row, tile, sums[sum], up_sums[sum]);
    }
  }
  _tile_release();
}

void linear_avx512(LinearArgs args, int first, int num_rows) {
  if (args.x) args.x += first * args.x_stride;
  args.xq += first * args.xq_stride;
  args.y += first * args.y_stride;
  args.num_rows = num_rows;
  avx512::linear_kernels().linear(args);
}

void linear(const LinearArgs& args) {
  const auto is_integer = [](const PackedWeight* w) { return !w || w->format.is_integer(); };
  if (args.num_rows < kBlockRows || !args.xq || !is_integer(args.weight) || !is_integer(args.up))
    return avx512::linear_kernels().linear(args);
  for (int first = 0; first < args.num_rows; first += kMaxRows) {
    const int num_rows = std::min(kMaxRows, args.num_rows - first), rest = num_rows % kBlockRows;
    const int num_tiled = num_rows < kBlockRows || rest < kRestRows ? num_rows - rest : num_rows;
    if (num_tiled > 0) linear_tiles(args, first, num_tiled);
    if (num_tiled < num_rows) linear_avx512(args, first + num_tiled, num_rows - num_tiled);
  }
}

}  // namespace

const LinearKernels& linear_kernels() {
  static const LinearKernels kernels = {avx512::linear_kernels().quantize_row, linear};
  return kernels;
}

}  // namespace gapless::amx
