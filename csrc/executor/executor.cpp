#include "executor/executor.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace gapless {

namespace {

std::string out_of_range(const char* what, int64_t value, int64_t low, int64_t high) {
  return std::string(what) + " is " + std::to_string(value) + "; it must be from " + std::to_string(low) + " to " +
         std::to_string(high);
}

void check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) throw std::invalid_argument(out_of_range(what, value, low, high));
}

// A mask that is late holds up the others for at most this long; then its slot sits out until it has come.
constexpr auto kMaskPatience = std::chrono::milliseconds(1);
constexpr size_t kMaxSpareBatches = 4;
constexpr size_t kMaxTraceSteps = size_t(1) << 20;

int num_blocks_for(int num_tokens) { return (num_tokens + kKvBlockTokens - 1) / kKvBlockTokens; }

}  // namespace

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::abort:
      return "abort";
    case FinishReason::error:
      return "error";
    case FinishReason::preempted:
      return "preempted";
  }
  return "error";
}

Executor::Executor(std::shared_ptr<Program> program, const ExecutorConfig& config)
    : program_(std::move(program)),
      config_(config),
      max_blocks_per_seq_(num_blocks_for(config.max_seq_len)),
      cache_(program_->kv_shape(), config.num_blocks),
      pool_(config.num_threads),
      budget_(config.max_step_tokens) {
  check_range("num_blocks", config.num_blocks, 1, std::numeric_limits<int32_t>::max());
  check_range("max_seq_len", config.max_seq_len, 1, 1 << 24);
  check_range("max_step_tokens", config.max_step_tokens, 1, program_->max_tokens());
  check_range("max_num_seqs", config.max_num_seqs, 1, config.max_step_tokens);
  slots_.resize(size_t(config.max_num_seqs));
  block_tables_.resize(slots_.size() * size_t(max_blocks_per_seq_));
  next_rows_.reserve(slots_.size());
  scratch_.resize(size_t(pool_.num_threads()));
  program_->reserve(pool_.num_threads());
  thread_ = std::thread([this] { loop(); });
}

Executor::~Executor() { close(); }

void Executor::close() {
  {
    std::lock_guard lock(command_mutex_);
    closing_ = true;
  }
  command_arrived_.notify_one();
  if (thread_.joinable()) thread_.join();
}

// ---- commands: checked by the caller's thread ----------------------------------------------------------------------

void Executor::check_slot(int slot) const { check_range("slot", slot, 0, config_.max_num_seqs - 1); }

void Executor::check_blocks(const std::vector<int32_t>& blocks) const {
  check_range("number of blocks", int64_t(blocks.size()), 0, max_blocks_per_seq_);
  for (int32_t block : blocks) check_range("block", block, 0, config_.num_blocks - 1);
}

void Executor::check(const AdmitCommand& command) const {
  check_slot(command.slot);
  check_blocks(command.blocks);
  const Pooling pooling = command.sampling.pooling;
  const int num_new = pooling == Pooling::none ? 1 : 0;  // tokens that follow at least
  if (pooling != Pooling::none && program_->state_width() == 0)
    throw std::invalid_argument("the program has no final states to make an embedding of");
  check_range("prompt length", int64_t(command.token_ids.size()), 1, config_.max_seq_len - num_new);
  for (int32_t token : command.token_ids) check_range("token id", token, 0, vocab_size() - 1);
  const int64_t max_cached = needs_all_tokens(pooling) ? 0 : int64_t(command.token_ids.size()) - 1;
  check_range("num_cached", command.num_cached, 0, max_cached);
  check_range("blocks for num_cached", int64_t(command.blocks.size()), num_blocks_for(command.num_cached),
              max_blocks_per_seq_);
  check_range("num_prompt", command.num_prompt, -1, int64_t(command.token_ids.size()));
  check_range("max_tokens", command.sampling.max_tokens, num_new, std::numeric_limits<int32_t>::max());
  for (int32_t token : command.sampling.stop_token_ids) check_range("stop token id", token, 0, vocab_size() - 1);
  for (const auto& [token, bias] : command.sampling.params.logit_bias)
    check_range("logit_bias token id", token, 0, vocab_size() - 1);
}

void Executor::check(const ExtendCommand& command) const {
  check_slot(command.slot);
  check_blocks(command.blocks);
}

void Executor::check(const CancelCommand& command) const { check_slot(command.slot); }

void Executor::check(const PreemptCommand& command) const { check_slot(command.slot); }

void Executor::check(const TargetTpotCommand& command) const {
  if (!(command.seconds >= 0)) throw std::invalid_argument("the TPOT target must not be negative");
}

void Executor::check(const MaskCommand& command) const {
  check_slot(command.slot);
  const int64_t words = (vocab_size() + 31) / 32;
  check_range("mask words", int64_t(command.allowed.size()), words, words);
}

void Executor::push(Command command) {
  std::visit([this](const auto& c) { check(c); }, command);
  {
    std::lock_guard lock(command_mutex_);
    if (closing_) throw std::logic_error("the executor is closed");
    if (auto* mask = std::get_if<MaskCommand>(&command))
      masks_.push_back(std::move(*mask));
    else
      commands_.push_back(std::move(command));
  }
  command_arrived_.notify_one();
}

// ---- the loop ------------------------------------------------------------------------------------------------------

void Executor::loop() {
  try {
    Clock::time_point sampled_at{}, resumed_at{};
    bool working = false;
    for (;;) {
      if (!take_commands(/*may_wait=*/!working)) break;
      if (!compose()) {
        if (working) {
          std::lock_guard lock(stats_mutex_);
          stats_.work_s += std::chrono::duration<double>(sampled_at - resumed_at).count();
        }
        working = false;
        publish(/*may_wait=*/true);
        wake_reader();
        continue;
      }
      const Clock::time_point start = Clock::now();
      if (!working) resumed_at = start;
      run_step();
      const Clock::time_point end = Clock::now();
      record_step(start, end, working ? std::chrono::duration<float, std::micro>(start - sampled_at).count() : -1.0f);
      sampled_at = end;
      working = true;
      publish(/*may_wait=*/false);
    }
    end_all(FinishReason::abort);
  } catch (const std::exception& error) {
    end_all(FinishReason::error);
    Event event(Event::Kind::failed);
    event.message = error.what();
    unpublished_.push_back(std::move(event));
  }
  publish(/*may_wait=*/true);
  {
    std::lock_guard lock(event_mutex_);
    ended_ = true;
  }
  event_arrived_.notify_all();
}

void Executor::record_step(Clock::time_point begin, Clock::time_point end, float gap_us) {
  const auto seconds = [](Clock::duration d) { return std::chrono::duration<double>(d).count(); };
  budget_.record(num_decode_rows_, prefill_work_, seconds(end - begin));
  // Sliced rows count as rows when they have come through.
  const bool is_through = !step_.slice || step_.slice->part_end == program_->num_parts();
  const int num_rows = is_through ? step_.num_rows() : num_decode_rows_;
  const int num_prefill_rows = num_rows - num_decode_rows_;
  std::lock_guard lock(stats_mutex_);
  ++stats_.num_steps;
  stats_.num_rows += uint64_t(num_rows);
  stats_.num_prefill_rows += uint64_t(num_prefill_rows);
  stats_.num_sliced_steps += step_.slice.has_value();
  stats_.busy_s += seconds(end - begin);
  if (gap_us >= 0) {
    gaps_us_[num_gaps_++ % gaps_us_.size()] = gap_us;
    const int bucket = gap_us < 1 ? 0 : std::ilogb(gap_us);
    ++stats_.gap_histogram[std::min(size_t(bucket), stats_.gap_histogram.size() - 1)];
  }
  if (config_.trace && trace_.size() < kMaxTraceSteps)
    trace_.push_back({seconds(begin.time_since_epoch()), seconds(forward_end_.time_since_epoch()),
                      seconds(end.time_since_epoch()), num_decode_rows_, num_prefill_rows,
                      step_.num_rows() - num_rows});
}

// Sequences in slots, and those whose admission the loop will not get to.
void Executor::end_all(FinishReason reason) {
  for (Slot& slot : slots_)
    if (slot.state != SlotState::free) finish(slot, reason);
  std::lock_guard lock(command_mutex_);
  closing_ = true;  // a loop that failed takes no more commands either
  for (const Command& command : commands_) {
    const auto* admission = std::get_if<AdmitCommand>(&command);
    if (!admission) continue;
    Event event(Event::Kind::finished, admission->sequence_id);
    event.reason = reason;
    unpublished_.push_back(std::move(event));
  }
  commands_.clear();
}

bool Executor::take_commands(bool may_wait) {
  std::unique_lock lock(command_mutex_, std::defer_lock);
  if (may_wait) {
    lock.lock();
    command_arrived_.wait(lock, [&] { return closing_ || !commands_.empty() || !masks_.empty(); });
  } else if (!lock.try_lock()) {
    return true;  // somebody is adding commands right now: they are for the next step
  }
  if (closing_) return false;
  taken_.swap(commands_);
  std::vector<MaskCommand> masks;
  masks.swap(masks_);
  lock.unlock();
  for (Command& command : taken_) std::visit([this](auto& c) { apply(c); }, command);
  taken_.clear();
  for (MaskCommand& mask : masks) apply(mask);
  return true;
}

void Executor::apply(AdmitCommand& command) {
  Slot& slot = slots_[size_t(command.slot)];
  if (slot.state != SlotState::free)
    throw std::logic_error("slot " + std::to_string(command.slot) + " was admitted twice");
  slot = Slot{};
  slot.state = SlotState::prefill;
  slot.sequence_id = command.sequence_id;
  slot.num_prompt = command.num_prompt < 0 ? int(command.token_ids.size()) : command.num_prompt;
  slot.priority = command.priority;
  slot.num_computed = command.num_cached;
  slot.tokens = std::move(command.token_ids);
  slot.sampling = std::move(command.sampling);
  slot.stop_ids.insert(slot.sampling.stop_token_ids.begin(), slot.sampling.stop_token_ids.end());
  if (slot.sampling.params.has_penalties()) {
    slot.counts.add_prompt(slot.tokens.data(), slot.num_prompt);
    for (size_t i = size_t(slot.num_prompt); i < slot.tokens.size(); ++i) slot.counts.add_output(slot.tokens[i]);
  }
  slot.num_blocks = int(command.blocks.size());
  std::copy(command.blocks.begin(), command.blocks.end(), block_row(command.slot));
  const auto after = std::find_if(prefilling_.begin(), prefilling_.end(),
                                  [&](int other) { return slots_[size_t(other)].priority > slot.priority; });
  prefilling_.insert(after, command.slot);
}

Executor::Slot* Executor::running(int index, uint64_t sequence_id) {
  Slot& slot = slots_[size_t(index)];
  return slot.state == SlotState::free || slot.sequence_id != sequence_id ? nullptr : &slot;
}

void Executor::apply(ExtendCommand& command) {
  Slot* slot = running(command.slot, command.sequence_id);
  if (!slot) return;
  const int count = std::min(max_blocks_per_seq_ - slot->num_blocks, int(command.blocks.size()));
  std::copy_n(command.blocks.begin(), count, block_row(command.slot) + slot->num_blocks);
  slot->num_blocks += count;
  slot->asked_for_blocks = false;
}

void Executor::apply(CancelCommand& command) {
  if (Slot* slot = running(command.slot, command.sequence_id)) finish(*slot, FinishReason::abort);
}

void Executor::apply(PreemptCommand& command) {
  if (Slot* slot = running(command.slot, command.sequence_id)) finish(*slot, FinishReason::preempted);
}

void Executor::apply(TargetTpotCommand& command) { budget_.set_target(command.seconds); }

void Executor::apply(MaskCommand& command) {
  Slot* slot = running(command.slot, command.sequence_id);
  if (!slot || command.output_index != slot->num_output()) return;
  slot->mask = std::move(command.allowed);
  slot->mask_index = command.output_index;
  slot->awaits_mask = false;
}

// Every decoding slot gets its row; the token budget says how many rows of prefill go with them.
bool Executor::compose() {
  step_.clear();
  tasks_.clear();
  state_slots_.clear();
  embedded_.clear();
  for (const DecodeRow& row : next_rows_) {
    const int index = step_.num_rows();
    step_.sequences.push_back({index, 1, row.position, block_row(row.slot)});
    step_.token_ids.push_back(row.token);
    step_.positions.push_back(row.position);
    step_.blocks.push_back(row.block);
    step_.logit_rows.push_back(index);
    tasks_.push_back({row.slot, row.position, true, false});
  }
  next_rows_.clear();
  std::erase_if(standing_, [&](int index) {
    const bool goes_on = possible_rows(slots_[size_t(index)]) > 0;
    if (goes_on) add_rows(index, 1);
    return goes_on;
  });
  num_decode_rows_ = step_.num_rows();
  compose_prefill();
  return step_.num_rows() > 0;
}

// A small budget does not go to few rows through all layers, but to many through some: rows that go together share
// what is read of weights, keys and values.
void Executor::compose_prefill() {
  prefill_work_ = 0;
  allotments_.clear();
  int64_t possible = 0;
  for (int index : prefilling_)
    if (const int rows = possible_rows(slots_[size_t(index)]); rows > 0) {
      allotments_.push_back({index, rows, 0});
      possible += rows;
    }
  if (allotments_.empty()) return;
  const int room = config_.max_step_tokens - num_decode_rows_;
  const double budget = budget_.prefill_rows(num_decode_rows_, int(allotments_.size()));
  if (sliced_.num_rows > room) drop_slices();  // begun beside fewer streams
  if (budget <= 0) return;
  if (sliced_.num_rows == 0) {
    const bool is_small = budget < double(std::min<int64_t>(possible, Program::kMaxSliceRows));
    if (!is_small || num_decode_rows_ == 0 || program_->num_parts() == 1) {
      allot_prefill(std::max(1, int(budget)));
      for (const Allotment& a : allotments_)
        if (a.rows > 0) add_rows(a.slot, a.rows);
      prefill_work_ = step_.num_rows() - num_decode_rows_;
      return;
    }
    begin_slices(budget);
  }
  compose_slice(budget);
}

// As many rows as go through a whole number of parts within the budget.
void Executor::begin_slices(double budget) {
  const double row_parts = budget * program_->num_parts();
  const int most = std::min(Program::kMaxSliceRows, config_.max_step_tokens - num_decode_rows_);
  const int parts = std::max(1, int(std::ceil(row_parts / most)));
  allot_prefill(std::clamp(int(row_parts / parts), 1, most));
  drop_slices();
  for (const Allotment& a : allotments_)
    if (a.rows > 0) {
      sliced_.members.push_back(a);
      sliced_.num_rows += a.rows;
    }
}

// The sliced rows go on through as many parts as fit the budget, but one at least; without streams through all.
void Executor::compose_slice(double budget) {
  const int num_parts = program_->num_parts(), left = num_parts - sliced_.next_part;
  const double fitting = std::round(budget * num_parts / sliced_.num_rows);
  const int parts = num_decode_rows_ == 0 || fitting > left ? left : std::max(1, int(fitting));
  const int end = sliced_.next_part + parts;
  step_.slice = {int(step_.sequences.size()), num_decode_rows_, sliced_.next_part, end};
  for (const Allotment& a : sliced_.members) add_rows(a.slot, a.rows, end == num_parts);
  prefill_work_ = double(sliced_.num_rows) * parts / num_parts;
  sliced_.next_part = end;
}

// A decoding slot goes on with its last token, in the next step or when it can.
void Executor::plan_decode_row(int index) {
  Slot& slot = slots_[size_t(index)];
  const int position = slot.num_computed;
  if (possible_rows(slot) > 0)
    next_rows_.push_back({index, slot.tokens.back(), position, block_row(index)[position / kKvBlockTokens]});
  else
    standing_.push_back(index);
}

// The first in line gets half of the budget, so that it surely comes through; the one with the least left to do gets
// the other half, so that a short prompt does not wait for a long one; what they leave goes to the others in line.
void Executor::allot_prefill(int budget) {
  const auto give = [&](Allotment& to, int most) {
    const int rows = std::min({to.possible - to.rows, most, budget});
    to.rows += rows;
    budget -= rows;
  };
  Allotment& head = allotments_.front();
  const auto left = [&](const Allotment& a) {
    const Slot& slot = slots_[size_t(a.slot)];
    return int(slot.tokens.size()) - slot.num_computed;
  };
  Allotment* shortest = &head;
  for (Allotment& a : allotments_)
    if (slots_[size_t(a.slot)].priority == slots_[size_t(head.slot)].priority && left(a) < left(*shortest))
      shortest = &a;
  give(head, (budget + 1) / 2);
  give(*shortest, budget);
  for (Allotment& a : allotments_) give(a, budget);
}

// Tokens of a slot that could be computed now: those that are known, as far as there are blocks for them.
int Executor::possible_rows(Slot& slot) {
  if (slot.awaits_mask) return 0;
  const int wanted = int(slot.tokens.size()) - slot.num_computed;
  const int granted = slot.num_blocks * kKvBlockTokens - slot.num_computed;
  if (granted < wanted && !slot.asked_for_blocks) {
    slot.asked_for_blocks = true;
    const int missing = num_blocks_for(int(slot.tokens.size())) - slot.num_blocks;
    unpublished_.emplace_back(Event::Kind::blocks_low, slot.sequence_id, missing);
  }
  return std::min(wanted, granted);
}

// `ends_here`: the rows go through the last layer in this step, so that something comes of them.
void Executor::add_rows(int slot_index, int num_rows, bool ends_here) {
  const Slot& slot = slots_[size_t(slot_index)];
  const int32_t* table = block_row(slot_index);
  const int first_row = step_.num_rows();
  step_.sequences.push_back({first_row, num_rows, slot.num_computed, table});
  for (int i = 0; i < num_rows; ++i) {
    const int position = slot.num_computed + i;
    step_.token_ids.push_back(slot.tokens[size_t(position)]);
    step_.positions.push_back(position);
    step_.blocks.push_back(table[position / kKvBlockTokens]);
    if (!ends_here) continue;
    const bool is_last = position + 1 == int(slot.tokens.size());
    if (const Pooling pooling = slot.sampling.pooling; pooling != Pooling::none) {
      if (takes_state(pooling, position, int(slot.tokens.size()))) {
        step_.state_rows.push_back(first_row + i);
        state_slots_.push_back(slot_index);
      }
      if (is_last) embedded_.push_back(slot_index);
      continue;
    }
    const bool prompt_logprob = slot.sampling.num_prompt_logprobs >= 0 && position + 1 < slot.num_prompt;
    if (is_last || prompt_logprob) {
      step_.logit_rows.push_back(first_row + i);
      tasks_.push_back({slot_index, position, is_last, prompt_logprob});
    }
  }
}

void Executor::run_step() {
  program_->begin_step(step_, pool_);
  wake_reader();
  program_->run_body(step_, cache_, pool_);
  if (step_.slice) {
    if (step_.slice->part_end == program_->num_parts())
      drop_slices();
    else
      step_.sequences.resize(size_t(step_.slice->first_sequence));  // the others are on their way
  }
  for (const AttentionSequence& sequence : step_.sequences) {
    // The slot is found through its block row: sequences hold pointers into the table.
    const size_t index = size_t(sequence.block_table - block_tables_.data()) / size_t(max_blocks_per_seq_);
    slots_[index].num_computed += sequence.num_rows;
    report_prefill(slots_[index], sequence.num_rows);
  }
  pool_states();
  const int num_logit_rows = int(step_.logit_rows.size());
  for (int first = 0; first < num_logit_rows; first += program_->max_logit_rows()) {
    const int count = std::min(program_->max_logit_rows(), num_logit_rows - first);
    program_->run_head(step_, first, count, cache_, pool_);
    forward_end_ = Clock::now();
    take_masks(first, count);
    sample_rows(first, count);
  }
  if (num_logit_rows == 0) forward_end_ = Clock::now();
}

// The states of embedded prompts, summed in the order of their tokens.
void Executor::pool_states() {
  const int num_rows = int(step_.state_rows.size());
  for (int first = 0; first < num_rows; first += program_->max_logit_rows()) {
    const int count = std::min(program_->max_logit_rows(), num_rows - first);
    program_->run_states(step_, first, count, cache_, pool_);
    for (int i = 0; i < count; ++i) {
      Slot& slot = slots_[size_t(state_slots_[size_t(first + i)])];
      slot.states.add(*program_->kernels().elementwise, program_->states(i), program_->state_width());
    }
  }
  for (int index : embedded_) finish_embedding(slots_[size_t(index)]);
}

void Executor::finish_embedding(Slot& slot) {
  Event event(Event::Kind::embedding, slot.sequence_id);
  event.embedding = slot.states.take(slot.sampling.normalize);
  if (event.embedding.empty()) return finish(slot, FinishReason::error);
  unpublished_.push_back(std::move(event));
  finish(slot, FinishReason::stop);
}

// Blocks that have been filled can be shared from now on. The end of a prefill is told by its token (or embedding).
void Executor::report_prefill(const Slot& slot, int num_rows) {
  const bool more_to_come = slot.num_computed < int(slot.tokens.size());
  if (more_to_come && slot.num_computed / kKvBlockTokens > (slot.num_computed - num_rows) / kKvBlockTokens)
    unpublished_.emplace_back(Event::Kind::prefilled, slot.sequence_id, slot.num_computed);
}

// Masks that have come during the forward pass. A row whose mask is late is not sampled: it will be computed again.
void Executor::take_masks(int first, int count) {
  const auto is_late = [&](int i) {
    const LogitTask& task = tasks_[size_t(first + i)];
    return task.sample && !slots_[size_t(task.slot)].has_mask();
  };
  const auto any_is_late = [&] {
    for (int i = 0; i < count; ++i)
      if (is_late(i)) return true;
    return false;
  };
  if (!any_is_late()) return;
  const Clock::time_point deadline = Clock::now() + kMaskPatience;
  std::vector<MaskCommand> masks, unknown;
  while (any_is_late()) {
    masks.clear();
    {
      std::unique_lock lock(command_mutex_);
      command_arrived_.wait_until(lock, deadline, [&] { return closing_ || !masks_.empty(); });
      masks.swap(masks_);
    }
    if (masks.empty()) break;
    for (MaskCommand& mask : masks)
      if (running(mask.slot, mask.sequence_id))
        apply(mask);
      else
        unknown.push_back(std::move(mask));  // of a sequence whose admission waits for the end of this step
  }
  if (!unknown.empty()) {
    std::lock_guard lock(command_mutex_);
    masks_.insert(masks_.begin(), std::make_move_iterator(unknown.begin()), std::make_move_iterator(unknown.end()));
  }
  for (int i = 0; i < count; ++i) {
    if (!is_late(i)) continue;
    LogitTask& task = tasks_[size_t(first + i)];
    Slot& slot = slots_[size_t(task.slot)];
    task.sample = false;
    slot.awaits_mask = true;
    --slot.num_computed;
    if (slot.state == SlotState::decode) standing_.push_back(task.slot);
  }
}

void Executor::sample_rows(int first, int count) {
  results_.resize(size_t(count));
  prompt_results_.resize(size_t(count));
  const int vocab = program_->vocab_size();
  const ElementwiseKernels& kernels = *program_->kernels().elementwise;
  pool_.run(count, [&](int i, int worker) {
    const LogitTask& task = tasks_[size_t(first + i)];
    Slot& slot = slots_[size_t(task.slot)];
    float* logits = program_->logits(i);
    if (task.prompt_logprob) {
      SampleResult& result = prompt_results_[size_t(i)];
      result.chosen = token_logprob(kernels, logits, vocab, slot.tokens[size_t(task.position) + 1],
                                    slot.sampling.num_prompt_logprobs, result.top, scratch_[size_t(worker)]);
    }
    if (task.sample) {
      const bool constrained = slot.sampling.constrained;  // then the grammar alone says where the end may come
      if (slot.num_output() < slot.sampling.min_tokens && !constrained)
        for (int32_t token : slot.stop_ids) logits[token] = -std::numeric_limits<float>::infinity();
      const TokenCounts* counts = slot.sampling.params.has_penalties() ? &slot.counts : nullptr;
      results_[size_t(i)] =
          sample(kernels, logits, vocab, slot.sampling.params, counts, constrained ? slot.mask.data() : nullptr,
                 uint64_t(slot.num_output()), scratch_[size_t(worker)]);
    }
  });
  for (int i = 0; i < count; ++i) {
    const LogitTask& task = tasks_[size_t(first + i)];
    if (task.prompt_logprob) {
      Event event(Event::Kind::prompt_logprobs, slots_[size_t(task.slot)].sequence_id, task.position + 1);
      event.has_logprob = true;
      event.logprob = prompt_results_[size_t(i)].chosen;
      event.top = std::move(prompt_results_[size_t(i)].top);
      unpublished_.push_back(std::move(event));
    }
    if (task.sample) take_token(task.slot, results_[size_t(i)]);
  }
}

void Executor::take_token(int slot_index, SampleResult& result) {
  Slot& slot = slots_[size_t(slot_index)];
  if (result.status != SampleStatus::ok) return finish(slot, FinishReason::error);
  if (slot.state == SlotState::prefill) std::erase(prefilling_, slot_index);
  slot.state = SlotState::decode;
  slot.tokens.push_back(result.token);
  if (slot.sampling.params.has_penalties()) slot.counts.add_output(result.token);
  Event event(Event::Kind::token, slot.sequence_id, result.token);
  event.has_logprob = slot.sampling.params.num_logprobs >= 0;
  if (event.has_logprob) {
    event.logprob = result.chosen;
    event.top = std::move(result.top);
  }
  unpublished_.push_back(std::move(event));
  if (slot.stop_ids.contains(result.token))
    finish(slot, FinishReason::stop);
  else if (slot.num_output() >= slot.sampling.max_tokens || int(slot.tokens.size()) >= config_.max_seq_len)
    finish(slot, FinishReason::length);
  else
    plan_decode_row(slot_index);
}

void Executor::finish(Slot& slot, FinishReason reason) {
  Event event(Event::Kind::finished, slot.sequence_id, slot.num_computed);
  event.reason = reason;
  unpublished_.push_back(std::move(event));
  const int index = index_of(slot);
  if (slot.state == SlotState::prefill) {
    std::erase(prefilling_, index);
    // What is on its way begins anew without this one, whose blocks may be given to others now.
    if (std::ranges::any_of(sliced_.members, [index](const Allotment& a) { return a.slot == index; })) drop_slices();
  } else {
    std::erase_if(next_rows_, [index](const DecodeRow& row) { return row.slot == index; });
    std::erase(standing_, index);
  }
  slot.state = SlotState::free;
}

// ---- events --------------------------------------------------------------------------------------------------------

void Executor::publish(bool may_wait) {
  if (unpublished_.empty()) return;
  std::unique_lock lock(event_mutex_, std::defer_lock);
  if (may_wait)
    lock.lock();
  else if (!lock.try_lock())
    return;  // the reader is taking events right now: these come with the next step's
  events_.push_back(std::move(unpublished_));
  unpublished_.clear();
  if (!spare_events_.empty()) {
    unpublished_.swap(spare_events_.back());
    spare_events_.pop_back();
  }
  lock.unlock();
  reader_is_due_ = true;
}

// Apart from publish: the reader, once awake, may take the CPU from the loop. Better in the midst of a step, when the
// other threads go on, than between two.
void Executor::wake_reader() {
  if (reader_is_due_) event_arrived_.notify_one();
  reader_is_due_ = false;
}

void Executor::wait(double timeout_s, std::vector<Event>& out) {
  out.clear();
  std::vector<std::vector<Event>> batches;
  {
    std::unique_lock lock(event_mutex_);
    event_arrived_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return ended_ || !events_.empty(); });
    batches.swap(events_);
  }
  for (std::vector<Event>& batch : batches) {
    std::move(batch.begin(), batch.end(), std::back_inserter(out));
    batch.clear();
  }
  std::lock_guard lock(event_mutex_);
  while (spare_events_.size() < kMaxSpareBatches && !batches.empty()) {
    spare_events_.push_back(std::move(batches.back()));
    batches.pop_back();
  }
}

std::vector<StepRecord> Executor::take_trace() {
  std::lock_guard lock(stats_mutex_);
  return std::exchange(trace_, {});
}

ExecutorStats Executor::stats() const {
  std::vector<float> gaps;
  ExecutorStats stats;
  {
    std::lock_guard lock(stats_mutex_);
    stats = stats_;
    gaps.assign(gaps_us_.begin(), gaps_us_.begin() + std::ptrdiff_t(std::min<uint64_t>(num_gaps_, gaps_us_.size())));
  }
  if (!gaps.empty()) {
    std::sort(gaps.begin(), gaps.end());
    stats.gap_p50_us = gaps[gaps.size() / 2];
    stats.gap_p99_us = gaps[gaps.size() * 99 / 100];
  }
  return stats;
}

}  // namespace gapless
