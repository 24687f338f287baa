// The loop that runs step after step on its own thread, without Python.
//
// Commands come in through a queue and are applied between steps; what happened goes out as events. The loop never
// waits for either side while it has work: both queues are taken with try_lock, and what could not be handed over this
// time is handed over after the next step. With nothing to do the thread sleeps.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "executor/kv_cache.h"
#include "executor/program.h"
#include "executor/sampler.h"
#include "executor/step.h"
#include "platform/thread_pool.h"

namespace gapless {

enum class FinishReason : uint8_t { stop, length, abort, error };

const char* finish_reason_name(FinishReason reason);

// Everything that decides how one slot is sampled and when it ends.
struct SlotSampling {
  SamplingParams params;
  int max_tokens = 1;
  int min_tokens = 0;  // stop tokens can't be sampled before that many
  std::vector<int32_t> stop_token_ids;
  int num_prompt_logprobs = -1;  // -1: none
};

struct AdmitCommand {
  int slot;
  uint64_t sequence_id;
  std::vector<int32_t> token_ids;
  std::vector<int32_t> blocks;
  SlotSampling sampling;
  int num_cached;
};
struct ExtendCommand {
  int slot;
  uint64_t sequence_id;
  std::vector<int32_t> blocks;
};
struct CancelCommand {
  int slot;
  uint64_t sequence_id;
};
struct StepTokensCommand {
  int num_tokens;
};
using Command = std::variant<AdmitCommand, ExtendCommand, CancelCommand, StepTokensCommand>;

struct Event {
  enum class Kind : uint8_t { token, prompt_logprobs, finished, blocks_low, failed };
  explicit Event(Kind kind, uint64_t sequence_id = 0, int32_t value = 0)
      : kind(kind), sequence_id(sequence_id), value(value) {}

  Kind kind;
  uint64_t sequence_id;
  int32_t value;  // token: its id; prompt_logprobs: the position; blocks_low: the number of blocks
  FinishReason reason = FinishReason::stop;
  bool has_logprob = false;
  TokenLogprob logprob{};  // of the token (or of the prompt token at that position)
  std::vector<TokenLogprob> top;
  std::string message;  // failed
};

struct ExecutorConfig {
  int num_blocks;
  int max_num_seqs;
  int max_seq_len;
  int max_step_tokens;
  int num_threads;
};

struct ExecutorStats {
  uint64_t num_steps = 0;
  uint64_t num_rows = 0;
  double busy_s = 0;  // inside steps, from the first op to the end of sampling
  double work_s = 0;  // from the first to the last moment with work, gaps included
  double gap_p50_us = 0;
  double gap_p99_us = 0;
};

class Executor {
 public:
  // Starts the loop. Throws std::invalid_argument on sizes that don't fit together or exceed the Program's arena.
  Executor(std::shared_ptr<Program> program, const ExecutorConfig& config);
  ~Executor();  // close()

  const ExecutorConfig& config() const { return config_; }
  size_t kv_bytes() const { return cache_.size_bytes(); }
  int vocab_size() const { return program_->vocab_size(); }

  // Commands are checked here, in the caller's thread: a slot, block, token id or length out of range throws
  // std::invalid_argument, and the loop never sees it. After close(): std::logic_error.
  void push(Command command);

  // Waits until there are events, the loop has ended or `timeout_s` is over, and moves the events to `out`.
  void wait(double timeout_s, std::vector<Event>& out);

  ExecutorStats stats() const;

  // Ends the loop after the running step. Sequences that are still open end with `abort`. Idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  enum class SlotState : uint8_t { free, prefill, decode };

  struct Slot {
    SlotState state = SlotState::free;
    uint64_t sequence_id = 0;
    std::vector<int32_t> tokens;  // prompt and output
    int num_prompt = 0;
    int num_computed = 0;  // tokens whose keys and values are in the cache
    int num_blocks = 0;    // granted so far
    bool asked_for_blocks = false;
    SlotSampling sampling;
    TokenCounts counts;
    std::unordered_set<int32_t> stop_ids;
  };

  // A row of logits and what is to be done with it.
  struct LogitTask {
    int slot;
    int position;  // of the row's token
    bool sample;   // else: log-probability of the prompt token at position + 1 only
    bool prompt_logprob;
  };

  void check(const AdmitCommand& command) const;
  void check(const ExtendCommand& command) const;
  void check(const CancelCommand& command) const;
  void check(const StepTokensCommand& command) const;
  void check_slot(int slot) const;
  void check_blocks(const std::vector<int32_t>& blocks) const;

  void loop();
  bool take_commands(bool may_wait);  // false: closing
  void end_all(FinishReason reason);
  void apply(AdmitCommand& command);
  void apply(ExtendCommand& command);
  void apply(CancelCommand& command);
  void apply(StepTokensCommand& command);
  bool compose();
  void add_rows(int slot, int num_rows);
  void run_step();
  void sample_rows(int first, int count);
  void finish(Slot& slot, FinishReason reason);
  void take_token(int slot_index, SampleResult& result);
  void publish(bool may_wait);
  int32_t* block_row(int slot) { return block_tables_.data() + size_t(slot) * max_blocks_per_seq_; }

  const std::shared_ptr<Program> program_;
  const ExecutorConfig config_;
  const int max_blocks_per_seq_;
  KVCache cache_;

  // The loop's own state.
  ThreadPool pool_;
  std::vector<Slot> slots_;
  std::vector<int> order_;  // occupied slots by admission
  std::vector<int32_t> block_tables_;
  int step_tokens_;
  Step step_;
  std::vector<LogitTask> tasks_;
  std::vector<SampleResult> results_;
  std::vector<SampleResult> prompt_results_;
  std::vector<SamplerScratch> scratch_;  // per pool worker
  std::vector<Command> taken_;
  std::vector<Event> unpublished_;

  std::mutex command_mutex_;
  std::condition_variable command_arrived_;
  std::vector<Command> commands_;
  bool closing_ = false;

  std::mutex event_mutex_;
  std::condition_variable event_arrived_;
  std::vector<Event> events_;
  bool ended_ = false;

  mutable std::mutex stats_mutex_;
  ExecutorStats stats_;
  std::array<float, 4096> gaps_us_{};  // the latest gaps, a ring
  uint64_t num_gaps_ = 0;

  std::thread thread_;  // last: started when all else is ready
};

}  // namespace gapless
