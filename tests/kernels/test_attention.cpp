// Attention against a scalar reference in double, and the bitwise equality of every way to cut the same work.
// Build with the flags of one ISA (csrc/simd/f32x16.h) together with attention_kernels.cpp and attention_plan.cpp.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "ops/attention.h"
#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {
const AttentionKernels& attention_kernels();
}

namespace {

using namespace gapless;
using gapless::GAPLESS_ISA::attention_kernels;
using gapless::GAPLESS_ISA::bf16_to_f32;
using gapless::GAPLESS_ISA::f16_to_f32;
using gapless::GAPLESS_ISA::f32_to_bf16;
using gapless::GAPLESS_ISA::f32_to_f16;

constexpr KvDtype kDtypes[] = {KvDtype::f16, KvDtype::bf16, KvDtype::int8};
constexpr std::byte kNan{0xff};  // in all bytes of an f16, bf16 or f32

// Keys or values [tokens][kv heads][head_dim] as the cache holds them.
struct Heads {
  KvDtype dtype;
  int head_dim;
  std::vector<uint16_t> codes;  // int8: as int8_t
  std::vector<float> scales;    // per token and kv head; 1 unless int8

  Heads(KvDtype dtype, int head_dim, int64_t num_heads, float deviation, std::mt19937& random)
      : dtype(dtype), head_dim(head_dim), codes(num_heads * head_dim), scales(num_heads, 1.0f) {
    std::normal_distribution<float> normal;
    if (dtype == KvDtype::int8)
      for (float& scale : scales) scale = deviation / float(30 + random() % 30);
    for (size_t i = 0; i < codes.size(); ++i) {
      const float x = normal(random) * deviation;
      if (dtype == KvDtype::f16) codes[i] = f32_to_f16(x);
      if (dtype == KvDtype::bf16) codes[i] = f32_to_bf16(x);
      if (dtype == KvDtype::int8)
        codes[i] = uint8_t(int8_t(std::clamp(std::round(x / scales[i / head_dim]), -127.0f, 127.0f)));
    }
  }

  double value(int64_t head, int d) const {
    const uint16_t code = codes[head * head_dim + d];
    if (dtype == KvDtype::f16) return f16_to_f32(code);
    if (dtype == KvDtype::bf16) return bf16_to_f32(code);
    return double(int8_t(code)) * scales[head];
  }

  // Element d of a head to out[d * stride].
  void store(int64_t head, std::byte* out, int stride) const {
    const int bytes = dtype == KvDtype::int8 ? 1 : 2;
    for (int d = 0; d < head_dim; ++d) std::memcpy(out + d * stride * bytes, &codes[head * head_dim + d], bytes);
  }
};

// What rotates the outputs of an int8 cache back: element i is a sum of all elements j of its group of neighbours, with
// a minus where i and j have an odd number of bits in common.
std::vector<double> rotate_back(const std::vector<double>& x) {
  const int n = int(x.size()), width = n & -n;
  std::vector<double> y(n, 0.0);
  for (int i = 0; i < n; ++i)
    for (int j = i / width * width; j < (i / width + 1) * width; ++j)
      y[i] += (__builtin_popcount(unsigned(i & j & (width - 1))) % 2 ? -x[j] : x[j]) / width;
  return y;
}

struct Problem {
  AttentionShape shape;
  std::vector<int> lengths;  // of the sequences
  float softcap = 0;
  bool with_sinks = false;
  KvDtype dtype = KvDtype::f16;
};

// Keys, values and queries of every token, and the outputs of those that were computed.
class Model {
 public:
  Model(const Problem& problem, uint32_t seed) : problem_(problem), random_(seed) {
    const AttentionShape& shape = problem.shape;
    std::normal_distribution<float> normal;
    const float q_scale = 1.5f / std::sqrt(float(shape.head_dim));
    int num_blocks = 3;  // some that belong to nobody
    for (int length : problem.lengths) {
      num_tokens_ += length;
      num_blocks += (length + 15) / 16;
    }
    q_.resize(int64_t(num_tokens_) * shape.num_heads * shape.head_dim);
    for (float& x : q_) x = normal(random_) * q_scale;
    k_.emplace(problem.dtype, shape.head_dim, int64_t(num_tokens_) * shape.num_kv_heads, 2.0f, random_);
    v_.emplace(problem.dtype, shape.head_dim, int64_t(num_tokens_) * shape.num_kv_heads, 1.0f, random_);
    sinks_.resize(shape.num_heads);
    for (float& x : sinks_) x = normal(random_) + 2;

    std::vector<int32_t> blocks(num_blocks);
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), random_);
    int used = 0;
    for (int length : problem.lengths) {
      tables_.emplace_back(blocks.begin() + used, blocks.begin() + used + (length + 15) / 16);
      used += (length + 15) / 16;
    }
    block_stride_ = shape.num_kv_heads * kv_head_bytes(problem.dtype, shape.head_dim) + 192;  // other layers follow
    cache_bytes_ = num_blocks * block_stride_;
  }

  // Runs the whole problem in steps: `next(sequence, position, length)` says how many tokens a sequence contributes to
  // the coming step. Returns the outputs [tokens][heads][dim].
  template <typename Next>
  std::vector<float> run(int num_threads, Next next, int64_t max_partial_floats = int64_t(4) << 20) {
    const AttentionShape& shape = problem_.shape;
    const int width = shape.num_heads * shape.head_dim, num_sequences = int(problem_.lengths.size());
    std::vector<std::byte> cache(cache_bytes_, kNan);
    const KvLayer kv{cache.data(), block_stride_, problem_.dtype, shape.head_dim};
    std::vector<float> outputs(q_.size(), 0.0f);
    std::vector<int> positions(num_sequences, 0);
    AttentionPlan plan(num_threads, max_partial_floats);
    for (;;) {
      std::vector<AttentionSequence> sequences;
      std::vector<int> tokens;  // of the step's rows
      for (int s = 0; s < num_sequences; ++s) {
        const int n = std::min(next(s, positions[s], problem_.lengths[s]), problem_.lengths[s] - positions[s]);
        if (n <= 0) continue;
        sequences.push_back({int(tokens.size()), n, positions[s], tables_[s].data()});
        for (int i = 0; i < n; ++i, ++positions[s]) {
          write(kv, s, positions[s]);
          tokens.push_back(first_token(s) + positions[s]);
        }
      }
      if (sequences.empty()) {
        if (std::equal(positions.begin(), positions.end(), problem_.lengths.begin())) return outputs;
        continue;
      }
      // Rows with a stride that is larger than their width.
      const int stride = width + 24;
      std::vector<float> q(tokens.size() * stride, NAN), out(tokens.size() * stride, NAN);
      for (size_t i = 0; i < tokens.size(); ++i)
        std::copy_n(q_.data() + int64_t(tokens[i]) * width, width, q.data() + i * stride);
      plan.build(sequences.data(), int(sequences.size()), shape);
      CHECK(plan.partial_floats() <= max_partial_floats);
      std::vector<float> partials(plan.partial_floats(), NAN), scratch(attention_scratch_floats(shape), NAN);
      const AttentionArgs args = {shape,
                                  sequences.data(),
                                  q.data(),
                                  stride,
                                  out.data(),
                                  stride,
                                  kv,
                                  problem_.softcap,
                                  problem_.with_sinks ? sinks_.data() : nullptr,
                                  partials.data()};
      std::vector<int> order(plan.num_items());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
      for (int i : order) attention_kernels().attend(args, plan.item(i), scratch.data());
      for (int i = 0; i < plan.num_merges(); ++i) attention_kernels().merge(args, plan.merge(i));
      num_merges += plan.num_merges();
      for (size_t i = 0; i < tokens.size(); ++i)
        std::copy_n(out.data() + i * stride, width, outputs.data() + int64_t(tokens[i]) * width);
    }
  }

  // Largest difference from the reference, checked against `tolerance`.
  void compare(const std::vector<float>& outputs, double tolerance) const {
    const AttentionShape& shape = problem_.shape;
    const int dim = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    double worst = 0;
    for (int s = 0; s < int(problem_.lengths.size()); ++s)
      for (int t = 0; t < problem_.lengths[s]; ++t)
        for (int h = 0; h < shape.num_heads; ++h) {
          const int64_t row = int64_t(first_token(s) + t) * shape.num_heads + h;
          std::vector<double> weights, sum(dim, 0.0);
          double largest = problem_.with_sinks ? sinks_[h] : -INFINITY;
          int begin = -1;
          for (int k = 0; k < problem_.lengths[s]; ++k) {
            if (shape.causal && k > t) continue;
            if (shape.window > 0 && std::abs(k - t) >= shape.window) continue;
            if (begin < 0) begin = k;
            double dot = 0;
            const int64_t head = int64_t(first_token(s) + k) * shape.num_kv_heads + h / group;
            for (int d = 0; d < dim; ++d) dot += double(q_[row * dim + d]) * k_->value(head, d);
            if (problem_.softcap > 0) dot = problem_.softcap * std::tanh(dot / problem_.softcap);
            weights.push_back(dot);
            largest = std::max(largest, dot);
          }
          double total = problem_.with_sinks ? std::exp(sinks_[h] - largest) : 0.0;
          for (double& w : weights) total += w = std::exp(w - largest);
          for (size_t i = 0; i < weights.size(); ++i) {
            const int64_t head = int64_t(first_token(s) + begin + i) * shape.num_kv_heads + h / group;
            for (int d = 0; d < dim; ++d) sum[d] += weights[i] * v_->value(head, d);
          }
          if (problem_.dtype == KvDtype::int8) sum = rotate_back(sum);
          for (int d = 0; d < dim; ++d) {
            const double error = std::fabs(outputs[row * dim + d] - sum[d] / total);
            worst = error <= worst ? worst : error;  // a NaN gets through
          }
        }
    CHECK_NEAR(worst, 0.0, tolerance);
  }

  int num_merges = 0;

 private:
  int first_token(int s) const { return std::accumulate(problem_.lengths.begin(), problem_.lengths.begin() + s, 0); }

  void write(const KvLayer& kv, int s, int position) const {
    const int dim = problem_.shape.head_dim, heads = problem_.shape.num_kv_heads, token = position % 16;
    const int bytes = problem_.dtype == KvDtype::int8 ? 1 : 2;
    const int64_t block = tables_[s][position / 16];
    for (int h = 0; h < heads; ++h) {
      const int64_t head = int64_t(first_token(s) + position) * heads + h;
      k_->store(head, kv.keys(block, h) + token * bytes, 16);
      v_->store(head, kv.values(block, h) + token * dim * bytes, 1);
      if (problem_.dtype != KvDtype::int8) continue;
      kv.scales(block, h)[token] = k_->scales[head];
      kv.scales(block, h)[16 + token] = v_->scales[head];
    }
  }

  Problem problem_;
  std::mt19937 random_;
  int num_tokens_ = 0;
  int64_t block_stride_ = 0, cache_bytes_ = 0;
  std::vector<float> q_, sinks_;
  std::optional<Heads> k_, v_;
  std::vector<std::vector<int32_t>> tables_;
};

int whole(int, int, int length) { return length; }

// A score here is a sum of up to 272 products that reaches about 10, so its rounding error is a random walk of
// sqrt(272) steps of 10 * 2^-24, 1e-5; it enters the weights relatively, and values are about 1. Measured: up
// to 1.1e-5.
constexpr double kTolerance = 3e-5;

void test_values(KvDtype dtype) {
  for (int dim : {16, 48, 64, 80, 96, 128, 256, 272})
    for (int group : dim == 64 ? std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9} : std::vector<int>{1, 3, 7}) {
      Model model({.shape = {2 * group, 2, dim}, .lengths = {1, 15, 16, 17, 70}, .dtype = dtype},
                  uint32_t(dim + group));
      model.compare(model.run(2, whole), kTolerance);
    }
  // Many heads on one kv head; more rows than fit a tile.
  for (int heads : {16, 47, 48, 49, 71, 100}) {
    Model model({.shape = {heads, 1, 64}, .lengths = {5, 33}, .dtype = dtype}, uint32_t(heads));
    model.compare(model.run(2, whole), kTolerance);
  }
  Model decode({.shape = {8, 2, 64}, .lengths = {1, 64, 65, 255, 256, 257, 600, 1100}, .dtype = dtype}, 5);
  decode.compare(decode.run(4, whole), kTolerance);
}

void test_options(KvDtype dtype) {
  for (bool causal : {true, false})
    for (int window : {0, 1, 2, 15, 16, 17, 63, 64, 65, 256, 5000})
      for (float softcap : {0.0f, 5.0f}) {
        Problem problem{{2, 1, 32, causal, window}, {3, 130, 330}, softcap, window % 2 == 1, dtype};
        Model model(problem, uint32_t(window));
        model.compare(model.run(3, whole), kTolerance);
      }
}

// Whatever cuts the work, the bits are the same.
void test_invariance(Problem problem, KvDtype dtype) {
  problem.dtype = dtype;
  Model model(problem, 11);
  const std::vector<float> expected = model.run(1, whole);
  CHECK(model.num_merges == 0);
  const auto same = [&](const std::vector<float>& outputs) {
    return std::memcmp(outputs.data(), expected.data(), expected.size() * sizeof(float)) == 0;
  };
  for (int threads : {2, 3, 64}) CHECK(same(model.run(threads, whole)));
  for (int chunk : {1, 7, 64, 100})
    for (int threads : {1, 64}) CHECK(same(model.run(threads, [=](int, int, int) { return chunk; })));
  // Each sequence alone, one after the other; then every step a random mixture of decode, prefill and waiting.
  int turn = 0;
  std::mt19937 random(3);
  CHECK(same(model.run(2, [&](int s, int position, int length) {
    if (s == turn && position == length) ++turn;
    return s == turn ? 13 : 0;
  })));
  for (int i = 0; i < 3; ++i)
    CHECK(same(model.run(4, [&](int, int, int) {
      return random() % 3 == 0 ? 0 : random() % 2 ? 1 : int(random() % 90);
    })));
  CHECK(model.num_merges > 0);
  // Too little room for all partial results, and for none.
  const int64_t room =
      9 * problem.shape.num_heads / problem.shape.num_kv_heads * attention_partial_stride(problem.shape.head_dim);
  CHECK(same(model.run(64, [](int, int, int) { return 1; }, room)));
  CHECK(same(model.run(64, [](int, int, int) { return 1; }, 0)));
}

void test_plan() {
  // One long sequence with one kv head must keep every thread busy.
  std::vector<int32_t> table(2048);
  for (int threads : {1, 2, 8, 32}) {
    AttentionPlan plan(threads);
    const AttentionSequence one = {0, 1, 32000, table.data()};
    plan.build(&one, 1, {4, 1, 256});
    CHECK(plan.num_items() >= threads);
    CHECK(plan.num_merges() == (threads > 1));
  }
  // A full house: short decodes beside one long prefill.
  AttentionPlan plan(16);
  std::vector<AttentionSequence> sequences;
  for (int s = 0; s < 1024; ++s) sequences.push_back({s, 1, s, table.data()});
  sequences[7] = {1024, 512, 32000 - 512, table.data()};
  plan.build(sequences.data(), 1024, {32, 8, 128});
  int64_t rows = 0;
  for (int i = 0; i < plan.num_items(); ++i) {
    const AttentionItem& item = plan.item(i);
    CHECK(i == 0 || item.cost <= plan.item(i - 1).cost);
    if (item.partial_offset < 0) rows += item.num_tokens * item.num_heads;
  }
  for (int i = 0; i < plan.num_merges(); ++i) rows += plan.merge(i).num_tokens * plan.merge(i).num_heads;
  CHECK(rows == (1023 + 512) * 32);
}

}  // namespace

int main() {
  for (KvDtype dtype : kDtypes) {
    test_values(dtype);
    test_options(dtype);
    test_invariance({{6, 2, 64}, {1, 40, 300, 530}}, dtype);
    test_invariance({{8, 1, 128}, {530, 17}, 30.0f, true}, dtype);
    test_invariance({{5, 5, 80, true, 100}, {350, 64}}, dtype);
    test_invariance({{14, 2, 64, true, 300}, {600, 3}}, dtype);
  }
  test_plan();
  return check::finish("attention");
}
