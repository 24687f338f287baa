// Turns a row of logits into a token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/elementwise.h"

namespace gapless {

struct SamplingParams {
  float temperature = 1.0f;         // 0: greedy
  int top_k = 0;                    // <= 0: all tokens
  float top_p = 1.0f;               // 0 keeps one token
  float min_p = 0.0f;               // relative to the most probable token
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over the output
  float frequency_penalty = 0.0f;   // over the output
  uint64_t seed = 0;
  int num_logprobs = -1;  // -1: none; 0: the sampled token's; n: those of the n most probable tokens as well
  std::vector<std::pair<int, float>> logit_bias;  // token ids within the vocabulary

  bool has_penalties() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

// How often each token has been seen by one sequence. Only needed by sequences with penalties.
class TokenCounts {
 public:
  struct Entry {
    int32_t token;
    int32_t num_output;  // 0: seen in the prompt only
  };

  void clear() {
    entries_.clear();
    slots_.clear();
  }
  void add_prompt(const int32_t* tokens, int n);
  void add_output(int32_t token);
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  int32_t find_or_add(int32_t token);     // index of its entry
  size_t free_slot(int32_t token) const;  // where the token's index is, or belongs
  std::vector<Entry> entries_;            // in order of first appearance
  std::vector<int32_t> slots_;            // open-addressed hash of token -> index into entries_, -1 empty
};

struct TokenLogprob {
  int32_t token;
  float logprob;
  int rank;  // 1 + the number of tokens with a greater logit
};

enum class SampleStatus {
  ok,
  no_candidate,  // every token is masked, -inf or NaN
};

struct SampleResult {
  SampleStatus status = SampleStatus::ok;
  int32_t token = -1;
  TokenLogprob chosen{-1, 0.0f, 0};  // filled when log-probabilities are asked for
  std::vector<TokenLogprob> top;     // num_logprobs entries, most probable first, equals by token id
};

struct Candidate {
  float logit;
  int32_t token;
  float weight;  // e^((logit - maximum) / temperature), once it is needed
};

// Memory that calls reuse; one per sampling thread.
struct SamplerScratch {
  std::vector<int32_t> indices;
  std::vector<Candidate> candidates;
  std::vector<float> values;  // logits and weights of candidates, maxima of chunks
  std::vector<float> logits;  // as the model gave them, if log-probabilities are asked for and something changes them
};

// Samples one token. `logits` [vocab] is modified. `step_index` is the index of the new token in its sequence's output:
// the random number depends on (seed, step_index) alone, never on the neighbours in the batch. `allowed` has a bit per
// token (bit t % 32 of word t / 32), or is null.
//
// Order: log-probabilities are taken from the logits as the model gave them (log-softmax in f32, before anything
// below); then mask, bias, repetition penalty (positive logits are divided, negative ones multiplied), presence and
// frequency penalties, temperature, min-p, top-k, top-p (on the distribution that the two before it left). Equal
// logits: the lowest token id comes first. NaN counts as -inf.
SampleResult sample(const ElementwiseKernels& kernels, float* logits, int vocab, const SamplingParams& params,
                    const TokenCounts* counts, const uint32_t* allowed, uint64_t step_index, SamplerScratch& scratch);

// Log-probability and rank of `token` and the `num_top` most probable tokens (into `top`), for prompt
// log-probabilities.
TokenLogprob token_logprob(const ElementwiseKernels& kernels, const float* logits, int vocab, int32_t token,
                           int num_top, std::vector<TokenLogprob>& top, SamplerScratch& scratch);

// Philox4x32-10 with key `seed` and counter `index`: the first two words, as a uniform number in [0, 1) of 53 bits.
double uniform_random(uint64_t seed, uint64_t index);

}  // namespace gapless
