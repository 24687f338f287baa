// InstantQuant: floats to int8 or int4 groups without calibration.
//
// Written with the compiler's own four-lane vectors: packing is not compiled once per ISA, and four lanes are what
// every machine has.
#include <algorithm>
#include <cstring>

#include "ops/pack_row.h"
#include "simd/f32x16.h"

namespace gapless {
namespace {

using generic::f16_to_f32;
using generic::f32_to_f16;

using F32x4 = float __attribute__((vector_size(16)));

F32x4 load4(const float* p) {
  F32x4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
F32x4 splat(float x) { return F32x4{x, x, x, x}; }
F32x4 smaller(F32x4 x, F32x4 y) { return x < y ? x : y; }
F32x4 larger(F32x4 x, F32x4 y) { return x > y ? x : y; }
float sum(F32x4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
float smallest(F32x4 x) { return std::min(std::min(x[0], x[1]), std::min(x[2], x[3])); }
float largest(F32x4 x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }

float finite_f16(float x) { return std::clamp(x, -65504.0f, 65504.0f); }

// Adding 1.5 * 2^23 rounds |x| < 2^22 to the nearest even integer and leaves it in the low bits of the float.
constexpr float kMagic = 12582912.0f;

// The low bytes of sixteen such floats.
void store_bytes(const F32x4 (&magic)[4], uint8_t* q) {
  uint32_t words[16];
  std::memcpy(words, magic, sizeof words);
  for (int i = 0; i < 16; ++i) q[i] = uint8_t(words[i]);
}

}  // namespace

void quantize_row_int8(const float* row, int cols, int group_cols, RowSink sink) {
  for (int begin = 0, index = 0; begin < cols; begin += group_cols, ++index) {
    const int n = std::min(group_cols, cols - begin);
    const float* x = row + begin;
    F32x4 low = load4(x), high = low;
    for (int i = 4; i < n; i += 4) {
      low = smaller(low, load4(x + i));
      high = larger(high, load4(x + i));
    }
    const uint16_t scale = f32_to_f16(finite_f16(std::max(-smallest(low), largest(high)) / 127));
    const float rounded = f16_to_f32(scale);
    const F32x4 inverse = splat(rounded > 0 ? 1 / rounded : 0);
    sink.set_scale(index, scale);
    for (int i = 0; i < n; i += 16) {
      F32x4 levels[4];
      for (int j = 0; j < 4; ++j)
        levels[j] = smaller(larger(load4(x + i + 4 * j) * inverse, splat(-127)), splat(127)) + splat(kMagic + 128);
      store_bytes(levels, sink.q + begin + i);
    }
  }
}

namespace {

struct Affine {
  float scale, min;  // value = scale * q - min
};

Affine rounded_to_f16(Affine a) {
  return {f16_to_f32(f32_to_f16(finite_f16(a.scale))), f16_to_f32(f32_to_f16(finite_f16(a.min)))};
}

// Squared error, and what the least-squares fit needs.
struct Quantized {
  float error, sum_q, sum_qq, sum_x, sum_qx;
};

Quantized quantize_int4(const float* x, int n, Affine a, uint8_t* q) {
  const F32x4 scale = splat(a.scale), min = splat(a.min), inverse = splat(a.scale > 0 ? 1 / a.scale : 0);
  F32x4 error = {}, sum_q = {}, sum_qq = {}, sum_x = {}, sum_qx = {};
  for (int i = 0; i < n; i += 16) {
    F32x4 levels[4];
    for (int j = 0; j < 4; ++j) {
      const F32x4 value = load4(x + i + 4 * j);
      levels[j] = smaller(larger((value + min) * inverse, splat(0)), splat(15)) + splat(kMagic);
      const F32x4 level = levels[j] - splat(kMagic), difference = scale * level - min - value;
      error += difference * difference;
      sum_q += level;
      sum_qq += level * level;
      sum_x += value;
      sum_qx += level * value;
    }
    store_bytes(levels, q + i);
  }
  return {sum(error), sum(sum_q), sum(sum_qq), sum(sum_x), sum(sum_qx)};
}

// The scale and minimum that fit the levels best in the least-squares sense.
Affine fit(const Quantized& s, int n, Affine fallback) {
  const float determinant = float(n) * s.sum_qq - s.sum_q * s.sum_q;
  if (determinant <= 0) return fallback;
  const float scale = (float(n) * s.sum_qx - s.sum_q * s.sum_x) / determinant;
  if (!(scale > 0)) return fallback;
  return {scale, (scale * s.sum_q - s.sum_x) / float(n)};
}

}  // namespace

void quantize_row_int4(const float* row, int cols, int group_cols, RowSink sink) {
  for (int begin = 0, index = 0; begin < cols; begin += group_cols, ++index) {
    const int n = std::min(group_cols, cols - begin);
    const float* x = row + begin;
    uint8_t* q = sink.q + begin;
    F32x4 low = load4(x), high = low;
    for (int i = 4; i < n; i += 4) {
      low = smaller(low, load4(x + i));
      high = larger(high, load4(x + i));
    }
    const float bottom = smallest(low), top = largest(high);
    Affine best = rounded_to_f16({(top - bottom) / 15, -bottom});
    const Quantized first = quantize_int4(x, n, best, q);
    const Affine fitted = rounded_to_f16(fit(first, n, best));
    if (quantize_int4(x, n, fitted, q).error < first.error)
      best = fitted;
    else
      quantize_int4(x, n, best, q);
    sink.set_scale(index, f32_to_f16(best.scale));
    sink.set_min(index, f32_to_f16(best.min));
  }
}

}  // namespace gapless
