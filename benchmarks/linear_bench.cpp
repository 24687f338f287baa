// Linear kernels against the bounds of the machine: read bandwidth for few rows, multiply throughput for many.
//
//   linear_bench [--threads N] [--isa NAME] [--type int4] [--shape 8960x1536] [--rows 1,64]
//
// Every figure is the best of several runs: the bounds, too, are what the machine does when it is left alone.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "linear_isas.h"
#include "machine_peaks.h"
#include "ops/linear.h"
#include "platform/thread_pool.h"
#include "simd/f32x16.h"

namespace {

using namespace gapless;

struct Options {
  int num_threads = default_num_threads();
  std::string isa, type, shape;
  std::vector<int> rows = {1, 2, 4, 8, 32, 128, 512};
};

struct NamedFormat {
  const char* name;
  PackedFormat format;
};

const NamedFormat kFormats[] = {
    {"int4 (Q4_0)", {PackedType::int4}},
    {"int4 min (Q4_1)", {PackedType::int4, true}},
    {"int4 sub (Q4_K)", {PackedType::int4, true, true, 8}},
    {"int5 (Q5_0)", {PackedType::int5}},
    {"int5 sub (Q5_K)", {PackedType::int5, true, true, 8}},
    {"int6 (Q6_K)", {PackedType::int6, false, true, 8}},
    {"int8 (Q8_0)", {PackedType::int8}},
    {"bf16", {PackedType::bf16}},
    {"f32", {PackedType::f32}},
};

// Enough copies of a weight that none is still in the L3 cache when its turn comes again.
std::vector<PackedWeight> cold_copies(int rows, int cols, const PackedFormat& format) {
  constexpr size_t kTotalBytes = 192 << 20;
  std::vector<PackedWeight> copies;
  std::mt19937 rng(1);
  for (size_t bytes = 0; bytes < kTotalBytes; bytes += copies.back().num_bytes()) {
    PackedWeight w = PackedWeight::allocate(rows, cols, format);
    auto* words = reinterpret_cast<uint32_t*>(w.memory.data());
    for (size_t i = 0; i < w.num_bytes() / 4; ++i) words[i] = rng() & 0x3fff3fff;  // finite floats of every kind
    for (size_t i = 0; w.scales && i < size_t(w.num_tiles) * w.num_scales * format.scales_per_entry() * kTileRows; ++i)
      w.scales[i] = 0x2000;
    copies.push_back(std::move(w));
  }
  return copies;
}

void run(const LinearKernels& kernels, ThreadPool& pool, const PackedWeight& w, const std::vector<float>& x,
         const std::vector<std::byte>& xq, int num_rows, std::vector<float>& y) {
  const int num_chunks = (num_rows + 63) / 64;
  const int num_parts = num_chunks >= 4 * pool.num_threads() ? 2 : 4 * pool.num_threads();
  pool.run(num_chunks * num_parts, [&](int item, int) {
    const int chunk = item / num_parts, part = item % num_parts;
    LinearArgs args;
    args.weight = &w;
    args.x = x.data() + size_t(chunk) * 64 * w.cols, args.x_stride = w.cols;
    if (w.format.is_integer())
      args.xq = xq.data() + chunk * 64 * a8_row_bytes(w.cols), args.xq_stride = a8_row_bytes(w.cols);
    args.num_rows = std::min(64, num_rows - chunk * 64);
    args.tile_begin = w.num_tiles * part / num_parts, args.tile_end = w.num_tiles * (part + 1) / num_parts;
    args.y = y.data() + size_t(chunk) * 64 * w.rows, args.y_stride = w.rows;
    kernels.linear(args);
  });
}

void bench_format(const NamedFormat& named, int rows, int cols, const Options& options, const LinearKernels& kernels,
                  ThreadPool& pool, const Peaks& peaks) {
  const std::vector<PackedWeight> copies = cold_copies(rows, cols, named.format);
  const int max_rows = *std::max_element(options.rows.begin(), options.rows.end());
  std::vector<float> x(size_t(max_rows) * cols), y(size_t(max_rows) * rows);
  std::mt19937 rng(2);
  for (float& value : x) value = float(int(rng() % 2001) - 1000) / 1000;
  std::vector<std::byte> xq(size_t(max_rows) * a8_row_bytes(cols));
  for (int m = 0; m < max_rows; ++m)
    kernels.quantize_row(x.data() + size_t(m) * cols, cols, xq.data() + m * a8_row_bytes(cols));
  const double bytes = double(copies[0].num_bytes());
  const double peak = named.format.is_integer() ? peaks.int8_ops : peaks.f32_flops;
  std::printf("%-16s %5dx%-5d", named.name, rows, cols);
  for (const int num_rows : options.rows) {
    size_t next = 0;
    const int calls = num_rows <= 2 ? std::min(8, int(copies.size())) : 1;
    const double s = fastest_s(8, pool.num_threads() == 1,
                               [&] {
                                 for (int i = 0; i < calls; ++i)
                                   run(kernels, pool, copies[next++ % copies.size()], x, xq, num_rows, y);
                               }) /
                     calls;
    const double ops = 2.0 * num_rows * rows * cols;
    if (num_rows <= 2)
      std::printf("  M%d %5.1f GB/s %3.0f%%", num_rows, bytes / s / 1e9, 100 * bytes / s / peaks.read_bandwidth);
    else
      std::printf("  M%d %4.0f %3.0f%%", num_rows, ops / s / 1e9, 100 * ops / s / peak);
    std::fflush(stdout);
  }
  std::printf("\n");
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--threads")
      options.num_threads = std::atoi(value.c_str());
    else if (key == "--isa")
      options.isa = value;
    else if (key == "--type")
      options.type = value;
    else if (key == "--shape")
      options.shape = value;
    else if (key == "--rows") {
      options.rows.clear();
      for (size_t at = 0; at < value.size();
           at = value.find(',', at) == std::string::npos ? value.size() : value.find(',', at) + 1)
        options.rows.push_back(std::atoi(value.c_str() + at));
    } else {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  ThreadPool pool(options.num_threads);
  const Peaks peaks = measure_peaks(pool);
  std::printf("%d threads: read %.1f GB/s, int8 multiply-add %.0f GOP/s, f32 fma %.0f GFLOP/s\n", options.num_threads,
              peaks.read_bandwidth / 1e9, peaks.int8_ops / 1e9, peaks.f32_flops / 1e9);
  for (const LinearIsa& isa : linear_isas()) {
    const bool chosen = options.isa.empty() ? &isa.kernels[0] == linear_isas().back().kernels : options.isa == isa.name;
    if (!chosen) continue;
    std::printf(
        "kernels: %s; M = rows; columns: GB/s of weights and %% of read bandwidth, else GOP/s and %% of the multiply "
        "peak\n",
        isa.name);
    for (const auto& [rows, cols] : {std::pair{8960, 1536}, {896, 4864}, {1536, 576}})
      for (const NamedFormat& named : kFormats)
        if (std::string(named.name).find(options.type) != std::string::npos &&
            (options.shape.empty() || options.shape == std::to_string(rows) + "x" + std::to_string(cols)))
          bench_format(named, rows, cols, options, *isa.kernels, pool, peaks);
  }
  return 0;
}
