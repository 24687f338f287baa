// Compiled once per ISA; see elementwise.h for what each function promises.
#include "ops/elementwise.h"
#include "simd/hadamard.h"
#include "simd/math.h"

namespace gapless::GAPLESS_ISA {
namespace {

// Sums of f(x) over a row: four accumulators hide the latency of the adds, in an order that only n decides.
template <typename Vector, typename Scalar>
GAPLESS_INLINE float sum_of(int n, Vector vector_term, Scalar scalar_term) {
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], vector_term(i + 16 * j));
  for (; i + 16 <= n; i += 16) sums[0] = add(sums[0], vector_term(i));
  float sum = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  for (; i < n; ++i) sum += scalar_term(i);
  return sum;
}

// Visits a row sixteen elements at a time and its tail one at a time.
template <typename Vector, typename Scalar>
GAPLESS_INLINE void for_each(int n, Vector vector_op, Scalar scalar_op) {
  int i = 0;
  for (; i + 16 <= n; i += 16) vector_op(i);
  for (; i < n; ++i) scalar_op(i);
}

GAPLESS_INLINE float inverse_rms(const float* x, int n, float eps) {
  const float sum = sum_of(n, [=](int i) { return mul(load(x + i), load(x + i)); }, [=](int i) { return x[i] * x[i]; });
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

void rms_norm(const float* x, const float* weight, int width, float eps, float* out) {
  const float factor = inverse_rms(x, width, eps);
  const F32x16 factors = set1(factor);
  for_each(
      width, [=](int i) { store(out + i, mul(mul(load(x + i), factors), load(weight + i))); },
      [=](int i) { out[i] = x[i] * factor * weight[i]; });
}

void rms_norm_add(const float* x, const float* weight, int width, float eps, float* out) {
  const float factor = inverse_rms(x, width, eps);
  const F32x16 factors = set1(factor);
  for_each(
      width, [=](int i) { store(out + i, add(load(out + i), mul(mul(load(x + i), factors), load(weight + i)))); },
      [=](int i) { out[i] += x[i] * factor * weight[i]; });
}

void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* out) {
  const float mean = sum_of(width, [=](int i) { return load(x + i); }, [=](int i) { return x[i]; }) / float(width);
  const F32x16 means = set1(mean);
  const float squares = sum_of(
      width,
      [=](int i) {
        const F32x16 centered = sub(load(x + i), means);
        return mul(centered, centered);
      },
      [=](int i) { return (x[i] - mean) * (x[i] - mean); });
  const float factor = 1.0f / std::sqrt(squares / float(width) + eps);
  const F32x16 factors = set1(factor);
  for_each(
      width,
      [=](int i) {
        const F32x16 y = mul(mul(sub(load(x + i), means), factors), load(weight + i));
        store(out + i, bias ? add(y, load(bias + i)) : y);
      },
      [=](int i) {
        const float y = (x[i] - mean) * factor * weight[i];
        out[i] = bias ? y + bias[i] : y;
      });
}

void add_row(const float* x, int n, float* out) {
  for_each(n, [=](int i) { store(out + i, add(load(out + i), load(x + i))); }, [=](int i) { out[i] += x[i]; });
}

void scale(float* x, int n, float factor) {
  const F32x16 factors = set1(factor);
  for_each(n, [=](int i) { store(x + i, mul(load(x + i), factors)); }, [=](int i) { x[i] *= factor; });
}

// A NaN loses every comparison, and `max` answers with its second operand then.
float max_of(const float* x, int n) {
  F32x16 best[4];
  for (F32x16& b : best) b = set1(-INFINITY);
  int i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) best[j] = max(load(x + i + 16 * j), best[j]);
  for (; i + 16 <= n; i += 16) best[0] = max(load(x + i), best[0]);
  float result = reduce_max(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < n; ++i)
    if (x[i] > result) result = x[i];
  return result;
}

// The last, incomplete vector of a row goes through the same arithmetic as the others, padded with zeros.
template <typename Op>
GAPLESS_INLINE void map_tail(const float* x, int n, Op op, float* out) {
  float padded[16] = {};
  std::memcpy(padded, x, n * sizeof(float));
  store(padded, op(load(padded)));
  std::memcpy(out, padded, n * sizeof(float));
}

template <typename Op>
GAPLESS_INLINE void map_row(const float* x, int n, Op op, float* out) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, op(load(x + i)));
  if (i < n) map_tail(x + i, n - i, op, out + i);
}

void softcap(float* x, int n, float cap) {
  const F32x16 caps = set1(cap), inverse = set1(1.0f / cap);
  map_row(x, n, [=](F32x16 v) { return mul(caps, tanh(mul(v, inverse))); }, x);
}

void exp_row(const float* x, int n, float shift, float scale, float* out) {
  const F32x16 shifts = set1(shift), scales = set1(scale);
  map_row(x, n, [=](F32x16 v) { return exp(mul(sub(v, shifts), scales)); }, out);
}

double sum_exp(const float* x, int n, float shift, float scale) {
  const F32x16 shifts = set1(shift), scales = set1(scale);
  const auto term = [=](F32x16 v) { return exp(mul(sub(v, shifts), scales)); };
  // A vocabulary is long: chunks are summed in f32, their sums in double.
  constexpr int chunk = 4096;
  double sum = 0;
  for (int begin = 0; begin < n; begin += chunk) {
    const float* p = x + begin;
    const int size = n - begin < chunk ? n - begin : chunk, whole = size & ~15;
    sum += sum_of(whole, [=](int i) { return term(load(p + i)); }, [](int) { return 0.0f; });
    if (whole == size) continue;
    float tail[16];
    map_tail(p + whole, size - whole, term, tail);
    for (int i = 0; i < size - whole; ++i) sum += tail[i];
  }
  return sum;
}

float logsumexp(const float* x, int n) {
  const float maximum = max_of(x, n);
  if (!(std::fabs(maximum) < INFINITY)) return maximum;
  return maximum + float(std::log(sum_exp(x, n, maximum, 1.0f)));
}

int argmax(const float* x, int n) {
  // One pass for the maximum of each chunk, then a search in the first chunk that has the greatest.
  constexpr int chunk = 2048;
  float best = -INFINITY;
  int best_begin = 0;
  for (int begin = 0; begin < n; begin += chunk) {
    const float maximum = max_of(x + begin, n - begin < chunk ? n - begin : chunk);
    if (maximum > best) {
      best = maximum;
      best_begin = begin;
    }
  }
  if (best == -INFINITY) return 0;
  int i = best_begin;
  while (x[i] != best) ++i;
  return i;
}

int count_above(const float* x, int n, float value) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += x[i] > value;
  return count;
}

int select_at_least(const float* x, int n, float threshold, int capacity, int32_t* indices) {
  // Few elements pass in practice: whole chunks are dismissed by a comparison that the compiler vectorises.
  constexpr int chunk = 64;
  int count = 0;
  for (int begin = 0; begin < n; begin += chunk) {
    const int end = n - begin < chunk ? n : begin + chunk;
    if (end - begin == chunk) {
      int hits = 0;
      for (int i = 0; i < chunk; ++i) hits |= x[begin + i] >= threshold;
      if (!hits) continue;
    }
    for (int i = begin; i < end; ++i) {
      if (!(x[i] >= threshold)) continue;
      if (count < capacity) indices[count] = i;
      ++count;
    }
  }
  return count;
}

// Rope of one head in place: (a, b) = (x[i], x[i + half]) turns by the angle of dimension i.
void rotate_head(float* x, int half, const float* cos, const float* sin) {
  for_each(
      half,
      [=](int i) {
        const F32x16 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, add(mul(b, c), mul(a, s)));
      },
      [=](int i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
      });
}

// The element type's largest value or a little less: infinities must not get into the cache, where a masked key's
// 0 x infinity would be NaN. A NaN becomes finite, too.
GAPLESS_INLINE float largest_of(KvDtype dtype) {
  if (dtype == KvDtype::f16) return 65504.0f;
  return dtype == KvDtype::bf16 ? 3.3e38f : 1e35f;  // int8: sums of a whole head must be finite
}

GAPLESS_INLINE void saturate(float* x, int n, float limit) {
  for (int i = 0; i < n; i += 16) store(x + i, min(max(load(x + i), set1(-limit)), set1(limit)));
}

// Rotates a head and rounds it to multiples of the returned scale, in place.
float quantize_head(float* x, int n) {
  hadamard(x, n);
  F32x16 largest = zero();
  for (int i = 0; i < n; i += 16) largest = max(largest, abs(load(x + i)));
  const float maximum = reduce_max(largest);
  const F32x16 inverse = set1(maximum > 1e-30f ? 127.0f / maximum : 0.0f);  // so small a head is zero
  for (int i = 0; i < n; i += 16) store(x + i, round_even(mul(load(x + i), inverse)));
  return maximum / 127.0f;
}

// Element d of the head goes to out[d * stride].
void store_head(const float* x, int n, KvDtype dtype, std::byte* out, int stride) {
  for (int d = 0; d < n; d += 16) {
    uint16_t column[16];
    if (dtype == KvDtype::int8) {
      for (int i = d; i < d + 16; ++i) out[i * stride] = std::byte(int8_t(x[i]));
      continue;
    }
    if (dtype == KvDtype::f16)
      store_f16(column, load(x + d));
    else
      store_bf16(column, load(x + d));
    auto* elements = reinterpret_cast<uint16_t*>(out) + d * stride;
    for (int i = 0; i < 16; ++i) elements[i * stride] = column[i];
  }
}

void rope_and_cache(const RopeCacheArgs& args) {
  const int dim = args.head_dim, half = args.rotary_dim / 2;
  const KvLayer& kv = args.kv;
  const bool quantizes = kv.dtype == KvDtype::int8;
  const float q_scale = quantizes ? args.q_scale / float(hadamard_width(dim)) : args.q_scale;
  for (int h = 0; h < args.num_heads; ++h) {
    float* q = args.qkv + args.q_column + h * dim;
    if (args.q_norm) rms_norm(q, args.q_norm, dim, args.eps, q);
    rotate_head(q, half, args.cos, args.sin);
    if (quantizes) hadamard(q, dim);
    scale(q, dim, q_scale);
  }
  const int token = args.block_offset, element_bytes = quantizes ? 1 : 2;
  for (int h = 0; h < args.num_kv_heads; ++h) {
    float* k = args.qkv + args.k_column + h * dim;
    float* v = args.qkv + args.v_column + h * dim;
    if (args.k_norm) rms_norm(k, args.k_norm, dim, args.eps, k);
    rotate_head(k, half, args.cos, args.sin);
    saturate(k, dim, largest_of(kv.dtype));
    saturate(v, dim, largest_of(kv.dtype));
    if (quantizes) {
      kv.scales(args.block, h)[token] = quantize_head(k, dim);
      kv.scales(args.block, h)[kKvBlockTokens + token] = quantize_head(v, dim);
    }
    store_head(k, dim, kv.dtype, kv.keys(args.block, h) + token * element_bytes, kKvBlockTokens);
    store_head(v, dim, kv.dtype, kv.values(args.block, h) + token * dim * element_bytes, 1);
  }
}

}  // namespace

const ElementwiseKernels& elementwise_kernels() {
  static constexpr ElementwiseKernels kernels = {
      .rms_norm = rms_norm,
      .rms_norm_add = rms_norm_add,
      .layer_norm = layer_norm,
      .add = add_row,
      .scale = scale,
      .softcap = softcap,
      .logsumexp = logsumexp,
      .sum_exp = sum_exp,
      .exp_row = exp_row,
      .argmax = argmax,
      .max = max_of,
      .count_above = count_above,
      .select_at_least = select_at_least,
      .rope_and_cache = rope_and_cache,
  };
  return kernels;
}

}  // namespace gapless::GAPLESS_ISA
