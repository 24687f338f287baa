// The ragged batch of one step: which rows the Program runs, and whose they are.
#pragma once

#include <cstdint>
#include <optional>
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

  // The last sequences of a step may go through some parts of the program's body only. The other parts have been or
  // will be other steps' business: the sequences stay the same until the last part has run.
  struct Slice {
    int first_sequence, first_row;
    int part_begin, part_end;
  };
  std::optional<Slice> slice;

  int num_rows() const { return int(token_ids.size()); }

  void clear() {
    token_ids.clear();
    positions.clear();
    blocks.clear();
    sequences.clear();
    logit_rows.clear();
    state_rows.clear();
    slice.reset();
  }
};

}  // namespace gapless
