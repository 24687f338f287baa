// Attention of a ragged batch over the paged cache (kv_layout.h).
//
// A row is one (token, query head). Its keys are visited in tiles of 64 tokens at absolute positions by the online
// softmax, and every 256 tokens (a split) the running (max, sum, accumulator) is folded into the row's total, in
// ascending order. Decode may compute the splits of a row on different threads and fold them afterwards (`merge`),
// prefill folds as it goes: the arithmetic is the same, so a row's bits do not depend on chunking, batch, plan or
// threads. Masked keys contribute exactly nothing.
#pragma once

#include <cstdint>

#include "ops/attention_plan.h"
#include "ops/kv_layout.h"

namespace gapless {

struct AttentionArgs {
  AttentionShape shape;
  const AttentionSequence* sequences;  // those the plan was built from
  const float* q;  // [rows][q_stride]; head h at column h * head_dim; roped, scaled and, for int8, rotated
  int64_t q_stride;
  float* out;  // [rows][out_stride], likewise
  int64_t out_stride;
  KvLayer kv;
  float softcap;       // scores become softcap * tanh(score / softcap); 0: none
  const float* sinks;  // [num_heads] an extra logit in each row's denominator, or null
  float* partials;     // plan.partial_floats() of them, shared by all items and merges of the step
};

struct AttentionKernels {
  // `scratch` is the thread's own: attention_scratch_floats(shape), 64-byte aligned.
  void (*attend)(const AttentionArgs&, const AttentionItem&, float* scratch);
  // After all items: folds the splits of one query tile.
  void (*merge)(const AttentionArgs&, const AttentionMerge&);
};

}  // namespace gapless
