#include "executor/ops.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace gapless {

namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

int width_of(const Program& program, int buffer) { return int(program.buffer(buffer).row_bytes / 4); }

void require_width(const Program& program, int buffer, int64_t width, const char* what) {
  require(program.buffer(buffer).row_bytes == width * 4, std::string(what) + " has rows of " +
                                                             std::to_string(width_of(program, buffer)) +
                                                             " floats; expected " + std::to_string(width));
}

void require_quantized(const Program& program, int buffer, int width) {
  require(program.buffer(buffer).row_bytes >= a8_row_bytes(width),
          "quantized rows need " + std::to_string(a8_row_bytes(width)) + " bytes; the buffer has " +
              std::to_string(program.buffer(buffer).row_bytes));
}

void require_same_domain(const Program& program, int a, int b) {
  require(program.buffer(a).domain == program.buffer(b).domain, "an op's buffers must have the same kind of rows");
}

int num_rows(const RunContext& c, Domain domain) {
  return domain == Domain::token ? c.num_token_rows : c.num_logit_rows;
}

// Calls fn(row) for all rows, a few at a time: enough to be worth a claim, few enough to balance.
template <typename Fn>
void for_rows(RunContext& c, Domain domain, Fn&& fn) {
  constexpr int kRows = 4;
  const int rows = num_rows(c, domain);
  c.pool.run((rows + kRows - 1) / kRows, [&](int item, int) {
    for (int row = item * kRows; row < std::min(rows, (item + 1) * kRows); ++row) fn(row);
  });
}

struct Embed final : Op {
  Weight weight;
  float scale;
  int out;

  void run(RunContext& c) const override {
    for_rows(c, Domain::token, [&](int row) {
      float* y = c.program.floats(out, row);
      weight->dequantize_row(c.step.token_ids[size_t(row)], y);
      if (scale != 1.0f) c.kernels.elementwise->scale(y, weight->cols, scale);
    });
  }
};

struct RmsNorm final : Op {
  int x, out, out_quantized, width;
  Floats weight;
  float eps;

  void run(RunContext& c) const override {
    for_rows(c, c.program.buffer(x).domain, [&](int row) {
      alignas(64) float local[kMaxLocal];
      float* y = out != kNone ? c.program.floats(out, row) : local;
      c.kernels.elementwise->rms_norm(c.program.floats(x, row), weight->data(), width, eps, y);
      if (out_quantized != kNone) c.kernels.linear->quantize_row(y, width, c.program.row_of(out_quantized, row));
    });
  }
  static constexpr int kMaxLocal = 16384;  // floats on the stack: 64 KiB; wider models keep the f32 rows
};

struct RmsNormAdd final : Op {
  int x, residual, width;
  Floats weight;
  float eps;

  void run(RunContext& c) const override {
    for_rows(c, c.program.buffer(x).domain, [&](int row) {
      c.kernels.elementwise->rms_norm_add(c.program.floats(x, row), weight->data(), width, eps,
                                          c.program.floats(residual, row));
    });
  }
};

struct Residual final : Op {
  int x, residual, width;

  void run(RunContext& c) const override {
    for_rows(c, c.program.buffer(x).domain, [&](int row) {
      c.kernels.elementwise->add(c.program.floats(x, row), width, c.program.floats(residual, row));
    });
  }
};

struct Quantize final : Op {
  int x, out, width;

  void run(RunContext& c) const override {
    for_rows(c, c.program.buffer(x).domain, [&](int row) {
      c.kernels.linear->quantize_row(c.program.floats(x, row), width, c.program.row_of(out, row));
    });
  }
};

// Rows of a step go through a linear op in chunks whose activations stay in L2 while the tiles of an item pass over
// them.
constexpr int kRowChunk = 64;
// The weights of an item stay in L2 while its row chunks share them. A single chunk reads them once: then an item is
// larger, for the first weights of each come from memory while the kernel waits.
constexpr int64_t kItemWeightBytes = 128 * 1024, kLargeItemWeightBytes = 1024 * 1024;

// How one weight matrix is cut into (tile range, row chunk) items; depends on the number of rows and threads only.
struct Split {
  int tiles_per_item, num_ranges, num_chunks;

  Split(const PackedWeight& weight, int rows, int num_threads) {
    num_chunks = (rows + kRowChunk - 1) / kRowChunk;
    const int64_t by_cache = std::max<int64_t>(1, (num_chunks == 1 ? kLargeItemWeightBytes : kItemWeightBytes) /
                                                      int64_t(weight.num_bytes() / size_t(weight.num_tiles)));
    // Few rows: two items a thread. One to eight made no difference that the noise lets one see; more than one, so that
    // a thread that lost its CPU for a moment holds up the others less.
    const int64_t by_balance = std::max<int64_t>(1, weight.num_tiles / (int64_t(num_threads) * 2));
    tiles_per_item = num_threads == 1 && num_chunks == 1 ? weight.num_tiles : int(std::min(by_cache, by_balance));
    num_ranges = (weight.num_tiles + tiles_per_item - 1) / tiles_per_item;
  }
  int num_items() const { return num_ranges * num_chunks; }
};

struct Linear final : Op {
  int x, x_quantized;
  std::vector<LinearSegment> segments;

  LinearArgs args(RunContext& c, const LinearSegment& segment, int row) const {
    LinearArgs a{};
    a.weight = segment.weight.get();
    if (x != kNone) {
      a.x = c.program.floats(x, row);
      a.x_stride = c.program.buffer(x).row_bytes / 4;
    }
    if (x_quantized != kNone) {
      a.xq = c.program.row_of(x_quantized, row);
      a.xq_stride = c.program.buffer(x_quantized).row_bytes;
    }
    a.bias = segment.bias ? segment.bias->data() : nullptr;
    a.y = c.program.floats(segment.out, row) + segment.out_column;
    a.y_stride = c.program.buffer(segment.out).row_bytes / 4;
    a.accumulate = segment.accumulate;
    return a;
  }

  void run(RunContext& c) const override {
    const int rows = num_rows(c, c.program.buffer(segments[0].out).domain);
    int num_items = 0;
    for (const LinearSegment& segment : segments)
      num_items += Split(*segment.weight, rows, c.pool.num_threads()).num_items();
    c.pool.run(num_items, [&](int item, int) {
      for (const LinearSegment& segment : segments) {
        const Split split(*segment.weight, rows, c.pool.num_threads());
        if (item >= split.num_items()) {
          item -= split.num_items();
          continue;
        }
        const int row = item % split.num_chunks * kRowChunk;
        LinearArgs a = args(c, segment, row);
        a.up = up.get();
        a.act = activation;
        a.num_rows = std::min(kRowChunk, rows - row);
        a.tile_begin = item / split.num_chunks * split.tiles_per_item;
        a.tile_end = std::min(segment.weight->num_tiles, a.tile_begin + split.tiles_per_item);
        c.kernels.linear->linear(a);
        return;
      }
    });
  }

  // A gated linear has one segment, the gate.
  Weight up;
  Activation activation{};
};

struct RopeCache final : Op {
  int qkv, layer;
  RopeCacheOptions options;

  void run(RunContext& c) const override {
    const KVShape& kv = c.program.kv_shape();
    RopeCacheArgs base{};
    base.q_column = 0;
    base.k_column = options.num_heads * kv.head_dim;
    base.v_column = base.k_column + kv.num_kv_heads * kv.head_dim;
    base.num_heads = options.num_heads;
    base.num_kv_heads = kv.num_kv_heads;
    base.head_dim = kv.head_dim;
    base.rotary_dim = options.rope == kNone ? 0 : c.program.rope_dim(options.rope);
    base.q_norm = options.q_norm ? options.q_norm->data() : nullptr;
    base.k_norm = options.k_norm ? options.k_norm->data() : nullptr;
    base.eps = options.norm_eps;
    base.q_scale = options.q_scale;
    base.kv = c.cache.layer(layer);
    for_rows(c, Domain::token, [&](int row) {
      RopeCacheArgs a = base;
      a.qkv = c.program.floats(qkv, row);
      if (options.rope != kNone) {
        a.cos = c.program.rope_cos(options.rope, row);
        a.sin = c.program.rope_sin(options.rope, row);
      }
      a.block = c.step.blocks[size_t(row)];
      a.block_offset = c.step.positions[size_t(row)] % kKvBlockTokens;
      c.kernels.elementwise->rope_and_cache(a);
    });
  }
};

struct Attention final : Op {
  int qkv, layer, out, plan;
  float softcap;

  void run(RunContext& c) const override {
    AttentionArgs a{};
    a.shape = c.program.shape(plan);
    a.sequences = c.step.sequences.data();
    a.q = c.program.floats(qkv, 0);
    a.q_stride = c.program.buffer(qkv).row_bytes / 4;
    a.out = c.program.floats(out, 0);
    a.out_stride = c.program.buffer(out).row_bytes / 4;
    a.kv = c.cache.layer(layer);
    a.softcap = softcap;
    a.partials = c.program.partials();
    const AttentionPlan& items = c.program.plan(plan, c.has_slice);
    c.pool.run(items.num_items(), [&](int i, int worker) {
      c.kernels.attention->attend(a, items.item(i), c.program.attention_scratch(worker));
    });
    c.pool.run(items.num_merges(), [&](int i, int) { c.kernels.attention->merge(a, items.merge(i)); });
  }
};

struct Gather final : Op {
  int x, out;

  void run(RunContext& c) const override {
    const size_t bytes = size_t(c.program.buffer(x).row_bytes);
    for (int i = 0; i < c.num_logit_rows; ++i) {
      std::memcpy(c.program.row_of(out, i), c.program.row_of(x, c.logit_rows[i]), bytes);
    }
  }
};

struct Softcap final : Op {
  int x;
  float cap;

  void run(RunContext& c) const override {
    const int width = width_of(c.program, x);
    for_rows(c, c.program.buffer(x).domain,
             [&](int row) { c.kernels.elementwise->softcap(c.program.floats(x, row), width, cap); });
  }
};

void require_floats(const Floats& values, int width, const char* what) {
  require(values && int(values->size()) == width, std::string(what) + " has " +
                                                      std::to_string(values ? values->size() : 0) +
                                                      " values; expected " + std::to_string(width));
}

// Checks the inputs that a linear op over `weight` reads.
void require_linear_input(const Program& program, int x, int x_quantized, const PackedWeight& weight) {
  const bool reads_quantized = x_quantized != kNone && weight.format.is_integer();
  if (reads_quantized) {
    require_quantized(program, x_quantized, weight.cols);
  } else {
    require(x != kNone,
            std::string("a ") + name_of(weight.format.type) + " weight without quantized input reads f32 rows");
    require_width(program, x, weight.cols, "the input of a linear op");
  }
}

}  // namespace

void add_embed(Program& program, Weight weight, float scale, int out) {
  require_width(program, out, weight->cols, "the output of embed");
  require(weight->rows >= program.vocab_size(), "the embedding has fewer rows than vocab_size");
  program.count_weight(*weight);
  auto op = std::make_unique<Embed>();
  op->weight = std::move(weight);
  op->scale = scale;
  op->out = out;
  program.add_op(Domain::token, std::move(op));
}

void add_rms_norm(Program& program, int x, Floats weight, float eps, int out, int out_quantized) {
  const int width = width_of(program, x);
  require_floats(weight, width, "the weight of rms_norm");
  require(out != kNone || out_quantized != kNone, "rms_norm needs an output");
  require(out != kNone || width <= RmsNorm::kMaxLocal, "rms_norm of such wide rows needs an f32 output");
  if (out != kNone) {
    require_width(program, out, width, "the output of rms_norm");
    require_same_domain(program, x, out);
  }
  if (out_quantized != kNone) {
    require_quantized(program, out_quantized, width);
    require_same_domain(program, x, out_quantized);
  }
  auto op = std::make_unique<RmsNorm>();
  op->x = x;
  op->out = out;
  op->out_quantized = out_quantized;
  op->width = width;
  op->weight = std::move(weight);
  op->eps = eps;
  program.add_op(program.buffer(x).domain, std::move(op));
}

void add_rms_norm_add(Program& program, int x, Floats weight, float eps, int residual) {
  const int width = width_of(program, x);
  require_floats(weight, width, "the weight of add_rms_norm");
  require_width(program, residual, width, "the residual of add_rms_norm");
  require_same_domain(program, x, residual);
  auto op = std::make_unique<RmsNormAdd>();
  op->x = x;
  op->residual = residual;
  op->width = width;
  op->weight = std::move(weight);
  op->eps = eps;
  program.add_op(program.buffer(x).domain, std::move(op));
}

void add_residual(Program& program, int x, int residual) {
  const int width = width_of(program, x);
  require_width(program, residual, width, "the residual of add");
  require_same_domain(program, x, residual);
  auto op = std::make_unique<Residual>();
  op->x = x;
  op->residual = residual;
  op->width = width;
  program.add_op(program.buffer(x).domain, std::move(op));
}

void add_quantize(Program& program, int x, int out_quantized) {
  const int width = width_of(program, x);
  require_quantized(program, out_quantized, width);
  require_same_domain(program, x, out_quantized);
  auto op = std::make_unique<Quantize>();
  op->x = x;
  op->out = out_quantized;
  op->width = width;
  program.add_op(program.buffer(x).domain, std::move(op));
}

void add_linear(Program& program, int x, int x_quantized, std::vector<LinearSegment> segments) {
  require(!segments.empty(), "a linear op needs at least one segment");
  const Domain domain = program.buffer(segments[0].out).domain;
  for (const LinearSegment& segment : segments) {
    require_linear_input(program, x, x_quantized, *segment.weight);
    require(segment.out_column >= 0 && segment.out_column + segment.weight->rows <= width_of(program, segment.out),
            "a segment of a linear op ends past its output row");
    require(program.buffer(segment.out).domain == domain,
            "the segments of a linear op must have the same kind of rows");
    if (segment.bias) require_floats(segment.bias, segment.weight->rows, "a bias");
    program.count_weight(*segment.weight);
  }
  auto op = std::make_unique<Linear>();
  op->x = x;
  op->x_quantized = x_quantized;
  op->segments = std::move(segments);
  program.add_op(domain, std::move(op));
}

void add_gated_linear(Program& program, int x, int x_quantized, Weight gate, Weight up, Activation activation,
                      int out) {
  require(gate->rows == up->rows && gate->cols == up->cols, "gate and up must have the same shape");
  require_linear_input(program, x, x_quantized, *gate);
  require_linear_input(program, x, x_quantized, *up);
  require_width(program, out, gate->rows, "the output of gated_linear");
  program.count_weight(*gate);
  program.count_weight(*up);
  auto op = std::make_unique<Linear>();
  op->x = x;
  op->x_quantized = x_quantized;
  op->up = std::move(up);
  op->activation = activation;
  op->segments = {{std::move(gate), nullptr, out, 0, false}};
  program.add_op(program.buffer(out).domain, std::move(op));
}

void add_rope_cache(Program& program, int qkv, int layer, const RopeCacheOptions& options) {
  const KVShape& kv = program.kv_shape();
  require(layer >= 0 && layer < kv.num_layers(), "there is no cache layer " + std::to_string(layer));
  require(options.num_heads > 0 && options.num_heads % kv.num_kv_heads == 0,
          "num_heads must be a multiple of num_kv_heads");
  require_width(program, qkv, int64_t(options.num_heads + 2 * kv.num_kv_heads) * kv.head_dim, "the qkv buffer");
  if (options.q_norm) require_floats(options.q_norm, kv.head_dim, "q_norm");
  if (options.k_norm) require_floats(options.k_norm, kv.head_dim, "k_norm");
  if (options.rope != kNone) program.rope_dim(options.rope);
  auto op = std::make_unique<RopeCache>();
  op->qkv = qkv;
  op->layer = layer;
  op->options = options;
  program.add_op(Domain::token, std::move(op));
}

void add_attention(Program& program, int qkv, int layer, int num_heads, int out, int window, float softcap) {
  const KVShape& kv = program.kv_shape();
  require(layer >= 0 && layer < kv.num_layers(), "there is no cache layer " + std::to_string(layer));
  require(num_heads > 0 && num_heads % kv.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads");
  require_width(program, qkv, int64_t(num_heads + 2 * kv.num_kv_heads) * kv.head_dim, "the qkv buffer");
  require_width(program, out, int64_t(num_heads) * kv.head_dim, "the output of attention");
  require(window >= 0, "the window of attention is negative");
  auto op = std::make_unique<Attention>();
  op->qkv = qkv;
  op->layer = layer;
  op->out = out;
  AttentionShape shape{num_heads, kv.num_kv_heads, kv.head_dim};
  shape.window = window;
  op->plan = program.add_attention(shape);
  op->softcap = softcap;
  program.add_op(Domain::token, std::move(op));
}

void add_gather(Program& program, int x, int out) {
  require(program.buffer(x).domain == Domain::token && program.buffer(out).domain == Domain::logit,
          "gather copies from token rows to logit rows");
  require(program.buffer(x).row_bytes == program.buffer(out).row_bytes, "gather needs rows of equal size");
  auto op = std::make_unique<Gather>();
  op->x = x;
  op->out = out;
  program.add_op(Domain::logit, std::move(op));
}

void add_softcap(Program& program, int x, float cap) {
  require(cap > 0, "a soft cap must be positive");
  auto op = std::make_unique<Softcap>();
  op->x = x;
  op->cap = cap;
  program.add_op(program.buffer(x).domain, std::move(op));
}

}  // namespace gapless
