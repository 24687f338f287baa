#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "bindings/bindings.h"
#include "executor/executor.h"
#include "executor/ops.h"

namespace gapless::bindings {

namespace {

Floats to_floats(const FloatArray& array) {
  return std::make_shared<const std::vector<float>>(to_vector<float>(array));
}

Floats to_floats(const std::optional<FloatArray>& array) { return array ? to_floats(*array) : nullptr; }

Domain domain_from_name(const std::string& name) {
  if (name == "token") return Domain::token;
  if (name == "logit") return Domain::logit;
  throw std::invalid_argument("domain is '" + name + "'; known: token, logit");
}

Activation activation_from_name(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "gelu") return Activation::gelu;
  if (name == "relu") return Activation::relu;
  throw std::invalid_argument("activation is '" + name + "'; known: silu, gelu_tanh, gelu, relu");
}

KvDtype kv_dtype_from_name(const std::string& name) {
  if (name == "f16") return KvDtype::f16;
  if (name == "bf16") return KvDtype::bf16;
  if (name == "int8") return KvDtype::int8;
  throw std::invalid_argument("kv_dtype is '" + name + "'; known: f16, bf16, int8");
}

Pooling pooling_from_name(const std::string& name) {
  if (name == "none") return Pooling::none;
  if (name == "last") return Pooling::last;
  if (name == "mean") return Pooling::mean;
  if (name == "cls") return Pooling::cls;
  throw std::invalid_argument("pooling is '" + name + "'; known: none, last, mean, cls");
}

// A Program under construction; `build` hands it over.
class ProgramBuilder {
 public:
  explicit ProgramBuilder(const ProgramLimits& limits) : program_(std::make_shared<Program>(limits)) {}

  Program& program() {
    if (!program_) throw std::invalid_argument("this builder has built its program already");
    return *program_;
  }

  std::shared_ptr<Program> build(int64_t arena_bytes, int logits) {
    program().finish(arena_bytes, logits);
    return std::move(program_);
  }

 private:
  std::shared_ptr<Program> program_;
};

using Segment = std::tuple<std::shared_ptr<PackedWeight>, std::optional<FloatArray>, int, int, bool>;

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def_prop_ro("arena_bytes", &Program::arena_bytes)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("num_ops", &Program::num_ops);

  using PB = ProgramBuilder;
  using WeightPtr = std::shared_ptr<PackedWeight>;
  nb::class_<PB>(m, "ProgramBuilder")
      .def(
          "__init__",
          [](PB* self, int max_tokens, int max_logit_rows, int vocab_size, const std::vector<std::string>& kv_dtypes,
             int num_kv_heads, int head_dim) {
            KVShape kv{{}, num_kv_heads, head_dim};
            for (const std::string& name : kv_dtypes) kv.dtypes.push_back(kv_dtype_from_name(name));
            new (self) PB({max_tokens, max_logit_rows, vocab_size, std::move(kv)});
          },
          nb::kw_only(), nb::arg("max_tokens"), nb::arg("max_logit_rows"), nb::arg("vocab_size"), nb::arg("kv_dtypes"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"))
      .def(
          "buffer",
          [](PB& b, const std::string& domain, int64_t row_bytes, int64_t offset) {
            return b.program().add_buffer(domain_from_name(domain), row_bytes, offset);
          },
          nb::arg("domain"), nb::arg("row_bytes"), nb::arg("offset"))
      .def(
          "rope",
          [](PB& b, FloatArray inv_freq, float scale) {
            return b.program().add_rope(to_vector<float>(inv_freq), scale);
          },
          nb::arg("inv_freq"), nb::arg("scale") = 1.0f)
      .def(
          "embed", [](PB& b, WeightPtr weight, float scale, int out) { add_embed(b.program(), weight, scale, out); },
          nb::arg("weight"), nb::arg("scale"), nb::arg("out"))
      .def(
          "rms_norm",
          [](PB& b, int x, FloatArray weight, float eps, int out, int out_quantized) {
            add_rms_norm(b.program(), x, to_floats(weight), eps, out, out_quantized);
          },
          nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out") = kNone, nb::arg("out_quantized") = kNone)
      .def(
          "add_rms_norm",
          [](PB& b, int x, FloatArray weight, float eps, int residual) {
            add_rms_norm_add(b.program(), x, to_floats(weight), eps, residual);
          },
          nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("residual"))
      .def(
          "add", [](PB& b, int x, int residual) { add_residual(b.program(), x, residual); }, nb::arg("x"),
          nb::arg("residual"))
      .def(
          "quantize", [](PB& b, int x, int out) { add_quantize(b.program(), x, out); }, nb::arg("x"),
          nb::arg("out_quantized"))
      .def(
          "linear",
          [](PB& b, int x, int x_quantized, const std::vector<Segment>& segments) {
            std::vector<LinearSegment> parts;
            for (const auto& [weight, bias, out, column, accumulate] : segments)
              parts.push_back({weight, to_floats(bias), out, column, accumulate});
            add_linear(b.program(), x, x_quantized, std::move(parts));
          },
          nb::arg("x"), nb::arg("x_quantized"), nb::arg("segments"))
      .def(
          "gated_linear",
          [](PB& b, int x, int x_quantized, WeightPtr gate, WeightPtr up, const std::string& activation, int out) {
            add_gated_linear(b.program(), x, x_quantized, gate, up, activation_from_name(activation), out);
          },
          nb::arg("x"), nb::arg("x_quantized"), nb::arg("gate"), nb::arg("up"), nb::arg("activation"), nb::arg("out"))
      .def(
          "rope_cache",
          [](PB& b, int qkv, int layer, int num_heads, int rope, float q_scale, std::optional<FloatArray> q_norm,
             std::optional<FloatArray> k_norm, float norm_eps) {
            add_rope_cache(b.program(), qkv, layer,
                           {num_heads, rope, q_scale, to_floats(q_norm), to_floats(k_norm), norm_eps});
          },
          nb::arg("qkv"), nb::arg("layer"), nb::arg("num_heads"), nb::arg("rope"), nb::arg("q_scale"),
          nb::arg("q_norm") = nb::none(), nb::arg("k_norm") = nb::none(), nb::arg("norm_eps") = 1e-6f)
      .def(
          "attention",
          [](PB& b, int qkv, int layer, int num_heads, int out, int window, float softcap) {
            add_attention(b.program(), qkv, layer, num_heads, out, window, softcap);
          },
          nb::arg("qkv"), nb::arg("layer"), nb::arg("num_heads"), nb::arg("out"), nb::arg("window") = 0,
          nb::arg("softcap") = 0.0f)
      .def(
          "gather", [](PB& b, int x, int out) { add_gather(b.program(), x, out); }, nb::arg("x"), nb::arg("out"))
      .def(
          "softcap", [](PB& b, int x, float cap) { add_softcap(b.program(), x, cap); }, nb::arg("x"), nb::arg("cap"))
      .def(
          "states", [](PB& b, int x) { b.program().mark_states(x); }, nb::arg("x"))
      .def(
          "part", [](PB& b, int x) { b.program().mark_part(x); }, nb::arg("x"))
      .def("build", &PB::build, nb::arg("arena_bytes"), nb::arg("logits"));
}

void init_sampling(SlotSampling* self, int max_tokens, float temperature, int top_k, float top_p, float min_p,
                   float repetition_penalty, float presence_penalty, float frequency_penalty, uint64_t seed,
                   std::vector<int32_t> stop_token_ids, int min_tokens, int num_logprobs, int num_prompt_logprobs,
                   const std::optional<std::unordered_map<int32_t, float>>& logit_bias, bool constrained,
                   const std::string& pooling, bool normalize) {
  new (self) SlotSampling;
  self->params.temperature = temperature;
  self->params.top_k = top_k;
  self->params.top_p = top_p;
  self->params.min_p = min_p;
  self->params.repetition_penalty = repetition_penalty;
  self->params.presence_penalty = presence_penalty;
  self->params.frequency_penalty = frequency_penalty;
  self->params.seed = seed;
  self->params.num_logprobs = num_logprobs;
  if (logit_bias) self->params.logit_bias.assign(logit_bias->begin(), logit_bias->end());
  self->max_tokens = max_tokens;
  self->min_tokens = min_tokens;
  self->stop_token_ids = std::move(stop_token_ids);
  self->num_prompt_logprobs = num_prompt_logprobs;
  self->constrained = constrained;
  self->pooling = pooling_from_name(pooling);
  self->normalize = normalize;
}

nb::object to_python(const Event& event) {
  const auto logprobs = [&](nb::object head) {
    nb::list top;
    for (const TokenLogprob& t : event.top) top.append(nb::make_tuple(t.token, t.logprob));
    nb::object logprob = nb::none(), rank = nb::none();
    if (event.has_logprob) {
      logprob = nb::float_(event.logprob.logprob);
      rank = nb::int_(event.logprob.rank);
    }
    return nb::object(head + nb::make_tuple(logprob, rank, top));
  };
  switch (event.kind) {
    case Event::Kind::token:
      return logprobs(nb::make_tuple("token", event.sequence_id, event.value));
    case Event::Kind::prompt_logprobs:
      return logprobs(nb::make_tuple("prompt_logprobs", event.sequence_id, event.value));
    case Event::Kind::embedding: {
      float* data = nullptr;
      nb::object vector = new_vector(int64_t(event.embedding.size()), data);
      std::copy(event.embedding.begin(), event.embedding.end(), data);
      return nb::make_tuple("embedding", event.sequence_id, vector);
    }
    case Event::Kind::prefilled:
      return nb::make_tuple("prefilled", event.sequence_id, event.value);
    case Event::Kind::finished:
      return nb::make_tuple("finished", event.sequence_id, finish_reason_name(event.reason), event.value);
    case Event::Kind::blocks_low:
      return nb::make_tuple("blocks_low", event.sequence_id, event.value);
    case Event::Kind::failed:
      return nb::make_tuple("failed", event.message);
  }
  return nb::none();
}

void bind_executor(nb::module_& m) {
  nb::class_<SlotSampling>(m, "Sampling")
      .def("__init__", &init_sampling, nb::kw_only(), nb::arg("max_tokens"), nb::arg("temperature") = 1.0f,
           nb::arg("top_k") = 0, nb::arg("top_p") = 1.0f, nb::arg("min_p") = 0.0f, nb::arg("repetition_penalty") = 1.0f,
           nb::arg("presence_penalty") = 0.0f, nb::arg("frequency_penalty") = 0.0f, nb::arg("seed") = 0,
           nb::arg("stop_token_ids") = std::vector<int32_t>(), nb::arg("min_tokens") = 0, nb::arg("num_logprobs") = -1,
           nb::arg("num_prompt_logprobs") = -1, nb::arg("logit_bias") = nb::none(), nb::arg("constrained") = false,
           nb::arg("pooling") = "none", nb::arg("normalize") = true);

  nb::class_<Executor>(m, "Executor")
      .def(
          "__init__",
          [](Executor* self, std::shared_ptr<Program> program, int num_blocks, int max_num_seqs, int max_seq_len,
             int max_step_tokens, int num_threads, bool trace) {
            new (self) Executor(std::move(program),
                                {num_blocks, max_num_seqs, max_seq_len, max_step_tokens, num_threads, trace});
          },
          nb::arg("program"), nb::kw_only(), nb::arg("num_blocks"), nb::arg("max_num_seqs"), nb::arg("max_seq_len"),
          nb::arg("max_step_tokens"), nb::arg("num_threads"), nb::arg("trace") = false)
      .def_ro_static("block_size", &kKvBlockTokens)
      .def_prop_ro("kv_bytes", &Executor::kv_bytes)
      .def_prop_ro("num_threads", [](const Executor& e) { return e.config().num_threads; })
      .def(
          "admit",
          [](Executor& e, int slot, uint64_t sequence_id, IntArray token_ids, IntArray blocks,
             const SlotSampling& sampling, int num_cached, int num_prompt, int priority) {
            e.push(AdmitCommand{slot, sequence_id, to_vector<int32_t>(token_ids), to_vector<int32_t>(blocks), sampling,
                                num_cached, num_prompt, priority});
          },
          nb::arg("slot"), nb::arg("sequence_id"), nb::arg("token_ids"), nb::arg("blocks"), nb::arg("sampling"),
          nb::arg("num_cached") = 0, nb::arg("num_prompt") = -1, nb::arg("priority") = 0)
      .def(
          "extend",
          [](Executor& e, int slot, uint64_t sequence_id, IntArray blocks) {
            e.push(ExtendCommand{slot, sequence_id, to_vector<int32_t>(blocks)});
          },
          nb::arg("slot"), nb::arg("sequence_id"), nb::arg("blocks"))
      .def(
          "cancel", [](Executor& e, int slot, uint64_t sequence_id) { e.push(CancelCommand{slot, sequence_id}); },
          nb::arg("slot"), nb::arg("sequence_id"))
      .def(
          "preempt", [](Executor& e, int slot, uint64_t sequence_id) { e.push(PreemptCommand{slot, sequence_id}); },
          nb::arg("slot"), nb::arg("sequence_id"))
      .def(
          "set_mask",
          [](Executor& e, int slot, uint64_t sequence_id, int output_index, MaskArray mask) {
            e.push(MaskCommand{slot, sequence_id, output_index, to_vector<uint32_t>(mask)});
          },
          nb::arg("slot"), nb::arg("sequence_id"), nb::arg("output_index"), nb::arg("mask"))
      .def(
          "set_target_tpot", [](Executor& e, double seconds) { e.push(TargetTpotCommand{seconds}); },
          nb::arg("seconds"))
      .def(
          "wait",
          [](Executor& e, double timeout_s) {
            std::vector<Event> events;
            {
              nb::gil_scoped_release release;
              e.wait(timeout_s, events);
            }
            nb::list out;
            for (const Event& event : events) out.append(to_python(event));
            return out;
          },
          nb::arg("timeout_s"))
      .def("stats",
           [](const Executor& e) {
             const ExecutorStats s = e.stats();
             nb::dict d;
             d["num_steps"] = s.num_steps;
             d["num_rows"] = s.num_rows;
             d["num_prefill_rows"] = s.num_prefill_rows;
             d["num_sliced_steps"] = s.num_sliced_steps;
             d["busy_s"] = s.busy_s;
             d["work_s"] = s.work_s;
             d["gap_p50_us"] = s.gap_p50_us;
             d["gap_p99_us"] = s.gap_p99_us;
             nb::list histogram;
             for (uint64_t count : s.gap_histogram) histogram.append(count);
             d["gap_histogram"] = histogram;
             return d;
           })
      .def("take_trace",
           [](Executor& e) {
             nb::list steps;
             for (const StepRecord& s : e.take_trace())
               steps.append(nb::make_tuple(s.begin_s, s.forward_end_s, s.end_s, s.num_decode_rows, s.num_prefill_rows,
                                           s.num_sliced_rows));
             return steps;
           })
      .def("close", &Executor::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_program(m);
  bind_executor(m);
}

}  // namespace gapless::bindings
