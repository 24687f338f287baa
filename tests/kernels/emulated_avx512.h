// AVX-512 on any x86 with AVX2 and F16C: SIMDe's emulation under the native names, and what it lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx512.h>

#include <cstring>

// Emulated instructions are loops: inlined everywhere they take the compiler an hour.
#define GAPLESS_INLINE inline
#define GAPLESS_LAMBDA_INLINE

namespace gapless::emulated {

template <typename Half, typename Whole>
Half half(const Whole& x, int which) {
  Half r;
  std::memcpy(&r, reinterpret_cast<const char*>(&x) + which * sizeof r, sizeof r);
  return r;
}
template <typename Whole, typename Half>
Whole whole(Half low, Half high) {
  Whole r;
  std::memcpy(&r, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&r) + sizeof low, &high, sizeof high);
  return r;
}

inline simde__m512 cvtph_ps(__m256i x) {
  return whole<simde__m512>(_mm256_cvtph_ps(half<__m128i>(x, 0)), _mm256_cvtph_ps(half<__m128i>(x, 1)));
}
inline __m256i cvtps_ph(simde__m512 x) {
  return whole<__m256i>(_mm256_cvtps_ph(half<__m256>(x, 0), _MM_FROUND_TO_NEAREST_INT),
                        _mm256_cvtps_ph(half<__m256>(x, 1), _MM_FROUND_TO_NEAREST_INT));
}
inline simde__m512i cvtps_epi32(simde__m512 x) {
  return whole<simde__m512i>(_mm256_cvtps_epi32(half<__m256>(x, 0)), _mm256_cvtps_epi32(half<__m256>(x, 1)));
}
inline simde__m512 cvtepi32_ps(simde__m512i x) {
  return whole<simde__m512>(_mm256_cvtepi32_ps(half<__m256i>(x, 0)), _mm256_cvtepi32_ps(half<__m256i>(x, 1)));
}
inline simde__m512i cvtepi8_epi32(__m128i x) {
  return whole<simde__m512i>(_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
}
inline __m128i cvtepi32_epi8(simde__m512i x) {
  __m128i r;
  for (int i = 0; i < 16; ++i) reinterpret_cast<char*>(&r)[i] = reinterpret_cast<const char*>(&x)[4 * i];
  return r;
}
inline simde__m512 shuffle_f32x4(simde__m512 x, simde__m512 y, int order) {
  simde__m512 r;
  for (int i = 0; i < 4; ++i)
    std::memcpy(reinterpret_cast<float*>(&r) + 4 * i,
                reinterpret_cast<const float*>(i < 2 ? &x : &y) + 4 * (order >> 2 * i & 3), 16);
  return r;
}
inline simde__m512 permute_ps(simde__m512 x, int order) {
  simde__m512 r;
  for (int i = 0; i < 16; ++i)
    std::memcpy(reinterpret_cast<float*>(&r) + i,
                reinterpret_cast<const float*>(&x) + i / 4 * 4 + (order >> 2 * (i % 4) & 3), 4);
  return r;
}

}  // namespace gapless::emulated

#define _mm512_cvtph_ps(x) gapless::emulated::cvtph_ps(x)
#define _mm512_cvtps_ph(x, rounding) gapless::emulated::cvtps_ph(x)
#define _mm512_cvtps_epi32(x) gapless::emulated::cvtps_epi32(x)
#define _mm512_cvtepi32_ps(x) gapless::emulated::cvtepi32_ps(x)
#define _mm512_cvtepi8_epi32(x) gapless::emulated::cvtepi8_epi32(x)
#define _mm512_extractf32x8_ps(x, which) gapless::emulated::half<__m256>(x, which)
#define _mm512_cvtepi32_epi8(x) gapless::emulated::cvtepi32_epi8(x)
#define _mm512_shuffle_f32x4(x, y, order) gapless::emulated::shuffle_f32x4(x, y, order)
#define _mm512_permute_ps(x, order) gapless::emulated::permute_ps(x, order)
