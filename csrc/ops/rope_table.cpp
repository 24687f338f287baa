#include "ops/rope_table.h"

#include <cmath>

namespace gapless {

void rope_table(const float* inv_freq, int half, int64_t position, float mscale, float* cos, float* sin) {
  for (int i = 0; i < half; ++i) {
    const double angle = double(position) * double(inv_freq[i]);
    cos[i] = float(mscale * std::cos(angle));
    sin[i] = float(mscale * std::sin(angle));
  }
}

}  // namespace gapless
