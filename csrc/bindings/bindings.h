// The Python module, in parts. Bindings validate and release the GIL; they hold no logic.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gapless::bindings {

namespace nb = nanobind;

// Arrays must be C-contiguous and of the very type: a copy would be silent.
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MaskArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T, typename Array>
std::vector<T> to_vector(const Array& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

// A new numpy array that owns its memory; `data` points to it.
nb::object new_vector(int64_t size, float*& data);
nb::object new_matrix(int64_t rows, int64_t cols, float*& data);

void bind_weights(nb::module_& m);
void bind_engine(nb::module_& m);

}  // namespace gapless::bindings
