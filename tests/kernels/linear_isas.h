// The linear kernels that this program was linked with and this machine can run.
#pragma once

#include <vector>

#include "ops/linear.h"
#include "platform/cpu.h"

namespace gapless {

namespace generic {
const LinearKernels& linear_kernels();
}
namespace avx2 {
const LinearKernels& linear_kernels();
}
namespace avx512 {
const LinearKernels& linear_kernels();
}
namespace amx {
const LinearKernels& linear_kernels();
}
namespace neon {
const LinearKernels& linear_kernels();
}

struct LinearIsa {
  const char* name;
  const LinearKernels* kernels;
};

inline std::vector<LinearIsa> linear_isas() {
  std::vector<LinearIsa> isas;
#if defined(GAPLESS_EMULATED_AVX512)  // built on SIMDe: runs anywhere
  isas.push_back({"avx512 (emulated)", &avx512::linear_kernels()});
#else
  for (const Isa isa : usable_isas()) {
    if (isa == Isa::generic) isas.push_back({"generic", &generic::linear_kernels()});
#if defined(GAPLESS_HAS_AVX2)
    if (isa == Isa::avx2) isas.push_back({"avx2", &avx2::linear_kernels()});
#endif
#if defined(GAPLESS_HAS_AVX512)
    if (isa == Isa::avx512) isas.push_back({"avx512", &avx512::linear_kernels()});
#endif
#if defined(GAPLESS_HAS_AMX)
    if (isa == Isa::amx) isas.push_back({"amx", &amx::linear_kernels()});
#endif
#if defined(GAPLESS_HAS_NEON)
    if (isa == Isa::neon) isas.push_back({"neon", &neon::linear_kernels()});
#endif
  }
#endif
  return isas;
}

}  // namespace gapless
