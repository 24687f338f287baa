// Attention on one thread: prefill against the machine's f32 FMA peak, decode in bytes of keys and values per second.
// Build as tests/kernels/test_attention.cpp. Best of several repetitions: the machine may be shared.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "platform/memory.h"
#include "simd/f32x16.h"

namespace gapless::GAPLESS_ISA {
const AttentionKernels& attention_kernels();
}

namespace {

using namespace gapless;
using namespace gapless::GAPLESS_ISA;

// Time that this thread was running: other processes take time away, too, on a shared machine.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

template <typename Work>
double best_seconds(int repetitions, Work work) {
  double best = 1e9;
  for (int i = 0; i < repetitions; ++i) {
    const double start = thread_seconds();
    work();
    best = std::min(best, thread_seconds() - start);
  }
  return best;
}

[[gnu::noinline]] double peak_flops() {
  constexpr int rounds = 2000000;
  F32x16 sums[6];
  float start[6 * 16];  // all different: equal ones would be computed once
  for (int i = 0; i < 6 * 16; ++i) start[i] = float(i);
  for (int i = 0; i < 6; ++i) sums[i] = load(start + 16 * i);
  const F32x16 a = set1(0.999f), b = set1(0.001f);
  const double seconds = best_seconds(5, [&] {
    for (int i = 0; i < rounds; ++i)
      for (F32x16& s : sums) s = gapless::GAPLESS_ISA::fma(s, a, b);
  });
  volatile float sink = reduce_add(add(add(add(sums[0], sums[1]), add(sums[2], sums[3])), add(sums[4], sums[5])));
  (void)sink;
  return 6.0 * 32 * rounds / seconds;
}

double read_bandwidth() {
  const std::vector<float> memory(32 << 20, 1.0f);
  F32x16 sums[4] = {zero(), zero(), zero(), zero()};
  const double seconds = best_seconds(5, [&] {
    for (size_t i = 0; i < memory.size(); i += 64)
      for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], load(&memory[i + 16 * j]));
  });
  volatile float sink = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  (void)sink;
  return double(memory.size()) * sizeof(float) / seconds;
}

struct Case {
  const char* name;
  AttentionShape shape;
  int num_sequences, cached, rows;
};

// Values between -1 and 1.
void fill(const KvLayer& kv, int64_t block, int head, std::mt19937& random) {
  const int64_t count = int64_t(2) * kv.head_dim * kKvBlockTokens;
  std::byte* tiles = kv.keys(block, head);
  for (int64_t i = 0; i < count; ++i) {
    const int value = int(random() % 255) - 127;
    const uint16_t element = kv.dtype == KvDtype::bf16 ? f32_to_bf16(value / 127.0f) : f32_to_f16(value / 127.0f);
    if (kv.dtype == KvDtype::int8)
      tiles[i] = std::byte(int8_t(value));
    else
      std::memcpy(tiles + 2 * i, &element, 2);
  }
  if (kv.dtype == KvDtype::int8) std::fill_n(kv.scales(block, head), 2 * kKvBlockTokens, 1 / 127.0f);
}

void measure(const Case& c, KvDtype dtype, double peak) {
  const AttentionShape& shape = c.shape;
  const int length = c.cached + c.rows, blocks = (length + 15) / 16, width = shape.num_heads * shape.head_dim;
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<int32_t> tables(c.num_sequences * blocks);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = int32_t(i);
  std::shuffle(tables.begin(), tables.end(), random);
  const int64_t block_bytes = shape.num_kv_heads * kv_head_bytes(dtype, shape.head_dim);
  const MappedMemory cache(tables.size() * size_t(block_bytes), /*huge_pages=*/true);
  const KvLayer kv{cache.data(), block_bytes, dtype, shape.head_dim};
  for (size_t b = 0; b < tables.size(); ++b)
    for (int h = 0; h < shape.num_kv_heads; ++h) fill(kv, int64_t(b), h, random);
  std::vector<float> q(int64_t(c.num_sequences) * c.rows * width), out(q.size());
  for (float& x : q) x = uniform(random);
  std::vector<AttentionSequence> sequences;
  for (int s = 0; s < c.num_sequences; ++s) sequences.push_back({s * c.rows, c.rows, c.cached, &tables[s * blocks]});
  AttentionPlan plan(1);
  plan.build(sequences.data(), c.num_sequences, shape);
  std::vector<float> scratch(attention_scratch_floats(shape) + 16);
  float* aligned = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t(63));
  const AttentionArgs args = {shape, sequences.data(), q.data(), width, out.data(), width, kv, 0, nullptr, nullptr};
  const double seconds = best_seconds(20, [&] {
    for (int i = 0; i < plan.num_items(); ++i) attention_kernels().attend(args, plan.item(i), aligned);
  });
  double pairs = 0, keys = 0;  // (row, key) pairs that count; keys read once per query tile do not
  for (int t = 0; t < c.rows; ++t) {
    const KeyRange seen = visible_keys(shape, c.cached + t, length);
    pairs += double(seen.end - seen.begin) * shape.num_heads * c.num_sequences;
  }
  const KeyRange seen = visible_keys(shape, length - 1, length);
  keys = double(seen.end - seen.begin) * c.num_sequences;
  const double flops = pairs * 4 * shape.head_dim, bytes = keys * double(block_bytes) / kKvBlockTokens;
  std::printf("%-34s %9.1f us  %6.1f GFLOP/s (%4.1f%% of peak)  %6.2f GB/s of KV\n", c.name, seconds * 1e6,
              flops / seconds * 1e-9, 100 * flops / seconds / peak, bytes / seconds * 1e-9);
}

}  // namespace

// Arguments: the type of the cache (f16, bf16 or int8; default f16), and a part of the names of the wanted cases.
int main(int argc, char** argv) {
  const std::string type = argc > 1 ? argv[1] : "f16";
  const KvDtype dtype = type == "int8" ? KvDtype::int8 : type == "bf16" ? KvDtype::bf16 : KvDtype::f16;
  const double peak = peak_flops();
  std::printf("f32 FMA peak of one thread: %.1f GFLOP/s\n", peak * 1e-9);
  std::printf("memory read bandwidth of one thread: %.1f GB/s\n", read_bandwidth() * 1e-9);
  const Case cases[] = {
      {"prefill 512, 9/3 heads of 64", {9, 3, 64}, 1, 0, 512},
      {"prefill 512, 14/2 heads of 64", {14, 2, 64}, 1, 0, 512},
      {"prefill 512, 12/2 heads of 128", {12, 2, 128}, 1, 0, 512},
      {"prefill 512, 8/8 heads of 128", {8, 8, 128}, 1, 0, 512},
      {"prefill 512, 4/1 heads of 256", {4, 1, 256}, 1, 0, 512},
      {"prefill 512 after 4096, 12/2 of 128", {12, 2, 128}, 1, 4096, 512},
      {"decode at 512, 9/3 of 64", {9, 3, 64}, 1, 511, 1},
      {"decode at 512, 8/8 of 64", {8, 8, 64}, 1, 511, 1},
      {"decode at 4096, 9/3 of 64", {9, 3, 64}, 1, 4095, 1},
      {"decode at 4096, 14/2 of 64", {14, 2, 64}, 1, 4095, 1},
      {"decode at 4096, 12/2 of 128", {12, 2, 128}, 1, 4095, 1},
      {"decode at 4096, 8/8 of 128", {8, 8, 128}, 1, 4095, 1},
      {"decode at 4096, 32/8 of 128", {32, 8, 128}, 1, 4095, 1},
      {"decode at 4096, 4/1 of 256", {4, 1, 256}, 1, 4095, 1},
      {"decode 32 x 1024, 9/3 of 64", {9, 3, 64}, 32, 1023, 1},
      {"decode 32 x 1024, 12/2 of 128", {12, 2, 128}, 32, 1023, 1},
      {"decode at 32000, 14/2 of 64", {14, 2, 64}, 1, 31999, 1},
      {"decode at 32000, 32/8 of 128", {32, 8, 128}, 1, 31999, 1},
      {"decode at 32000, 8/8 of 128", {8, 8, 128}, 1, 31999, 1},
  };
  for (const Case& c : cases)
    if (argc < 3 || std::strstr(c.name, argv[2])) measure(c, dtype, peak);
}
