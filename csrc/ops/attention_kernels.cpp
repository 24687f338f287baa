// Compiled once per ISA. attention.h says what is computed and why the order of the arithmetic is what it is.
//
// An item's rows (tokens x query heads of one kv head) are worked on in blocks of up to kMaxRows rows, so that a loaded
// and converted vector of keys or values serves all of them from registers. Converting a whole tile to f32 beforehand,
// for items of several blocks, was slower: beside six rows' multiplications the conversion in registers costs nothing.
#include "ops/attention.h"
#include "simd/hadamard.h"
#include "simd/line.h"
#include "simd/math.h"

namespace gapless::GAPLESS_ISA {
namespace {

// How many F32x16 the registers hold beside one broadcast factor: it is 1 of 32 registers with AVX-512, 2 of 16 with
// AVX2, 4 of 32 with NEON. A single spilled accumulator halves the speed.
#if defined(GAPLESS_ISA_AVX512)
constexpr int kMaxRows = 12, kRegisters = 31;
#else
constexpr int kMaxRows = 6, kRegisters = 7;
#endif
constexpr int kMaxRowBlocks = (kAttentionTileRows + kMaxRows - 1) / kMaxRows;
constexpr int kTileBlocks = kAttentionTileTokens / kKvBlockTokens;
constexpr int kValueColumns = 64;  // of a tile's values that stay in the L1 cache while all row blocks use them
constexpr int kLineBytes = 64;
constexpr float kMasked = -1e30f;  // finite, so that differences of two of them are 0
constexpr float kLog2E = 1.44269504f;

// With few rows, several vectors of keys (or of value columns) keep enough independent sums in flight. Each needs a
// register and an accumulator per row; for a single row it is used at once and needs none.
constexpr int vectors_per_row(int rows) {
  for (int n : {4, 3, 2})
    if (rows * n + (rows == 1 ? 1 : n) <= kRegisters) return n;
  return 1;
}

// sums[r][n] += factor(r) * vector(n)
template <int R, int N, typename Factor, typename Vector>
GAPLESS_INLINE void multiply_add(F32x16 (&sums)[R][N], Factor factor, Vector vector) {
  if constexpr (R == 1) {
    const F32x16 f = set1(factor(0));
    for (int n = 0; n < N; ++n) sums[0][n] = fma(f, vector(n), sums[0][n]);
  } else {
    F32x16 v[N];
    for (int n = 0; n < N; ++n) v[n] = vector(n);
    for (int r = 0; r < R; ++r) {
      const F32x16 f = set1(factor(r));
      for (int n = 0; n < N; ++n) sums[r][n] = fma(f, v[n], sums[r][n]);
    }
  }
}

// The elements of a cache as floats.
template <KvDtype>
struct Kv {
  using Element = uint16_t;
  static GAPLESS_INLINE F32x16 load(const Element* p) { return load_f16(p); }
};
template <>
struct Kv<KvDtype::bf16> {
  using Element = uint16_t;
  static GAPLESS_INLINE F32x16 load(const Element* p) { return load_bf16(p); }
};
template <>
struct Kv<KvDtype::int8> {
  using Element = int8_t;
  static GAPLESS_INLINE F32x16 load(const Element* p) { return load_i8(p); }
};
template <KvDtype D>
using Element = typename Kv<D>::Element;

// Where the blocks of one tile of 64 tokens lie.
template <KvDtype D>
struct TileBlocks {
  const Element<D>* keys[kTileBlocks];
  const Element<D>* values[kTileBlocks];
  const Element<D>* next[kTileBlocks];  // what is fetched while the values are read
  const float* scales[kTileBlocks];     // int8: of 16 keys and of 16 values
};

// Asks for the cache lines of `bytes` bytes at `p`. Into L2: its queue of misses is longer than that of L1, which alone
// makes reading from memory up to 1.5 times as fast.
template <int bytes>
GAPLESS_INLINE void prefetch(const void* p) {
  for (int i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

// out[r][16 n + i] = sum over d of q[r][d] * keys[n][d][i], for R rows and N blocks of 16 keys. Meanwhile the blocks in
// `ahead`, of the same size, are fetched.
template <KvDtype D, int R, int N>
GAPLESS_INLINE void dot_keys(const float* q, int dim, const Element<D>* const* keys, const Element<D>* const* ahead,
                             const float* const* scales, float* out) {
  constexpr int line = kLineBytes / (16 * sizeof(Element<D>));  // how many d share a cache line; divides dim
  F32x16 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = zero();
  for (int d = 0; d < dim; d += line) {
    for (int i = d; i < d + line; ++i)
      multiply_add<R, N>(
          sums, [=](int r) { return q[r * dim + i]; }, [=](int n) { return Kv<D>::load(keys[n] + i * 16); });
    for (int n = 0; n < N; ++n) prefetch<kLineBytes>(ahead[n] + d * 16);
  }
  if constexpr (D == KvDtype::int8)
    for (int n = 0; n < N; ++n) {
      const F32x16 scale = load(scales[n]);
      for (int r = 0; r < R; ++r) sums[r][n] = mul(sums[r][n], scale);
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * kAttentionTileTokens + 16 * n, sums[r][n]);
}

// Scores of R rows and the tile's blocks [first, last).
template <KvDtype D, int R>
void scores(const float* q, int dim, const TileBlocks<D>& tile, int first, int last, float* out) {
  constexpr int N = vectors_per_row(R);
  int b = first;
  for (; b + N <= last; b += N)
    dot_keys<D, R, N>(q, dim, tile.keys + b, tile.values + b, tile.scales + b, out + 16 * b);
  for (; b < last; ++b) dot_keys<D, R, 1>(q, dim, tile.keys + b, tile.values + b, tile.scales + b, out + 16 * b);
}

// acc[r][i] = acc[r][i] * corrections[r] + sum over tokens of p[r][token] * values[token][i], for R rows, 16 N columns
// and the tile's tokens in `seen`. Meanwhile the same part of the blocks in `tile.next` is fetched.
template <KvDtype D, int R, int N>
GAPLESS_INLINE void add_columns(const float* p, KeyRange seen, const TileBlocks<D>& tile, int dim, int column,
                                const float* corrections, float* acc, int acc_stride) {
  constexpr int bytes = 16 * N * sizeof(Element<D>);
  F32x16 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = mul(load(acc + r * acc_stride + 16 * n), set1(corrections[r]));
  const bool fetches = bytes >= kLineBytes || column * sizeof(Element<D>) % kLineBytes == 0;
  for (int t = seen.begin; t < seen.end;) {
    const int stop = (t | 15) + 1 < seen.end ? (t | 15) + 1 : seen.end;
    int64_t offset = (t % 16) * dim + column;
    const Element<D>*v = tile.values[t / 16], *next = tile.next[t / 16];
    for (; t < stop; ++t, offset += dim) {
      multiply_add<R, N>(
          sums, [=](int r) { return p[r * kAttentionTileTokens + t]; },
          [=](int n) { return Kv<D>::load(v + offset + 16 * n); });
      if (fetches) prefetch<bytes>(next + offset);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(acc + r * acc_stride + 16 * n, sums[r][n]);
}

template <KvDtype D, int R>
void weigh_values(const float* p, KeyRange seen, const TileBlocks<D>& tile, int dim, int column, int column_end,
                  const float* corrections, float* acc, int acc_stride) {
  constexpr int N = vectors_per_row(R);
  int c = column;
  for (; c + 16 * N <= column_end; c += 16 * N)
    add_columns<D, R, N>(p, seen, tile, dim, c, corrections, acc + c, acc_stride);
  for (; c < column_end; c += 16) add_columns<D, R, 1>(p, seen, tile, dim, c, corrections, acc + c, acc_stride);
}

// The two functions above by number of rows.
template <KvDtype D>
struct RowBlockKernels {
  void (*scores)(const float*, int, const TileBlocks<D>&, int, int, float*);
  void (*weigh_values)(const float*, KeyRange, const TileBlocks<D>&, int, int, int, const float*, float*, int);
};
template <KvDtype D, int... R>
struct RowBlockTable {
  static constexpr RowBlockKernels<D> kernels[] = {{scores<D, R>, weigh_values<D, R>}...};
};
template <KvDtype D>
GAPLESS_INLINE const RowBlockKernels<D>& row_block_kernels(int rows) {
#if defined(GAPLESS_ISA_AVX512)
  return RowBlockTable<D, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>::kernels[rows - 1];
#else
  return RowBlockTable<D, 1, 2, 3, 4, 5, 6>::kernels[rows - 1];
#endif
}

// The running result of a row: maximum score, sum of exponentials, accumulator. Also the format of partial results.
struct Record {
  float* base;
  float& maximum() const { return base[0]; }
  float& sum() const { return base[1]; }
  float* acc() const { return base + 16; }
};

GAPLESS_INLINE float first_lane(F32x16 x) {
  float lanes[16];
  to_array(lanes, x);
  return lanes[0];
}

GAPLESS_INLINE F32x16 weight_of(F32x16 score, F32x16 maximum) { return exp2(mul(sub(score, maximum), set1(kLog2E))); }

// Adds a later split to a row's total.
void fold(Record total, Record split, int dim) {
  const F32x16 old_maximum = set1(total.maximum()), split_maximum = set1(split.maximum());
  const F32x16 maximum = max(old_maximum, split_maximum);
  const F32x16 old_weight = weight_of(old_maximum, maximum), split_weight = weight_of(split_maximum, maximum);
  total.maximum() = first_lane(maximum);
  total.sum() = first_lane(fma(set1(total.sum()), old_weight, mul(set1(split.sum()), split_weight)));
  for (int d = 0; d < dim; d += 16)
    store(total.acc() + d, fma(load(total.acc() + d), old_weight, mul(load(split.acc() + d), split_weight)));
}

// A row's output: divides by the sum of the exponentials. Adding zero turns -0 into +0: masked keys may do so too.
void finish(Record total, int dim, const float* sink, KvDtype dtype, float* out) {
  F32x16 sum = set1(total.sum()), scale = set1(1.0f);
  if (sink) {
    const F32x16 old_maximum = set1(total.maximum()), sink_score = set1(*sink);
    const F32x16 maximum = max(old_maximum, sink_score);
    scale = weight_of(old_maximum, maximum);
    sum = fma(sum, scale, weight_of(sink_score, maximum));
  }
  scale = div(scale, sum);
  // int8 values are rotated; twice is hadamard_width(dim) times the identity.
  if (dtype == KvDtype::int8) scale = mul(scale, set1(1.0f / float(hadamard_width(dim))));
  for (int d = 0; d < dim; d += 16) store(out + d, add(mul(load(total.acc() + d), scale), zero()));
  if (dtype == KvDtype::int8) hadamard(out, dim);
}

// Keys of the current tile, relative to its start, that a row or a block of rows sees; empty if end <= begin.
GAPLESS_INLINE KeyRange within_tile(KeyRange keys, int tile_begin) {
  const int begin = keys.begin - tile_begin, end = keys.end - tile_begin;
  return {begin > 0 ? begin : 0, end < kAttentionTileTokens ? end : kAttentionTileTokens};
}

// Sixteen lanes of which those in [begin, end), clamped to [0, 16], hold `seen` and the others `hidden`: two windows on
// a step function each.
struct LaneMask {
  float at_least[32], below[32];
  constexpr LaneMask(float seen, float hidden) : at_least(), below() {
    for (int i = 0; i < 32; ++i) {
      at_least[i] = i < 16 ? hidden : seen;
      below[i] = i < 16 ? seen : hidden;
    }
  }
  GAPLESS_INLINE F32x16 lanes(int begin, int end) const {
    begin = begin < 0 ? 0 : begin > 16 ? 16 : begin;
    end = end < 0 ? 0 : end > 16 ? 16 : end;
    return min(load(at_least + 16 - begin), load(below + 16 - end));
  }
};
constexpr LaneMask kBounds(INFINITY, kMasked), kSelect(1.0f, 0.0f);

// Turns a row's scores of the 16-key blocks [first, last) into weights, in place, and updates its maximum and the lanes
// of its sum. Keys outside `keys` get weight 0. Returns the factor that corrects what was accumulated before.
GAPLESS_INLINE float softmax_tile(float* row, int first, int last, KeyRange keys, float softcap, float& maximum,
                                  float* sum_lanes) {
  const auto is_partial = [=](int b) { return keys.begin > 16 * b || keys.end < 16 * b + 16; };
  F32x16 largest = set1(maximum);
  for (int b = first; b < last; ++b) {
    F32x16 s = load(row + 16 * b);
    if (softcap > 0) s = mul(set1(softcap), tanh(mul(s, set1(1.0f / softcap))));
    if (is_partial(b)) s = min(s, kBounds.lanes(keys.begin - 16 * b, keys.end - 16 * b));  // also a NaN of a stale key
    if (softcap > 0 || is_partial(b)) store(row + 16 * b, s);
    largest = max(s, largest);
  }
  const F32x16 old_maximum = set1(maximum), new_maximum = set1(reduce_max(largest));
  const F32x16 correction = weight_of(old_maximum, new_maximum);
  F32x16 sum = mul(load(sum_lanes), correction);
  for (int b = first; b < last; ++b) {
    F32x16 p = weight_of(load(row + 16 * b), new_maximum);
    if (is_partial(b)) p = mul(p, kSelect.lanes(keys.begin - 16 * b, keys.end - 16 * b));
    store(row + 16 * b, p);
    sum = add(sum, p);
  }
  store(sum_lanes, sum);
  maximum = first_lane(new_maximum);
  return first_lane(correction);
}

// One item at work.
template <KvDtype D>
class ItemWorker {
 public:
  ItemWorker(const AttentionArgs& args, const AttentionItem& item, float* scratch)
      : args_(args),
        shape_(args.shape),
        item_(item),
        sequence_(args.sequences[item.sequence]),
        dim_(shape_.head_dim),
        num_rows_(item.num_tokens * item.num_heads),
        num_row_blocks_((num_rows_ + kMaxRows - 1) / kMaxRows),
        kv_{args.kv.data, args.kv.block_stride, D, dim_},
        kv_head_(item.head_begin / (shape_.num_heads / shape_.num_kv_heads)),
        record_stride_(int(attention_partial_stride(dim_))) {
    const auto take = [&](int64_t floats) {
      float* p = scratch;
      scratch += floats;
      return p;
    };
    q_ = take(int64_t(kAttentionTileRows) * dim_);
    scores_ = take(int64_t(kAttentionTileRows) * kAttentionTileTokens);
    sum_lanes_ = take(kAttentionTileRows * 16);
    corrections_ = take(kAttentionTileRows * 16);
    total_ = take(int64_t(kAttentionTileRows) * record_stride_);
    split_ = take(int64_t(kAttentionTileRows) * record_stride_);
  }

  void run() {
    for (int r = 0; r < num_rows_; ++r)
      std::memcpy(q_ + r * dim_, args_.q + row_of(r) * args_.q_stride + head_of(r) * dim_, dim_ * sizeof(float));
    if (item_.partial_offset >= 0) {
      float* partial = args_.partials + item_.partial_offset;
      for (int s = item_.split_begin; s < item_.split_end; ++s, partial += num_rows_ * record_stride_)
        run_split(s, partial);
      return;
    }
    run_split(item_.split_begin, total_);
    for (int s = item_.split_begin + 1; s < item_.split_end; ++s) {
      run_split(s, split_);
      for (int r = 0; r < num_rows_; ++r) fold(record(total_, r), record(split_, r), dim_);
    }
    for (int r = 0; r < num_rows_; ++r)
      finish(record(total_, r), dim_, args_.sinks ? args_.sinks + head_of(r) : nullptr, D,
             args_.out + row_of(r) * args_.out_stride + head_of(r) * dim_);
  }

 private:
  int token_of(int r) const { return item_.token_begin + r / item_.num_heads; }
  int head_of(int r) const { return item_.head_begin + r % item_.num_heads; }
  int64_t row_of(int r) const { return sequence_.row_begin + token_of(r); }
  Record record(float* records, int r) const { return {records + r * record_stride_}; }
  int block_begin(int i) const { return num_rows_ * i / num_row_blocks_; }
  KeyRange keys_of(int r) const {
    return visible_keys(shape_, sequence_.position + token_of(r), sequence_.position + sequence_.num_rows);
  }
  // Both bounds grow with the position, so the first and the last row bound those between.
  KeyRange keys_of(int first_row, int last_row) const { return {keys_of(first_row).begin, keys_of(last_row).end}; }

  void run_split(int split, float* records) {
    for (int r = 0; r < num_rows_; ++r) {
      record(records, r).maximum() = kMasked;
      std::memset(record(records, r).acc(), 0, dim_ * sizeof(float));
    }
    std::memset(sum_lanes_, 0, num_rows_ * 16 * sizeof(float));
    const KeyRange keys = keys_of(0, num_rows_ - 1);
    const int split_begin = split * kAttentionSplitTokens;
    for (int begin = split_begin; begin < split_begin + kAttentionSplitTokens; begin += kAttentionTileTokens)
      if (begin < keys.end && begin + kAttentionTileTokens > keys.begin)
        run_tile(begin, within_tile(keys, begin), records);
    for (int r = 0; r < num_rows_; ++r) record(records, r).sum() = reduce_add(load(sum_lanes_ + r * 16));
  }

  // One step of the online softmax: the keys [begin, begin + 64), of which some row sees `keys`.
  void run_tile(int begin, KeyRange keys, float* records) {
    TileBlocks<D> tile;
    const int first = keys.begin / 16, last = (keys.end + 15) / 16;
    const int next_begin = begin + kAttentionTileTokens, next_end = keys_of(num_rows_ - 1).end;
    for (int b = first; b < last; ++b) {
      const int64_t block = sequence_.block_table[begin / 16 + b];
      tile.keys[b] = reinterpret_cast<const Element<D>*>(kv_.keys(block, kv_head_));
      tile.values[b] = reinterpret_cast<const Element<D>*>(kv_.values(block, kv_head_));
      tile.scales[b] = kv_.scales(block, kv_head_);
      // The next tile's keys, or else what is at hand. The blocks of a sequence lie anywhere, which hardware cannot
      // foresee.
      tile.next[b] = tile.values[b];
      if (next_begin + 16 * b >= next_end) continue;
      const int64_t next = sequence_.block_table[next_begin / 16 + b];
      tile.next[b] = reinterpret_cast<const Element<D>*>(kv_.keys(next, kv_head_));
      if constexpr (D == KvDtype::int8) prefetch<2 * kLineBytes>(kv_.scales(next, kv_head_));
    }
    KeyRange seen[kMaxRowBlocks];
    for (int i = 0; i < num_row_blocks_; ++i)
      seen[i] = within_tile(keys_of(block_begin(i), block_begin(i + 1) - 1), begin);

    for (int i = 0; i < num_row_blocks_; ++i) {
      if (seen[i].begin >= seen[i].end) continue;
      const int r = block_begin(i), b = seen[i].begin / 16;
      row_block_kernels<D>(block_begin(i + 1) - r)
          .scores(q_ + r * dim_, dim_, tile, b, (seen[i].end + 15) / 16, scores_ + r * kAttentionTileTokens);
      softmax(i, seen[i], begin, tile, records);
    }
    for (int c = 0; c < dim_; c += kValueColumns)
      for (int i = 0; i < num_row_blocks_; ++i) {
        if (seen[i].begin >= seen[i].end) continue;
        const int r = block_begin(i);
        row_block_kernels<D>(block_begin(i + 1) - r)
            .weigh_values(scores_ + r * kAttentionTileTokens, seen[i], tile, dim_, c,
                          c + kValueColumns < dim_ ? c + kValueColumns : dim_, corrections_ + r,
                          record(records, r).acc(), record_stride_);
      }
  }

  void softmax(int row_block, KeyRange seen, int tile_begin, const TileBlocks<D>& tile, float* records) {
    const int first = seen.begin / 16, last = (seen.end + 15) / 16;
    for (int r = block_begin(row_block); r < block_begin(row_block + 1); ++r) {
      float* row = scores_ + r * kAttentionTileTokens;
      corrections_[r] = softmax_tile(row, first, last, within_tile(keys_of(r), tile_begin), args_.softcap,
                                     record(records, r).maximum(), sum_lanes_ + r * 16);
      if constexpr (D == KvDtype::int8)
        for (int b = first; b < last; ++b)
          store(row + 16 * b, mul(load(row + 16 * b), load(tile.scales[b] + kKvBlockTokens)));
    }
  }

  const AttentionArgs& args_;
  const AttentionShape& shape_;
  const AttentionItem& item_;
  const AttentionSequence& sequence_;
  const int dim_;
  const int num_rows_;
  const int num_row_blocks_;
  const KvLayer kv_;  // args.kv, but of a dtype that the compiler knows
  const int kv_head_;
  const int record_stride_;
  float* q_;            // [rows][dim]
  float* scores_;       // [rows][64], weights after the softmax
  float* sum_lanes_;    // [rows][16] the sum of the current split, by key modulo 16
  float* corrections_;  // [rows]
  float* total_;        // [rows] records of all splits so far
  float* split_;        // [rows] records of the current split
};

void attend(const AttentionArgs& args, const AttentionItem& item, float* scratch) {
  switch (args.kv.dtype) {
    case KvDtype::f16:
      return ItemWorker<KvDtype::f16>(args, item, scratch).run();
    case KvDtype::bf16:
      return ItemWorker<KvDtype::bf16>(args, item, scratch).run();
    case KvDtype::int8:
      return ItemWorker<KvDtype::int8>(args, item, scratch).run();
  }
}

void merge(const AttentionArgs& args, const AttentionMerge& merge) {
  const int dim = args.shape.head_dim, rows = merge.num_tokens * merge.num_heads;
  const int64_t stride = attention_partial_stride(dim);
  const int64_t first_row = args.sequences[merge.sequence].row_begin + merge.token_begin;
  for (int r = 0; r < rows; ++r) {
    const int head = merge.head_begin + r % merge.num_heads;
    float* partial = args.partials + merge.partial_offset + r * stride;
    for (int s = 1; s < merge.num_splits; ++s) fold({partial}, {partial + s * rows * stride}, dim);
    finish({partial}, dim, args.sinks ? args.sinks + head : nullptr, args.kv.dtype,
           args.out + (first_row + r / merge.num_heads) * args.out_stride + head * dim);
  }
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels kernels = {attend, merge};
  return kernels;
}

}  // namespace gapless::GAPLESS_ISA
