#include "executor/executor.h"

#include <algorithm>
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
  }
  return "error";
}

Executor::Executor(std::shared_ptr<Program> program, const ExecutorConfig& config)
    : program_(std::move(program)),
      config_(config),
      max_blocks_per_seq_(num_blocks_for(config.max_seq_len)),
      cache_(program_->kv_shape(), config.num_blocks),
      pool_(config.num_threads),
      step_tokens_(config.max_step_tokens) {
  check_range("num_blocks", config.num_blocks, 1, std::numeric_limits<int32_t>::max());
  check_range("max_seq_len", config.max_seq_len, 1, 1 << 24);
  check_range("max_step_tokens", config.max_step_tokens, 1, program_->max_tokens());
  check_range("max_num_seqs", config.max_num_seqs, 1, config.max_step_tokens);
  slots_.resize(size_t(config.max_num_seqs));
  block_tables_.resize(slots_.size() * size_t(max_blocks_per_seq_));
  order_.reserve(slots_.size());
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
  check_range("prompt length", int64_t(command.token_ids.size()), 1, config_.max_seq_len - 1);
  for (int32_t token : command.token_ids) check_range("token id", token, 0, vocab_size() - 1);
  check_range("num_cached", command.num_cached, 0, int64_t(command.token_ids.size()) - 1);
  check_range("blocks for num_cached", int64_t(command.blocks.size()), num_blocks_for(command.num_cached),
              max_blocks_per_seq_);
  check_range("max_tokens", command.sampling.max_tokens, 1, std::numeric_limits<int32_t>::max());
  for (int32_t token : command.sampling.stop_token_ids) check_range("stop token id", token, 0, vocab_size() - 1);
  for (const auto& [token, bias] : command.sampling.params.logit_bias)
    check_range("logit_bias token id", token, 0, vocab_size() - 1);
}

void Executor::check(const ExtendCommand& command) const {
  check_slot(command.slot);
  check_blocks(command.blocks);
}

void Executor::check(const CancelCommand& command) const { check_slot(command.slot); }

void Executor::check(const StepTokensCommand& command) const {
  check_range("step tokens", command.num_tokens, config_.max_num_seqs, config_.max_step_tokens);
}

void Executor::push(Command command) {
  std::visit([this](const auto& c) { check(c); }, command);
  {
    std::lock_guard lock(command_mutex_);
    if (closing_) throw std::logic_error("the executor is closed");
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
        continue;
      }
      const Clock::time_point start = Clock::now();
      if (!working) resumed_at = start;
      run_step();
      const Clock::time_point end = Clock::now();
      {
        std::lock_guard lock(stats_mutex_);
        ++stats_.num_steps;
        stats_.num_rows += uint64_t(step_.num_rows());
        stats_.busy_s += std::chrono::duration<double>(end - start).count();
        if (working)
          gaps_us_[num_gaps_++ % gaps_us_.size()] =
              std::chrono::duration<float, std::micro>(start - sampled_at).count();
      }
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

// Sequences in slots, and those whose admission the loop will not get to.
void Executor::end_all(FinishReason reason) {
  for (int slot : std::vector<int>(order_)) finish(slots_[size_t(slot)], reason);
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
    command_arrived_.wait(lock, [&] { return closing_ || !commands_.empty(); });
  } else if (!lock.try_lock()) {
    return true;  // somebody is adding commands right now: they are for the next step
  }
  if (closing_) return false;
  taken_.swap(commands_);
  lock.unlock();
  for (Command& command : taken_) std::visit([this](auto& c) { apply(c); }, command);
  taken_.clear();
  return true;
}

void Executor::apply(AdmitCommand& command) {
  Slot& slot = slots_[size_t(command.slot)];
  if (slot.state != SlotState::free)
    throw std::logic_error("slot " + std::to_string(command.slot) + " was admitted twice");
  slot = Slot{};
  slot.state = SlotState::prefill;
  slot.sequence_id = command.sequence_id;
  slot.num_prompt = int(command.token_ids.size());
  slot.num_computed = command.num_cached;
  slot.tokens = std::move(command.token_ids);
  slot.sampling = std::move(command.sampling);
  slot.stop_ids.insert(slot.sampling.stop_token_ids.begin(), slot.sampling.stop_token_ids.end());
  if (slot.sampling.params.has_penalties()) slot.counts.add_prompt(slot.tokens.data(), slot.num_prompt);
  slot.num_blocks = int(command.blocks.size());
  std::copy(command.blocks.begin(), command.blocks.end(), block_row(command.slot));
  order_.push_back(command.slot);
}

void Executor::apply(ExtendCommand& command) {
  Slot& slot = slots_[size_t(command.slot)];
  if (slot.state == SlotState::free || slot.sequence_id != command.sequence_id) return;  // it has ended meanwhile
  const int room = max_blocks_per_seq_ - slot.num_blocks;
  const int count = std::min(room, int(command.blocks.size()));
  std::copy_n(command.blocks.begin(), count, block_row(command.slot) + slot.num_blocks);
  slot.num_blocks += count;
  slot.asked_for_blocks = false;
}

void Executor::apply(CancelCommand& command) {
  Slot& slot = slots_[size_t(command.slot)];
  if (slot.state == SlotState::free || slot.sequence_id != command.sequence_id) return;
  finish(slot, FinishReason::abort);
}

void Executor::apply(StepTokensCommand& command) { step_tokens_ = command.num_tokens; }

// Every decoding slot gets its row; what is left of the token budget goes to prefills, first admitted first.
bool Executor::compose() {
  step_.clear();
  tasks_.clear();
  for (SlotState wanted : {SlotState::decode, SlotState::prefill}) {
    for (int index : order_) {
      Slot& slot = slots_[size_t(index)];
      if (slot.state != wanted) continue;
      const int granted = slot.num_blocks * kKvBlockTokens - slot.num_computed;
      const int wanted_rows = int(slot.tokens.size()) - slot.num_computed;
      const int rows = std::min({wanted_rows, granted, step_tokens_ - step_.num_rows()});
      if (granted < wanted_rows && !slot.asked_for_blocks) {
        slot.asked_for_blocks = true;
        const int missing = num_blocks_for(int(slot.tokens.size())) - slot.num_blocks;
        unpublished_.emplace_back(Event::Kind::blocks_low, slot.sequence_id, missing);
      }
      if (rows > 0) add_rows(index, rows);
    }
  }
  return step_.num_rows() > 0;
}

void Executor::add_rows(int slot_index, int num_rows) {
  const Slot& slot = slots_[size_t(slot_index)];
  const int32_t* table = block_row(slot_index);
  const int first_row = step_.num_rows();
  step_.sequences.push_back({first_row, num_rows, slot.num_computed, table});
  for (int i = 0; i < num_rows; ++i) {
    const int position = slot.num_computed + i;
    step_.token_ids.push_back(slot.tokens[size_t(position)]);
    step_.positions.push_back(position);
    step_.blocks.push_back(table[position / kKvBlockTokens]);
    const bool is_last = position + 1 == int(slot.tokens.size());
    const bool prompt_logprob = slot.sampling.num_prompt_logprobs >= 0 && position + 1 < slot.num_prompt;
    if (is_last || prompt_logprob) {
      step_.logit_rows.push_back(first_row + i);
      tasks_.push_back({slot_index, position, is_last, prompt_logprob});
    }
  }
}

void Executor::run_step() {
  program_->run_body(step_, cache_, pool_);
  for (const AttentionSequence& sequence : step_.sequences) {
    // The slot is found through its block row: sequences hold pointers into the table.
    const size_t index = size_t(sequence.block_table - block_tables_.data()) / size_t(max_blocks_per_seq_);
    slots_[index].num_computed += sequence.num_rows;
  }
  const int num_logit_rows = int(step_.logit_rows.size());
  for (int first = 0; first < num_logit_rows; first += program_->max_logit_rows()) {
    const int count = std::min(program_->max_logit_rows(), num_logit_rows - first);
    program_->run_head(step_, first, count, cache_, pool_);
    sample_rows(first, count);
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
      const int num_output = int(slot.tokens.size()) - slot.num_prompt;
      if (num_output < slot.sampling.min_tokens)
        for (int32_t token : slot.stop_ids) logits[token] = -std::numeric_limits<float>::infinity();
      const TokenCounts* counts = slot.sampling.params.has_penalties() ? &slot.counts : nullptr;
      results_[size_t(i)] = sample(kernels, logits, vocab, slot.sampling.params, counts, nullptr, uint64_t(num_output),
                                   scratch_[size_t(worker)]);
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
  const int num_output = int(slot.tokens.size()) - slot.num_prompt;
  if (slot.stop_ids.contains(result.token))
    finish(slot, FinishReason::stop);
  else if (num_output >= slot.sampling.max_tokens || int(slot.tokens.size()) >= config_.max_seq_len)
    finish(slot, FinishReason::length);
}

void Executor::finish(Slot& slot, FinishReason reason) {
  Event event(Event::Kind::finished, slot.sequence_id);
  event.reason = reason;
  unpublished_.push_back(std::move(event));
  slot.state = SlotState::free;
  order_.erase(std::find(order_.begin(), order_.end(), int(&slot - slots_.data())));
}

// ---- events --------------------------------------------------------------------------------------------------------

void Executor::publish(bool may_wait) {
  if (unpublished_.empty()) return;
  std::unique_lock lock(event_mutex_, std::defer_lock);
  if (may_wait)
    lock.lock();
  else if (!lock.try_lock())
    return;  // the reader is taking events right now: these come with the next step's
  if (events_.empty()) {
    events_.swap(unpublished_);
  } else {
    std::move(unpublished_.begin(), unpublished_.end(), std::back_inserter(events_));
    unpublished_.clear();
  }
  lock.unlock();
  event_arrived_.notify_one();
}

void Executor::wait(double timeout_s, std::vector<Event>& out) {
  out.clear();
  std::unique_lock lock(event_mutex_);
  event_arrived_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return ended_ || !events_.empty(); });
  out.swap(events_);
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
