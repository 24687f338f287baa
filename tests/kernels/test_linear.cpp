// Linear kernels of every ISA of this host against a double-precision reference, and against themselves: a row alone
// must give the bits that it gives among others.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "linear_isas.h"
#include "ops/linear.h"
#include "ops/packed_weight.h"
#include "simd/f32x16.h"

namespace {

using namespace gapless;
using generic::f16_to_f32;
using generic::f32_to_bf16;
using generic::f32_to_f16;

constexpr double kUnit = 0x1p-24;  // half an ulp of 1
std::mt19937 rng(7);

float normal() { return std::normal_distribution<float>()(rng); }
int below(int n) { return int(rng() % uint32_t(n)); }

struct Failure {
  std::string what;
};

void check(bool ok, const std::string& what) {
  if (!ok) throw Failure{what};
}

// A weight of random bits with scales of a sensible size. Padding stays zero, as pack leaves it.
PackedWeight random_weight(int rows, int cols, const PackedFormat& format) {
  PackedWeight w = PackedWeight::allocate(rows, cols, format);
  if (!format.is_integer()) {
    const size_t items = w.tile_quant_bytes * size_t(w.num_tiles) / (format.type == PackedType::f32 ? 4 : 2);
    for (size_t i = 0; i < items; ++i) {
      const float value = normal();
      const uint16_t half = format.type == PackedType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
      if (format.type == PackedType::f32)
        std::memcpy(w.quants + 4 * i, &value, 4);
      else
        std::memcpy(w.quants + 2 * i, &half, 2);
    }
    return w;
  }
  for (size_t i = 0; i < w.tile_quant_bytes * size_t(w.num_tiles); ++i) w.quants[i] = std::byte(rng());
  const int entry = format.scales_per_entry() * kTileRows;
  for (int i = 0; i < w.num_tiles * w.num_scales * entry; ++i) w.scales[i] = f32_to_f16(0.02f * normal());
  for (int i = 0; i < w.num_tiles * w.num_groups * format.subs_per_group() * kTileRows; ++i) w.subs[i] = int8_t(rng());
  return w;
}

// One output in double, and the sum of magnitudes that bounds its rounding errors.
struct Reference {
  double value, magnitude;
};

// What the kernels subtract per unit of activation: the minimum, or (from f32 rows) the zero point times the scale.
double offset(const PackedWeight& w, int output, int group) {
  if (!w.format.is_integer()) return 0;
  const int tile = output / kTileRows, lane = output % kTileRows, has_min = w.format.has_min;
  const int entry = (tile * w.num_scales + group / w.format.groups_per_scale) * w.format.scales_per_entry() + has_min;
  double result = std::fabs(f16_to_f32(w.scales[entry * kTileRows + lane])) * (has_min ? 1 : w.format.zero_point());
  const int num_subs = w.format.subs_per_group();
  if (num_subs) result *= std::abs(w.subs[((tile * w.num_groups + group) * num_subs + has_min) * kTileRows + lane]);
  if (w.format.type == PackedType::int6) return 0;  // in exact integers
  return result;
}

Reference reference(const PackedWeight& w, int output, const std::vector<double>& x) {
  std::vector<float> row(size_t(w.cols));
  w.dequantize_row(output, row.data());
  Reference r = {0, 0};
  for (int k = 0; k < w.cols; ++k) {
    double magnitude = std::fabs(row[k]);
    magnitude += 2 * offset(w, output, k / kGroupCols);  // a difference: its parts are larger than itself
    r.value += double(row[k]) * x[k];
    r.magnitude += magnitude * std::fabs(x[k]);
  }
  return r;
}

double activated(double g, Activation act) {
  switch (act) {
    case Activation::silu:
      return g / (1 + std::exp(-g));
    case Activation::gelu_tanh:
      return 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    case Activation::gelu:
      return 0.5 * g * std::erfc(-g / std::sqrt(2.0));
    case Activation::relu:
      return g > 0 ? g : 0;
  }
  return g;
}

// Memory that starts `offset` bytes past an aligned address.
template <typename T>
struct Misaligned {
  std::vector<std::byte> storage;
  T* data;
  Misaligned(size_t count, size_t offset) : storage(count * sizeof(T) + 128) {
    const auto address = (reinterpret_cast<uintptr_t>(storage.data()) + 63) / 64 * 64 + offset;
    data = reinterpret_cast<T*>(address);
  }
};

struct Case {
  PackedFormat format;
  int rows, cols, num_rows;
  bool a8, gated, bias, accumulate;
  Activation act;
};

std::string describe(const Case& c, const char* isa) {
  char text[200];
  std::snprintf(text, sizeof text, "%s %s%s%s gps %d, N %d K %d M %d%s%s%s%s", isa, name_of(c.format.type),
                c.format.has_min ? " min" : "", c.format.has_sub ? " sub" : "", c.format.groups_per_scale, c.rows,
                c.cols, c.num_rows, c.a8 ? " a8" : "", c.gated ? " gated" : "", c.bias ? " bias" : "",
                c.accumulate ? " +=" : "");
  return text;
}

void run_case(const Case& c, const char* isa, const LinearKernels& kernels) {
  const std::string name = describe(c, isa);
  const PackedWeight w = random_weight(c.rows, c.cols, c.format);
  const PackedWeight up = c.gated ? random_weight(c.rows, c.cols, c.format) : PackedWeight{};
  const int64_t x_stride = c.cols + 3, y_stride = c.rows + 5, xq_stride = a8_row_bytes(c.cols) + 4;
  Misaligned<float> x(size_t(c.num_rows * x_stride), 4), y(size_t(c.num_rows * y_stride), 8), bias(size_t(c.rows), 12);
  Misaligned<std::byte> xq(size_t(c.num_rows * xq_stride), 4);
  for (int i = 0; i < c.num_rows * int(x_stride); ++i) x.data[i] = normal();
  for (int i = 0; i < c.num_rows * int(y_stride); ++i) y.data[i] = normal();
  for (int i = 0; i < c.rows; ++i) bias.data[i] = normal();
  for (int m = 0; m < c.num_rows; ++m) kernels.quantize_row(x.data + m * x_stride, c.cols, xq.data + m * xq_stride);
  const std::vector<float> before(y.data, y.data + c.num_rows * y_stride);

  LinearArgs args;
  args.weight = &w;
  args.up = c.gated ? &up : nullptr;
  args.act = c.act;
  args.x = x.data;
  args.x_stride = x_stride;
  if (c.a8) args.xq = xq.data, args.xq_stride = xq_stride;
  args.num_rows = c.num_rows;
  args.tile_end = w.num_tiles;
  if (c.bias) args.bias = bias.data;
  args.y = y.data;
  args.y_stride = y_stride;
  args.accumulate = c.accumulate;
  kernels.linear(args);

  const bool integers = c.a8 && c.format.is_integer();
  for (int m = 0; m < c.num_rows; ++m) {
    std::vector<double> input(size_t(c.cols));
    for (int k = 0; k < c.cols; ++k) {
      input[k] = x.data[m * x_stride + k];
      if (!integers) continue;
      const std::byte* group = xq.data + m * xq_stride + k / 32 * kA8GroupBytes;
      float scale;
      std::memcpy(&scale, group + 32, 4);
      input[k] = double(scale) * int8_t(group[k % 32]);
    }
    for (int n = 0; n < c.rows; n += c.rows > 40 && m > 2 ? 7 : 1) {  // a sample is enough for large cases
      const Reference r = reference(w, n, input);
      // Integers: per group three roundings of its term and one of the total. Floats: two roundings per input.
      const double steps = integers ? (c.cols + 31) / 32 + 8 : 2 * c.cols + 4;
      double expected = r.value, bound = steps * kUnit * r.magnitude;
      if (c.gated) {
        const Reference u = reference(up, n, input);
        const double u_bound = steps * kUnit * u.magnitude, g = activated(r.value, c.act);
        // The slopes of all activations are below 1.13.
        const double g_bound = 1.13 * bound + 1e-6 * std::fabs(g) + 1e-9;
        expected = g * u.value;
        bound = g_bound * (std::fabs(u.value) + u_bound) + std::fabs(g) * u_bound + 2 * kUnit * std::fabs(expected);
      }
      if (c.bias) expected += bias.data[n], bound += kUnit * (std::fabs(expected) + bound);
      if (c.accumulate) expected += before[m * y_stride + n], bound += kUnit * (std::fabs(expected) + bound);
      const double error = std::fabs(y.data[m * y_stride + n] - expected);
      if (!(error <= bound))
        check(false, name + ": row " + std::to_string(m) + " output " + std::to_string(n) + " is " +
                         std::to_string(y.data[m * y_stride + n]) + ", not " + std::to_string(expected) + " +- " +
                         std::to_string(bound));
    }
    for (int n = c.rows; n < y_stride; ++n)
      check(y.data[m * y_stride + n] == before[m * y_stride + n], name + ": wrote past the row");
  }

  // Each row alone, its tiles in two calls.
  std::vector<float> alone(before);
  args.y = alone.data();
  args.num_rows = 1;
  for (int m = 0; m < c.num_rows; ++m) {
    args.x = x.data + m * x_stride;
    if (c.a8) args.xq = xq.data + m * xq_stride;
    args.y = alone.data() + m * y_stride;
    const int middle = below(w.num_tiles + 1);
    args.tile_begin = middle, args.tile_end = w.num_tiles;
    kernels.linear(args);
    args.tile_begin = 0, args.tile_end = middle;
    kernels.linear(args);
  }
  check(std::memcmp(alone.data(), y.data, alone.size() * 4) == 0,
        name + ": a row alone differs from the same row in a batch");
}

// Activations: q and sums against their definition, and the same bytes on every ISA.
void test_quantize_row(const char* isa, const LinearKernels& kernels) {
  for (const int k : {1, 31, 32, 33, 64, 128, 576, 1000, 1024, 2212}) {
    std::vector<float> x(size_t(k) + 1);
    for (float& value : x) value = normal() * std::exp2(float(below(40) - 20));
    for (int i = 0; i < k; i += 5) x[i] = 0;
    for (int i = 33; i < std::min(k, 65); ++i) x[size_t(i)] = 1e-35f;
    std::vector<std::byte> out(size_t(a8_row_bytes(k))), expected(out.size());
    kernels.quantize_row(x.data() + 1, k, out.data());
    generic::linear_kernels().quantize_row(x.data() + 1, k, expected.data());
    check(out == expected, std::string(isa) + ": quantize_row differs from the generic one");
    for (int first = 0; first < k; first += kGroupCols) {
      const std::byte* group = out.data() + first / 32 * kA8GroupBytes;
      float scale;
      std::memcpy(&scale, group + 32, 4);
      double error = 0, largest = 0;
      const int n = std::min(kGroupCols, k - first);
      for (int i = 0; i < n; ++i) {
        const double value = x[size_t(first + i) + 1], difference = double(scale) * int8_t(group[i]) - value;
        error += difference * difference;
        largest = std::max(largest, std::fabs(value));
      }
      if (largest < 1e-30) {  // too small for a scale
        check(scale == 0 && std::all_of(group, group + 32, [](std::byte q) { return q == std::byte(0); }),
              std::string(isa) + ": a group next to zero is zero");
        continue;
      }
      // Half a level each, and one whole level where the largest value of the other sign is clipped.
      const double level = largest / 124;
      check(error <= (0.25 * n + 1) * level * level * (1 + 1e-5), std::string(isa) + ": quantize_row error");
    }
  }
}

std::vector<PackedFormat> formats() {
  return {{PackedType::f32},
          {PackedType::f16},
          {PackedType::bf16},
          {PackedType::int4},
          {PackedType::int4, false, false, 4},
          {PackedType::int4, true},
          {PackedType::int4, true, true, 8},
          {PackedType::int4, true, false, 1000},
          {PackedType::int5},
          {PackedType::int5, true},
          {PackedType::int5, true, true, 8},
          {PackedType::int6, false, true, 8},
          {PackedType::int8},
          {PackedType::int8, false, false, 2},
          {PackedType::int8, false, true, 8}};
}

void test_linear(const char* isa, const LinearKernels& kernels) {
  for (const PackedFormat& format : formats())
    for (const bool a8 : {false, true}) {
      if (a8 && !format.is_integer()) continue;
      for (const int num_rows : {1, 2, 3, 4, 5, 8, 11, 16, 19, 29, 65, 76})
        for (const auto& [rows, cols] : {std::pair{1, 1}, {17, 33}, {48, 320}, {31, 767}}) {
          const int variant = below(8);
          const bool gated = variant >= 5;
          run_case({format, rows, cols, num_rows, a8, gated, !gated && variant % 2 == 1, !gated && variant >= 3,
                    Activation(below(4))},
                   isa, kernels);
        }
    }
}

// The largest products that can occur: 16-bit partial sums must not overflow.
void test_extremes(const char* isa, const LinearKernels& kernels) {
  for (const PackedFormat& format : formats()) {
    if (!format.is_integer()) continue;
    for (const int fill : {0, 255})
      for (const float sign : {-1.0f, 1.0f}) {
        PackedWeight w = random_weight(16, 64, format);
        std::memset(w.quants, fill, w.tile_quant_bytes);
        const std::vector<double> input(64, sign);
        const std::vector<float> x(64, sign);
        std::vector<std::byte> xq(size_t(a8_row_bytes(64)));
        kernels.quantize_row(x.data(), 64, xq.data());
        std::vector<float> y(16);
        LinearArgs args;
        args.weight = &w;
        args.xq = xq.data(), args.xq_stride = int64_t(xq.size());
        args.num_rows = 1, args.tile_end = 1;
        args.y = y.data(), args.y_stride = 16;
        kernels.linear(args);
        for (int n = 0; n < 16; ++n) {
          const Reference r = reference(w, n, input);
          check(std::fabs(y[n] - r.value) <= 16 * kUnit * r.magnitude,
                std::string(isa) + ": overflow in " + name_of(format.type));
        }
      }
  }
}

}  // namespace

int main() {
  try {
    for (const LinearIsa& isa : linear_isas()) {
      test_quantize_row(isa.name, *isa.kernels);
      test_extremes(isa.name, *isa.kernels);
      test_linear(isa.name, *isa.kernels);
      std::printf("linear kernels, %s: ok\n", isa.name);
    }
  } catch (const Failure& failure) {
    std::printf("FAILED: %s\n", failure.what.c_str());
    return 1;
  }
  return 0;
}
