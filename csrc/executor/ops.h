// The ops of a Program. Each `add_*` checks its arguments against the buffers (std::invalid_argument) and appends one
// op. Buffers are indices from Program::add_buffer; kNone where an op can do without.
#pragma once

#include <memory>
#include <vector>

#include "executor/program.h"

namespace gapless {

inline constexpr int kNone = -1;

using Floats = std::shared_ptr<const std::vector<float>>;  // a norm weight or a bias
using Weight = std::shared_ptr<const PackedWeight>;

// A part of a linear op: out[:, out_column...) (+)= x @ weight.T + bias.
struct LinearSegment {
  Weight weight;
  Floats bias;  // may be null
  int out;
  int out_column;
  bool accumulate;
};

// Heads of one token's row: [q heads | k heads | v heads], head_dim each.
struct RopeCacheOptions {
  int num_heads;
  int rope = kNone;
  float q_scale = 1;
  Floats q_norm, k_norm;  // may be null
  float norm_eps = 1e-6f;
};

void add_embed(Program& program, Weight weight, float scale, int out);
void add_rms_norm(Program& program, int x, Floats weight, float eps, int out, int out_quantized);
void add_rms_norm_add(Program& program, int x, Floats weight, float eps, int residual);
void add_residual(Program& program, int x, int residual);
void add_quantize(Program& program, int x, int out_quantized);
void add_linear(Program& program, int x, int x_quantized, std::vector<LinearSegment> segments);
void add_gated_linear(Program& program, int x, int x_quantized, Weight gate, Weight up, Activation activation, int out);
void add_rope_cache(Program& program, int qkv, int layer, const RopeCacheOptions& options);
void add_attention(Program& program, int qkv, int layer, int num_heads, int out, int window, float softcap);
void add_gather(Program& program, int x, int out);
void add_softcap(Program& program, int x, float cap);

}  // namespace gapless
