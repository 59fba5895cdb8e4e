// RMSNorm (Zhang and Sennrich 2019), alone or after adding to the residual.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace manta::MANTA_ISA {

template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* y, int64_t size, float eps) {
  V squares = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    V value = load_part(x + i, size - i);
    if (residual) {
      store_part(residual + i, value + load_part(residual + i, size - i), size - i);
      value = load_part(residual + i, size - i);
    }
    squares = fma(value, value, squares);
  }
  const V mean = set1(sum(squares) / static_cast<float>(size) + eps);
  const V scale = set1(1.0f) / sqrt(mean);
  const T* from = residual ? residual : x;
  for (int64_t i = 0; i < size; i += kLanes) {
    const V value = load_part(from + i, size - i) * scale;
    store_part(y + i, value * load_part(weight + i, size - i), size - i);
  }
}

template <class T>
void norm(const Norm& a) {
  constexpr int64_t kTask = 16;
  const T* weight = static_cast<const T*>(a.weight);
  const int64_t rows = a.rows * a.heads;
  const bool small = rows * a.size < 32768;
  run_ranges(rows, kTask, small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* x = static_cast<const T*>(a.x) + i / a.heads * a.x_stride + i % a.heads * a.x_head_stride;
      T* residual = a.residual ? static_cast<T*>(a.residual) + i * a.size : nullptr;
      norm_row(x, residual, weight, static_cast<T*>(a.y) + i * a.size, a.size, a.eps);
    }
  });
}

}  // namespace manta::MANTA_ISA
