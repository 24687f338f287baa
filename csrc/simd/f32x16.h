// Sixteen floats as one value: the only vector type the float kernels know.
//
// A logical width of 16 on every ISA (1 zmm, 2 ymm, 4 NEON q registers, or a plain array) keeps kernels, memory layouts
// and the order of every reduction the same everywhere. The ISA is chosen by the macros that the build sets for each
// translation unit; everything lives in a namespace of that ISA so that the linker never mixes two builds of one
// function.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(GAPLESS_ISA_AMX)
#define GAPLESS_ISA amx
#define GAPLESS_ISA_AVX512  // in all but the tiles
#include <immintrin.h>
#elif defined(GAPLESS_ISA_AVX512)
#define GAPLESS_ISA avx512
#if defined(GAPLESS_EMULATE_AVX512)  // a test build, for machines without AVX-512
#include "emulated_avx512.h"
#else
#include <immintrin.h>
#endif
#elif defined(GAPLESS_ISA_AVX2)
#define GAPLESS_ISA avx2
#include <immintrin.h>
#elif defined(GAPLESS_ISA_NEON)
#define GAPLESS_ISA neon
#include <arm_neon.h>
#else
#define GAPLESS_ISA generic
#endif

#if !defined(GAPLESS_INLINE)
#define GAPLESS_INLINE inline __attribute__((always_inline))
#define GAPLESS_LAMBDA_INLINE __attribute__((always_inline))
#endif

namespace gapless::GAPLESS_ISA {

// Scalar conversions, used for tails and by the generic build.
GAPLESS_INLINE float bf16_to_f32(uint16_t h) {
  uint32_t bits = uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest even; NaN stays NaN.
GAPLESS_INLINE uint16_t f32_to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

GAPLESS_INLINE float f16_to_f32(uint16_t h) {
#if defined(GAPLESS_ISA_AVX2) || defined(GAPLESS_ISA_AVX512)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  float f;
  if (magnitude >= 0x7c00) {  // infinity and NaN
    const uint32_t bits = sign | 0x7f800000u | ((magnitude & 0x3ff) << 13);
    std::memcpy(&f, &bits, 4);
    return f;
  }
  // Subnormals and normals alike: place the bits and rescale the exponent by 2^112 exactly.
  uint32_t bits = magnitude << 13;
  std::memcpy(&f, &bits, 4);
  f *= 0x1p112f;
  std::memcpy(&bits, &f, 4);
  bits |= sign;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

GAPLESS_INLINE uint16_t f32_to_f16(float f) {
#if defined(GAPLESS_ISA_AVX2) || defined(GAPLESS_ISA_AVX512)
  return uint16_t(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(GAPLESS_ISA_NEON)
  const __fp16 h = __fp16(f);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
#else
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return sign | 0x7e00 | uint16_t((bits >> 13) & 0x3ff);  // NaN, payload kept
  if (bits >= 0x477ff000u) return sign | 0x7c00;                                  // rounds past 65504
  if (bits < 0x38800000u) {                                                       // subnormal: let the adder round
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &magnitude, 4);
    return sign | uint16_t(rounded - 0x3f000000u);
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1);  // rebias the exponent by -112 and round to nearest even
  return sign | uint16_t(bits >> 13);
#endif
}

struct F32x16 {
#if defined(GAPLESS_ISA_AVX512)
  __m512 v;
#elif defined(GAPLESS_ISA_AVX2)
  __m256 lo, hi;
#elif defined(GAPLESS_ISA_NEON)
  float32x4_t a, b, c, d;
#else
  float v[16];
#endif
};

#if defined(GAPLESS_ISA_AVX512)

GAPLESS_INLINE F32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
GAPLESS_INLINE F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
GAPLESS_INLINE void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
GAPLESS_INLINE F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
GAPLESS_INLINE void store_f16(uint16_t* p, F32x16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
GAPLESS_INLINE F32x16 add(F32x16 x, F32x16 y) { return {_mm512_add_ps(x.v, y.v)}; }
GAPLESS_INLINE F32x16 sub(F32x16 x, F32x16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
GAPLESS_INLINE F32x16 mul(F32x16 x, F32x16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
GAPLESS_INLINE F32x16 div(F32x16 x, F32x16 y) { return {_mm512_div_ps(x.v, y.v)}; }
// x > y ? x : y on every ISA: a NaN on either side gives y. Likewise min.
GAPLESS_INLINE F32x16 max(F32x16 x, F32x16 y) { return {_mm512_max_ps(x.v, y.v)}; }
GAPLESS_INLINE F32x16 min(F32x16 x, F32x16 y) { return {_mm512_min_ps(x.v, y.v)}; }
// x * y + z in one rounding
GAPLESS_INLINE F32x16 fma(F32x16 x, F32x16 y, F32x16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
GAPLESS_INLINE F32x16 round_even(F32x16 x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
GAPLESS_INLINE F32x16 abs(F32x16 x) { return {_mm512_abs_ps(x.v)}; }
// 2^n for integral n in [-126, 127]
GAPLESS_INLINE F32x16 exp2_int(F32x16 n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
GAPLESS_INLINE void to_array(float* out, F32x16 x) { _mm512_storeu_ps(out, x.v); }

#elif defined(GAPLESS_ISA_AVX2)

GAPLESS_INLINE F32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
GAPLESS_INLINE F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
GAPLESS_INLINE void store(float* p, F32x16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
GAPLESS_INLINE F32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
GAPLESS_INLINE void store_f16(uint16_t* p, F32x16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
}
GAPLESS_INLINE F32x16 add(F32x16 x, F32x16 y) { return {_mm256_add_ps(x.lo, y.lo), _mm256_add_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 sub(F32x16 x, F32x16 y) { return {_mm256_sub_ps(x.lo, y.lo), _mm256_sub_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 mul(F32x16 x, F32x16 y) { return {_mm256_mul_ps(x.lo, y.lo), _mm256_mul_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 div(F32x16 x, F32x16 y) { return {_mm256_div_ps(x.lo, y.lo), _mm256_div_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 max(F32x16 x, F32x16 y) { return {_mm256_max_ps(x.lo, y.lo), _mm256_max_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 min(F32x16 x, F32x16 y) { return {_mm256_min_ps(x.lo, y.lo), _mm256_min_ps(x.hi, y.hi)}; }
GAPLESS_INLINE F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
  return {_mm256_fmadd_ps(x.lo, y.lo, z.lo), _mm256_fmadd_ps(x.hi, y.hi, z.hi)};
}
GAPLESS_INLINE F32x16 round_even(F32x16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
GAPLESS_INLINE F32x16 abs(F32x16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.lo), _mm256_andnot_ps(sign, x.hi)};
}
GAPLESS_INLINE F32x16 exp2_int(F32x16 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i lo = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias), 23);
  const __m256i hi = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias), 23);
  return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
GAPLESS_INLINE void to_array(float* out, F32x16 x) { store(out, x); }

#elif defined(GAPLESS_ISA_NEON)

GAPLESS_INLINE F32x16 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
GAPLESS_INLINE F32x16 load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
GAPLESS_INLINE void store(float* p, F32x16 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
GAPLESS_INLINE F32x16 load_f16(const uint16_t* p) {
  const uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
  return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(lo))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(lo))),
          vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(hi))), vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(hi)))};
}
GAPLESS_INLINE void store_f16(uint16_t* p, F32x16 x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x.a)));
  vst1_u16(p + 4, vreinterpret_u16_f16(vcvt_f16_f32(x.b)));
  vst1_u16(p + 8, vreinterpret_u16_f16(vcvt_f16_f32(x.c)));
  vst1_u16(p + 12, vreinterpret_u16_f16(vcvt_f16_f32(x.d)));
}
GAPLESS_INLINE F32x16 add(F32x16 x, F32x16 y) {
  return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
GAPLESS_INLINE F32x16 sub(F32x16 x, F32x16 y) {
  return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
GAPLESS_INLINE F32x16 mul(F32x16 x, F32x16 y) {
  return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
GAPLESS_INLINE F32x16 div(F32x16 x, F32x16 y) {
  return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
GAPLESS_INLINE float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
GAPLESS_INLINE float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
GAPLESS_INLINE F32x16 max(F32x16 x, F32x16 y) {
  return {max4(x.a, y.a), max4(x.b, y.b), max4(x.c, y.c), max4(x.d, y.d)};
}
GAPLESS_INLINE F32x16 min(F32x16 x, F32x16 y) {
  return {min4(x.a, y.a), min4(x.b, y.b), min4(x.c, y.c), min4(x.d, y.d)};
}
GAPLESS_INLINE F32x16 fma(F32x16 x, F32x16 y, F32x16 z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
GAPLESS_INLINE F32x16 round_even(F32x16 x) {
  return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)};
}
GAPLESS_INLINE F32x16 abs(F32x16 x) { return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)}; }
GAPLESS_INLINE float32x4_t exp2_int4(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
GAPLESS_INLINE F32x16 exp2_int(F32x16 n) { return {exp2_int4(n.a), exp2_int4(n.b), exp2_int4(n.c), exp2_int4(n.d)}; }
GAPLESS_INLINE void to_array(float* out, F32x16 x) { store(out, x); }

#else

#define GAPLESS_EACH(expression)                      \
  F32x16 r;                                           \
  for (int i = 0; i < 16; ++i) r.v[i] = (expression); \
  return r;
GAPLESS_INLINE F32x16 set1(float x){GAPLESS_EACH(x)} GAPLESS_INLINE F32x16
    load(const float* p){GAPLESS_EACH(p[i])} GAPLESS_INLINE void store(float* p, F32x16 x) {
  std::memcpy(p, x.v, 64);
}
GAPLESS_INLINE F32x16 load_f16(const uint16_t* p){GAPLESS_EACH(f16_to_f32(p[i]))} GAPLESS_INLINE
    void store_f16(uint16_t* p, F32x16 x) {
  for (int i = 0; i < 16; ++i) p[i] = f32_to_f16(x.v[i]);
}
GAPLESS_INLINE F32x16 add(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] + y.v[i])} GAPLESS_INLINE F32x16
    sub(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] - y.v[i])} GAPLESS_INLINE F32x16
    mul(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] * y.v[i])} GAPLESS_INLINE F32x16
    div(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] / y.v[i])} GAPLESS_INLINE F32x16
    max(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i])} GAPLESS_INLINE F32x16
    min(F32x16 x, F32x16 y){GAPLESS_EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i])}
// Two roundings: a library call per lane for a fused one would make the generic build far slower, not better.
GAPLESS_INLINE F32x16 fma(F32x16 x, F32x16 y, F32x16 z){GAPLESS_EACH(x.v[i] * y.v[i] + z.v[i])} GAPLESS_INLINE F32x16
    round_even(F32x16 x){GAPLESS_EACH(std::nearbyint(x.v[i]))} GAPLESS_INLINE F32x16
    abs(F32x16 x){GAPLESS_EACH(std::fabs(x.v[i]))} GAPLESS_INLINE F32x16
    exp2_int(F32x16 n){GAPLESS_EACH(std::ldexp(1.0f, int(n.v[i])))} GAPLESS_INLINE void to_array(float* out, F32x16 x) {
  std::memcpy(out, x.v, 64);
}

#endif

GAPLESS_INLINE F32x16 zero() { return set1(0.0f); }

GAPLESS_INLINE F32x16 load_bf16(const uint16_t* p) {
#if defined(GAPLESS_ISA_AVX512)
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
#elif defined(GAPLESS_ISA_AVX2)
  const auto eight = [](const uint16_t* q) GAPLESS_LAMBDA_INLINE {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  };
  return {eight(p), eight(p + 8)};
#elif defined(GAPLESS_ISA_NEON)
  const auto four = [](const uint16_t* q)
                        GAPLESS_LAMBDA_INLINE { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(q), 16)); };
  return {four(p), four(p + 4), four(p + 8), four(p + 12)};
#else
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = bf16_to_f32(p[i]);
  return r;
#endif
}

GAPLESS_INLINE void store_bf16(uint16_t* p, F32x16 x) {
  float lanes[16];
  to_array(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = f32_to_bf16(lanes[i]);
}

// Sum and maximum of the lanes, in one fixed tree on every ISA: halves are folded onto each other.
#if defined(GAPLESS_ISA_AVX512) || defined(GAPLESS_ISA_AVX2)
#if defined(GAPLESS_ISA_AVX512)
GAPLESS_INLINE __m256 low_half(F32x16 x) { return _mm512_castps512_ps256(x.v); }
GAPLESS_INLINE __m256 high_half(F32x16 x) { return _mm512_extractf32x8_ps(x.v, 1); }
#else
GAPLESS_INLINE __m256 low_half(F32x16 x) { return x.lo; }
GAPLESS_INLINE __m256 high_half(F32x16 x) { return x.hi; }
#endif
GAPLESS_INLINE float reduce_add(F32x16 x) {
  const __m256 v8 = _mm256_add_ps(low_half(x), high_half(x));
  const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
  const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
  return _mm_cvtss_f32(_mm_add_ss(v2, _mm_shuffle_ps(v2, v2, 1)));
}
GAPLESS_INLINE float reduce_max(F32x16 x) {
  const __m256 v8 = _mm256_max_ps(low_half(x), high_half(x));
  const __m128 v4 = _mm_max_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
  const __m128 v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
  return _mm_cvtss_f32(_mm_max_ss(v2, _mm_shuffle_ps(v2, v2, 1)));
}
#else
GAPLESS_INLINE float reduce_add(F32x16 x) {
  float v[16];
  to_array(v, x);
  for (int i = 0; i < 8; ++i) v[i] += v[i + 8];
  for (int i = 0; i < 4; ++i) v[i] += v[i + 4];
  return (v[0] + v[2]) + (v[1] + v[3]);
}
GAPLESS_INLINE float larger(float x, float y) { return x > y ? x : y; }
GAPLESS_INLINE float reduce_max(F32x16 x) {
  float v[16];
  to_array(v, x);
  for (int i = 0; i < 8; ++i) v[i] = larger(v[i], v[i + 8]);
  for (int i = 0; i < 4; ++i) v[i] = larger(v[i], v[i + 4]);
  return larger(larger(v[0], v[2]), larger(v[1], v[3]));
}
#endif

// e^x by Cody-Waite reduction and a degree-6 Taylor polynomial: relative error below 2e-7. The argument
// is clamped to [-87.33, 88], so a masked lane (-inf) gives 1.2e-38, not 0: callers that need an exact zero select it.
GAPLESS_INLINE F32x16 exp(F32x16 x) {
  const F32x16 clamped = min(max(x, set1(-87.33f)), set1(88.0f));
  const F32x16 n = round_even(mul(clamped, set1(1.44269504f)));
  F32x16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  F32x16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return mul(p, exp2_int(n));
}

}  // namespace gapless::GAPLESS_ISA
