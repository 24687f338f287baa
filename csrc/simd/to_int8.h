// Pieces of the quantization of activations: several sums at once, and floats that are small integers as int8.
#pragma once

#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {

struct FourSums {
  float v[4];
};

// reduce_add of four vectors, in the same order, for little more than the price of one.
GAPLESS_INLINE FourSums reduce_add(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
#if defined(GAPLESS_ISA_AVX2) || defined(GAPLESS_ISA_AVX512)
  const auto eight = [](F32x16 x) GAPLESS_LAMBDA_INLINE { return _mm256_add_ps(low_half(x), high_half(x)); };
  const auto fold_halves = [](__m256 x, __m256 y) GAPLESS_LAMBDA_INLINE {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const __m256 ab = fold_halves(eight(a), eight(b)), cd = fold_halves(eight(c), eight(d));
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m256 sums = _mm256_hadd_ps(pairs, pairs);  // a c a c | b d b d
  FourSums r;
  _mm_storeu_ps(r.v, _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
  return r;
#else
  return {{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)}};
#endif
}

// 32 integral floats in [-128, 127] as int8.
GAPLESS_INLINE void store_i8(int8_t* p, F32x16 low, F32x16 high) {
#if defined(GAPLESS_ISA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(low.v)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(high.v)));
#elif defined(GAPLESS_ISA_AVX2)
  // The packs work within 128-bit halves; the permutation puts their dwords back in order.
  const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(low.lo), _mm256_cvtps_epi32(low.hi));
  const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(high.lo), _mm256_cvtps_epi32(high.hi));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#elif defined(GAPLESS_ISA_NEON)
  const auto narrow = [](float32x4_t x, float32x4_t y) GAPLESS_LAMBDA_INLINE {
    return vcombine_s16(vmovn_s32(vcvtq_s32_f32(x)), vmovn_s32(vcvtq_s32_f32(y)));
  };
  vst1q_s8(p, vcombine_s8(vmovn_s16(narrow(low.a, low.b)), vmovn_s16(narrow(low.c, low.d))));
  vst1q_s8(p + 16, vcombine_s8(vmovn_s16(narrow(high.a, high.b)), vmovn_s16(narrow(high.c, high.d))));
#else
  for (int i = 0; i < 16; ++i) {
    p[i] = int8_t(int(low.v[i]));
    p[16 + i] = int8_t(int(high.v[i]));
  }
#endif
}

}  // namespace gapless::GAPLESS_ISA
