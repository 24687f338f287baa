// Lines of 64 bytes, the unit in which packed weights are stored: sixteen 32-bit words, one per output.
#pragma once

#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {

template <int i>
struct Constant {
  static constexpr int value = i;
  constexpr operator int() const { return i; }
};

// Calls f(Constant<0>) ... f(Constant<n - 1>): a loop whose index is a constant, as immediate operands need it.
template <int n, int i = 0, typename F>
GAPLESS_INLINE void unroll(F&& f) {
  if constexpr (i < n) {
    f(Constant<i>{});
    unroll<n, i + 1>(f);
  }
}

GAPLESS_INLINE int32_t load_i32(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

#if defined(GAPLESS_ISA_AVX512)

struct Line {
  __m512i v;
};
GAPLESS_INLINE Line load_line(const void* p) { return {_mm512_loadu_si512(p)}; }
GAPLESS_INLINE void store_line(void* p, Line x) { _mm512_storeu_si512(p, x.v); }
GAPLESS_INLINE Line operator&(Line x, uint8_t mask) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(char(mask)))}; }
GAPLESS_INLINE Line operator|(Line x, Line y) { return {_mm512_or_si512(x.v, y.v)}; }
// Shifts of 16-bit units: the caller masks what crosses a byte. Negative counts shift left.
template <int n>
GAPLESS_INLINE Line shift_right(Line x) {
  if constexpr (n > 0) return {_mm512_srli_epi16(x.v, n)};
  if constexpr (n < 0) return {_mm512_slli_epi16(x.v, -n)};
  return x;
}
// Sixteen int8 as floats.
GAPLESS_INLINE F32x16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Byte j of each of the sixteen 32-bit words: input j of every output.
template <int j>
GAPLESS_INLINE F32x16 byte_to_f32(Line x) {
  return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x.v, 8 * j), _mm512_set1_epi32(255)))};
}
// A line of sixteen pairs of bf16: the first and the second of each pair.
GAPLESS_INLINE F32x16 even_bf16(Line x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
GAPLESS_INLINE F32x16 odd_bf16(Line x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(int(0xffff0000))))};
}

#elif defined(GAPLESS_ISA_AVX2)

struct Line {
  __m256i lo, hi;
};
GAPLESS_INLINE Line load_line(const void* p) {
  const auto* v = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
GAPLESS_INLINE void store_line(void* p, Line x) {
  auto* v = static_cast<__m256i*>(p);
  _mm256_storeu_si256(v, x.lo);
  _mm256_storeu_si256(v + 1, x.hi);
}
GAPLESS_INLINE Line operator&(Line x, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(char(mask));
  return {_mm256_and_si256(x.lo, m), _mm256_and_si256(x.hi, m)};
}
GAPLESS_INLINE Line operator|(Line x, Line y) { return {_mm256_or_si256(x.lo, y.lo), _mm256_or_si256(x.hi, y.hi)}; }
template <int n>
GAPLESS_INLINE Line shift_right(Line x) {
  if constexpr (n > 0) return {_mm256_srli_epi16(x.lo, n), _mm256_srli_epi16(x.hi, n)};
  if constexpr (n < 0) return {_mm256_slli_epi16(x.lo, -n), _mm256_slli_epi16(x.hi, -n)};
  return x;
}
GAPLESS_INLINE F32x16 load_i8(const int8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
template <int j>
GAPLESS_INLINE F32x16 byte_to_f32(Line x) {
  const __m256i mask = _mm256_set1_epi32(255);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.lo, 8 * j), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.hi, 8 * j), mask))};
}
GAPLESS_INLINE F32x16 even_bf16(Line x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.hi, 16))};
}
GAPLESS_INLINE F32x16 odd_bf16(Line x) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(x.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(x.hi, mask))};
}

#elif defined(GAPLESS_ISA_NEON)

struct Line {
  uint8x16_t a, b, c, d;
};
GAPLESS_INLINE Line load_line(const void* p) {
  const auto* v = static_cast<const uint8_t*>(p);
  return {vld1q_u8(v), vld1q_u8(v + 16), vld1q_u8(v + 32), vld1q_u8(v + 48)};
}
GAPLESS_INLINE void store_line(void* p, Line x) {
  auto* v = static_cast<uint8_t*>(p);
  vst1q_u8(v, x.a);
  vst1q_u8(v + 16, x.b);
  vst1q_u8(v + 32, x.c);
  vst1q_u8(v + 48, x.d);
}
GAPLESS_INLINE Line operator&(Line x, uint8_t mask) {
  const uint8x16_t m = vdupq_n_u8(mask);
  return {vandq_u8(x.a, m), vandq_u8(x.b, m), vandq_u8(x.c, m), vandq_u8(x.d, m)};
}
GAPLESS_INLINE Line operator|(Line x, Line y) {
  return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b), vorrq_u8(x.c, y.c), vorrq_u8(x.d, y.d)};
}
template <int n>
GAPLESS_INLINE Line shift_right(Line x) {
  if constexpr (n > 0) return {vshrq_n_u8(x.a, n), vshrq_n_u8(x.b, n), vshrq_n_u8(x.c, n), vshrq_n_u8(x.d, n)};
  if constexpr (n < 0) return {vshlq_n_u8(x.a, -n), vshlq_n_u8(x.b, -n), vshlq_n_u8(x.c, -n), vshlq_n_u8(x.d, -n)};
  return x;
}
GAPLESS_INLINE F32x16 load_i8(const int8_t* p) {
  const int8x16_t v = vld1q_s8(p);
  const int16x8_t lo = vmovl_s8(vget_low_s8(v)), hi = vmovl_s8(vget_high_s8(v));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))};
}
template <int j>
GAPLESS_INLINE float32x4_t byte_to_f32x4(uint8x16_t x) {
  uint32x4_t words = vreinterpretq_u32_u8(x);
  if constexpr (j > 0) words = vshrq_n_u32(words, 8 * j);
  return vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)));
}
template <int j>
GAPLESS_INLINE F32x16 byte_to_f32(Line x) {
  return {byte_to_f32x4<j>(x.a), byte_to_f32x4<j>(x.b), byte_to_f32x4<j>(x.c), byte_to_f32x4<j>(x.d)};
}
GAPLESS_INLINE float32x4_t even_bf16x4(uint8x16_t x) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x), 16));
}
GAPLESS_INLINE float32x4_t odd_bf16x4(uint8x16_t x) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(x), vdupq_n_u32(0xffff0000)));
}
GAPLESS_INLINE F32x16 even_bf16(Line x) {
  return {even_bf16x4(x.a), even_bf16x4(x.b), even_bf16x4(x.c), even_bf16x4(x.d)};
}
GAPLESS_INLINE F32x16 odd_bf16(Line x) { return {odd_bf16x4(x.a), odd_bf16x4(x.b), odd_bf16x4(x.c), odd_bf16x4(x.d)}; }

#else

// Not forced inline: unrolled into the kernels these loops take the compiler minutes.
struct Line {
  uint8_t v[64];
};
inline Line load_line(const void* p) {
  Line x;
  std::memcpy(x.v, p, 64);
  return x;
}
inline void store_line(void* p, Line x) { std::memcpy(p, x.v, 64); }
inline Line operator&(Line x, uint8_t mask) {
  for (uint8_t& byte : x.v) byte &= mask;
  return x;
}
inline Line operator|(Line x, Line y) {
  for (int i = 0; i < 64; ++i) x.v[i] |= y.v[i];
  return x;
}
template <int n>
inline Line shift_right(Line x) {
  for (uint8_t& byte : x.v) byte = uint8_t(n >= 0 ? byte >> (n >= 0 ? n : 0) : byte << (n < 0 ? -n : 0));
  return x;
}
inline F32x16 load_i8(const int8_t* p) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float(p[i]);
  return r;
}
template <int j>
inline F32x16 byte_to_f32(Line x) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float(x.v[4 * i + j]);
  return r;
}
inline F32x16 bf16_of_pairs(Line x, int which) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = bf16_to_f32(uint16_t(x.v[4 * i + 2 * which] | x.v[4 * i + 2 * which + 1] << 8));
  return r;
}
inline F32x16 even_bf16(Line x) { return bf16_of_pairs(x, 0); }
inline F32x16 odd_bf16(Line x) { return bf16_of_pairs(x, 1); }

#endif

}  // namespace gapless::GAPLESS_ISA
