// Cuts the attention of one step into items for the thread pool.
#pragma once

#include <cstdint>
#include <vector>

namespace gapless {

inline constexpr int kAttentionTileTokens = 64;    // keys per online-softmax step
inline constexpr int kAttentionSplitTokens = 256;  // keys per partial result
inline constexpr int kAttentionTileRows = 48;      // most (token, head) rows of an item

// Some tokens of one sequence: consecutive rows of the batch at consecutive positions. Their keys and values are in the
// cache already.
struct AttentionSequence {
  int row_begin;  // first row in the batch
  int num_rows;
  int position;                // of the first row, counted from 0
  const int32_t* block_table;  // blocks of 16 tokens, enough for position + num_rows
};

struct AttentionShape {
  int num_heads;
  int num_kv_heads;  // divides num_heads
  int head_dim;      // a multiple of 16
  bool causal = true;
  int window = 0;  // a token sees itself and window - 1 tokens before it (and after it, if not causal); 0: no limit
};

// The keys [begin, end) that a token at `position` sees in a sequence that has `length` tokens.
struct KeyRange {
  int begin, end;
};
[[gnu::always_inline]] constexpr KeyRange visible_keys(const AttentionShape& shape, int position, int length) {
  int begin = 0, end = shape.causal ? position + 1 : length;
  if (shape.window > 0) {
    if (position - shape.window + 1 > begin) begin = position - shape.window + 1;
    if (shape.window < end - position) end = position + shape.window;
  }
  return {begin, end};
}

// Tokens x query heads that share one kv head, over all their keys or over some splits of them.
struct AttentionItem {
  int sequence;
  int token_begin, num_tokens;  // within the sequence's rows
  int head_begin, num_heads;    // query heads, all of kv head head_begin / (num_heads / num_kv_heads)
  int split_begin, split_end;   // absolute splits
  int64_t partial_offset;       // in floats, of split_begin's partial results; -1: writes its output itself
  int64_t cost;                 // estimated work, in (row, key) pairs
};

// Rows whose splits were computed by different items.
struct AttentionMerge {
  int sequence;
  int token_begin, num_tokens;
  int head_begin, num_heads;
  int num_splits;
  int64_t partial_offset;
};

class AttentionPlan {
 public:
  // `max_partial_floats` caps the shared memory for partial results; a query tile that no longer fits is not split.
  explicit AttentionPlan(int num_threads, int64_t max_partial_floats = int64_t(4) << 20);

  // Plans one step. `sequences` must stay alive and unchanged while the plan is in use.
  void build(const AttentionSequence* sequences, int num_sequences, const AttentionShape& shape);

  int num_items() const { return int(items_.size()); }
  const AttentionItem& item(int i) const { return items_[i]; }  // the most work first
  int num_merges() const { return int(merges_.size()); }        // to run after all items
  const AttentionMerge& merge(int i) const { return merges_[i]; }
  int64_t partial_floats() const { return partial_floats_; }

 private:
  int num_threads_;
  int64_t max_partial_floats_;
  int64_t partial_floats_ = 0;
  std::vector<AttentionItem> items_;
  std::vector<AttentionMerge> merges_;
};

// Floats that one row's partial result of one split takes: max, sum, padding to a cache line, accumulator.
[[gnu::always_inline]] constexpr int64_t attention_partial_stride(int head_dim) { return 16 + head_dim; }

// Floats of scratch that a thread needs for `attend`.
int64_t attention_scratch_floats(const AttentionShape& shape);

}  // namespace gapless
