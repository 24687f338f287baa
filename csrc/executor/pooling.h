// How the final states of a prompt become one vector, its embedding.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "ops/elementwise.h"

namespace gapless {

// Whose state is taken: nobody's (the sequence is sampled), the last token's, the mean of all, or the first token's.
enum class Pooling : uint8_t { none, last, mean, cls };

// Whether the state of the token at `position` of `num_tokens` counts.
inline bool takes_state(Pooling pooling, int position, int num_tokens) {
  switch (pooling) {
    case Pooling::none:
      return false;
    case Pooling::last:
      return position == num_tokens - 1;
    case Pooling::mean:
      return true;
    case Pooling::cls:
      return position == 0;
  }
  return false;
}

// States that the cache cannot give back: what is cached are keys and values.
inline bool needs_all_tokens(Pooling pooling) { return pooling == Pooling::mean || pooling == Pooling::cls; }

// Adds states one by one in the order of the tokens: how a prompt was cut into steps does not show in the sum.
class StateSum {
 public:
  void add(const ElementwiseKernels& kernels, const float* state, int width) {
    if (num_states_++ == 0)
      sum_.assign(state, state + width);
    else
      kernels.add(state, width, sum_.data());
  }

  // The mean, of length 1 if so wished (zeros stay zeros). Empty if it is not finite. Ends the sum.
  std::vector<float> take(bool normalize) {
    double squares = 0;
    for (float& value : sum_) {
      value /= float(num_states_);
      squares += double(value) * value;
    }
    if (!std::isfinite(squares)) return {};
    const double length = std::sqrt(squares);
    if (normalize && length > 0)
      for (float& value : sum_) value = float(value / length);
    return std::move(sum_);
  }

 private:
  std::vector<float> sum_;
  int num_states_ = 0;
};

}  // namespace gapless
