// The Walsh-Hadamard transform: a rotation whose every output is a sum of all inputs with signs, but for a factor.
#pragma once

#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {

// Lane i of the result is lane i ^ distance; distance is 1, 2, 4 or 8.
template <int distance>
GAPLESS_INLINE F32x16 swap_lanes(F32x16 x) {
#if defined(GAPLESS_ISA_AVX512)
  if constexpr (distance == 8) return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
  if constexpr (distance == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
  return {_mm512_permute_ps(x.v, distance == 2 ? 0x4e : 0xb1)};
#elif defined(GAPLESS_ISA_AVX2)
  if constexpr (distance == 8) return {x.hi, x.lo};
  if constexpr (distance == 4) return {_mm256_permute2f128_ps(x.lo, x.lo, 1), _mm256_permute2f128_ps(x.hi, x.hi, 1)};
  constexpr int order = distance == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(x.lo, order), _mm256_permute_ps(x.hi, order)};
#elif defined(GAPLESS_ISA_NEON)
  if constexpr (distance == 8) return {x.c, x.d, x.a, x.b};
  if constexpr (distance == 4) return {x.b, x.a, x.d, x.c};
  if constexpr (distance == 2)
    return {vextq_f32(x.a, x.a, 2), vextq_f32(x.b, x.b, 2), vextq_f32(x.c, x.c, 2), vextq_f32(x.d, x.d, 2)};
  return {vrev64q_f32(x.a), vrev64q_f32(x.b), vrev64q_f32(x.c), vrev64q_f32(x.d)};
#else
  F32x16 r;
  for (int i = 0; i < 16; ++i) r.v[i] = x.v[i ^ distance];
  return r;
#endif
}

// (a, b) becomes (a + b, a - b) for lanes i and i + distance.
template <int distance>
GAPLESS_INLINE F32x16 butterfly_lanes(F32x16 x) {
  float signs[16];
  for (int i = 0; i < 16; ++i) signs[i] = i & distance ? -1.0f : 1.0f;
  return fma(x, load(signs), swap_lanes<distance>(x));
}

// How many neighbours are transformed together: the largest power of two that divides n, a multiple of 16.
GAPLESS_INLINE int hadamard_width(int n) { return n & -n; }

// Transforms x[n] in place, hadamard_width(n) elements at a time. Twice gives hadamard_width(n) * x.
GAPLESS_INLINE void hadamard(float* x, int n) {
  for (int i = 0; i < n; i += 16)
    store(x + i, butterfly_lanes<8>(butterfly_lanes<4>(butterfly_lanes<2>(butterfly_lanes<1>(load(x + i))))));
  for (int distance = 16; distance < hadamard_width(n); distance *= 2)
    for (int begin = 0; begin < n; begin += 2 * distance)
      for (int i = begin; i < begin + distance; i += 16) {
        const F32x16 a = load(x + i), b = load(x + i + distance);
        store(x + i, add(a, b));
        store(x + i + distance, sub(a, b));
      }
}

}  // namespace gapless::GAPLESS_ISA
