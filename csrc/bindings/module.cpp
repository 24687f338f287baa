#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "ops/kernels.h"
#include "platform/cpu.h"

namespace gapless::bindings {

nb::object new_matrix(int64_t rows, int64_t cols, float*& data) {
  data = new float[size_t(rows) * size_t(cols)];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  const size_t shape[2] = {size_t(rows), size_t(cols)};
  return nb::cast(nb::ndarray<nb::numpy, float>(data, 2, shape, owner));
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
