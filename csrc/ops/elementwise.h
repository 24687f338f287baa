// Row-wise operations between the linear layers: norms, residual adds, rope with the write into the KV cache,
// reductions over logits. Everything works on one row, so that a row's result cannot depend on its neighbours.
#pragma once

#include <cstdint>

#include "ops/kv_layout.h"

namespace gapless {

// One token's row of the fused qkv projection on its way into attention:
//   per head: optional RMS norm of q and k, rope (halves: element i turns with element i + rotary_dim / 2);
//   q is rewritten in place and multiplied by q_scale, k and v go to the cache, saturated where its type ends.
// An int8 cache wants all three rotated. What the row holds of k and v afterwards means nothing.
struct RopeCacheArgs {
  float* qkv;                        // one row
  int q_column, k_column, v_column;  // where the heads of each kind start in the row, [heads][head_dim]
  int num_heads, num_kv_heads;
  int head_dim;         // a multiple of 16
  int rotary_dim;       // even, <= head_dim; the rest of a head is left as it is; 0: no rope
  const float* q_norm;  // [head_dim] weights of the qk-norm, or null
  const float* k_norm;
  float eps;         // of the qk-norm
  const float* cos;  // [rotary_dim / 2] for this token's position
  const float* sin;
  float q_scale;  // the attention scale
  KvLayer kv;
  int64_t block;     // the block of this token
  int block_offset;  // its place in the block, 0...15
};

struct ElementwiseKernels {
  // out = x / rms(x) * weight, rms(x) = sqrt(mean(x^2) + eps). `out` may be x.
  void (*rms_norm)(const float* x, const float* weight, int width, float eps, float* out);
  // out += x / rms(x) * weight
  void (*rms_norm_add)(const float* x, const float* weight, int width, float eps, float* out);
  // out = (x - mean) / sqrt(var + eps) * weight + bias; bias may be null. `out` may be x.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int width, float eps, float* out);
  // out += x
  void (*add)(const float* x, int n, float* out);
  // x *= factor
  void (*scale)(float* x, int n, float factor);
  // x = cap * tanh(x / cap)
  void (*softcap)(float* x, int n, float cap);
  // log(sum(exp(x))); -inf when every element is -inf or NaN (a NaN counts as -inf)
  float (*logsumexp)(const float* x, int n);
  // sum(e^((x - shift) * scale)), where every element counts at least 1e-38 (also -inf and NaN)
  double (*sum_exp)(const float* x, int n, float shift, float scale);
  // out = e^((x - shift) * scale), at least 1e-38
  void (*exp_row)(const float* x, int n, float shift, float scale, float* out);
  // Index of the largest element, the first of equals; a NaN counts as -inf. 0 when every element is.
  int (*argmax)(const float* x, int n);
  // Largest element; NaNs count as -inf.
  float (*max)(const float* x, int n);
  // How many elements are greater than `value`: the rank of a token's logit.
  int (*count_above)(const float* x, int n, float value);
  // Writes the indices of the elements >= threshold in ascending order, at most `capacity` of them, and returns how
  // many there are in all (which may be more than were written).
  int (*select_at_least)(const float* x, int n, float threshold, int capacity, int32_t* indices);
  void (*rope_and_cache)(const RopeCacheArgs&);
};

}  // namespace gapless
