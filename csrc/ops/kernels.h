// The kernels of one ISA, gathered; chosen once at start.
#pragma once

#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/linear.h"
#include "platform/cpu.h"

namespace gapless {

struct Kernels {
  Isa isa;
  const LinearKernels* linear;
  const AttentionKernels* attention;
  const ElementwiseKernels* elementwise;
};

// Kernels of an ISA that this machine can run (see usable_isas).
const Kernels& kernels_for(Isa isa);

// The best ISA of this machine, or the one that the environment variable GAPLESS_ISA names. An ISA asked for that can't
// run here throws std::invalid_argument.
const Kernels& default_kernels();

}  // namespace gapless
