// The cosines and sines that rotate one token's query and key heads.
#pragma once

#include <cstdint>

namespace gapless {

// cos[i], sin[i] = mscale * cos/sin(position * inv_freq[i]) for i < half. Angles are taken in double: in f32 an angle
// of 32768 radians is off by 0.002, which long contexts show.
void rope_table(const float* inv_freq, int half, int64_t position, float mscale, float* cos, float* sin);

}  // namespace gapless
