#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bindings/bindings.h"
#include "ops/kernels.h"
#include "ops/pack.h"
#include "platform/thread_pool.h"

namespace gapless::bindings {

namespace {

InstantQuant quant_from_name(const std::string& name) {
  if (name == "none") return InstantQuant::none;
  if (name == "int8") return InstantQuant::int8;
  if (name == "int4") return InstantQuant::int4;
  throw std::invalid_argument("quant is '" + name + "'; known: none, int8, int4");
}

std::shared_ptr<PackedWeight> pack(ByteArray raw, uint32_t type_number, int rows, int cols, const std::string& quant,
                                   int group_size, std::optional<IntArray> row_map, int num_threads,
                                   bool release_source) {
  const auto type = GgmlType(type_number);
  if (rows < 1 || cols < 1) throw std::invalid_argument("a weight needs at least one row and column");
  const size_t source_rows = raw.size() / ggml_row_bytes(type, cols);
  if (row_map) {
    if (int64_t(row_map->size()) != rows) throw std::invalid_argument("row_map must have one entry per packed row");
    for (size_t i = 0; i < row_map->size(); ++i)
      if (row_map->data()[i] < 0 || size_t(row_map->data()[i]) >= source_rows)
        throw std::invalid_argument("row_map names row " + std::to_string(row_map->data()[i]) + " of " +
                                    std::to_string(source_rows));
  } else if (source_rows < size_t(rows)) {
    throw std::invalid_argument("raw holds " + std::to_string(source_rows) + " rows; " + std::to_string(rows) +
                                " were asked for");
  }
  const PackedFormat format = packed_format(type, cols, quant_from_name(quant), group_size);
  const PackSource source{reinterpret_cast<const std::byte*>(raw.data()), type, cols,
                          row_map ? row_map->data() : nullptr};
  nb::gil_scoped_release release;
  auto weight = std::make_shared<PackedWeight>(PackedWeight::allocate(rows, cols, format));
  // In slabs, so that a large tensor is never in memory twice: as pages of the file and packed.
  constexpr size_t kSlabBytes = size_t(8) << 20;
  constexpr int kTiles = 4;
  const size_t tile_bytes = ggml_row_bytes(type, cols) * kTileRows;
  const int slab_tiles = std::max(kTiles, int(kSlabBytes / tile_bytes));
  ThreadPool pool(num_threads);
  for (int begin = 0; begin < weight->num_tiles; begin += slab_tiles) {
    const int end = std::min(weight->num_tiles, begin + slab_tiles);
    pool.run((end - begin + kTiles - 1) / kTiles, [&](int item, int) {
      const int first = begin + item * kTiles;
      pack_tiles(*weight, source, first, std::min(end, first + kTiles));
    });
    if (release_source && !row_map)
      release_file_pages(source.data + tile_bytes * size_t(begin), tile_bytes * size_t(end - begin));
  }
  return weight;
}

nb::object dequantize(const PackedWeight& weight) {
  float* data;
  nb::object array = new_matrix(weight.rows, weight.cols, data);
  nb::gil_scoped_release release;
  for (int row = 0; row < weight.rows; ++row) weight.dequantize_row(row, data + int64_t(row) * weight.cols);
  return array;
}

nb::object linear(const PackedWeight& weight, FloatMatrix x, const std::string& activations,
                  std::optional<std::string> isa, int num_threads) {
  if (int64_t(x.shape(1)) != weight.cols)
    throw std::invalid_argument("x has " + std::to_string(x.shape(1)) + " columns; the weight has " +
                                std::to_string(weight.cols));
  if (activations != "a8" && activations != "a16")
    throw std::invalid_argument("activations is '" + activations + "'; known: a8, a16");
  const Kernels& kernels = isa ? kernels_for(isa_from_name(*isa)) : default_kernels();
  const int rows = int(x.shape(0));
  float* y;
  nb::object array = new_matrix(rows, weight.rows, y);
  nb::gil_scoped_release release;
  LinearArgs args{};
  args.weight = &weight;
  args.x = x.data();
  args.x_stride = weight.cols;
  args.num_rows = rows;
  args.y = y;
  args.y_stride = weight.rows;
  std::vector<std::byte> quantized;
  if (activations == "a8" && weight.format.is_integer()) {
    args.xq_stride = a8_row_bytes(weight.cols);
    quantized.resize(size_t(args.xq_stride) * size_t(rows));
    for (int row = 0; row < rows; ++row)
      kernels.linear->quantize_row(x.data() + int64_t(row) * weight.cols, weight.cols,
                                   quantized.data() + args.xq_stride * row);
    args.xq = quantized.data();
  }
  ThreadPool pool(num_threads);
  pool.run(weight.num_tiles, [&](int tile, int) {
    LinearArgs part = args;
    part.tile_begin = tile;
    part.tile_end = tile + 1;
    kernels.linear->linear(part);
  });
  return array;
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<PackedWeight>(m, "PackedWeight")
      .def_static("pack", &pack, nb::arg("raw"), nb::arg("ggml_type"), nb::arg("rows"), nb::arg("cols"),
                  nb::arg("quant") = "none", nb::arg("group_size") = 32, nb::arg("row_map") = nb::none(),
                  nb::arg("num_threads") = 1, nb::arg("release_source") = false)
      .def_prop_ro("rows", [](const PackedWeight& w) { return w.rows; })
      .def_prop_ro("cols", [](const PackedWeight& w) { return w.cols; })
      .def_prop_ro("type", [](const PackedWeight& w) { return name_of(w.format.type); })
      .def_prop_ro("nbytes", [](const PackedWeight& w) { return w.num_bytes(); })
      .def("dequantize", &dequantize);
  m.def("linear", &linear, nb::arg("weight"), nb::arg("x"), nb::arg("activations") = "a8", nb::arg("isa") = nb::none(),
        nb::arg("num_threads") = 1);
  m.def("a8_row_bytes", [](int cols) { return a8_row_bytes(cols); }, nb::arg("cols"));
}

}  // namespace gapless::bindings
