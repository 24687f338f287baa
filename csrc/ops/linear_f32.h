// Float activations: plain weights, and integer weights that are dequantized on the way (a16).
//
// Per row and output one fma per input, in the order of the inputs, whatever the number of rows.
#pragma once

#include "ops/linear_input.h"

namespace gapless::GAPLESS_ISA {

#if defined(GAPLESS_ISA_AVX512)
constexpr int kF32Rows = 8;
#elif defined(GAPLESS_ISA_AVX2) || defined(GAPLESS_ISA_NEON)
constexpr int kF32Rows = 4;
#else
constexpr int kF32Rows = 1;
#endif

constexpr int kBlockCols = 128;  // 8 KB of dequantized weights

// Column k of a tile: sixteen weights.
template <PackedType type>
GAPLESS_INLINE F32x16 load_column(const std::byte* tile, int k) {
  if constexpr (type == PackedType::f32) return load(reinterpret_cast<const float*>(tile) + int64_t(k) * kTileRows);
  if constexpr (type == PackedType::f16)
    return load_f16(reinterpret_cast<const uint16_t*>(tile) + int64_t(k) * kTileRows);
  const Line pairs = load_line(tile + int64_t(k / 2) * kLineBytes);
  return k % 2 ? odd_bf16(pairs) : even_bf16(pairs);
}

template <int rows>
GAPLESS_INLINE void add_column(F32x16 w, const float* x, int64_t x_stride, F32x16 (&totals)[rows]) {
  unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { totals[r] = fma(w, set1(x[r * x_stride]), totals[r]); });
}

// `streamed`: the weights come from memory, each once.
template <PackedType type, bool streamed, int rows>
GAPLESS_INLINE void add_columns(const std::byte* tile, int num_cols, const float* x, int64_t x_stride,
                                float (*sums)[kTileRows]) {
  F32x16 totals[rows];
  unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { totals[r] = load(sums[r]); });
  int k = 0;
  if constexpr (type == PackedType::bf16)
    for (; k + 2 <= num_cols; k += 2) {
      if constexpr (streamed) __builtin_prefetch(tile + int64_t(k / 2) * kLineBytes + kPrefetchBytes);
      add_column<rows>(load_column<type>(tile, k), x + k, x_stride, totals);
      add_column<rows>(load_column<type>(tile, k + 1), x + k + 1, x_stride, totals);
    }
  for (; k < num_cols; ++k) {
    constexpr int64_t column_bytes = type == PackedType::f32 ? 64 : 32;
    if constexpr (streamed) __builtin_prefetch(tile + k * column_bytes + kPrefetchBytes);
    add_column<rows>(load_column<type>(tile, k), x + k, x_stride, totals);
  }
  unroll<rows>([&](auto r) GAPLESS_LAMBDA_INLINE { store(sums[r], totals[r]); });
}

template <PackedType type, bool streamed, int rows = kF32Rows>
GAPLESS_INLINE void add_columns_to_rows(const std::byte* tile, int first_col, int num_cols, const InputRows& input,
                                        int row, TileSums& sums) {
  for (; row + rows <= input.num_rows; row += rows)
    add_columns<type, streamed, rows>(tile, num_cols, input.floats(row) + first_col, input.x_stride, sums + row);
  if constexpr (rows > 1) add_columns_to_rows<type, streamed, rows / 2>(tile, first_col, num_cols, input, row, sums);
}

template <PackedType type>
void plain_tile(const PackedWeight& w, int tile, const InputRows& input, TileSums& sums) {
  for (int row = 0; row < input.num_rows; ++row) store(sums[row], zero());
  const std::byte* data = w.quants + tile * int64_t(w.tile_quant_bytes);
  if (type == PackedType::f32 || input.num_rows <= kF32Rows) {
    add_columns_to_rows<type, true>(data, 0, w.cols, input, 0, sums);
    return;
  }
  alignas(64) float block[kBlockCols][kTileRows];
  for (int first = 0; first < w.cols; first += kBlockCols) {
    const int n = w.cols - first < kBlockCols ? w.cols - first : kBlockCols;
    for (int k = 0; k < n; ++k) store(block[k], load_column<type>(data, first + k));
    add_columns_to_rows<PackedType::f32, false>(reinterpret_cast<const std::byte*>(block), first, n, input, 0, sums);
  }
}

// The 32 columns of one group, dequantized.
template <int bits, bool has_min>
GAPLESS_INLINE void dequantize_group(const std::byte* quants, const ScaleReader<has_min, bits == 6>& scales,
                                     float (*out)[kTileRows]) {
  const F32x16 zero_point = set1(float(zero_point_of(bits, has_min)));
  const F32x16 scale = scales.scale();
  F32x16 first = scale, second = scale, min = zero();
  if constexpr (bits == 6) {
    first = mul(scale, load_i8(scales.subs));
    second = mul(scale, load_i8(scales.subs + kTileRows));
  }
  if constexpr (has_min) min = scales.min();
  unroll<8>([&](auto step) GAPLESS_LAMBDA_INLINE {
    const Line line = unpack_step<bits, step>(quants);
    unroll<4>([&](auto j) GAPLESS_LAMBDA_INLINE {
      const F32x16 q = byte_to_f32<j>(line);
      if constexpr (has_min)
        store(out[step * 4 + j], sub(mul(scale, q), min));
      else if constexpr (step < 4)
        store(out[step * 4 + j], mul(first, sub(q, zero_point)));
      else
        store(out[step * 4 + j], mul(second, sub(q, zero_point)));
    });
  });
}

template <int bits, bool has_min>
void a16_tile(const PackedWeight& w, int tile, const InputRows& input, TileSums& sums) {
  for (int row = 0; row < input.num_rows; ++row) store(sums[row], zero());
  alignas(64) float block[kBlockCols][kTileRows];
  const std::byte* quants = w.quants + tile * int64_t(w.tile_quant_bytes);
  ScaleReader<has_min, bits == 6> scales(w, tile, 0);
  for (int first = 0; first < w.cols; first += kBlockCols) {
    const int n = w.cols - first < kBlockCols ? w.cols - first : kBlockCols;
    for (int k = 0; k < n; k += kGroupCols, quants += bits * kLineBytes, scales.advance())
      dequantize_group<bits, has_min>(quants, scales, block + k);
    add_columns_to_rows<PackedType::f32, false>(reinterpret_cast<const std::byte*>(block), first, n, input, 0, sums);
  }
}

inline TileFunction f32_tile_function(const PackedFormat& format) {
  switch (format.type) {
    case PackedType::f32:
      return plain_tile<PackedType::f32>;
    case PackedType::f16:
      return plain_tile<PackedType::f16>;
    case PackedType::bf16:
      return plain_tile<PackedType::bf16>;
    case PackedType::int4:
      return format.has_min ? a16_tile<4, true> : a16_tile<4, false>;
    case PackedType::int5:
      return format.has_min ? a16_tile<5, true> : a16_tile<5, false>;
    case PackedType::int6:
      return a16_tile<6, false>;
    case PackedType::int8:
      return a16_tile<8, false>;
  }
  return nullptr;
}

}  // namespace gapless::GAPLESS_ISA
