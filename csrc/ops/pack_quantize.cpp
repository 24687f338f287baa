// InstantQuant: floats to int8 or int4 groups without calibration.
#include <algorithm>
#include <cmath>

#include "ops/pack_row.h"
#include "simd/f32x16.h"

namespace gapless {
namespace {

using generic::f16_to_f32;
using generic::f32_to_f16;

// Adding and taking away 1.5 * 2^23 rounds to the nearest even integer for |x| < 2^22, and vectorizes on any ISA.
float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }

float finite_f16(float x) { return std::clamp(x, -65504.0f, 65504.0f); }

}  // namespace

void quantize_row_int8(const float* row, int cols, int group_cols, RowSink sink) {
  for (int begin = 0, index = 0; begin < cols; begin += group_cols, ++index) {
    const int n = std::min(group_cols, cols - begin);
    const float* x = row + begin;
    float largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
    const uint16_t scale = f32_to_f16(finite_f16(largest / 127));
    const float rounded = f16_to_f32(scale), inverse = rounded > 0 ? 1 / rounded : 0;
    sink.set_scale(index, scale);
    for (int i = 0; i < n; ++i)
      sink.q[begin + i] = uint8_t(int(std::clamp(round_even(x[i] * inverse), -127.0f, 127.0f)) + 128);
  }
}

namespace {

struct Affine {
  float scale, min;  // value = scale * q - min
};

Affine rounded_to_f16(Affine a) {
  return {f16_to_f32(f32_to_f16(finite_f16(a.scale))), f16_to_f32(f32_to_f16(finite_f16(a.min)))};
}

float quantize_int4(const float* x, int n, Affine a, uint8_t* q) {
  const float inverse = a.scale > 0 ? 1 / a.scale : 0;
  float error = 0;
  for (int i = 0; i < n; ++i) {
    const float level = std::clamp(round_even((x[i] + a.min) * inverse), 0.0f, 15.0f);
    const float difference = a.scale * level - a.min - x[i];
    error += difference * difference;
    q[i] = uint8_t(int(level));
  }
  return error;
}

// The scale and minimum that fit the levels q best in the least-squares sense.
Affine fit(const float* x, int n, const uint8_t* q, Affine fallback) {
  float sum_q = 0, sum_qq = 0, sum_x = 0, sum_qx = 0;
  for (int i = 0; i < n; ++i) {
    const float level = q[i];
    sum_q += level;
    sum_qq += level * level;
    sum_x += x[i];
    sum_qx += level * x[i];
  }
  const float determinant = float(n) * sum_qq - sum_q * sum_q;
  if (determinant <= 0) return fallback;
  const float scale = (float(n) * sum_qx - sum_q * sum_x) / determinant;
  if (!(scale > 0)) return fallback;
  return {scale, (scale * sum_q - sum_x) / float(n)};
}

}  // namespace

void quantize_row_int4(const float* row, int cols, int group_cols, RowSink sink) {
  for (int begin = 0, index = 0; begin < cols; begin += group_cols, ++index) {
    const int n = std::min(group_cols, cols - begin);
    const float* x = row + begin;
    uint8_t* q = sink.q + begin;
    float lowest = x[0], highest = x[0];
    for (int i = 1; i < n; ++i) {
      lowest = std::min(lowest, x[i]);
      highest = std::max(highest, x[i]);
    }
    Affine best = rounded_to_f16({(highest - lowest) / 15, -lowest});
    const float error = quantize_int4(x, n, best, q);
    const Affine fitted = rounded_to_f16(fit(x, n, q, best));
    if (quantize_int4(x, n, fitted, q) < error)
      best = fitted;
    else
      quantize_int4(x, n, best, q);
    sink.set_scale(index, f32_to_f16(best.scale));
    sink.set_min(index, f32_to_f16(best.min));
  }
}

}  // namespace gapless
