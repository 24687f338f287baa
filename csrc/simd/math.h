// Activation functions on sixteen lanes, branch-free. The relative error is below 1e-6, near zero as well (hence no
// "1 - something"); in the tails of gelu, where results are below 1e-3, it grows to 4e-6.
#pragma once

#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {

GAPLESS_INLINE F32x16 negate(F32x16 x) { return sub(set1(-0.0f), x); }

// 2^x, x clamped to [-126, 127]; exactly 1 at 0. Minimax polynomial of 2^r on [-1/2, 1/2]: relative error below 2e-7.
GAPLESS_INLINE F32x16 exp2(F32x16 x) {
  const F32x16 clamped = min(max(x, set1(-126.0f)), set1(127.0f));
  const F32x16 n = round_even(clamped);
  const F32x16 r = sub(clamped, n);
  F32x16 p = set1(0.00132647271f);
  p = fma(p, r, set1(0.00967151265f));
  p = fma(p, r, set1(0.0555073374f));
  p = fma(p, r, set1(0.240222421f));
  p = fma(p, r, set1(0.693146978f));
  p = fma(p, r, set1(1.0f));
  return mul(p, exp2_int(n));
}

// e^x - 1 without cancellation near 0, for x in [-40, 40]. With x = n ln 2 + r: 2^n (e^r - 1) + (2^n - 1).
GAPLESS_INLINE F32x16 expm1(F32x16 x) {
  const F32x16 n = round_even(mul(x, set1(1.44269504f)));
  F32x16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F32x16 p = set1(1.0f / 5040);  // Taylor: the remainder is below 1e-8 of r
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, mul(r, r), r);
  const F32x16 power = exp2_int(n);
  return fma(power, p, sub(power, set1(1.0f)));
}

GAPLESS_INLINE F32x16 tanh(F32x16 x) {
  const F32x16 e = expm1(min(max(add(x, x), set1(-20.0f)), set1(20.0f)));  // tanh(10) rounds to 1
  return div(e, add(e, set1(2.0f)));
}

// x / (1 + e^-x)
GAPLESS_INLINE F32x16 silu(F32x16 x) { return div(x, add(exp(negate(x)), set1(1.0f))); }

// x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
GAPLESS_INLINE F32x16 gelu_tanh(F32x16 x) {
  const F32x16 square = mul(x, x);
  const F32x16 minus_2u = mul(x, fma(square, set1(-0.0713548162f), set1(-1.59576912f)));
  return div(x, add(exp(minus_2u), set1(1.0f)));
}

// x Phi(x) = max(x, 0) - |x| erfc(a) / 2 with a = |x| / sqrt 2. erfc(a) = e^(-a^2) t P(t), t = 1 / (1 + 0.3 a), where P
// is a minimax polynomial on a in [0, 9.4] (relative error 2e-8; f32 erfc is 0 beyond).
GAPLESS_INLINE F32x16 gelu(F32x16 x) {
  const F32x16 magnitude = abs(x);
  const F32x16 a = min(mul(magnitude, set1(0.707106781f)), set1(9.4f));
  const F32x16 t = div(set1(1.0f), fma(a, set1(0.3f), set1(1.0f)));
  F32x16 p = set1(-0.129406696f);
  p = fma(p, t, set1(0.484952378f));
  p = fma(p, t, set1(-0.510901398f));
  p = fma(p, t, set1(0.545984891f));
  p = fma(p, t, set1(-0.0933151192f));
  p = fma(p, t, set1(0.214284101f));
  p = fma(p, t, set1(0.148527043f));
  p = fma(p, t, set1(0.170684663f));
  p = fma(p, t, set1(0.169190119f));
  const F32x16 half_erfc = mul(mul(exp(negate(mul(a, a))), t), mul(p, set1(0.5f)));
  return sub(max(x, zero()), mul(magnitude, half_erfc));
}

GAPLESS_INLINE F32x16 relu(F32x16 x) { return max(x, zero()); }

}  // namespace gapless::GAPLESS_ISA
