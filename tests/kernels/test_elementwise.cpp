// Element-wise kernels against scalar references in double, over odd widths and unaligned rows.
// Build with the flags of one ISA together with elementwise_kernels.cpp and rope_table.cpp.
#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "ops/elementwise.h"
#include "ops/rope_table.h"
#include "simd/math.h"

namespace gapless::GAPLESS_ISA {
const ElementwiseKernels& elementwise_kernels();
}

namespace {

using namespace gapless;
using namespace gapless::GAPLESS_ISA;

const ElementwiseKernels& kernels() { return elementwise_kernels(); }

constexpr int kWidths[] = {1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 576, 896, 1000, 4096, 5001};

// A row that starts one float past an aligned address, with a guard behind it.
class Row {
 public:
  Row(int n, std::mt19937& random, float deviation = 1) : n_(n), memory_(n + 2, 12345.0f) {
    std::normal_distribution<float> normal(0, deviation);
    for (int i = 0; i < n; ++i) data()[i] = normal(random);
  }
  ~Row() { CHECK(memory_.front() == 12345.0f && memory_.back() == 12345.0f); }
  Row(const Row&) = default;
  float* data() { return memory_.data() + 1; }
  float& operator[](int i) { return data()[i]; }
  int size() const { return n_; }

 private:
  int n_;
  std::vector<float> memory_;
};

void check_near(float actual, double expected, double relative, double absolute = 0) {
  CHECK_NEAR(actual, expected, std::fabs(expected) * relative + absolute);
}

void test_math() {
  const auto sweep = [](auto function, auto reference, double low, double high, double relative, double absolute) {
    for (int i = 0; i <= 20000; ++i) {
      const float x = float(low + (high - low) * i / 20000);
      float lanes[16];
      store(lanes, function(set1(x)));
      check_near(lanes[0], reference(double(x)), relative, absolute);
      CHECK(lanes[0] == lanes[15]);
    }
  };
  namespace isa = gapless::GAPLESS_ISA;
  sweep([](F32x16 x) { return isa::exp2(x); }, [](double x) { return std::exp2(x); }, -126, 40, 3e-7, 0);
  sweep([](F32x16 x) { return isa::tanh(x); }, [](double x) { return std::tanh(x); }, -12, 12, 5e-7, 0);
  sweep([](F32x16 x) { return isa::tanh(x); }, [](double x) { return std::tanh(x); }, -1e-3, 1e-3, 5e-7, 0);
  sweep([](F32x16 x) { return silu(x); }, [](double x) { return x / (1 + std::exp(-x)); }, -80, 80, 1e-6, 0);
  const auto gelu_tanh_reference = [](double x) {
    return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  sweep([](F32x16 x) { return gelu_tanh(x); }, gelu_tanh_reference, -8, 8, 1e-6, 1e-8);
  const auto gelu_reference = [](double x) { return x / 2 * std::erfc(-x / std::sqrt(2.0)); };
  sweep([](F32x16 x) { return gelu(x); }, gelu_reference, -12, 12, 1e-6, 1e-8);
  sweep([](F32x16 x) { return relu(x); }, [](double x) { return std::max(x, 0.0); }, -3, 3, 0, 0);
  float lanes[16];
  store(lanes, isa::exp2(set1(0.0f)));
  CHECK(lanes[0] == 1.0f);
}

void test_norms() {
  std::mt19937 random(1);
  for (int n : kWidths) {
    Row x(n, random), weight(n, random), bias(n, random), out(n, random), residual(n, random);
    Row sum = residual;
    double squares = 0, mean = 0, variance = 0;
    for (int i = 0; i < n; ++i) squares += double(x[i]) * x[i];
    for (int i = 0; i < n; ++i) mean += double(x[i]) / n;
    for (int i = 0; i < n; ++i) variance += (x[i] - mean) * (x[i] - mean) / n;
    const double rms = std::sqrt(squares / n + 1e-5);
    kernels().rms_norm(x.data(), weight.data(), n, 1e-5f, out.data());
    kernels().rms_norm_add(x.data(), weight.data(), n, 1e-5f, sum.data());
    for (int i = 0; i < n; ++i) {
      check_near(out[i], x[i] / rms * weight[i], 1e-6);
      check_near(sum[i], residual[i] + x[i] / rms * weight[i], 1e-6, 1e-6);
    }
    for (bool with_bias : {false, true}) {
      kernels().layer_norm(x.data(), weight.data(), with_bias ? bias.data() : nullptr, n, 1e-5f, out.data());
      for (int i = 0; i < n; ++i)
        check_near(out[i], (x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + (with_bias ? bias[i] : 0), 1e-6,
                   1e-5);
    }
    Row in_place = x;
    kernels().rms_norm(x.data(), weight.data(), n, 1e-5f, out.data());
    kernels().rms_norm(in_place.data(), weight.data(), n, 1e-5f, in_place.data());
    CHECK(std::memcmp(in_place.data(), out.data(), n * sizeof(float)) == 0);
  }
}

void test_maps() {
  std::mt19937 random(2);
  for (int n : kWidths) {
    Row x(n, random, 20), y(n, random);
    Row sum = y, scaled = x, capped = x, exponentials = x;
    kernels().add(x.data(), n, sum.data());
    kernels().scale(scaled.data(), n, 1.25f);
    kernels().softcap(capped.data(), n, 30.0f);
    kernels().exp_row(x.data(), n, 60.0f, 0.5f, exponentials.data());
    for (int i = 0; i < n; ++i) {
      CHECK(sum[i] == x[i] + y[i]);
      CHECK(scaled[i] == x[i] * 1.25f);
      check_near(capped[i], 30 * std::tanh(x[i] / 30.0), 1e-6);
      check_near(exponentials[i], std::exp((x[i] - 60.0) * 0.5), 6e-6);  // the argument is rounded to 24 bits
    }
  }
}

void test_reductions() {
  std::mt19937 random(3);
  for (int n : {1, 2, 15, 16, 17, 64, 100, 2047, 2048, 2049, 5000, 150001}) {
    Row x(n, random, 4);
    const int best = int(std::max_element(x.data(), x.data() + n) - x.data());
    CHECK(kernels().argmax(x.data(), n) == best);
    CHECK(kernels().max(x.data(), n) == x[best]);
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::exp(double(x[i]));
    CHECK_NEAR(kernels().logsumexp(x.data(), n), std::log(sum), 2e-6);
    check_near(float(kernels().sum_exp(x.data(), n, 1.0f, 1.0f)), sum / std::exp(1.0), 2e-6);
    const float threshold = x[n / 2];
    std::vector<int32_t> expected, indices(n, -1);
    for (int i = 0; i < n; ++i)
      if (x[i] >= threshold) expected.push_back(i);
    CHECK(kernels().count_above(x.data(), n, threshold) == int(expected.size()) - 1);
    CHECK(kernels().select_at_least(x.data(), n, threshold, n, indices.data()) == int(expected.size()));
    CHECK(std::equal(expected.begin(), expected.end(), indices.begin()));
    std::fill(indices.begin(), indices.end(), -1);
    CHECK(kernels().select_at_least(x.data(), n, threshold, 1, indices.data()) == int(expected.size()));
    CHECK(indices[0] == expected[0] && (n == 1 || indices[1] == -1));
    // The first of equals; NaN and -inf never win.
    x[n - 1] = x[best] = 1000;
    CHECK(kernels().argmax(x.data(), n) == std::min(best, n - 1));
    for (int i = 0; i < n; ++i) x[i] = i % 2 ? NAN : -INFINITY;
    CHECK(kernels().argmax(x.data(), n) == 0);
    CHECK(kernels().max(x.data(), n) == -INFINITY);
    CHECK(kernels().logsumexp(x.data(), n) == -INFINITY);
    x[n - 1] = -1e30f;
    CHECK(kernels().argmax(x.data(), n) == n - 1);
    CHECK(kernels().max(x.data(), n) == -1e30f);
    CHECK(kernels().logsumexp(x.data(), n) == -1e30f);
  }
}

void test_rope_table() {
  const float inv_freq[] = {1.0f, 0.25f, 1e-4f};
  float cos[3], sin[3];
  for (int64_t position : {0, 1, 32767, 1000000}) {
    rope_table(inv_freq, 3, position, 1.5f, cos, sin);
    for (int i = 0; i < 3; ++i) {
      CHECK_NEAR(cos[i], 1.5 * std::cos(double(position) * inv_freq[i]), 1.5e-7);
      CHECK_NEAR(sin[i], 1.5 * std::sin(double(position) * inv_freq[i]), 1.5e-7);
    }
  }
}

// Every group of `width` neighbours becomes sums of all of them, with a minus where the index of the sum and that of
// the element have an odd number of bits in common.
std::vector<double> rotated(const std::vector<double>& x) {
  const int n = int(x.size()), width = n & -n;
  std::vector<double> y(n, 0.0);
  for (int i = 0; i < n; ++i)
    for (int j = i / width * width; j < (i / width + 1) * width; ++j)
      y[i] += __builtin_popcount(unsigned(i & j & (width - 1))) % 2 ? -x[j] : x[j];
  return y;
}

// One head of a token as the cache holds it.
struct CachedHead {
  std::vector<double> codes;
  double scale = 1;
};

CachedHead cached_head(const KvLayer& kv, int64_t block, int head, int token, bool is_value) {
  CachedHead result;
  const std::byte* tile = is_value ? kv.values(block, head) : kv.keys(block, head);
  for (int d = 0; d < kv.head_dim; ++d) {
    const int64_t i = is_value ? token * kv.head_dim + d : d * 16 + token;
    if (kv.dtype == KvDtype::int8) {
      result.codes.push_back(int8_t(tile[i]));
      continue;
    }
    uint16_t code;
    std::memcpy(&code, tile + 2 * i, 2);
    result.codes.push_back(kv.dtype == KvDtype::f16 ? f16_to_f32(code) : bf16_to_f32(code));
  }
  if (kv.dtype == KvDtype::int8) result.scale = kv.scales(block, head)[is_value * 16 + token];
  return result;
}

void check_cached(const CachedHead& found, const std::vector<double>& expected, KvDtype dtype) {
  const int dim = int(expected.size());
  if (dtype != KvDtype::int8) {
    for (int d = 0; d < dim; ++d) check_near(found.codes[d], expected[d], dtype == KvDtype::f16 ? 0.0005 : 0.004, 1e-5);
    return;
  }
  const std::vector<double> x = rotated(expected);
  double largest = 0;
  for (double value : x) largest = std::max(largest, std::fabs(value));
  check_near(found.scale, largest / 127, 1e-5, 0);
  for (int d = 0; d < dim; ++d) CHECK_NEAR(found.codes[d] * found.scale, x[d], largest * (0.5 / 127 + 1e-5));
}

void test_rope_and_cache(KvDtype dtype, int dim, int rotary, int heads, int kv_heads, bool qk_norm) {
  std::mt19937 random(4);
  const int half = rotary / 2, width = (heads + 2 * kv_heads) * dim;
  Row qkv(width + 7, random, 2), cos(half, random), sin(half, random), q_norm(dim, random), k_norm(dim, random);
  // v first: the order of the columns is the caller's.
  const int v_column = 0, q_column = kv_heads * dim, k_column = q_column + heads * dim;
  qkv[v_column] = 1e6f;  // beyond f16
  Row before = qkv;
  const int64_t block = 3, stride = kv_heads * kv_head_bytes(dtype, dim) + 64;
  const int token = 5;
  constexpr std::byte untouched{0x5a};
  std::vector<std::byte> cache(5 * stride, untouched);
  RopeCacheArgs args{.qkv = qkv.data(),
                     .q_column = q_column,
                     .k_column = k_column,
                     .v_column = v_column,
                     .num_heads = heads,
                     .num_kv_heads = kv_heads,
                     .head_dim = dim,
                     .rotary_dim = rotary,
                     .q_norm = qk_norm ? q_norm.data() : nullptr,
                     .k_norm = qk_norm ? k_norm.data() : nullptr,
                     .eps = 1e-6f,
                     .cos = cos.data(),
                     .sin = sin.data(),
                     .q_scale = 0.125f,
                     .kv = {cache.data(), stride, dtype, dim},
                     .block = block,
                     .block_offset = token};
  kernels().rope_and_cache(args);
  int64_t written = 0;
  for (std::byte x : cache) written += x != untouched;
  const int head_bytes = dtype == KvDtype::int8 ? dim + int(sizeof(float)) : 2 * dim;
  CHECK(written <= int64_t(2) * kv_heads * head_bytes);  // nothing else was touched
  for (int i = 0; i < 7; ++i) CHECK(qkv[width + i] == before[width + i]);

  const auto expected = [&](int column, Row& norm) {
    std::vector<double> x(dim), y;
    double squares = 0;
    for (int d = 0; d < dim; ++d) squares += double(before[column + d]) * before[column + d];
    for (int d = 0; d < dim; ++d)
      x[d] = qk_norm ? before[column + d] / std::sqrt(squares / dim + 1e-6) * norm[d] : before[column + d];
    y = x;
    for (int i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[i + half] * sin[i];
      y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
    return y;
  };
  for (int h = 0; h < heads; ++h) {
    std::vector<double> q = expected(q_column + h * dim, q_norm);
    if (dtype == KvDtype::int8) {
      q = rotated(q);
      for (double& x : q) x /= dim & -dim;
    }
    for (int d = 0; d < dim; ++d) CHECK_NEAR(qkv[q_column + h * dim + d], q[d] * 0.125, 3e-6);
  }
  for (int h = 0; h < kv_heads; ++h) {
    check_cached(cached_head(args.kv, block, h, token, false), expected(k_column + h * dim, k_norm), dtype);
    std::vector<double> v(dim);
    for (int d = 0; d < dim; ++d) v[d] = before[v_column + h * dim + d];
    if (dtype == KvDtype::f16) v[0] = std::min(v[0], 65504.0);
    check_cached(cached_head(args.kv, block, h, token, true), v, dtype);
  }

  // The same token elsewhere, beside others: the same bits.
  qkv = before;
  args.qkv = qkv.data();
  args.block = 1;
  args.block_offset = 15;
  kernels().rope_and_cache(args);
  for (int h = 0; h < kv_heads; ++h)
    for (bool is_value : {false, true}) {
      const CachedHead a = cached_head(args.kv, block, h, token, is_value),
                       b = cached_head(args.kv, 1, h, 15, is_value);
      CHECK(a.codes == b.codes && a.scale == b.scale);
    }
}

// Whatever comes, what is cached is finite.
void test_cache_of_extremes(KvDtype dtype) {
  constexpr int dim = 32;
  for (float extreme : {INFINITY, -INFINITY, NAN, 3e38f, 0.0f, 1e-40f}) {
    std::vector<float> qkv(3 * dim, 0.0f);
    qkv[dim + 3] = qkv[2 * dim + 17] = extreme;
    std::vector<std::byte> cache(kv_head_bytes(dtype, dim));
    RopeCacheArgs args{};
    args.qkv = qkv.data();
    args.k_column = dim;
    args.v_column = 2 * dim;
    args.num_heads = args.num_kv_heads = 1;
    args.head_dim = dim;
    args.kv = {cache.data(), int64_t(cache.size()), dtype, dim};
    kernels().rope_and_cache(args);
    for (bool is_value : {false, true}) {
      const CachedHead found = cached_head(args.kv, 0, 0, 0, is_value);
      CHECK(std::isfinite(found.scale));
      for (double code : found.codes) CHECK(std::isfinite(code));
    }
  }
}

}  // namespace

int main() {
  test_math();
  test_norms();
  test_maps();
  test_reductions();
  test_rope_table();
  for (KvDtype dtype : {KvDtype::f16, KvDtype::bf16, KvDtype::int8}) {
    for (bool qk_norm : {false, true}) {
      test_rope_and_cache(dtype, 64, 64, 9, 3, qk_norm);
      test_rope_and_cache(dtype, 128, 128, 4, 4, qk_norm);
      test_rope_and_cache(dtype, 80, 32, 2, 2, qk_norm);
      test_rope_and_cache(dtype, 96, 96, 2, 1, qk_norm);
      test_rope_and_cache(dtype, 256, 256, 4, 1, qk_norm);
      test_rope_and_cache(dtype, 64, 0, 2, 1, qk_norm);
      test_rope_and_cache(dtype, 48, 22, 3, 1, qk_norm);
    }
    test_cache_of_extremes(dtype);
  }
  return check::finish("elementwise");
}
