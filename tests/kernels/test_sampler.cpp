// The sampler: distributions, penalties, ties, hostile logits, log-probabilities.
// Build with the flags of one ISA together with sampler.cpp and elementwise_kernels.cpp.
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "check.h"
#include "executor/sampler.h"
#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {
const ElementwiseKernels& elementwise_kernels();
}

namespace {

using namespace gapless;

const ElementwiseKernels& kernels() { return gapless::GAPLESS_ISA::elementwise_kernels(); }

std::vector<float> normal_logits(int vocab, uint32_t seed, float deviation = 3) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> logits(vocab);
  for (float& x : logits) x = normal(random);
  return logits;
}

SampleResult sample_once(std::vector<float> logits, const SamplingParams& params, uint64_t step = 0,
                         const TokenCounts* counts = nullptr, const uint32_t* allowed = nullptr) {
  static SamplerScratch scratch;
  return sample(kernels(), logits.data(), int(logits.size()), params, counts, allowed, step, scratch);
}

// What the documentation promises, token by token in double: probabilities after temperature, min-p, top-k, top-p.
std::map<int, double> reference_distribution(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<int> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  std::vector<double> weights;
  for (int token : order) weights.push_back(std::exp((double(logits[token]) - logits[order[0]]) / params.temperature));
  size_t keep = weights.size();
  while (keep > 1 && weights[keep - 1] < params.min_p) --keep;
  if (params.top_k > 0) keep = std::min(keep, size_t(params.top_k));
  double total = std::accumulate(weights.begin(), weights.begin() + keep, 0.0), cumulative = 0;
  for (size_t i = 0; i < keep && params.top_p < 1; ++i)
    if ((cumulative += weights[i]) >= params.top_p * total) keep = i + 1;
  total = std::accumulate(weights.begin(), weights.begin() + keep, 0.0);
  std::map<int, double> result;
  for (size_t i = 0; i < keep; ++i) result[order[i]] = weights[i] / total;
  return result;
}

// Draws many times and compares with the reference: nothing outside the support, and Pearson's chi-square within
// 5 standard deviations (seeds are fixed, so this either holds or does not).
void check_distribution(const std::vector<float>& logits, const SamplingParams& base, int draws) {
  const std::map<int, double> expected = reference_distribution(logits, base);
  std::map<int, int> seen;
  SamplingParams params = base;
  for (int i = 0; i < draws; ++i) {
    params.seed = 1000 + i / 100;  // both seed and step vary
    ++seen[sample_once(logits, params, i % 100).token];
  }
  for (const auto& [token, count] : seen) CHECK(expected.count(token));
  double chi_square = 0, rest_expected = 0;
  int rest_seen = 0, cells = 0;
  const auto add_cell = [&](double e, int n) {
    chi_square += (n - e) * (n - e) / e;
    ++cells;
  };
  for (const auto& [token, probability] : expected) {
    const double e = probability * draws;
    const int n = seen.count(token) ? seen[token] : 0;
    if (e >= 5) {
      add_cell(e, n);
    } else {
      rest_expected += e;
      rest_seen += n;
    }
  }
  if (rest_expected >= 5) add_cell(rest_expected, rest_seen);
  const double freedom = cells - 1;
  CHECK(chi_square <= freedom + 5 * std::sqrt(2 * freedom) + 1e-9);
}

void test_distributions() {
  const std::vector<float> small = normal_logits(50, 1), large = normal_logits(5000, 2);
  check_distribution(small, {.temperature = 1.0f}, 20000);
  check_distribution(small, {.temperature = 0.3f}, 5000);
  check_distribution(small, {.temperature = 2.0f, .top_k = 7}, 5000);
  check_distribution(small, {.temperature = 1.5f, .top_p = 0.8f}, 5000);
  check_distribution(small, {.temperature = 1.5f, .min_p = 0.1f}, 5000);
  check_distribution(small, {.temperature = 2.0f, .top_k = 20, .top_p = 0.9f, .min_p = 0.05f}, 5000);
  check_distribution(large, {.temperature = 1.0f}, 20000);
  check_distribution(large, {.temperature = 1.0f, .top_p = 0.9f}, 5000);
  check_distribution(large, {.temperature = 3.0f, .top_p = 0.95f}, 5000);
  check_distribution(large, {.temperature = 1.0f, .top_k = 40}, 5000);
  check_distribution(large, {.temperature = 1.0f, .top_k = 3000, .top_p = 0.99f}, 5000);
}

// The support alone, which is exact: every token that is drawn is in it, and its least probable one is drawn at last.
void test_supports() {
  for (int vocab : {1, 2, 15, 16, 17, 63, 100, 1000, 1025, 20000})
    for (float deviation : {0.0f, 0.01f, 1.0f, 5.0f})
      for (const SamplingParams& base :
           {SamplingParams{.top_k = 1}, SamplingParams{.top_k = 3}, SamplingParams{.top_k = 20000},
            SamplingParams{.top_p = 0.0f}, SamplingParams{.top_p = 0.5f}, SamplingParams{.min_p = 1.0f},
            SamplingParams{.top_p = 0.7f, .min_p = 0.2f}}) {
        const std::vector<float> logits = normal_logits(vocab, vocab, deviation);
        const std::map<int, double> expected = reference_distribution(logits, base);
        for (int step = 0; step < 20; ++step) CHECK(expected.count(sample_once(logits, base, step).token));
      }
}

void test_greedy_and_ties() {
  std::vector<float> logits(1000, 1.0f);
  CHECK(sample_once(logits, {.temperature = 0}).token == 0);
  for (const SamplingParams& params : {SamplingParams{.top_k = 1}, SamplingParams{.top_p = 0.0f}})
    for (int step = 0; step < 10; ++step) CHECK(sample_once(logits, params, step).token == 0);
  logits[700] = logits[701] = logits[999] = 2.0f;
  CHECK(sample_once(logits, {.temperature = 0}).token == 700);
  CHECK(sample_once(logits, {.top_k = 1}).token == 700);
  // -1 and 0 both disable top-k: with equal logits nearly every draw differs.
  for (int top_k : {0, -1}) {
    std::set<int> tokens;
    for (int step = 0; step < 50; ++step)
      tokens.insert(sample_once(std::vector<float>(1000, 0.0f), {.top_k = top_k}, step).token);
    CHECK(tokens.size() > 40);
  }
}

void test_seeds() {
  const std::vector<float> logits = normal_logits(1000, 3, 1);
  std::vector<int> first, again, other;
  for (int step = 0; step < 64; ++step) first.push_back(sample_once(logits, {.seed = 7}, step).token);
  for (int step = 63; step >= 0; --step) {  // in another order, with others in between
    sample_once(logits, {.seed = 123}, step);
    again.insert(again.begin(), sample_once(logits, {.seed = 7}, step).token);
    other.insert(other.begin(), sample_once(logits, {.seed = 8}, step).token);
  }
  CHECK(first == again);
  CHECK(first != other);
  // Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3": the known answer for zeros is
  // 6627e8d5 e169c58d bc57ac4c 9b00dbd8.
  CHECK(uniform_random(0, 0) == double(0xe169c58d6627e8d5u >> 11) * 0x1p-53);
}

void test_penalties() {
  // Eight times the same token in the prompt: presence and frequency do not look at it, repetition does.
  const std::vector<int32_t> prompt(8, 5);
  std::vector<float> logits(20, 0.0f);
  logits[5] = 2;
  logits[6] = 1.5f;
  logits[7] = -1;
  TokenCounts counts;
  counts.add_prompt(prompt.data(), 8);
  CHECK(sample_once(logits, {.temperature = 0, .presence_penalty = 2, .frequency_penalty = 2}, 0, &counts).token == 5);
  CHECK(sample_once(logits, {.temperature = 0, .repetition_penalty = 1.5f}, 0, &counts).token == 6);
  counts.add_output(5);
  CHECK(sample_once(logits, {.temperature = 0, .presence_penalty = 0.4f}, 0, &counts).token == 5);
  CHECK(sample_once(logits, {.temperature = 0, .presence_penalty = 0.6f}, 0, &counts).token == 6);
  CHECK(sample_once(logits, {.temperature = 0, .frequency_penalty = 0.4f}, 0, &counts).token == 5);
  counts.add_output(5);
  CHECK(sample_once(logits, {.temperature = 0, .presence_penalty = 0.4f}, 0, &counts).token == 5);
  CHECK(sample_once(logits, {.temperature = 0, .frequency_penalty = 0.4f}, 0, &counts).token == 6);
  CHECK(sample_once(logits, {.temperature = 0, .presence_penalty = -1}, 0, &counts).token == 5);

  // The exact values, through the log-probability of what bias leaves: negative logits are multiplied.
  counts.clear();
  const int32_t seen[] = {5, 7};
  counts.add_prompt(seen, 2);
  std::vector<float> changed = logits;
  SamplerScratch scratch;
  sample(kernels(), changed.data(), 20, {.temperature = 0, .repetition_penalty = 2}, &counts, nullptr, 0, scratch);
  CHECK(changed[5] == 1 && changed[6] == 1.5f && changed[7] == -2 && changed[8] == 0);

  // Many tokens: the counts stay right while the table grows.
  counts.clear();
  std::mt19937 random(1);
  std::map<int32_t, int> expected;
  for (int i = 0; i < 20000; ++i) {
    const int32_t token = int32_t(random() % 3000) * 64;
    counts.add_output(token);
    ++expected[token];
  }
  CHECK(counts.entries().size() == expected.size());
  for (const TokenCounts::Entry& entry : counts.entries()) CHECK(expected[entry.token] == entry.num_output);
}

void test_bias_and_mask() {
  std::vector<float> logits = normal_logits(100, 4);
  CHECK(sample_once(logits, {.temperature = 0, .logit_bias = {{42, 100.0f}}}).token == 42);
  const int best = sample_once(logits, {.temperature = 0}).token;
  CHECK(sample_once(logits, {.temperature = 0, .logit_bias = {{best, -100.0f}}}).token != best);
  for (const SamplingParams& params :
       {SamplingParams{.temperature = 0}, SamplingParams{}, SamplingParams{.top_k = 10}, SamplingParams{.top_p = 0.9f},
        SamplingParams{.min_p = 0.01f}, SamplingParams{.num_logprobs = 3}}) {
    std::vector<uint32_t> allowed(4, 0);
    for (int token : {3, 64, 99}) allowed[token / 32] |= 1u << token % 32;
    for (int step = 0; step < 30; ++step) {
      const SampleResult result = sample_once(logits, params, step, nullptr, allowed.data());
      CHECK(result.token == 3 || result.token == 64 || result.token == 99);
    }
    std::fill(allowed.begin(), allowed.end(), 0);
    CHECK(sample_once(logits, params, 0, nullptr, allowed.data()).status == SampleStatus::no_candidate);
  }
}

void test_hostile_logits() {
  const SamplingParams all[] = {
      {.temperature = 0}, {},           {.temperature = 1e-4f}, {.temperature = 100}, {.top_k = 5},
      {.top_p = 0.9f},    {.top_p = 0}, {.min_p = 0.1f},        {.num_logprobs = 5}};
  for (const SamplingParams& params : all)
    for (int vocab : {1, 7, 1000}) {
      for (float value : {NAN, -INFINITY}) {
        std::vector<float> logits(vocab, value);
        CHECK(sample_once(logits, params).status == SampleStatus::no_candidate);
        logits[vocab / 2] = -3e38f;  // one that is possible, however small
        for (int step = 0; step < 5; ++step) CHECK(sample_once(logits, params, step).token == vocab / 2);
        logits[vocab / 2] = INFINITY;
        const SampleResult result = sample_once(logits, params);
        CHECK(result.token == vocab / 2 && result.chosen.logprob == 0);
      }
      std::vector<float> mixed = normal_logits(vocab, 5);
      for (int i = 0; i < vocab; i += 3) mixed[i] = i % 2 ? NAN : -INFINITY;
      if (vocab > 1)
        for (int step = 0; step < 20; ++step) CHECK(std::isfinite(mixed[sample_once(mixed, params, step).token]));
    }
}

void test_logprobs() {
  for (int vocab : {3, 100, 5000, 50000}) {
    const std::vector<float> logits = normal_logits(vocab, 6);
    double sum = 0;
    for (float x : logits) sum += std::exp(double(x));
    std::vector<int> order(vocab);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    std::vector<TokenLogprob> top;
    SamplerScratch scratch;
    for (int place : {0, 1, 2, vocab / 2, vocab - 1}) {
      const TokenLogprob got = token_logprob(kernels(), logits.data(), vocab, order[place], 20, top, scratch);
      CHECK(got.token == order[place] && got.rank == place + 1);
      CHECK_NEAR(got.logprob, logits[order[place]] - std::log(sum), 3e-6);
    }
    CHECK(top.size() == size_t(std::min(20, vocab)));
    for (size_t i = 0; i < top.size(); ++i) {
      CHECK(top[i].token == order[i] && top[i].rank == int(i) + 1);
      CHECK_NEAR(top[i].logprob, logits[order[i]] - std::log(sum), 3e-6);
    }
    // Taken before temperature, penalties and bias.
    TokenCounts counts;
    counts.add_output(order[0]);
    const SampleResult result = sample_once(
        logits, {.temperature = 0, .presence_penalty = 1, .num_logprobs = 2, .logit_bias = {{order[1], 100.0f}}}, 0,
        &counts);
    CHECK(result.token == order[1] && result.chosen.rank == 2 && result.top.size() == 2 &&
          result.top[0].token == order[0]);
    CHECK_NEAR(result.chosen.logprob, logits[order[1]] - std::log(sum), 3e-6);
    CHECK(sample_once(logits, {.num_logprobs = 0}).top.empty());
  }
  // Impossible tokens are not listed, equal ones share a rank.
  std::vector<TokenLogprob> top;
  SamplerScratch scratch;
  const std::vector<float> logits = {1, -INFINITY, 2, NAN, 2, -INFINITY};
  CHECK(token_logprob(kernels(), logits.data(), 6, 0, 5, top, scratch).rank == 3);
  CHECK(top.size() == 3 && top[0].token == 2 && top[1].token == 4 && top[1].rank == 1 && top[2].rank == 3);
}

}  // namespace

int main() {
  test_distributions();
  test_supports();
  test_greedy_and_ties();
  test_seeds();
  test_penalties();
  test_bias_and_mask();
  test_hostile_logits();
  test_logprobs();
  return check::finish("sampler");
}
