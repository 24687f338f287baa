#include "executor/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace gapless {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();  // a threshold that -inf and NaN do not reach
constexpr float kGreedyTemperature = 1e-5f;                      // below, dividing by it would overflow

// Most probable first, equals by token id: a total order, so that every selection has one answer.
bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// --- What changes the logits ---

void apply_mask(float* logits, int vocab, const uint32_t* allowed) {
  for (int begin = 0; begin < vocab; begin += 32) {
    const uint32_t word = allowed[begin / 32];
    if (word == ~0u) continue;
    for (int i = begin; i < std::min(begin + 32, vocab); ++i)
      if (!(word >> (i - begin) & 1)) logits[i] = -INFINITY;
  }
}

void apply_penalties(float* logits, const SamplingParams& params, const TokenCounts& counts) {
  for (const TokenCounts::Entry& entry : counts.entries()) {
    float& logit = logits[entry.token];
    logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    logit -= params.frequency_penalty * float(entry.num_output);
    if (entry.num_output > 0) logit -= params.presence_penalty;
  }
}

// --- Selection ---

// Puts the tokens whose logit is at least `threshold` into scratch.candidates, in order of their ids.
void select_candidates(const ElementwiseKernels& kernels, const float* logits, int vocab, float threshold,
                       SamplerScratch& scratch) {
  scratch.indices.resize(vocab);
  const int n = kernels.select_at_least(logits, vocab, std::max(threshold, kLowest), vocab, scratch.indices.data());
  scratch.candidates.resize(n);
  for (int i = 0; i < n; ++i) scratch.candidates[i] = {logits[scratch.indices[i]], scratch.indices[i], 0.0f};
}

// Puts the k most probable tokens into scratch.candidates, in order; fewer if fewer are possible.
void select_top(const ElementwiseKernels& kernels, const float* logits, int vocab, int k, SamplerScratch& scratch) {
  k = std::min(k, vocab);
  // At least k tokens reach the k-th largest maximum of any k or more chunks of the row, and hardly more do.
  const int chunk = std::clamp(vocab / (8 * std::max(k, 1)), 1, 16) * 16;
  float threshold = kLowest;
  if (k <= vocab / chunk) {
    std::vector<float>& maxima = scratch.values;
    maxima.clear();
    for (int begin = 0; begin < vocab; begin += chunk)
      maxima.push_back(kernels.max(logits + begin, std::min(chunk, vocab - begin)));
    std::nth_element(maxima.begin(), maxima.begin() + std::max(k - 1, 0), maxima.end(), std::greater<float>());
    threshold = maxima[std::max(k - 1, 0)];
  }
  select_candidates(kernels, logits, vocab, threshold, scratch);
  std::vector<Candidate>& candidates = scratch.candidates;
  k = std::min(k, int(candidates.size()));
  std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(), before);
  candidates.resize(k);
}

// The distribution after temperature: weight of a logit = e^((logit - maximum) * scale).
struct Tempered {
  float maximum, scale;
  float threshold(double weight) const { return float(maximum + std::log(weight) / scale); }
};

// Fills in the candidates' weights and returns their sum.
double weigh(const ElementwiseKernels& kernels, const Tempered& tempered, SamplerScratch& scratch) {
  const size_t n = scratch.candidates.size();
  std::vector<float>& values = scratch.values;
  values.resize(n);
  for (size_t i = 0; i < n; ++i) values[i] = scratch.candidates[i].logit;
  kernels.exp_row(values.data(), int(n), tempered.maximum, tempered.scale, values.data());
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += scratch.candidates[i].weight = values[i];
  return sum;
}

// Keeps the most probable candidates whose weights add up to at least `mass`, at least one; all of them if they never
// do. Quickselect by weight: linear where a sort would not be, which a flat distribution over a large vocabulary needs.
void keep_mass(std::vector<Candidate>& candidates, double mass) {
  auto begin = candidates.begin(), end = candidates.end();
  while (end - begin > 32) {
    Candidate a = *begin, b = begin[(end - begin) / 2], c = end[-1];
    const Candidate pivot = std::max(std::min(a, b, before), std::min(std::max(a, b, before), c, before), before);
    const auto middle = std::partition(begin, end, [&](const Candidate& x) { return !before(pivot, x); });
    double left = 0;
    for (auto i = begin; i != middle; ++i) left += i->weight;
    if (left >= mass) {
      end = middle;  // shorter than before: one of the three comes after the pivot
    } else {
      mass -= left;
      begin = middle;
    }
  }
  std::sort(begin, end, before);
  while (begin != end) {
    mass -= begin->weight;
    ++begin;
    if (mass <= 0) break;
  }
  candidates.erase(begin, candidates.end());
}

// Reduces the whole row to the candidates of top_p.
void select_nucleus(const ElementwiseKernels& kernels, const float* logits, int vocab, const Tempered& tempered,
                    float top_p, SamplerScratch& scratch) {
  const double total = kernels.sum_exp(logits, vocab, tempered.maximum, tempered.scale), mass = top_p * total;
  // Tokens below the last threshold weigh less than 1 - top_p together, so those above it always suffice; those above
  // the first mostly do, and are few.
  for (const double lightest : {3e-4, 3e-5, (1.0 - top_p) * total / vocab}) {
    select_candidates(kernels, logits, vocab, tempered.threshold(lightest), scratch);
    if (weigh(kernels, tempered, scratch) >= mass) break;
  }
  keep_mass(scratch.candidates, mass);
}

// --- The draw ---

int32_t draw(const std::vector<Candidate>& candidates, double uniform) {
  double remaining = 0;
  for (const Candidate& c : candidates) remaining += c.weight;
  remaining *= uniform;
  for (const Candidate& c : candidates) {
    remaining -= c.weight;
    if (remaining < 0) return c.token;
  }
  return candidates.back().token;  // rounding left something for a token after the last
}

// From all tokens, without a list of candidates: first a chunk of the row, then a token in it. -1 if rounding left
// none.
int32_t draw_from_row(const ElementwiseKernels& kernels, const float* logits, int vocab, const Tempered& tempered,
                      double uniform, SamplerScratch& scratch) {
  constexpr int chunk = 1024;
  double remaining = uniform * kernels.sum_exp(logits, vocab, tempered.maximum, tempered.scale);
  scratch.values.resize(chunk);
  for (int begin = 0; begin < vocab; begin += chunk) {
    const int size = std::min(chunk, vocab - begin);
    const double weight = kernels.sum_exp(logits + begin, size, tempered.maximum, tempered.scale);
    if (remaining >= weight) {
      remaining -= weight;
      continue;
    }
    kernels.exp_row(logits + begin, size, tempered.maximum, tempered.scale, scratch.values.data());
    for (int i = 0; i < size; ++i) {
      if (!(logits[begin + i] >= kLowest)) continue;
      remaining -= scratch.values[i];
      if (remaining < 0) return begin + i;
    }
  }
  return -1;
}

int32_t choose(const ElementwiseKernels& kernels, const float* logits, int vocab, const SamplingParams& params,
               uint64_t step_index, SamplerScratch& scratch) {
  const int32_t best = kernels.argmax(logits, vocab);
  const float maximum = logits[best];
  if (!(maximum >= kLowest)) return -1;
  if (params.temperature < kGreedyTemperature || maximum == INFINITY) return best;

  const Tempered tempered = {maximum, 1.0f / params.temperature};
  const double uniform = uniform_random(params.seed, step_index);
  const bool has_min_p = params.min_p > 0, has_top_p = params.top_p < 1;
  const float threshold = has_min_p ? tempered.threshold(std::min(params.min_p, 1.0f)) : kLowest;
  if (params.top_k > 0 && params.top_k < vocab) {
    select_top(kernels, logits, vocab, params.top_k, scratch);
    std::erase_if(scratch.candidates, [=](const Candidate& c) { return c.logit < threshold; });
  } else if (has_min_p) {
    select_candidates(kernels, logits, vocab, threshold, scratch);
  } else if (has_top_p) {
    select_nucleus(kernels, logits, vocab, tempered, params.top_p, scratch);
    return draw(scratch.candidates, uniform);
  } else {
    const int32_t token = draw_from_row(kernels, logits, vocab, tempered, uniform, scratch);
    return token < 0 ? best : token;
  }
  const double total = weigh(kernels, tempered, scratch);
  if (has_top_p) keep_mass(scratch.candidates, params.top_p * total);
  return draw(scratch.candidates, uniform);
}

// --- Log-probabilities ---

float logprob_of(float logit, float logsumexp) {
  const float logprob = logit - logsumexp;
  return logprob <= 0 ? logprob : 0.0f;  // rounding, and +inf - +inf
}

}  // namespace

int32_t TokenCounts::find_or_add(int32_t token) {
  if (2 * (entries_.size() + 1) > slots_.size()) {
    slots_.assign(std::max<size_t>(64, 4 * entries_.size()), -1);
    for (size_t i = 0; i < entries_.size(); ++i) slots_[free_slot(entries_[i].token)] = int32_t(i);
  }
  int32_t& slot = slots_[free_slot(token)];
  if (slot < 0) {
    slot = int32_t(entries_.size());
    entries_.push_back({token, 0});
  }
  return slot;
}

size_t TokenCounts::free_slot(int32_t token) const {
  size_t i = (uint32_t(token) * 2654435761u) % slots_.size();
  while (slots_[i] >= 0 && entries_[slots_[i]].token != token) i = (i + 1) % slots_.size();
  return i;
}

void TokenCounts::add_prompt(const int32_t* tokens, int n) {
  for (int i = 0; i < n; ++i) find_or_add(tokens[i]);
}

void TokenCounts::add_output(int32_t token) { ++entries_[find_or_add(token)].num_output; }

TokenLogprob token_logprob(const ElementwiseKernels& kernels, const float* logits, int vocab, int32_t token,
                           int num_top, std::vector<TokenLogprob>& top, SamplerScratch& scratch) {
  const float logsumexp = kernels.logsumexp(logits, vocab);
  top.clear();
  if (num_top > 0) {
    select_top(kernels, logits, vocab, num_top, scratch);
    for (size_t i = 0; i < scratch.candidates.size(); ++i) {
      const Candidate& c = scratch.candidates[i];
      const bool tied = i > 0 && scratch.candidates[i - 1].logit == c.logit;
      top.push_back({c.token, logprob_of(c.logit, logsumexp), tied ? top[i - 1].rank : int(i) + 1});
    }
  }
  return {token, logprob_of(logits[token], logsumexp), 1 + kernels.count_above(logits, vocab, logits[token])};
}

SampleResult sample(const ElementwiseKernels& kernels, float* logits, int vocab, const SamplingParams& params,
                    const TokenCounts* counts, const uint32_t* allowed, uint64_t step_index, SamplerScratch& scratch) {
  const bool has_penalties = counts && params.has_penalties();
  const float* raw = logits;
  if (params.num_logprobs >= 0 && (allowed || has_penalties || !params.logit_bias.empty())) {
    scratch.logits.assign(logits, logits + vocab);
    raw = scratch.logits.data();
  }
  if (allowed) apply_mask(logits, vocab, allowed);
  for (const auto& [token, bias] : params.logit_bias) logits[token] += bias;
  if (has_penalties) apply_penalties(logits, params, *counts);

  SampleResult result;
  result.token = choose(kernels, logits, vocab, params, step_index, scratch);
  if (result.token < 0) {
    result.status = SampleStatus::no_candidate;
  } else if (params.num_logprobs >= 0) {
    result.chosen = token_logprob(kernels, raw, vocab, result.token, params.num_logprobs, result.top, scratch);
  }
  return result;
}

double uniform_random(uint64_t seed, uint64_t index) {
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  uint32_t counter[4] = {uint32_t(index), uint32_t(index >> 32), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53) * counter[0], b = uint64_t(0xCD9E8D57) * counter[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b),
                              uint32_t(a >> 32) ^ counter[3] ^ key[1], uint32_t(a)};
    std::copy(next, next + 4, counter);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  const uint64_t bits = uint64_t(counter[1]) << 32 | counter[0];
  return double(bits >> 11) * 0x1p-53;
}

}  // namespace gapless
