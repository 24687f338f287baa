#include "ops/attention_plan.h"

#include <algorithm>

namespace gapless {
namespace {

constexpr int kItemsPerThread = 4;  // enough for the last ones to even out, few enough to keep splits rare
constexpr int kKeyCost = 4;         // reading a key costs about as much as working on it for this many rows

int div_up(int a, int b) { return (a + b - 1) / b; }

// How many tokens and query heads make a tile: all heads of a kv head if they fit, as many tokens as fill the rows.
struct TileShape {
  int tokens, heads;
};

TileShape tile_shape(const AttentionShape& shape) {
  const int group = shape.num_heads / shape.num_kv_heads;
  const int heads = std::min(group, kAttentionTileRows);
  return {std::max(1, kAttentionTileRows / heads), heads};
}

KeyRange tile_keys(const AttentionShape& shape, const AttentionSequence& sequence, int token_begin, int token_end) {
  const int length = sequence.position + sequence.num_rows;
  return {visible_keys(shape, sequence.position + token_begin, length).begin,
          visible_keys(shape, sequence.position + token_end - 1, length).end};
}

// Calls visit(sequence index, first token, last token + 1, keys) for every query tile of one head group.
template <typename Visit>
void for_each_token_tile(const AttentionSequence* sequences, int num_sequences, const AttentionShape& shape, int tokens,
                         Visit visit) {
  for (int s = 0; s < num_sequences; ++s)
    for (int begin = 0; begin < sequences[s].num_rows; begin += tokens) {
      const int end = std::min(begin + tokens, sequences[s].num_rows);
      visit(s, begin, end, tile_keys(shape, sequences[s], begin, end));
    }
}

int64_t tile_cost(KeyRange keys, int rows) { return int64_t(keys.end - keys.begin) * (rows + kKeyCost); }

}  // namespace

AttentionPlan::AttentionPlan(int num_threads, int64_t max_partial_floats)
    : num_threads_(num_threads), max_partial_floats_(max_partial_floats) {}

void AttentionPlan::build(const AttentionSequence* sequences, int num_sequences, const AttentionShape& shape) {
  items_.clear();
  merges_.clear();
  partial_floats_ = 0;
  const TileShape tile = tile_shape(shape);
  const int group = shape.num_heads / shape.num_kv_heads;

  int64_t total = 0;
  for_each_token_tile(sequences, num_sequences, shape, tile.tokens, [&](int, int begin, int end, KeyRange keys) {
    total += tile_cost(keys, (end - begin) * tile.heads) * shape.num_kv_heads * div_up(group, tile.heads);
  });
  // One thread has nothing to balance.
  const int64_t target = num_threads_ > 1 ? total / (int64_t(num_threads_) * kItemsPerThread) + 1 : total + 1;

  const auto add_tile = [&](int s, int token_begin, int num_tokens, int head_begin, int num_heads, KeyRange keys) {
    const int rows = num_tokens * num_heads;
    const int64_t cost = tile_cost(keys, rows);
    const int first = keys.begin / kAttentionSplitTokens, last = div_up(keys.end, kAttentionSplitTokens);
    const int num_splits = last - first;
    const int64_t split_floats = rows * attention_partial_stride(shape.head_dim);
    int parts = int(std::min<int64_t>(num_splits, (cost + target - 1) / target));
    if (partial_floats_ + num_splits * split_floats > max_partial_floats_) parts = 1;
    if (parts <= 1) {
      items_.push_back({s, token_begin, num_tokens, head_begin, num_heads, first, last, -1, cost});
      return;
    }
    for (int p = 0; p < parts; ++p) {
      const int begin = num_splits * p / parts, end = num_splits * (p + 1) / parts;
      items_.push_back({s, token_begin, num_tokens, head_begin, num_heads, first + begin, first + end,
                        partial_floats_ + begin * split_floats, cost * (end - begin) / num_splits});
    }
    merges_.push_back({s, token_begin, num_tokens, head_begin, num_heads, num_splits, partial_floats_});
    partial_floats_ += num_splits * split_floats;
  };

  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
    for (int h = 0; h < group; h += tile.heads)
      for_each_token_tile(sequences, num_sequences, shape, tile.tokens, [&](int s, int begin, int end, KeyRange keys) {
        add_tile(s, begin, end - begin, kv_head * group + h, std::min(tile.heads, group - h), keys);
      });

  // Threads take items in this order: the long ones first leave the short ones to fill the gaps.
  std::stable_sort(items_.begin(), items_.end(),
                   [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

int64_t attention_scratch_floats(const AttentionShape& shape) {
  const int64_t records = 2 * attention_partial_stride(shape.head_dim);  // the total and the current split
  const int64_t per_row = shape.head_dim + kAttentionTileTokens + 16 + 16 + records;
  return kAttentionTileRows * per_row;
}

}  // namespace gapless
