// Pieces of the quantization of activations: several sums at once, and floats that are small integers as int8.
#pragma once

#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {

// Four floats and four integers, with the language's operators; one register on every ISA.
using F32x4 = float __attribute__((vector_size(16)));
using I32x4 = int32_t __attribute__((vector_size(16)));

// reduce_add or reduce_max of four vectors, in the same order, for little more than the price of one.
#if defined(GAPLESS_ISA_AVX512)
template <typename Combine>
GAPLESS_INLINE F32x4 reduce_four(const F32x16 (&x)[4], Combine combine) {
  const auto halves = [&](__m512 a, __m512 b) GAPLESS_LAMBDA_INLINE {  // quarters: a0 a1 b0 b1
    return combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const __m512 ab = halves(x[0].v, x[1].v), cd = halves(x[2].v, x[3].v);
  const __m512 fours = combine(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  const __m512 pairs = combine(fours, _mm512_permute_ps(fours, 0x4e));
  const __m512 ones = combine(pairs, _mm512_permute_ps(pairs, 0xb1));
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, ones));
}
GAPLESS_INLINE F32x4 reduce_add(const F32x16 (&x)[4]) {
  return reduce_four(x, [](__m512 a, __m512 b) GAPLESS_LAMBDA_INLINE { return _mm512_add_ps(a, b); });
}
GAPLESS_INLINE F32x4 reduce_max(const F32x16 (&x)[4]) {
  return reduce_four(x, [](__m512 a, __m512 b) GAPLESS_LAMBDA_INLINE { return _mm512_max_ps(a, b); });
}
#elif defined(GAPLESS_ISA_AVX2)
template <typename Combine>
GAPLESS_INLINE F32x4 reduce_four(const F32x16 (&x)[4], Combine combine) {
  const auto fours = [&](F32x16 a, F32x16 b) GAPLESS_LAMBDA_INLINE {
    const __m256 a8 = combine(a.lo, a.hi), b8 = combine(b.lo, b.hi);
    return combine(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31));
  };
  const __m256 ab = fours(x[0], x[1]), cd = fours(x[2], x[3]);
  const __m256 pairs = combine(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m256 ones = combine(pairs, _mm256_permute_ps(pairs, 0xb1));  // a a c c | b b d d
  const __m128 low = _mm256_castps256_ps128(ones), high = _mm256_extractf128_ps(ones, 1);
  return _mm_unpacklo_ps(_mm_permute_ps(low, 0x08), _mm_permute_ps(high, 0x08));
}
GAPLESS_INLINE F32x4 reduce_add(const F32x16 (&x)[4]) {
  return reduce_four(x, [](__m256 a, __m256 b) GAPLESS_LAMBDA_INLINE { return _mm256_add_ps(a, b); });
}
GAPLESS_INLINE F32x4 reduce_max(const F32x16 (&x)[4]) {
  return reduce_four(x, [](__m256 a, __m256 b) GAPLESS_LAMBDA_INLINE { return _mm256_max_ps(a, b); });
}
#else
GAPLESS_INLINE F32x4 reduce_add(const F32x16 (&x)[4]) {
  return F32x4{reduce_add(x[0]), reduce_add(x[1]), reduce_add(x[2]), reduce_add(x[3])};
}
GAPLESS_INLINE F32x4 reduce_max(const F32x16 (&x)[4]) {
  return F32x4{reduce_max(x[0]), reduce_max(x[1]), reduce_max(x[2]), reduce_max(x[3])};
}
#endif

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
