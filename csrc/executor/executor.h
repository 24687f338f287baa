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
#include "executor/pooling.h"
#include "executor/program.h"
#include "executor/sampler.h"
#include "executor/step.h"
#include "executor/token_budget.h"
#include "platform/thread_pool.h"

namespace gapless {

// `preempted` is no end: the sequence is to be admitted again, with the tokens it has by then.
enum class FinishReason : uint8_t { stop, length, abort, error, preempted };

const char* finish_reason_name(FinishReason reason);

// Everything that decides what comes of one slot and when it ends.
struct SlotSampling {
  SamplingParams params;
  int max_tokens = 1;
  int min_tokens = 0;  // stop tokens can't be sampled before that many
  std::vector<int32_t> stop_token_ids;
  int num_prompt_logprobs = -1;     // -1: none
  bool constrained = false;         // every token is sampled under a mask of its own (MaskCommand), or not at all
  Pooling pooling = Pooling::none;  // else: nothing is sampled; the prompt is embedded, and that is the end
  bool normalize = true;            // the embedding gets length 1
};

struct AdmitCommand {
  int slot;
  uint64_t sequence_id;
  std::vector<int32_t> token_ids;
  std::vector<int32_t> blocks;
  SlotSampling sampling;
  int num_cached;       // first tokens whose keys and values are in the given blocks already
  int num_prompt = -1;  // tokens after these are output: a preempted sequence goes on; -1: all are prompt
  int priority = 0;     // lower values prefill first
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
struct PreemptCommand {
  int slot;
  uint64_t sequence_id;
};
struct TargetTpotCommand {
  double seconds;  // 0: automatic
};
// The tokens that may be sampled as output number `output_index` (0 is the first): bit t % 32 of word t / 32.
struct MaskCommand {
  int slot;
  uint64_t sequence_id;
  int output_index;
  std::vector<uint32_t> allowed;
};
using Command =
    std::variant<AdmitCommand, ExtendCommand, CancelCommand, PreemptCommand, TargetTpotCommand, MaskCommand>;

struct Event {
  enum class Kind : uint8_t { token, prompt_logprobs, embedding, prefilled, finished, blocks_low, failed };
  explicit Event(Kind kind, uint64_t sequence_id = 0, int32_t value = 0)
      : kind(kind), sequence_id(sequence_id), value(value) {}

  Kind kind;
  uint64_t sequence_id;
  // token: its id; prompt_logprobs: the position; prefilled, finished: tokens whose keys and values are in the cache;
  // blocks_low: the number of blocks
  int32_t value;
  FinishReason reason = FinishReason::stop;
  bool has_logprob = false;
  TokenLogprob logprob{};  // of the token (or of the prompt token at that position)
  std::vector<TokenLogprob> top;
  std::vector<float> embedding;
  std::string message;  // failed
};

struct ExecutorConfig {
  int num_blocks;
  int max_num_seqs;
  int max_seq_len;
  int max_step_tokens;
  int num_threads;
  bool trace = false;
};

struct ExecutorStats {
  uint64_t num_steps = 0;
  uint64_t num_rows = 0;
  uint64_t num_prefill_rows = 0;
  uint64_t num_sliced_steps = 0;  // with rows that went through a part of the layers
  double busy_s = 0;              // inside steps, from the first op to the end of sampling
  double work_s = 0;              // from the first to the last moment with work, gaps included
  double gap_p50_us = 0;
  double gap_p99_us = 0;
  std::array<uint64_t, 24>
      gap_histogram{};  // of all steps: bucket i holds gaps of [2^i, 2^(i+1)) us, the first all below
};

// One step as a trace shows it; seconds of the monotonic clock.
struct StepRecord {
  double begin_s;        // the first op
  double forward_end_s;  // all but the last rows of logits have been sampled
  double end_s;          // the end of sampling
  int num_decode_rows, num_prefill_rows;
  int num_sliced_rows;  // of prompts, which went through some layers but not through the last
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

  // The steps since the last call (at most 2^20 are kept); none without config().trace.
  std::vector<StepRecord> take_trace();

  // Ends the loop after the running step. Sequences that are still open end with `abort`. Idempotent.
  void close();

 private:
  using Clock = std::chrono::steady_clock;

  enum class SlotState : uint8_t { free, prefill, decode };

  struct Slot {
    SlotState state = SlotState::free;
    bool asked_for_blocks = false;
    bool awaits_mask = false;  // has been computed once and could not be sampled
    int num_prompt = 0;
    int num_computed = 0;  // tokens whose keys and values are in the cache
    int num_blocks = 0;    // granted so far
    uint64_t sequence_id = 0;
    std::vector<int32_t> tokens;  // prompt and output
    int priority = 0;
    int mask_index = -1;  // the output that `mask` is for
    std::vector<uint32_t> mask;
    SlotSampling sampling;
    TokenCounts counts;
    std::unordered_set<int32_t> stop_ids;
    StateSum states;

    int num_output() const { return int(tokens.size()) - num_prompt; }
    bool has_mask() const { return !sampling.constrained || mask_index == num_output(); }
  };

  // All that a decoding slot's row of the next step needs.
  struct DecodeRow {
    int slot;
    int32_t token;
    int32_t position;
    int32_t block;
  };

  // Rows of prefill that a slot gets in this step.
  struct Allotment {
    int slot;
    int possible;
    int rows;
  };

  // Rows of prompts that go through the layers in several steps, so that none of these takes long.
  struct SlicedPrefill {
    std::vector<Allotment> members;
    int num_rows = 0;
    int next_part = 0;
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
  void check(const PreemptCommand& command) const;
  void check(const TargetTpotCommand& command) const;
  void check(const MaskCommand& command) const;
  void check_slot(int slot) const;
  void check_blocks(const std::vector<int32_t>& blocks) const;

  void loop();
  bool take_commands(bool may_wait);  // false: closing
  void end_all(FinishReason reason);
  void apply(AdmitCommand& command);
  void apply(ExtendCommand& command);
  void apply(CancelCommand& command);
  void apply(PreemptCommand& command);
  void apply(TargetTpotCommand& command);
  void apply(MaskCommand& command);
  Slot* running(int slot, uint64_t sequence_id);  // null when that sequence has ended
  bool compose();
  int possible_rows(Slot& slot);
  void compose_prefill();
  void begin_slices(double budget);
  void compose_slice(double budget);
  void drop_slices() { sliced_ = {}; }
  void allot_prefill(int budget);
  void add_rows(int slot, int num_rows, bool ends_here = true);
  void plan_decode_row(int slot);
  int index_of(const Slot& slot) const { return int(&slot - slots_.data()); }
  void run_step();
  void report_prefill(const Slot& slot, int num_rows);
  void pool_states();
  void finish_embedding(Slot& slot);
  void take_masks(int first, int count);
  void sample_rows(int first, int count);
  void record_step(Clock::time_point begin, Clock::time_point end, float gap_us);
  void finish(Slot& slot, FinishReason reason);
  void take_token(int slot_index, SampleResult& result);
  void publish(bool may_wait);
  void wake_reader();
  int32_t* block_row(int slot) { return block_tables_.data() + size_t(slot) * max_blocks_per_seq_; }

  const std::shared_ptr<Program> program_;
  const ExecutorConfig config_;
  const int max_blocks_per_seq_;
  KVCache cache_;

  // The loop's own state.
  ThreadPool pool_;
  std::vector<Slot> slots_;
  // The loop never looks at all slots between two steps: a step sweeps the caches, and to fetch hundreds of slots one
  // after the other would be most of the gap. Each is on one of these lists.
  std::vector<int> prefilling_;       // by priority, then admission
  std::vector<DecodeRow> next_rows_;  // of slots that go on in the next step, written while sampling
  std::vector<int> standing_;         // decoding slots that wait for a block or a mask
  std::vector<int32_t> block_tables_;
  TokenBudget budget_;
  int num_decode_rows_ = 0;  // of the step
  double prefill_work_ = 0;  // in rows; one that goes through half of the layers is half a row
  Clock::time_point forward_end_{};
  std::vector<Allotment> allotments_;
  SlicedPrefill sliced_;
  Step step_;
  std::vector<LogitTask> tasks_;
  std::vector<int> state_slots_;  // whose state_rows they are
  std::vector<int> embedded_;     // slots whose prompts end in this step
  std::vector<SampleResult> results_;
  std::vector<SampleResult> prompt_results_;
  std::vector<SamplerScratch> scratch_;  // per pool worker
  std::vector<Command> taken_;
  std::vector<Event> unpublished_;
  bool reader_is_due_ = false;  // published, but the reader has not been woken

  std::mutex command_mutex_;
  std::condition_variable command_arrived_;
  std::vector<Command> commands_;
  std::vector<MaskCommand> masks_;  // apart from the others: also taken in mid-step
  bool closing_ = false;

  std::mutex event_mutex_;
  std::condition_variable event_arrived_;
  std::vector<std::vector<Event>> events_;        // a batch is handed over in constant time
  std::vector<std::vector<Event>> spare_events_;  // read batches: their memory is used again
  bool ended_ = false;

  mutable std::mutex stats_mutex_;
  ExecutorStats stats_;
  std::array<float, 4096> gaps_us_{};  // the latest gaps, a ring
  uint64_t num_gaps_ = 0;
  std::vector<StepRecord> trace_;

  std::thread thread_;  // last: started when all else is ready
};

}  // namespace gapless
