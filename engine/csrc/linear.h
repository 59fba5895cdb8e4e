// y = x W^T + bias for one row or a thousand.
//
// Each output is one float32 sum over the inputs in their order, whatever the number of rows and
// threads. A panel of W (kPanel outputs) is multiplied by up to kRows rows at a time, from
// registers; a thread takes one panel and a block of rows after the other.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace manta::MANTA_ISA {

constexpr int kVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kPanel = kVectors * kLanes;
constexpr int kRows = kLanes == 16 ? 6 : 5;
constexpr int64_t kRowBlock = 96;
constexpr int64_t kAloneMacs = 1 << 18;  // below this another thread costs more than it saves
constexpr int64_t kAloneUnits = 1 << 15;  // the same of units that are copied
constexpr int64_t kUnpackedRows = 8;      // that a thread takes at a time

inline int64_t panels(int64_t out) { return (out + kPanel - 1) / kPanel; }

// The units of kPanel rows of W, [in / unit][kPanel]; rows beyond `count` are 0.
template <class T>
void pack_panel(const T* weight, int64_t count, int64_t in, uint32_t* packed) {
  for (int64_t group = 0; group < kPanel; group += kLanes) {
    transpose_units(in / kPerUnit<T>, packed + group, kPanel, [&](int i, int64_t first) {
      if (group + i >= count) return zero();
      const int64_t column = first * kPerUnit<T>;
      return read_units<T>(weight + (group + i) * in + column, in - column);
    });
  }
}

template <class T>
void pack(const void* weight, int64_t out, int64_t in, void* packed) {
  const int64_t size = in / kPerUnit<T> * kPanel;
  for (int64_t p = 0; p < panels(out); p++) {
    const T* rows = static_cast<const T*>(weight) + p * kPanel * in;
    pack_panel<T>(rows, out - p * kPanel, in, static_cast<uint32_t*>(packed) + p * size);
  }
}

// The same for int8: [in / unit][kPanel / kLanes][numbers of a unit][kLanes].
template <class T>
void pack_int8(const int8_t* weight, int64_t out, int64_t in, int8_t* packed) {
  constexpr int64_t per = kPerUnit<T>, block = 64;  // a block of inputs stays in the L1 cache
  for (int64_t column = 0; column < panels(out) * kPanel; column += kPanel, packed += kPanel * in) {
    for (int64_t first = 0; first < in; first += block) {
      const int64_t end = first + block < in ? first + block : in;
      for (int64_t n = 0; n < kPanel; n++) {
        const int8_t* row = column + n < out ? weight + (column + n) * in : nullptr;
        int8_t* to = packed + n / kLanes * kLanes * per + n % kLanes;
        for (int64_t k = first; k < end; k++)
          to[k / per * kPanel * per + k % per * kLanes] = row ? row[k] : int8_t{0};
      }
    }
  }
}

inline U load_units(const uint32_t* w, const void*) { return loadu(w); }
template <class T>
inline auto load_units(const int8_t* w, const T* type) { return load_int8(w, type); }

// Sums of `M` rows of x times one panel, whose units lie `stride` apart from input to input.
template <class T, int M, int64_t stride = kPanel, class W>
inline __attribute__((always_inline)) void multiply(
    const T* x, int64_t x_stride, const W* panel, int64_t units, V (&sums)[M][kVectors]) {
  constexpr int64_t kStep = sizeof(W) == 4 ? 1 : kPerUnit<T>;  // elements of W per unit
  for (int m = 0; m < M; m++)
    for (int v = 0; v < kVectors; v++) sums[m][v] = zero();
  for (int64_t k = 0; k < units; k++) {
    decltype(load_units(panel, static_cast<const T*>(nullptr))) w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++)
      w[v] = load_units(panel + (k * stride + v * kLanes) * kStep, static_cast<const T*>(nullptr));
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const U unit = broadcast_unit(x + m * x_stride + k * kPerUnit<T>);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++)
        sums[m][v] = mac(sums[m][v], unit, w[v], static_cast<const T*>(nullptr));
    }
  }
}

template <class T, int M, class W>
void panel_rows(const Linear& a, int64_t row, int64_t column, const W* panel) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  V sums[M][kVectors];
  multiply<T, M>(x, a.x_stride, panel, a.in / kPerUnit<T>, sums);
  for (int v = 0; v < kVectors; v++) {
    const int64_t first = column + v * kLanes;
    const int64_t n = a.out - first;
    if (n <= 0) break;
    const V bias = a.bias ? load_part(static_cast<const T*>(a.bias) + first, n) : zero();
    const V scale = a.scale ? load_part(a.scale + first, n) : set1(1.0f);
    for (int m = 0; m < M; m++) {
      const V y = fma(sums[m][v], scale, bias);
      const int64_t at = (row + m) * a.y_stride + first;
      if (a.y_float) store_part(static_cast<float*>(a.y) + at, y, n);
      else store_part(static_cast<T*>(a.y) + at, y, n);
    }
  }
}

template <class T, class W, int M = kRows>
void panel_rest(const Linear& a, int64_t row, int64_t rows, int64_t column, const W* panel) {
  if (rows == M) return panel_rows<T, M>(a, row, column, panel);
  if constexpr (M > 1) panel_rest<T, W, M - 1>(a, row, rows, column, panel);
}

template <class T, class W>
void panel_block(const Linear& a, int64_t row, int64_t end, int64_t column, const W* panel) {
  // Blocks of nearly equal height: 32 rows as 6 6 5 5 5 5, not as 6 6 6 6 6 2.
  for (int64_t blocks = (end - row + kRows - 1) / kRows; blocks > 0; blocks--) {
    const int64_t rows = (end - row + blocks - 1) / blocks;
    panel_rest<T, W>(a, row, rows, column, panel);
    row += rows;
  }
}

template <class T>
void linear(const Linear& a) {
  const int64_t num_panels = panels(a.out);
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  const bool small = a.rows * a.in * a.out < kAloneMacs;
  const int64_t panel_units = a.in / kPerUnit<T> * kPanel;
  run_tasks(num_panels * blocks, small ? 1 : a.threads, [&](int64_t task) {
    const int64_t p = task / blocks, row = task % blocks * kRowBlock;
    const int64_t end = row + kRowBlock < a.rows ? row + kRowBlock : a.rows;
    const int64_t column = p * kPanel;
    if (a.form == Form::packed) {
      const uint32_t* panel = static_cast<const uint32_t*>(a.weight) + p * panel_units;
      panel_block<T>(a, row, end, column, panel);
    } else {
      const int8_t* panel = static_cast<const int8_t*>(a.weight) + p * panel_units * kPerUnit<T>;
      panel_block<T>(a, row, end, column, panel);
    }
  });
}

// A row's units lie kPanel apart, each in a cache line of its own.
inline void unpack_rows(const UnpackRows& a) {
  const bool small = a.rows * a.units < kAloneUnits;
  run_ranges(a.rows, kUnpackedRows, small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t id = a.ids[row];
      const uint32_t* from = a.packed + id / kPanel * kPanel * a.units + id % kPanel;
      uint32_t* to = a.y + row * a.units;
      for (int64_t k = 0; k < a.units; k++) to[k] = from[k * kPanel];
    }
  });
}

}  // namespace manta::MANTA_ISA
