#include "ops/kernels.h"

#include <cstdlib>
#include <stdexcept>

namespace gapless {

#define GAPLESS_DECLARE(isa)                       \
  namespace isa {                                  \
  const LinearKernels& linear_kernels();           \
  const AttentionKernels& attention_kernels();     \
  const ElementwiseKernels& elementwise_kernels(); \
  }

#define GAPLESS_KERNELS(isa)                                                                  \
  {                                                                                           \
    static const Kernels kernels{Isa::isa, &isa::linear_kernels(), &isa::attention_kernels(), \
                                 &isa::elementwise_kernels()};                                \
    return kernels;                                                                           \
  }

GAPLESS_DECLARE(generic)
#if defined(GAPLESS_HAS_AVX2)
GAPLESS_DECLARE(avx2)
#endif
#if defined(GAPLESS_HAS_AVX512)
GAPLESS_DECLARE(avx512)
#endif
#if defined(GAPLESS_HAS_AMX)
namespace amx {
const LinearKernels& linear_kernels();
}
#endif
#if defined(GAPLESS_HAS_NEON)
GAPLESS_DECLARE(neon)
#endif

const Kernels& kernels_for(Isa isa) {
  switch (isa) {
    case Isa::generic:
      GAPLESS_KERNELS(generic)
#if defined(GAPLESS_HAS_AVX2)
    case Isa::avx2:
      GAPLESS_KERNELS(avx2)
#endif
#if defined(GAPLESS_HAS_AVX512)
    case Isa::avx512:
      GAPLESS_KERNELS(avx512)
#endif
#if defined(GAPLESS_HAS_AMX)
    case Isa::amx: {
      static const Kernels kernels{Isa::amx, &amx::linear_kernels(), &avx512::attention_kernels(),
                                   &avx512::elementwise_kernels()};
      return kernels;
    }
#endif
#if defined(GAPLESS_HAS_NEON)
    case Isa::neon:
      GAPLESS_KERNELS(neon)
#endif
    default:
      throw std::invalid_argument(std::string("this build has no kernels for ") + isa_name(isa));
  }
}

const Kernels& default_kernels() {
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* asked = std::getenv("GAPLESS_ISA");
    return kernels_for(asked && *asked ? isa_from_name(asked) : usable_isas().back());
  }();
  return chosen;
}

}  // namespace gapless
