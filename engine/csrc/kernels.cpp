// Compiled once for each instruction set, with MANTA_ISA as its name.
#include "adapters.h"
#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "grouped.h"
#include "linear.h"
#include "norm.h"
#include "sampling.h"

namespace manta::MANTA_ISA {

// The form of `kernel` for a type.
#define MANTA_BY_TYPE(type, call)             \
  switch (type) {                             \
    case Type::f32: { using T = float; call; } break; \
    case Type::bf16: { using T = bf16; call; } break; \
    default: { using T = f16; call; } break;  \
  }

const Kernels& kernels() {
  static const Kernels table = {
      .panel = kPanel,
      .pack = [](Type type, const void* weight, int64_t out, int64_t in, void* packed) {
        MANTA_BY_TYPE(type, pack<T>(weight, out, in, packed));
      },
      .linear = [](const Linear& a) { MANTA_BY_TYPE(a.type, linear<T>(a)); },
      .unpack_rows = unpack_rows,
      .pack_numbers = pack_numbers,
      .grouped_linear = [](const GroupedLinear& a) { MANTA_BY_TYPE(a.type, grouped_linear<T>(a)); },
      .grouped_row = [](Type type, const GroupedMatrix& weight, int64_t row, void* y) {
        MANTA_BY_TYPE(type, grouped_row<T>(weight, row, static_cast<T*>(y)));
      },
      .attention = [](const Attention& a) { MANTA_BY_TYPE(a.type, attention<T>(a)); },
      .norm = [](const Norm& a) { MANTA_BY_TYPE(a.type, norm<T>(a)); },
      .rope = [](const Rope& a) { MANTA_BY_TYPE(a.type, rope<T>(a)); },
      .silu_mul = [](const SiluMul& a) { MANTA_BY_TYPE(a.type, silu_mul<T>(a)); },
      .experts = [](const Experts& a) { MANTA_BY_TYPE(a.type, experts<T>(a)); },
      .grouped_experts = [](const GroupedExperts& a) { MANTA_BY_TYPE(a.type, grouped_experts<T>(a)); },
      .adapt = [](const Adapted& a) { MANTA_BY_TYPE(a.type, adapt<T>(a)); },
      .sample = sample,
      .logprobs = logprobs,
  };
  return table;
}

}  // namespace manta::MANTA_ISA
