#include "executor/program.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ops/rope_table.h"

namespace gapless {

namespace {

constexpr int64_t kMaxPartialFloats = int64_t(4) << 20;  // 16 MiB of split-KV partials, touched only by long contexts

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

}  // namespace

Program::Program(const ProgramLimits& limits) : limits_(limits), kernels_(default_kernels()) {
  require(limits.max_tokens > 0 && limits.max_logit_rows > 0 && limits.vocab_size > 0,
          "program limits must be positive");
  require(limits.kv.num_layers() > 0 && limits.kv.num_kv_heads > 0, "a program needs at least one layer and kv head");
  require(limits.kv.head_dim > 0 && limits.kv.head_dim % 16 == 0,
          "head_dim is " + std::to_string(limits.kv.head_dim) + "; it must be a multiple of 16");
}

const Buffer& Program::buffer(int id) const {
  require(id >= 0 && id < int(buffers_.size()), "there is no buffer " + std::to_string(id));
  return buffers_[size_t(id)];
}

int Program::rope_dim(int rope) const {
  require(rope >= 0 && rope < int(ropes_.size()), "there is no rope " + std::to_string(rope));
  return int(ropes_[size_t(rope)].inv_freq.size()) * 2;
}

int Program::add_buffer(Domain domain, int64_t row_bytes, int64_t offset) {
  require(row_bytes > 0 && row_bytes % 4 == 0, "row_bytes is " + std::to_string(row_bytes) + "; a multiple of 4");
  require(offset >= 0 && offset % 64 == 0, "buffer offset is " + std::to_string(offset) + "; a multiple of 64");
  buffers_.push_back({domain, row_bytes, offset});
  return int(buffers_.size()) - 1;
}

int Program::add_rope(std::vector<float> inv_freq, float scale) {
  require(!inv_freq.empty() && int(inv_freq.size()) * 2 <= limits_.kv.head_dim, "rope turns more than a head");
  const int64_t floats = int64_t(inv_freq.size()) * 2 * limits_.max_tokens;
  ropes_.push_back({std::move(inv_freq), scale, rope_floats_});
  rope_floats_ += floats;
  return int(ropes_.size()) - 1;
}

int Program::add_attention(const AttentionShape& shape) {
  for (size_t i = 0; i < attentions_.size(); ++i) {
    const AttentionShape& s = attentions_[i].shape;
    if (s.num_heads == shape.num_heads && s.window == shape.window) return int(i);
  }
  attentions_.push_back({shape, AttentionPlan(1), AttentionPlan(1)});
  return int(attentions_.size()) - 1;
}

void Program::count_weight(const PackedWeight& weight) {
  if (counted_weights_.insert(&weight).second) weight_bytes_ += int64_t(weight.num_bytes());
}

void Program::add_op(Domain domain, std::unique_ptr<Op> op) {
  (domain == Domain::token ? body_ : head_).push_back(std::move(op));
}

void Program::mark_states(int id) {
  require(buffer(id).domain == Domain::logit, "final states are rows of the head");
  require(!head_.empty(), "final states need an op that makes them");
  states_buffer_ = id;
  state_width_ = int(buffer(id).row_bytes / 4);
  num_state_ops_ = head_.size();
}

void Program::mark_part(int id) {
  require(buffer(id).domain == Domain::token, "what a part leaves for the next are rows of tokens");
  require(body_.size() > (parts_.empty() ? 0 : parts_.back().end), "a part needs an op");
  parts_.push_back({body_.size(), id});
}

void Program::finish(int64_t arena_bytes, int logits_buffer) {
  for (const Buffer& b : buffers_) {
    const int64_t rows = b.domain == Domain::token ? limits_.max_tokens : limits_.max_logit_rows;
    require(b.offset + b.row_bytes * rows <= arena_bytes, "a buffer ends past the arena");
  }
  require(parts_.empty() || parts_.back().end < body_.size(), "no op follows the last part that was marked");
  const Buffer& logits = buffer(logits_buffer);
  require(logits.domain == Domain::logit && logits.row_bytes >= int64_t(limits_.vocab_size) * 4,
          "the logits buffer must have a row of vocab_size floats");
  logits_buffer_ = logits_buffer;
  arena_ = MappedMemory(size_t(arena_bytes), true);
  rope_memory_ = MappedMemory(size_t(rope_floats_) * 4, false);
}

void Program::reserve(int num_threads) {
  for (Attention& attention : attentions_) {
    attention.plan = attention.plan_without_slice = AttentionPlan(num_threads, kMaxPartialFloats);
    scratch_floats_ = std::max(scratch_floats_, attention_scratch_floats(attention.shape));
  }
  scratch_floats_ = (scratch_floats_ + 15) / 16 * 16;
  partials_ = MappedMemory(size_t(kMaxPartialFloats) * 4, false);
  scratch_ = MappedMemory(size_t(scratch_floats_) * 4 * size_t(num_threads), false);
  int64_t most = 0;
  for (const Part& part : parts_) most = std::max(most, buffer(part.buffer).row_bytes);
  if (most > 0) slice_rows_ = MappedMemory(size_t(most * kMaxSliceRows), false);
}

float* Program::attention_scratch(int worker) const {
  return reinterpret_cast<float*>(scratch_.data()) + scratch_floats_ * worker;
}

const float* Program::rope_cos(int rope, int row) const {
  const Rope& r = ropes_[size_t(rope)];
  return reinterpret_cast<const float*>(rope_memory_.data()) + r.offset + int64_t(row) * int64_t(r.inv_freq.size()) * 2;
}

const float* Program::rope_sin(int rope, int row) const {
  return rope_cos(rope, row) + ropes_[size_t(rope)].inv_freq.size();
}

void Program::begin_step(const Step& step, ThreadPool& pool) {
  constexpr int kRows = 16;
  const int num_rows = step.num_rows();
  pool.run((num_rows + kRows - 1) / kRows, [&](int item, int) {
    for (int rope = 0; rope < int(ropes_.size()); ++rope) {
      const Rope& r = ropes_[size_t(rope)];
      const int half = int(r.inv_freq.size());
      for (int row = item * kRows; row < std::min(num_rows, (item + 1) * kRows); ++row) {
        float* cos = const_cast<float*>(rope_cos(rope, row));
        rope_table(r.inv_freq.data(), half, step.positions[size_t(row)], r.scale, cos, cos + half);
      }
    }
  });
}

void Program::run_body(const Step& step, const KVCache& cache, ThreadPool& pool) {
  const AttentionSequence* sequences = step.sequences.data();
  for (Attention& attention : attentions_) {
    attention.plan.build(sequences, int(step.sequences.size()), attention.shape);
    if (step.slice) attention.plan_without_slice.build(sequences, step.slice->first_sequence, attention.shape);
  }
  RunContext context{*this, step, cache, pool, kernels_};
  for (int part = 0; part < num_parts(); ++part) {
    const bool with_slice = !step.slice || (part >= step.slice->part_begin && part < step.slice->part_end);
    context.num_token_rows = with_slice ? step.num_rows() : step.slice->first_row;
    context.has_slice = with_slice;
    if (context.num_token_rows == 0) continue;
    if (step.slice && part > 0 && part == step.slice->part_begin) copy_slice(step, part, /*saves=*/false);
    const size_t end = part < int(parts_.size()) ? parts_[size_t(part)].end : body_.size();
    for (size_t i = part > 0 ? parts_[size_t(part) - 1].end : 0; i < end; ++i) body_[i]->run(context);
    if (step.slice && part + 1 < num_parts() && part + 1 == step.slice->part_end)
      copy_slice(step, part + 1, /*saves=*/true);
  }
}

// What the ops of `part` need of the slice's rows: to where it outlasts the step, or from there.
void Program::copy_slice(const Step& step, int part, bool saves) {
  const int id = parts_[size_t(part) - 1].buffer;
  std::byte *rows = row_of(id, step.slice->first_row), *saved = slice_rows_.data();
  const size_t bytes = size_t(buffer(id).row_bytes) * size_t(step.num_rows() - step.slice->first_row);
  std::memcpy(saves ? saved : rows, saves ? rows : saved, bytes);
}

void Program::run_head(const Step& step, int first, int count, const KVCache& cache, ThreadPool& pool) {
  RunContext context{*this, step, cache, pool, kernels_};
  context.logit_rows = step.logit_rows.data() + first;
  context.num_logit_rows = count;
  for (const auto& op : head_) op->run(context);
}

void Program::run_states(const Step& step, int first, int count, const KVCache& cache, ThreadPool& pool) {
  RunContext context{*this, step, cache, pool, kernels_};
  context.logit_rows = step.state_rows.data() + first;
  context.num_logit_rows = count;
  for (size_t i = 0; i < num_state_ops_; ++i) head_[i]->run(context);
}

}  // namespace gapless
