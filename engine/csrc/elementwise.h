// Rotary embedding (RoFormer, Su et al. 2021) and the gate of the MLP (SwiGLU, Shazeer 2020).
#pragma once

#include "parallel.h"
#include "simd.h"

namespace manta::MANTA_ISA {

template <class T>
void rope(const Rope& a) {
  const int64_t half = a.dim / 2;
  for (int64_t t = 0; t < a.tokens; t++) {
    const float* cosines = a.cos_sin + a.positions[t] * a.dim;
    const float* sines = cosines + half;
    for (int64_t h = 0; h < a.heads; h++) {
      T* x = static_cast<T*>(a.x) + t * a.x_stride + h * a.x_head_stride;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const V first = load_part(x + i, n), second = load_part(x + half + i, n);
        const V c = load_part(cosines + i, n), s = load_part(sines + i, n);
        store_part(x + i, fma(first, c, zero() - second * s), n);
        store_part(x + half + i, fma(second, c, first * s), n);
      }
    }
  }
}

template <class T>
void silu_mul(const SiluMul& a) {
  const bool small = a.rows * a.size < 16384;
  run_tasks(a.rows, small ? 1 : a.threads, [&](int64_t row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * 2 * a.size;
    const T* up = gate + a.size;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const int64_t n = a.size - i;
      const V g = load_part(gate + i, n);
      // exp stays finite, and e^88 is not enough to close a gate of -1e38.
      const V sigmoid = where_less(
          g, set1(-88.0f), zero(), set1(1.0f) / (set1(1.0f) + exp(zero() - g)));
      store_part(y + i, g * sigmoid * load_part(up + i, n), n);
    }
  });
}

}  // namespace manta::MANTA_ISA
