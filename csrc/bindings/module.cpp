#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/kernels.h"
#include "platform/cpu.h"

namespace gapless::bindings {

namespace {

nb::object new_array(size_t num_dimensions, const size_t* shape, float*& data) {
  size_t size = 1;
  for (size_t i = 0; i < num_dimensions; ++i) size *= shape[i];
  data = new float[size];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(data, num_dimensions, shape, owner));
}

}  // namespace

nb::object new_vector(int64_t size, float*& data) {
  const size_t shape[1] = {size_t(size)};
  return new_array(1, shape, data);
}

nb::object new_matrix(int64_t rows, int64_t cols, float*& data) {
  const size_t shape[2] = {size_t(rows), size_t(cols)};
  return new_array(2, shape, data);
}

}  // namespace gapless::bindings

NB_MODULE(_native, m) {
  using namespace gapless;
  namespace nb = nanobind;
  m.def("cpu_info", [] {
    std::vector<std::string> isas;
    for (Isa isa : usable_isas()) isas.emplace_back(isa_name(isa));
    nb::dict info;
    info["isa"] = isa_name(default_kernels().isa);
    info["isas"] = isas;
    info["num_threads"] = default_num_threads();
    info["cgroup_cpu_quota"] = cgroup_cpu_quota();
    return info;
  });
  bindings::bind_weights(m);
  bindings::bind_engine(m);
}
