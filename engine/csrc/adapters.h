// y += x A^T B of the adapter of each row (LoRA, Hu et al. 2021); rows of several adapters are in one
// call (Punica, Chen et al. 2023). A row's sums are taken in one order, whatever rows are beside it.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "simd.h"

namespace manta::MANTA_ISA {

constexpr int kAdaptedRows = 4;  // that share what is read of an adapter
constexpr int kRanks = 4;

struct AdapterRoom {};

// h[row][rank] = x[row] . a[rank], for kinds of ROWS rows and RANKS ranks.
template <int ROWS, int RANKS, class T>
inline void shrink_tile(const T* const* x, const T* a, int64_t in, float* h, int64_t h_stride) {
  V sums[ROWS][RANKS];
  for (auto& row : sums)
    for (V& one : row) one = zero();
  for (int64_t i = 0; i < in; i += kLanes) {
    const int64_t n = in - i;
    V inputs[ROWS];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++) inputs[row] = load_part(x[row] + i, n);
#pragma GCC unroll 4
    for (int rank = 0; rank < RANKS; rank++) {
      const V weight = load_part(a + rank * in + i, n);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) sums[row][rank] = fma(inputs[row], weight, sums[row][rank]);
    }
  }
  for (int row = 0; row < ROWS; row++)
    for (int rank = 0; rank < RANKS; rank++) h[row * h_stride + rank] = sum(sums[row][rank]);
}

// y[row][o] += sum over ranks of h[row][rank] * b[rank][o]
template <int ROWS, class T>
inline void expand_rows(const float* h, int64_t h_stride, int64_t ranks, const T* b, int64_t out, T* const* y) {
  constexpr int kWide = 2;
  int64_t o = 0;
  for (; o + kWide * kLanes <= out; o += kWide * kLanes) {
    V sums[ROWS][kWide];
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
      for (int w = 0; w < kWide; w++) sums[row][w] = zero();
    for (int64_t rank = 0; rank < ranks; rank++) {
      V weights[kWide];
#pragma GCC unroll 2
      for (int w = 0; w < kWide; w++) weights[w] = load_as_float(b + rank * out + o + w * kLanes);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) {
        const V by = set1(h[row * h_stride + rank]);
#pragma GCC unroll 2
        for (int w = 0; w < kWide; w++) sums[row][w] = fma(by, weights[w], sums[row][w]);
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 2
      for (int w = 0; w < kWide; w++) {
        T* to = y[row] + o + w * kLanes;
        store_as(to, load_as_float(to) + sums[row][w]);
      }
  }
  for (; o < out; o += kLanes) {
    const int64_t n = out - o;
    for (int row = 0; row < ROWS; row++) {
      V total = zero();
      for (int64_t rank = 0; rank < ranks; rank++)
        total = fma(set1(h[row * h_stride + rank]), load_part(b + rank * out + o, n), total);
      store_part(y[row] + o, load_part(y[row] + o, n) + total, n);
    }
  }
}

template <int ROWS, class T>
inline void adapt_rows(const AdapterPart* parts, int64_t num_parts, int64_t in, const T* const* x, T* const* y) {
  for (int64_t p = 0; p < num_parts; p++) {
    const AdapterPart& part = parts[p];
    if (part.rank == 0) continue;
    const T* a = static_cast<const T*>(part.a);
    float* h = reinterpret_cast<float*>(own_memory<AdapterRoom>(kAdaptedRows * part.rank));
    int64_t rank = 0;
    for (; rank + kRanks <= part.rank; rank += kRanks)
      shrink_tile<ROWS, kRanks>(x, a + rank * in, in, h + rank, part.rank);
    for (; rank < part.rank; rank++)
      shrink_tile<ROWS, 1>(x, a + rank * in, in, h + rank, part.rank);
    T* to[ROWS];
    for (int row = 0; row < ROWS; row++) to[row] = y[row] + part.start;
    expand_rows<ROWS>(h, part.rank, part.rank, static_cast<const T*>(part.b), part.out, to);
  }
}

template <class T>
void adapt(const Adapted& a) {
  // Blocks of neighbours in the order of the adapters.
  run_tasks(a.num_blocks, a.threads, [&](int64_t i) {
    const AdapterBlock& block = a.blocks[i];
    const T* x[kAdaptedRows];
    T* y[kAdaptedRows];
    for (int row = 0; row < block.count; row++) {
      x[row] = static_cast<const T*>(a.x) + block.rows[row] * a.x_stride;
      y[row] = static_cast<T*>(a.y) + block.rows[row] * a.y_stride;
    }
    switch (block.count) {
      case 1: return adapt_rows<1>(block.parts, block.num_parts, a.in, x, y);
      case 2: return adapt_rows<2>(block.parts, block.num_parts, a.in, x, y);
      case 3: return adapt_rows<3>(block.parts, block.num_parts, a.in, x, y);
      default: return adapt_rows<4>(block.parts, block.num_parts, a.in, x, y);
    }
  });
}

}  // namespace manta::MANTA_ISA
