// The loop on a tiny network: events, slots, blocks, and threads that talk to it all at once.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "executor/executor.h"
#include "executor/ops.h"
#include "ops/pack.h"

using namespace gapless;

namespace {

constexpr int kVocab = 64, kHidden = 32, kHeadDim = 16, kHeads = 2, kMaxTokens = 32, kLogitRows = 4;
constexpr int kLayers = 3;

Weight random_weight(int rows, int cols, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.5f);
  std::vector<float> values(size_t(rows) * size_t(cols));
  for (float& value : values) value = normal(random);
  auto weight = std::make_shared<PackedWeight>(
      PackedWeight::allocate(rows, cols, packed_format(GgmlType::f32, cols, InstantQuant::none, 32)));
  const PackSource source{reinterpret_cast<const std::byte*>(values.data()), GgmlType::f32, cols, nullptr};
  pack_tiles(*weight, source, 0, weight->num_tiles);
  return weight;
}

std::shared_ptr<Program> tiny_program(bool has_states = true) {
  auto program = std::make_shared<Program>(
      ProgramLimits{kMaxTokens, kLogitRows, kVocab, {std::vector<KvDtype>(kLayers, KvDtype::f16), 1, kHeadDim}});
  const Floats ones = std::make_shared<std::vector<float>>(kHidden, 1.0f);
  int64_t end = 0;
  const auto buffer = [&](Domain domain, int width) {
    const int64_t rows = domain == Domain::token ? kMaxTokens : kLogitRows;
    const int id = program->add_buffer(domain, width * 4, end);
    end += (rows * width * 4 + 63) / 64 * 64;
    return id;
  };
  const int x = buffer(Domain::token, kHidden), h = buffer(Domain::token, kHidden);
  const int qkv = buffer(Domain::token, (kHeads + 2) * kHeadDim), out = buffer(Domain::token, kHeads * kHeadDim);
  const int last = buffer(Domain::logit, kHidden), logits = buffer(Domain::logit, kVocab);
  const int rope = program->add_rope(std::vector<float>(kHeadDim / 2, 0.1f), 1.0f);
  add_embed(*program, random_weight(kVocab, kHidden, 1), 1.0f, x);
  for (int layer = 0; layer < kLayers; ++layer) {
    const uint32_t seed = 10 * uint32_t(layer);
    if (layer > 0) program->mark_part(x);
    add_rms_norm(*program, x, ones, 1e-6f, h, kNone);
    add_linear(*program, h, kNone,
               {{random_weight((kHeads + 2) * kHeadDim, kHidden, seed + 2), nullptr, qkv, 0, false}});
    add_rope_cache(*program, qkv, layer, {kHeads, rope, 0.25f, nullptr, nullptr, 1e-6f});
    add_attention(*program, qkv, layer, kHeads, out, 0, 0.0f);
    add_linear(*program, out, kNone, {{random_weight(kHidden, kHeads * kHeadDim, seed + 3), nullptr, x, 0, true}});
  }
  add_gather(*program, x, last);
  if (has_states) program->mark_states(last);
  add_linear(*program, last, kNone, {{random_weight(kVocab, kHidden, 4), nullptr, logits, 0, false}});
  program->finish(end, logits);
  return program;
}

ExecutorConfig config(int num_blocks = 64, int num_threads = 2) {
  return {num_blocks, 8, 128, kMaxTokens, num_threads};
}

AdmitCommand admission(int slot, uint64_t id, std::vector<int32_t> tokens, std::vector<int32_t> blocks,
                       int max_tokens) {
  SlotSampling sampling;
  sampling.params.temperature = 0;
  sampling.max_tokens = max_tokens;
  return {slot, id, std::move(tokens), std::move(blocks), std::move(sampling), 0};
}

// Tokens and end of each sequence, gathered until `num_finished` have ended.
struct Outcome {
  std::map<uint64_t, std::vector<int32_t>> tokens;
  std::map<uint64_t, FinishReason> finished;
  std::map<uint64_t, std::vector<float>> prompt_logprobs;
  std::map<uint64_t, std::vector<int32_t>> prefilled;
  std::map<uint64_t, int32_t> num_computed;
  std::map<uint64_t, std::vector<float>> embeddings;
  std::vector<Event> others;

  void gather(Executor& executor, size_t num_finished) {
    std::vector<Event> events;
    for (int waits = 0; finished.size() < num_finished && waits < 600; ++waits) {
      executor.wait(0.1, events);
      for (Event& event : events) take(event);
    }
  }
  void take(Event& event) {
    switch (event.kind) {
      case Event::Kind::token:
        tokens[event.sequence_id].push_back(event.value);
        break;
      case Event::Kind::finished:
        CHECK(!finished.contains(event.sequence_id));  // exactly one end
        finished[event.sequence_id] = event.reason;
        num_computed[event.sequence_id] = event.value;
        break;
      case Event::Kind::prompt_logprobs:
        prompt_logprobs[event.sequence_id].push_back(event.logprob.logprob);
        break;
      case Event::Kind::embedding:
        CHECK(!finished.contains(event.sequence_id) && !embeddings.contains(event.sequence_id));
        embeddings[event.sequence_id] = std::move(event.embedding);
        break;
      case Event::Kind::prefilled:
        prefilled[event.sequence_id].push_back(event.value);
        break;
      default:
        others.push_back(std::move(event));
    }
  }
};

std::vector<int32_t> prompt(int length, int seed) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < length; ++i) tokens.push_back((seed * 31 + i * 7) % kVocab);
  return tokens;
}

std::vector<int32_t> alone(const std::vector<int32_t>& tokens, int max_tokens) {
  Executor executor(tiny_program(), config(64, 1));
  executor.push(admission(0, 1, tokens, {5, 3, 9, 1, 0, 2, 4, 6}, max_tokens));
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK(outcome.finished.at(1) == FinishReason::length);
  return outcome.tokens[1];
}

void test_batch_equals_alone() {
  Executor executor(tiny_program(), config());
  for (int i = 0; i < 8; ++i) {
    std::vector<int32_t> blocks;
    for (int b = 0; b < 8; ++b) blocks.push_back(b * 8 + i);
    executor.push(admission(i, 100 + uint64_t(i), prompt(3 + 11 * i, i), blocks, 5 + i));
  }
  Outcome outcome;
  outcome.gather(executor, 8);
  for (int i = 0; i < 8; ++i) CHECK(outcome.tokens[100 + uint64_t(i)] == alone(prompt(3 + 11 * i, i), 5 + i));
}

void test_stop_tokens_and_min_tokens() {
  const std::vector<int32_t> tokens = alone(prompt(5, 3), 12);
  for (int min_tokens : {0, 6}) {
    Executor executor(tiny_program(), config());
    AdmitCommand command = admission(2, 7, prompt(5, 3), {0, 1, 2}, 12);
    command.sampling.stop_token_ids = {tokens[1]};
    command.sampling.min_tokens = min_tokens;
    executor.push(command);
    Outcome outcome;
    outcome.gather(executor, 1);
    const std::vector<int32_t>& found = outcome.tokens[7];
    const auto stop = std::find(found.begin(), found.end(), tokens[1]);
    CHECK(stop - found.begin() >= min_tokens);
    if (min_tokens == 0) CHECK(found.size() == 2 && outcome.finished[7] == FinishReason::stop);
  }
}

void test_prompt_logprobs_take_several_head_runs() {
  Executor executor(tiny_program(), config());
  AdmitCommand command = admission(0, 1, prompt(21, 1), {0, 1}, 1);
  command.sampling.num_prompt_logprobs = 0;
  executor.push(command);
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK(outcome.prompt_logprobs[1].size() == 20);
  for (float logprob : outcome.prompt_logprobs[1]) CHECK(logprob <= 0 && std::isfinite(logprob));
  CHECK(outcome.tokens[1] == alone(prompt(21, 1), 1));
}

// A slot without blocks sits out, asks once, and goes on where it was; its neighbour never waits.
void test_blocks_on_demand() {
  Executor executor(tiny_program(), config());
  executor.push(admission(0, 1, prompt(20, 1), {0}, 20));
  executor.push(admission(1, 2, prompt(20, 2), {1, 2, 3}, 20));
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK(outcome.finished.contains(2));
  CHECK(outcome.others.size() == 1 && outcome.others[0].kind == Event::Kind::blocks_low);
  CHECK(outcome.others[0].sequence_id == 1 && outcome.others[0].value == 1);
  executor.push(ExtendCommand{0, 1, {4, 5}});
  outcome.gather(executor, 2);
  CHECK(outcome.tokens[1] == alone(prompt(20, 1), 20));
  CHECK(outcome.tokens[2] == alone(prompt(20, 2), 20));
}

void test_cancel_and_close() {
  Outcome outcome;
  {
    Executor executor(tiny_program(), config());
    executor.push(admission(0, 1, prompt(40, 1), {0}, 50));  // stuck without blocks
    executor.push(CancelCommand{0, 99});                     // somebody else's id: nothing happens
    executor.push(CancelCommand{0, 1});
    outcome.gather(executor, 1);
    CHECK(outcome.finished[1] == FinishReason::abort);
    executor.push(admission(0, 2, prompt(4, 1), {0, 1}, 3));  // the slot is free again
    outcome.gather(executor, 2);
    CHECK(outcome.finished[2] == FinishReason::length);
    executor.push(admission(3, 3, prompt(40, 1), {0}, 50));
    executor.close();
    outcome.gather(executor, 3);
    CHECK(outcome.finished[3] == FinishReason::abort);
    bool refused = false;
    try {
      executor.push(admission(4, 4, {1}, {0}, 1));
    } catch (const std::logic_error&) {
      refused = true;
    }
    CHECK(refused);
  }
}

void test_commands_out_of_range_are_refused() {
  Executor executor(tiny_program(), config());
  const auto refused = [&](Command command) {
    try {
      executor.push(std::move(command));
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(refused(admission(8, 1, {1}, {0}, 1)));
  CHECK(refused(admission(-1, 1, {1}, {0}, 1)));
  CHECK(refused(admission(0, 1, {}, {0}, 1)));
  CHECK(refused(admission(0, 1, {kVocab}, {0}, 1)));
  CHECK(refused(admission(0, 1, {1}, {64}, 1)));
  CHECK(refused(admission(0, 1, {1}, {0}, 0)));
  CHECK(refused(admission(0, 1, prompt(128, 1), {0}, 1)));
  CHECK(refused(ExtendCommand{0, 1, {-1}}));
  CHECK(refused(TargetTpotCommand{-1.0}));
  CHECK(refused(PreemptCommand{8, 1}));
  CHECK(refused(MaskCommand{0, 1, 0, {1}}));
  AdmitCommand cached = admission(0, 1, {1, 2}, {0}, 1);
  cached.num_cached = 2;
  CHECK(refused(cached));
}

// Put out after some tokens and admitted again with them, a sequence goes on as if nothing had happened: penalties,
// seeds and limits count from its prompt.
void test_preempted_and_resumed() {
  AdmitCommand command = admission(0, 1, prompt(20, 1), {0, 1, 2, 3, 4, 5}, 60);
  command.sampling.params.temperature = 1.0f;
  command.sampling.params.seed = 11;
  command.sampling.params.frequency_penalty = 0.7f;
  std::vector<int32_t> expected;
  {
    Executor executor(tiny_program(), config());
    executor.push(command);
    Outcome outcome;
    outcome.gather(executor, 1);
    expected = outcome.tokens[1];
    CHECK(expected.size() == 60);
  }
  Executor executor(tiny_program(), config());
  command.blocks = {0, 1};  // it stands still after 32 tokens
  executor.push(command);
  Outcome first;
  std::vector<Event> events;
  while (first.others.empty()) {
    executor.wait(0.1, events);
    for (Event& event : events) first.take(event);
  }
  executor.push(PreemptCommand{0, 1});
  executor.push(PreemptCommand{0, 1});  // once more does nothing
  first.gather(executor, 1);
  CHECK(first.finished[1] == FinishReason::preempted);
  CHECK(first.num_computed[1] == 32);
  for (const int num_cached : {0, 16, 32}) {
    AdmitCommand again = command;
    again.token_ids.insert(again.token_ids.end(), first.tokens[1].begin(), first.tokens[1].end());
    again.num_prompt = 20;
    again.num_cached = num_cached;
    again.blocks = {0, 1, 2, 3, 4, 5};
    executor.push(again);
    Outcome rest;
    rest.gather(executor, 1);
    CHECK(rest.finished[1] == FinishReason::length);
    std::vector<int32_t> all = first.tokens[1];
    all.insert(all.end(), rest.tokens[1].begin(), rest.tokens[1].end());
    CHECK(all == expected);
  }
}

// Prompts beside a stream go through the layers in several steps; some of them end on their way, and their blocks are
// given to others. Nobody's tokens show any of that.
void test_sliced_prefill(int num_steps) {
  Executor executor(tiny_program(), config());
  executor.push(TargetTpotCommand{1e-9});  // out of reach: prefill gets as little time as it ever does
  const auto blocks = [](int first) {
    std::vector<int32_t> found;
    for (int i = 0; i < 8; ++i) found.push_back(8 * first + i);
    return found;
  };
  executor.push(admission(0, 1, prompt(4, 1), blocks(0), 120));
  executor.push(admission(1, 2, prompt(90, 2), blocks(1), 20));
  executor.push(admission(2, 3, prompt(70, 3), blocks(2), 20));
  Outcome outcome;
  const auto wait_for_steps = [&](int count) {
    std::vector<Event> events;
    for (const size_t goal = outcome.tokens[1].size() + size_t(count);
         outcome.tokens[1].size() < goal && !outcome.finished.contains(1);) {
      executor.wait(0.1, events);
      for (Event& event : events) outcome.take(event);
    }
  };
  wait_for_steps(num_steps);
  executor.push(PreemptCommand{1, 2});
  executor.push(admission(1, 4, prompt(80, 4), blocks(1), 5));  // the same blocks
  wait_for_steps(num_steps);
  executor.push(CancelCommand{2, 3});
  executor.push(admission(3, 5, prompt(60, 5), blocks(3), 5));
  AdmitCommand embedding = admission(4, 6, prompt(50, 6), blocks(4), 1);
  embedding.sampling.pooling = Pooling::mean;
  executor.push(embedding);
  outcome.gather(executor, 6);
  CHECK(outcome.finished.size() == 6);
  const auto is_beginning = [](const std::vector<int32_t>& part, const std::vector<int32_t>& whole) {
    return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
  };
  CHECK(is_beginning(outcome.tokens[2], alone(prompt(90, 2), 20)));
  CHECK(is_beginning(outcome.tokens[3], alone(prompt(70, 3), 20)));
  CHECK(outcome.tokens[1] == alone(prompt(4, 1), 120));
  CHECK(outcome.tokens[4] == alone(prompt(80, 4), 5));
  CHECK(outcome.tokens[5] == alone(prompt(60, 5), 5));
  CHECK(executor.stats().num_sliced_steps > 10);
  CHECK(executor.stats().num_rows >= executor.stats().num_prefill_rows + 120);
  Executor quiet(tiny_program(), config());
  embedding.slot = 0;
  quiet.push(embedding);
  Outcome expected;
  expected.gather(quiet, 1);
  CHECK(!expected.embeddings[6].empty() && outcome.embeddings[6] == expected.embeddings[6]);
  CHECK(quiet.stats().num_sliced_steps == 0);
}

// A long prefill tells which blocks can be shared.
void test_prefill_is_reported() {
  Executor executor(tiny_program(), config());
  executor.push(admission(0, 1, prompt(100, 1), {0, 1, 2, 3, 4, 5, 6}, 1));
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK((outcome.prefilled[1] == std::vector<int32_t>{32, 64, 96}));
  CHECK(outcome.num_computed[1] == 100);
}

// Two sequences share the blocks of one prompt, and one of them writes its last token once more: the same bits.
void test_shared_blocks() {
  const std::vector<int32_t> expected = alone(prompt(32, 4), 20);
  Executor executor(tiny_program(), config());
  executor.push(admission(0, 1, prompt(32, 4), {0, 1, 2, 3}, 20));
  Outcome outcome;
  std::vector<Event> events;
  while (outcome.tokens[1].empty()) {
    executor.wait(0.1, events);
    for (Event& event : events) outcome.take(event);
  }
  for (const int num_cached : {16, 31}) {
    AdmitCommand command = admission(1, uint64_t(num_cached), prompt(32, 4), {0, 1, 4, 5}, 20);
    command.num_cached = num_cached;
    executor.push(command);
    while (!outcome.finished.contains(uint64_t(num_cached))) {
      executor.wait(0.1, events);
      for (Event& event : events) outcome.take(event);
    }
    CHECK(outcome.tokens[uint64_t(num_cached)] == expected);
  }
  outcome.gather(executor, 3);
  CHECK(outcome.tokens[1] == expected);
}

// A constrained slot takes tokens from its masks only, waits for those that are late, and nobody waits with it.
void test_masks() {
  Executor executor(tiny_program(), config());
  const auto only = [](int token) {
    std::vector<uint32_t> words((kVocab + 31) / 32);
    words[size_t(token) / 32] |= 1u << (token % 32);
    return words;
  };
  AdmitCommand command = admission(0, 1, prompt(5, 1), {0, 1}, 3);
  command.sampling.constrained = true;
  command.sampling.params.logit_bias = {{9, 100.0f}};  // no bias lifts a token that is not allowed
  command.sampling.min_tokens = 3;
  command.sampling.stop_token_ids = {40};
  executor.push(command);
  executor.push(admission(1, 2, prompt(5, 2), {2, 3}, 20));
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK(outcome.finished.contains(2));
  CHECK(outcome.tokens[2] == alone(prompt(5, 2), 20));
  CHECK(outcome.tokens[1].empty());
  executor.push(MaskCommand{0, 1, 1, only(7)});  // not its turn: of no effect
  executor.push(MaskCommand{0, 9, 0, only(7)});  // another sequence's
  std::vector<Event> events;
  executor.wait(0.05, events);
  CHECK(events.empty());
  const int wanted[] = {33, 3, 40};
  for (int i = 0; i < 3; ++i) {
    executor.push(MaskCommand{0, 1, i, only(wanted[i])});
    while (int(outcome.tokens[1].size()) <= i) {
      executor.wait(0.1, events);
      for (Event& event : events) outcome.take(event);
    }
  }
  outcome.gather(executor, 2);
  CHECK((outcome.tokens[1] == std::vector<int32_t>{33, 3, 40}));
  CHECK(outcome.finished[1] == FinishReason::stop);

  command.sequence_id = 3;
  executor.push(command);
  executor.push(MaskCommand{0, 3, 0, std::vector<uint32_t>((kVocab + 31) / 32)});  // nothing is allowed
  outcome.gather(executor, 3);
  CHECK(outcome.finished[3] == FinishReason::error);
}

// A short prompt behind a long one is through before it; a lower priority number goes before both.
void test_prefill_order() {
  Executor executor(tiny_program(), {64, 8, 1024, kMaxTokens, 1});
  std::vector<int32_t> blocks(63);
  for (int i = 0; i < 63; ++i) blocks[size_t(i)] = i;
  executor.push(admission(0, 1, prompt(1000, 1), blocks, 1));
  executor.push(admission(1, 2, prompt(15, 2), {63}, 1));
  std::vector<uint64_t> order;
  std::vector<Event> events;
  while (order.size() < 2) {
    executor.wait(0.1, events);
    for (const Event& event : events)
      if (event.kind == Event::Kind::finished) order.push_back(event.sequence_id);
  }
  CHECK((order == std::vector<uint64_t>{2, 1}));
}

constexpr Pooling kPoolings[] = {Pooling::last, Pooling::mean, Pooling::cls};

AdmitCommand embedding_of(int slot, uint64_t id, std::vector<int32_t> tokens, std::vector<int32_t> blocks,
                          Pooling pooling, bool normalize = false) {
  AdmitCommand command = admission(slot, id, std::move(tokens), std::move(blocks), 0);
  command.sampling.pooling = pooling;
  command.sampling.normalize = normalize;
  return command;
}

std::vector<float> embedded_alone(const std::vector<int32_t>& tokens, Pooling pooling, bool normalize = false,
                                  int max_step_tokens = kMaxTokens, int num_threads = 1) {
  Executor executor(tiny_program(), {64, 1, 128, max_step_tokens, num_threads});
  executor.push(embedding_of(0, 1, tokens, {5, 3, 9, 1, 0, 2, 4, 6}, pooling, normalize));
  Outcome outcome;
  outcome.gather(executor, 1);
  CHECK(outcome.finished.at(1) == FinishReason::stop);
  CHECK(outcome.num_computed.at(1) == int(tokens.size()));
  CHECK(outcome.tokens.empty());
  return outcome.embeddings[1];
}

void test_state_sum() {
  const auto pooled = [](const std::vector<std::vector<float>>& states, bool normalize) {
    StateSum sum;
    for (const std::vector<float>& state : states)
      sum.add(*default_kernels().elementwise, state.data(), int(state.size()));
    return sum.take(normalize);
  };
  CHECK((pooled({{1, 2, 3}, {3, 2, 1}}, false) == std::vector<float>{2, 2, 2}));
  CHECK((pooled({{0x3p100f, 0x4p100f}}, true) == std::vector<float>{0.6f, 0.8f}));  // the squares have no f32
  CHECK((pooled({{0, 0}}, true) == std::vector<float>{0, 0}));
  CHECK(pooled({{1, 2}, {INFINITY, 0}}, true).empty());
  CHECK(pooled({{NAN, 2}}, false).empty());
}

// The mean adds up the states that the beginnings of the prompt end in, in their order.
void test_embeddings_are_pooled_states() {
  const std::vector<int32_t> tokens = prompt(128, 5);  // the whole context: nothing follows
  const std::vector<float> mean = embedded_alone(tokens, Pooling::mean);
  CHECK(mean.size() == kHidden);
  std::vector<float> sum(kHidden);
  for (size_t length = 1; length <= tokens.size(); ++length) {
    const std::vector<float> state = embedded_alone({tokens.begin(), tokens.begin() + int(length)}, Pooling::last);
    if (length == 1) CHECK(embedded_alone(tokens, Pooling::cls) == state);
    for (size_t i = 0; i < kHidden; ++i) sum[i] = length == 1 ? state[i] : sum[i] + state[i];
  }
  for (size_t i = 0; i < kHidden; ++i) CHECK(mean[i] == sum[i] / float(tokens.size()));
  double length = 0, squares = 0;
  for (float value : mean) length += double(value) * value;
  const std::vector<float> unit = embedded_alone(tokens, Pooling::mean, true);
  for (size_t i = 0; i < kHidden; ++i) {
    CHECK(std::abs(unit[i] - mean[i] / std::sqrt(length)) < 1e-6);
    squares += double(unit[i]) * unit[i];
  }
  CHECK(std::abs(squares - 1) < 1e-6);
}

// Beside running streams and other prompts, in small steps and with more threads: the same bits.
void test_embeddings_have_the_same_bits_everywhere() {
  for (Pooling pooling : kPoolings) {
    const std::vector<float> expected = embedded_alone(prompt(77, 3), pooling, true);
    CHECK(embedded_alone(prompt(77, 3), pooling, true, 5, 2) == expected);
    CHECK(embedded_alone(prompt(77, 3), pooling, true, 1, 1) == expected);
    Executor executor(tiny_program(), {64, 8, 128, 13, 2});
    for (int i = 0; i < 6; ++i) {
      std::vector<int32_t> blocks;
      for (int b = 0; b < 6; ++b) blocks.push_back(b * 8 + i);
      executor.push(admission(i, 100 + uint64_t(i), prompt(3 + 5 * i, i), blocks, 60));
    }
    executor.push(embedding_of(6, 1, prompt(77, 3), {6, 14, 22, 30, 38}, pooling, true));
    executor.push(embedding_of(7, 2, prompt(40, 9), {7, 15, 23}, Pooling::mean));
    Outcome outcome;
    outcome.gather(executor, 8);
    CHECK(outcome.embeddings[1] == expected);
    CHECK(outcome.embeddings[2] == embedded_alone(prompt(40, 9), Pooling::mean));
    for (int i = 0; i < 6; ++i) CHECK(outcome.tokens[100 + uint64_t(i)] == alone(prompt(3 + 5 * i, i), 60));
  }
}

// An embedding that stands still for want of blocks goes on, is cancelled, or is put out and begun again.
void test_embeddings_wait_end_and_begin_again() {
  for (Pooling pooling : kPoolings) {
    const std::vector<float> expected = embedded_alone(prompt(40, 2), pooling);
    Executor executor(tiny_program(), config());
    Outcome outcome;
    std::vector<Event> events;
    const auto start = [&](uint64_t id) {
      executor.push(embedding_of(0, id, prompt(40, 2), {0}, pooling));
      while (outcome.others.empty()) {
        executor.wait(0.1, events);
        for (Event& event : events) outcome.take(event);
      }
      CHECK(outcome.others[0].kind == Event::Kind::blocks_low && outcome.others[0].value == 2);
      outcome.others.clear();
    };
    start(1);
    executor.push(ExtendCommand{0, 1, {1, 2}});
    outcome.gather(executor, 1);
    CHECK(outcome.embeddings[1] == expected);
    start(2);
    executor.push(CancelCommand{0, 2});
    outcome.gather(executor, 2);
    start(3);
    executor.push(PreemptCommand{0, 3});
    outcome.gather(executor, 3);
    executor.push(embedding_of(0, 4, prompt(40, 2), {3, 4, 5}, pooling));
    outcome.gather(executor, 4);
    CHECK(outcome.embeddings[4] == expected);
    CHECK(outcome.finished[2] == FinishReason::abort && outcome.finished[3] == FinishReason::preempted);
    CHECK(!outcome.embeddings.contains(2) && !outcome.embeddings.contains(3));
  }
}

// The last token's state needs no more of the others than the cache holds; the others' own states are not there.
void test_embeddings_and_cached_blocks() {
  const std::vector<float> expected = embedded_alone(prompt(32, 4), Pooling::last);
  Executor executor(tiny_program(), config());
  executor.push(embedding_of(0, 1, prompt(32, 4), {0, 1}, Pooling::mean));
  Outcome outcome;
  outcome.gather(executor, 1);
  for (const int num_cached : {16, 31}) {
    AdmitCommand command = embedding_of(0, 1 + uint64_t(num_cached), prompt(32, 4), {0, 1}, Pooling::last);
    command.num_cached = num_cached;
    executor.push(command);
    outcome.gather(executor, outcome.finished.size() + 1);
    CHECK(outcome.embeddings[1 + uint64_t(num_cached)] == expected);
  }
  const auto refused = [](Executor& by, AdmitCommand command) {
    try {
      by.push(std::move(command));
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  for (Pooling pooling : {Pooling::mean, Pooling::cls}) {
    AdmitCommand command = embedding_of(0, 9, prompt(32, 4), {0, 1}, pooling);
    command.num_cached = 16;
    CHECK(refused(executor, command));
  }
  CHECK(refused(executor, embedding_of(0, 9, prompt(129, 4), {}, Pooling::last)));
  Executor without(tiny_program(false), config());
  CHECK(refused(without, embedding_of(0, 9, prompt(5, 4), {0}, Pooling::last)));
}

void test_traces_and_gaps_are_counted() {
  ExecutorConfig with_trace = config();
  with_trace.trace = true;
  Executor executor(tiny_program(), with_trace);
  executor.push(admission(0, 1, prompt(40, 1), {0, 1, 2, 3}, 10));
  Outcome outcome;
  outcome.gather(executor, 1);
  executor.close();
  const std::vector<StepRecord> steps = executor.take_trace();
  const ExecutorStats stats = executor.stats();
  CHECK(steps.size() == 11 && stats.num_steps == 11);  // 32 + 8 tokens of prefill, 9 more tokens
  CHECK(stats.num_rows == 49 && stats.num_prefill_rows == 40);
  uint64_t num_gaps = 0;
  for (uint64_t count : stats.gap_histogram) num_gaps += count;
  CHECK(num_gaps == 10);
  double last_end = 0;
  for (const StepRecord& step : steps) {
    CHECK(last_end <= step.begin_s && step.begin_s <= step.forward_end_s && step.forward_end_s <= step.end_s);
    CHECK(step.num_decode_rows + step.num_prefill_rows > 0);
    last_end = step.end_s;
  }
  CHECK(executor.take_trace().empty());
}

void test_token_budget() {
  TokenBudget budget(512);
  CHECK(budget.prefill_rows(0, 1) == 512);
  budget.record(0, 512, 0.512);           // a row takes 1 ms
  CHECK(budget.prefill_rows(8, 1) == 0);  // what eight streams take is not known yet
  budget.record(8, 0, 0.1);
  CHECK(std::abs(budget.prefill_rows(8, 1) - 60) <= 1);
  CHECK(std::abs(budget.prefill_rows(8, 80) - 504) <= 1);  // a burst
  budget.set_target(0.15);
  CHECK(std::abs(budget.prefill_rows(8, 80) - 50) <= 1);
  budget.set_target(0.05);
  CHECK(std::abs(budget.prefill_rows(8, 1) - 25) <= 1);  // out of reach, but a prompt is never starved
  budget.record(8, 25, 0.125);
  for (int i = 0; i < 40; ++i) budget.record(8, 25, 0.125);
  CHECK(budget.prefill_rows(8, 1) == 0);  // time to look again
  CHECK(budget.prefill_rows(8, 1) > 0);   // never twice in a row
  CHECK(budget.prefill_rows(505, 1) <= 7);

  TokenBudget changing(512);
  changing.record(0, 512, 0.512);
  changing.record(8, 0, 0.1);
  CHECK(changing.prefill_rows(10, 1) > 0);  // a small change is looked at when it has lasted
  CHECK(changing.prefill_rows(10, 1) > 0);
  CHECK(changing.prefill_rows(10, 1) == 0);
  changing.record(10, 0, 0.12);
  CHECK(changing.prefill_rows(20, 1) > 0);   // never two in a row
  CHECK(changing.prefill_rows(20, 1) == 0);  // a large one at once
  changing.record(20, 0, 0.2);
  changing.record(20, 0, 10.0);  // something else had the processor
  CHECK(std::abs(changing.prefill_rows(20, 1) - 0.6 * 225) < 1);
}

// Three clients, each with slots and blocks of its own, admit and cancel as they like while one reader takes the
// events: every sequence ends exactly once. Meant for TSan.
void test_many_clients() {
  constexpr int kClients = 3, kRounds = 60;
  Executor executor(tiny_program(), config());
  std::atomic<int> num_finished{0};
  std::vector<std::atomic<uint64_t>> ended(kClients);
  std::thread reader([&] {
    std::vector<Event> events;
    std::set<uint64_t> seen;
    for (int waits = 0; num_finished < kClients * kRounds && waits < 6000; ++waits) {
      executor.wait(0.01, events);
      for (const Event& event : events) {
        if (event.kind != Event::Kind::finished) continue;
        CHECK(seen.insert(event.sequence_id).second);
        ended[event.sequence_id % kClients].store(event.sequence_id + 1);
        ++num_finished;
      }
    }
  });
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([&, client] {
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t id = uint64_t(round * kClients + client);
        executor.push(admission(client, id, prompt(1 + round % 9, round), {client * 2, client * 2 + 1}, 1 + round % 7));
        if (round % 3 == 0) executor.push(CancelCommand{client, id});
        if (round % 4 == 1) executor.push(PreemptCommand{client, id});
        if (round % 5 == 0) executor.push(MaskCommand{client, id, 0, std::vector<uint32_t>((kVocab + 31) / 32)});
        while (ended[size_t(client)].load() != id + 1) std::this_thread::yield();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  reader.join();
  CHECK(num_finished == kClients * kRounds);
  CHECK(executor.stats().num_steps > 0);
}

}  // namespace

int main() {
  test_batch_equals_alone();
  test_stop_tokens_and_min_tokens();
  test_prompt_logprobs_take_several_head_runs();
  test_blocks_on_demand();
  test_cancel_and_close();
  test_commands_out_of_range_are_refused();
  test_preempted_and_resumed();
  for (const int num_steps : {1, 2, 3, 4, 7}) test_sliced_prefill(num_steps);
  test_prefill_is_reported();
  test_shared_blocks();
  test_masks();
  test_prefill_order();
  test_state_sum();
  test_embeddings_are_pooled_states();
  test_embeddings_have_the_same_bits_everywhere();
  test_embeddings_wait_end_and_begin_again();
  test_embeddings_and_cached_blocks();
  test_traces_and_gaps_are_counted();
  test_token_budget();
  test_many_clients();
  return check::finish("executor");
}
