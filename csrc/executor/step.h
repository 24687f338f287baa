// The ragged batch of one step: which rows the Program runs, and whose they are.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention_plan.h"

namespace gapless {

// Rows of one step. Row r is token_ids[r] at position positions[r]; the rows of one sequence are adjacent and
// ascending.
struct Step {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> blocks;  // per row: the cache block that takes this token
  std::vector<AttentionSequence> sequences;
  std::vector<int32_t> logit_rows;  // rows whose logits are wanted, ascending
  std::vector<int32_t> state_rows;  // rows whose final states are wanted, ascending for each sequence

  int num_rows() const { return int(token_ids.size()); }

  void clear() {
    token_ids.clear();
    positions.clear();
    blocks.clear();
    sequences.clear();
    logit_rows.clear();
    state_rows.clear();
  }
};

}  // namespace gapless
