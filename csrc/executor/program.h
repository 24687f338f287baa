// A model as a flat list of ops over a planned activation arena. Built once, run every step for a ragged batch.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "executor/kv_cache.h"
#include "executor/step.h"
#include "ops/kernels.h"
#include "platform/memory.h"
#include "platform/thread_pool.h"

namespace gapless {

class Program;

// What an op may touch while it runs.
struct RunContext {
  Program& program;
  const Step& step;
  const KVCache& cache;
  ThreadPool& pool;
  const Kernels& kernels;
  int num_token_rows = 0;               // rows of the step, from the first, that body ops run on
  bool has_slice = true;                // whether those of the step's slice are among them
  const int32_t* logit_rows = nullptr;  // rows of the step that head ops run on
  int num_logit_rows = 0;
};

class Op {
 public:
  virtual ~Op() = default;
  virtual void run(RunContext& context) const = 0;
};

enum class Domain : uint8_t { token, logit };

// A planned buffer: row r of `row_bytes` bytes starts at arena offset + r * row_bytes.
struct Buffer {
  Domain domain;
  int64_t row_bytes;
  int64_t offset;
};

struct ProgramLimits {
  int max_tokens;      // rows of a step
  int max_logit_rows;  // rows of logits computed at a time
  int vocab_size;
  KVShape kv;
};

class Program {
 public:
  explicit Program(const ProgramLimits& limits);

  // ---- building: wrong arguments throw std::invalid_argument --------------------------------------------------------
  int add_buffer(Domain domain, int64_t row_bytes, int64_t offset);
  int add_rope(std::vector<float> inv_freq, float scale);
  int add_attention(const AttentionShape& shape);  // the plan's index; equal shapes share one
  void add_op(Domain domain, std::unique_ptr<Op> op);
  void count_weight(const PackedWeight& weight);  // once, however many ops share it
  // The ops of the head so far leave the final states (f32, after the last norm) of its rows in this logit buffer.
  void mark_states(int buffer);
  // The ops of the body so far are parts of it that can run in other steps than what follows, for which rows of this
  // token buffer are all that the next ops need of them. Not after the last op.
  void mark_part(int buffer);
  // Ends the list and takes the arena.
  void finish(int64_t arena_bytes, int logits_buffer);

  const Buffer& buffer(int id) const;
  int rope_dim(int rope) const;
  const ProgramLimits& limits() const { return limits_; }
  int max_tokens() const { return limits_.max_tokens; }
  int max_logit_rows() const { return limits_.max_logit_rows; }
  int vocab_size() const { return limits_.vocab_size; }
  const KVShape& kv_shape() const { return limits_.kv; }
  int state_width() const { return state_width_; }  // values of a final state; 0: not marked
  int64_t arena_bytes() const { return int64_t(arena_.size()); }
  int64_t weight_bytes() const { return weight_bytes_; }
  int num_ops() const { return int(body_.size() + head_.size()); }
  int num_parts() const { return int(parts_.size()) + 1; }
  static constexpr int kMaxSliceRows = 64;

  // ---- running ------------------------------------------------------------------------------------------------------
  // Takes the memory that depends on the executor: plans and per-thread scratch. Before the first run.
  void reserve(int num_threads);
  // The step's first op: rotary tables. Then run_body, then run_head as often as needed. A step's slice has at most
  // kMaxSliceRows rows; from its first part to its last there is no other slice.
  void begin_step(const Step& step, ThreadPool& pool);
  void run_body(const Step& step, const KVCache& cache, ThreadPool& pool);
  // Logits of step.logit_rows[first, first + count), count <= max_logit_rows, into rows 0... of the logits buffer.
  void run_head(const Step& step, int first, int count, const KVCache& cache, ThreadPool& pool);
  float* logits(int row) { return floats(logits_buffer_, row); }
  // Final states of step.state_rows[first, first + count), count <= max_logit_rows. The head's logits are lost.
  void run_states(const Step& step, int first, int count, const KVCache& cache, ThreadPool& pool);
  const float* states(int row) const { return floats(states_buffer_, row); }
  const Kernels& kernels() const { return kernels_; }

  // ---- for ops ------------------------------------------------------------------------------------------------------
  std::byte* row_of(int buffer, int row) const {
    const Buffer& b = buffers_[size_t(buffer)];
    return arena_.data() + b.offset + b.row_bytes * row;
  }
  float* floats(int buffer, int row) const { return reinterpret_cast<float*>(row_of(buffer, row)); }
  const float* rope_cos(int rope, int row) const;
  const float* rope_sin(int rope, int row) const;
  // For all sequences of the step, or all but its slice.
  const AttentionPlan& plan(int attention, bool with_slice) const {
    const Attention& a = attentions_[size_t(attention)];
    return with_slice ? a.plan : a.plan_without_slice;
  }
  const AttentionShape& shape(int attention) const { return attentions_[size_t(attention)].shape; }
  float* attention_scratch(int worker) const;
  float* partials() const { return reinterpret_cast<float*>(partials_.data()); }

 private:
  struct Rope {
    std::vector<float> inv_freq;
    float scale;
    int64_t offset;  // in floats into rope_memory_: [max_tokens][cos half | sin half]
  };
  struct Attention {
    AttentionShape shape;
    AttentionPlan plan, plan_without_slice;
  };
  struct Part {
    size_t end;  // of its ops
    int buffer;  // what the next part needs
  };

  void copy_slice(const Step& step, int part, bool saves);

  const ProgramLimits limits_;
  const Kernels& kernels_;
  std::vector<Buffer> buffers_;
  std::vector<Rope> ropes_;
  int64_t rope_floats_ = 0;
  std::vector<Attention> attentions_;
  std::vector<std::unique_ptr<Op>> body_, head_;
  std::vector<Part> parts_;  // all but the last
  int logits_buffer_ = -1;
  int states_buffer_ = -1, state_width_ = 0;
  size_t num_state_ops_ = 0;  // of the head
  std::set<const PackedWeight*> counted_weights_;
  int64_t weight_bytes_ = 0;
  int64_t scratch_floats_ = 0;  // per worker
  MappedMemory arena_, rope_memory_, partials_, scratch_;
  MappedMemory slice_rows_;  // what the slice's next part needs, between steps
};

}  // namespace gapless
