// Dot products of unsigned weights with int8 activations, sixteen outputs at a time.
//
// A line is 64 bytes: sixteen outputs x four inputs. `Dot<bits>` sums the eight lines of a group times the activations'
// 8 x 4 values; all arithmetic is in exact integers, so that every ISA and every way to block the loops gives the same
// number. How a line is multiplied is the ISA's business: vpdpbusd, sdot, or vpmaddubsw with 16-bit partial sums that
// are widened before they can overflow.
//
// Weights are stored unsigned. Of those with a zero point (`centred`), zero point times the sum of the activations is
// part of the sum; the activations bring it along, so it costs nothing where it can be the accumulator's start value.
#pragma once

#include <cstddef>

#include "simd/line.h"

namespace gapless::GAPLESS_ISA {

// One group of 32 activations: x = scale * q.
struct A8Group {
  int8_t q[32];
  float scale;
  float offset;          // -scale * (sum of q): the weights' minimum times this is added to the dot product
  int32_t zero_dot[3];   // the sum of q times minus the zero point of int4, int5, int8
  int32_t half_zero[2];  // the sums of the first and the last 16 q times minus the zero point of int6
  int16_t half_sum[2];   // of the first and the last 16 q
};
static_assert(sizeof(A8Group) == 64);
template <int bits>
GAPLESS_INLINE const int32_t& zero_dot(const A8Group* x) {
  static_assert(bits == 4 || bits == 5 || bits == 8);
  return x->zero_dot[bits == 8 ? 2 : bits - 4];
}

// The weights of one step, in the form that Dot wants, and the two integer scales per group that int6 has.
template <int bits>
struct Operand;
template <int bits>
struct SubScales {};
template <int bits, bool centred>
struct Dot;
template <int bits>
GAPLESS_INLINE SubScales<bits> load_sub_scales(const int8_t*) {
  return {};
}
// From what store_sub_scales wrote.
template <int bits>
GAPLESS_INLINE SubScales<bits> reload_sub_scales(const std::byte*) {
  return {};
}

#if defined(GAPLESS_ISA_AVX2)

struct I32x16 {
  __m256i lo, hi;
};
GAPLESS_INLINE I32x16 set1_i32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
GAPLESS_INLINE I32x16 operator+(I32x16 x, I32x16 y) {
  I32x16 sum = {_mm256_add_epi32(x.lo, y.lo), _mm256_add_epi32(x.hi, y.hi)};
  asm("" : "+x"(sum.lo), "+x"(sum.hi));  // as for Pairs below
  return sum;
}
GAPLESS_INLINE F32x16 to_f32(I32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }

// Products of a line with four activations, neighbours added: 16-bit sums, two per output.
struct Pairs {
  __m256i lo, hi;
};
GAPLESS_INLINE Pairs multiply(Line w, const int8_t* x) {
  const __m256i v = _mm256_set1_epi32(load_i32(x));
  return {_mm256_maddubs_epi16(w.lo, v), _mm256_maddubs_epi16(w.hi, v)};
}
// The empty asm hides the sum from the compiler, which would otherwise turn a chain of sums into a tree, keep all
// products alive for that, and spend a third of the time on spilling them.
GAPLESS_INLINE Pairs operator+(Pairs x, Pairs y) {
  Pairs sum = {_mm256_add_epi16(x.lo, y.lo), _mm256_add_epi16(x.hi, y.hi)};
  asm("" : "+x"(sum.lo), "+x"(sum.hi));
  return sum;
}
GAPLESS_INLINE I32x16 widen(Pairs x, Pairs factors) {
  return {_mm256_madd_epi16(x.lo, factors.lo), _mm256_madd_epi16(x.hi, factors.hi)};
}
GAPLESS_INLINE I32x16 widen(Pairs x, int16_t factor) {
  const __m256i f = _mm256_set1_epi16(factor);
  return widen(x, Pairs{f, f});
}

template <int bits>
struct Operand {
  Line line;
};
template <int bits>
GAPLESS_INLINE Operand<bits> make_operand(Line w) {
  return {w};
}
template <int bits>
GAPLESS_INLINE void store_operand(std::byte* p, const Operand<bits>& w) {
  store_line(p, w.line);
}
template <int bits>
GAPLESS_INLINE Operand<bits> load_operand(const std::byte* p) {
  return {load_line(p)};
}

// The sum of up to 8, 4, 2 steps stays below 2^15: 15 * 128 * 2 * 8, 31 * 128 * 2 * 4, 63 * 128 * 2 * 2.
template <int bits, bool centred>
struct Dot {
  static constexpr int kRun = bits == 4 ? 8 : 4;
  Pairs run;
  I32x16 sum;

  template <int step>
  GAPLESS_INLINE void add(Operand<bits> w, const A8Group* x, const SubScales<bits>&) {
    const Pairs product = multiply(w.line, x->q + 4 * step);
    run = step % kRun == 0 ? product : run + product;
    if constexpr (step % kRun == kRun - 1) {
      const I32x16 wide = widen(run, int16_t(1));
      sum = step < kRun ? wide : sum + wide;
    }
  }
  GAPLESS_INLINE F32x16 finish(const A8Group* x, const SubScales<bits>&) const {
    if constexpr (centred) return to_f32(sum + set1_i32(zero_dot<bits>(x)));
    return to_f32(sum);
  }
};

template <>
struct SubScales<6> {
  Pairs first, second;  // each output's factor for both its pairs
  Pairs correction;     // -32 times the first and the second factor
};
template <>
GAPLESS_INLINE SubScales<6> load_sub_scales<6>(const int8_t* p) {
  const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
  const auto widened = [](__m128i a, __m128i b) {
    return Pairs{_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
  };
  const Pairs both = widened(first, second);
  const __m256i factor = _mm256_set1_epi16(-32);
  return {widened(first, first),
          widened(second, second),
          {_mm256_mullo_epi16(both.lo, factor), _mm256_mullo_epi16(both.hi, factor)}};
}

GAPLESS_INLINE void store_sub_scales(std::byte* p, const SubScales<6>& subs) {
  store_line(p, {subs.first.lo, subs.first.hi});
  store_line(p + 64, {subs.second.lo, subs.second.hi});
  store_line(p + 128, {subs.correction.lo, subs.correction.hi});
}
template <>
GAPLESS_INLINE SubScales<6> reload_sub_scales<6>(const std::byte* p) {
  const Line first = load_line(p), second = load_line(p + 64), correction = load_line(p + 128);
  return {{first.lo, first.hi}, {second.lo, second.hi}, {correction.lo, correction.hi}};
}

template <bool centred>
struct Dot<6, centred> {
  Pairs run;
  I32x16 sum;

  template <int step>
  GAPLESS_INLINE void add(Operand<6> w, const A8Group* x, const SubScales<6>& subs) {
    const Pairs product = multiply(w.line, x->q + 4 * step);
    run = step % 2 == 0 ? product : run + product;
    if constexpr (step % 2 == 1) {
      const I32x16 wide = widen(run, step < 4 ? subs.first : subs.second);
      sum = step < 2 ? wide : sum + wide;
    }
  }
  GAPLESS_INLINE F32x16 finish(const A8Group* x, const SubScales<6>& subs) const {
    const __m256i half_sums = _mm256_set1_epi32(load_i32(x->half_sum));
    return to_f32(sum + widen(subs.correction, Pairs{half_sums, half_sums}));
  }
};

// An eight-bit weight is two nibbles, each summed like a four-bit one.
template <>
struct Operand<8> {
  Line low, high;
};
template <>
GAPLESS_INLINE Operand<8> make_operand<8>(Line w) {
  return {w & 15, shift_right<4>(w) & 15};
}
GAPLESS_INLINE void store_operand(std::byte* p, const Operand<8>& w) {
  store_line(p, w.low);
  store_line(p + 64, w.high);
}
template <>
GAPLESS_INLINE Operand<8> load_operand<8>(const std::byte* p) {
  return {load_line(p), load_line(p + 64)};
}
template <bool centred>
struct Dot<8, centred> {
  Pairs low, high;

  template <int step>
  GAPLESS_INLINE void add(Operand<8> w, const A8Group* x, const SubScales<8>&) {
    const Pairs low_product = multiply(w.low, x->q + 4 * step), high_product = multiply(w.high, x->q + 4 * step);
    low = step == 0 ? low_product : low + low_product;
    high = step == 0 ? high_product : high + high_product;
  }
  GAPLESS_INLINE F32x16 finish(const A8Group* x, const SubScales<8>&) const {
    return to_f32(widen(low, int16_t(1)) + widen(high, int16_t(16)) + set1_i32(zero_dot<8>(x)));
  }
};

#else

#if defined(GAPLESS_ISA_AVX512)

struct I32x16 {
  __m512i v;
};
GAPLESS_INLINE I32x16 set1_i32(int32_t x) { return {_mm512_set1_epi32(x)}; }
GAPLESS_INLINE F32x16 to_f32(I32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
template <int bits, int step>
GAPLESS_INLINE void dot_step(I32x16& sum, Line w, const A8Group* x) {
  sum.v = _mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(load_i32(x->q + 4 * step)));
}
constexpr bool kSignedWeights = false;  // eight-bit weights are multiplied as they are

#elif defined(GAPLESS_ISA_NEON)

struct I32x16 {
  int32x4_t a, b, c, d;
};
GAPLESS_INLINE I32x16 set1_i32(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
GAPLESS_INLINE F32x16 to_f32(I32x16 x) {
  return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
template <int bits, int step>
GAPLESS_INLINE void dot_step(I32x16& sum, Line w, const A8Group* x) {
  const int8x16_t v = vld1q_s8(x->q + step / 4 * 16);
  sum.a = vdotq_laneq_s32(sum.a, vreinterpretq_s8_u8(w.a), v, step % 4);
  sum.b = vdotq_laneq_s32(sum.b, vreinterpretq_s8_u8(w.b), v, step % 4);
  sum.c = vdotq_laneq_s32(sum.c, vreinterpretq_s8_u8(w.c), v, step % 4);
  sum.d = vdotq_laneq_s32(sum.d, vreinterpretq_s8_u8(w.d), v, step % 4);
}
constexpr bool kSignedWeights = true;

#else

struct I32x16 {
  int32_t v[16];
};
GAPLESS_INLINE I32x16 set1_i32(int32_t x) {
  I32x16 r;
  for (int32_t& lane : r.v) lane = x;
  return r;
}
GAPLESS_INLINE F32x16 to_f32(I32x16 x) {
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = float(x.v[i]);
  return r;
}
// Out of line: unrolled into its callers this takes the compiler minutes.
template <int bits, int step>
__attribute__((noinline)) void dot_step(I32x16& sum, Line w, const A8Group* x) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) sum.v[i] += int32_t(w.v[4 * i + j]) * x->q[4 * step + j];
}
constexpr bool kSignedWeights = false;

#endif

template <int bits>
struct Operand {
  Line line;
};
template <int bits>
GAPLESS_INLINE Operand<bits> make_operand(Line w) {
#if defined(GAPLESS_ISA_NEON)
  if constexpr (bits == 8) {
    const uint8x16_t top = vdupq_n_u8(0x80);
    return {{veorq_u8(w.a, top), veorq_u8(w.b, top), veorq_u8(w.c, top), veorq_u8(w.d, top)}};
  }
#endif
  return {w};
}

template <int bits>
GAPLESS_INLINE void store_operand(std::byte* p, const Operand<bits>& w) {
  store_line(p, w.line);
}
template <int bits>
GAPLESS_INLINE Operand<bits> load_operand(const std::byte* p) {
  return {load_line(p)};
}

template <int bits, bool centred>
struct Dot {
  I32x16 sum;

  template <int step>
  GAPLESS_INLINE void add(Operand<bits> w, const A8Group* x, const SubScales<bits>&) {
    constexpr bool is_signed = bits == 8 && kSignedWeights;  // without a zero point then
    if constexpr (step == 0) sum = set1_i32(centred && !is_signed ? zero_dot<bits>(x) : 0);
    dot_step<bits, step>(sum, w.line, x);
  }
  GAPLESS_INLINE F32x16 finish(const A8Group*, const SubScales<bits>&) const { return to_f32(sum); }
};

// The products of both halves with their factors are integers below 2^24, so the fused sum is rounded once, like the
// conversion of the exact integer.
template <>
struct SubScales<6> {
  F32x16 first, second;
};
template <>
GAPLESS_INLINE SubScales<6> load_sub_scales<6>(const int8_t* p) {
  return {load_i8(p), load_i8(p + 16)};
}

GAPLESS_INLINE void store_sub_scales(std::byte* p, const SubScales<6>& subs) {
  store(reinterpret_cast<float*>(p), subs.first);
  store(reinterpret_cast<float*>(p + 64), subs.second);
}
template <>
GAPLESS_INLINE SubScales<6> reload_sub_scales<6>(const std::byte* p) {
  return {load(reinterpret_cast<const float*>(p)), load(reinterpret_cast<const float*>(p + 64))};
}

template <bool centred>
struct Dot<6, centred> {
  I32x16 first, second;

  template <int step>
  GAPLESS_INLINE void add(Operand<6> w, const A8Group* x, const SubScales<6>&) {
    I32x16& sum = step < 4 ? first : second;
    if constexpr (step % 4 == 0) sum = set1_i32(x->half_zero[step / 4]);
    dot_step<6, step>(sum, w.line, x);
  }
  GAPLESS_INLINE F32x16 finish(const A8Group*, const SubScales<6>& subs) const {
    return fma(to_f32(second), subs.second, mul(to_f32(first), subs.first));
  }
};

#endif

}  // namespace gapless::GAPLESS_ISA
