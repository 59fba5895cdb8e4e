// y = x W^T + bias for one row or a thousand.
//
// Each output is one float32 sum over the inputs in their order, whatever the number of rows and
// threads. A panel of W (kPanel outputs) is multiplied by up to kRows rows at a time, from
// registers; a thread takes one panel and a block of rows after the other.
#pragma once

#include <type_traits>

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

// Sums of `M` rows of x times one panel, whose units lie `stride` apart from input to input.
template <class T, int M, int64_t stride = kPanel>
inline __attribute__((always_inline)) void multiply(
    const T* x, int64_t x_stride, const uint32_t* panel, int64_t units, V (&sums)[M][kVectors]) {
  for (int m = 0; m < M; m++)
    for (int v = 0; v < kVectors; v++) sums[m][v] = zero();
  for (int64_t k = 0; k < units; k++) {
    U w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) w[v] = loadu(panel + k * stride + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const U unit = broadcast_unit(x + m * x_stride + k * kPerUnit<T>);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v++)
        sums[m][v] = mac(sums[m][v], unit, w[v], static_cast<const T*>(nullptr));
    }
  }
}

template <class T, int M>
void panel_rows(const Linear& a, int64_t row, int64_t column, const uint32_t* panel) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  V sums[M][kVectors];
  multiply<T, M>(x, a.x_stride, panel, a.in / kPerUnit<T>, sums);
  for (int v = 0; v < kVectors; v++) {
    const int64_t first = column + v * kLanes;
    const int64_t n = a.out - first;
    if (n <= 0) break;
    const V bias = a.bias ? load_part(static_cast<const T*>(a.bias) + first, n) : zero();
    for (int m = 0; m < M; m++) {
      const V y = sums[m][v] + bias;
      const int64_t at = (row + m) * a.y_stride + first;
      if (a.y_float) store_part(static_cast<float*>(a.y) + at, y, n);
      else store_part(static_cast<T*>(a.y) + at, y, n);
    }
  }
}

template <class T, int M = kRows>
void panel_rest(const Linear& a, int64_t row, int64_t rows, int64_t column, const uint32_t* panel) {
  if (rows == M) return panel_rows<T, M>(a, row, column, panel);
  if constexpr (M > 1) panel_rest<T, M - 1>(a, row, rows, column, panel);
}

template <class T>
void panel_block(const Linear& a, int64_t row, int64_t end, int64_t column, const uint32_t* panel) {
  // Blocks of nearly equal height: 32 rows as 6 6 5 5 5 5, not as 6 6 6 6 6 2.
  for (int64_t blocks = (end - row + kRows - 1) / kRows; blocks > 0; blocks--) {
    const int64_t rows = (end - row + blocks - 1) / blocks;
    panel_rest<T>(a, row, rows, column, panel);
    row += rows;
  }
}

#ifdef __AMX_BF16__
// Rows of bfloat16 by tiles: 16 rows of x times a panel, 32 inputs at a time. A row's sums are the
// same whatever rows are multiplied beside it, so a single row takes tiles, too. (Intel's manual,
// TDPBF16PS.)
constexpr int64_t kAmxRows = 16;
constexpr int64_t kAmxInputs = 32;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of the four vectors of a panel's columns; 4: x; 5 and 6: W.
inline void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 7; tile++) {
    config.bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 5 ? rows : kAmxRows);
  }
  _tile_loadconfig(&config);
}

// `sums` [rows][kPanel] of as many rows of x as tiles are configured for, by a panel.
inline void tile_product(const bf16* x, int64_t x_stride, const uint32_t* panel, int64_t in,
                         float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  constexpr int kStride = kPanel * 4;
  // Eight at a time: in a shorter loop the loads of the next tiles start too late.
#pragma GCC unroll 8
  for (int64_t k = 0; k < in; k += kAmxInputs, panel += kAmxInputs / 2 * kPanel) {
    _tile_loadd(4, x + k, x_stride * 2);
    _tile_loadd(5, panel, kStride);
    _tile_loadd(6, panel + kLanes, kStride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, panel + 2 * kLanes, kStride);
    _tile_loadd(6, panel + 3 * kLanes, kStride);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + kLanes, kStride);
  _tile_stored(2, sums + 2 * kLanes, kStride);
  _tile_stored(3, sums + 3 * kLanes, kStride);
}

inline void tile_rows(const Linear& a, int64_t row, int64_t rows, int64_t column,
                      const uint32_t* panel) {
  alignas(64) float sums[kAmxRows][kPanel];
  const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
  tile_product(x, a.x_stride, panel, a.in, sums[0]);
  for (int v = 0; v < kVectors; v++) {
    const int64_t first = column + v * kLanes, n = a.out - first;
    if (n <= 0) break;
    const V bias = a.bias ? load_part(static_cast<const bf16*>(a.bias) + first, n) : zero();
    for (int64_t m = 0; m < rows; m++) {
      const V y = load_part(sums[m] + v * kLanes, kLanes) + bias;
      const int64_t at = (row + m) * a.y_stride + first;
      if (a.y_float) store_part(static_cast<float*>(a.y) + at, y, n);
      else store_part(static_cast<bf16*>(a.y) + at, y, n);
    }
  }
}

inline void tile_block(const Linear& a, int64_t row, int64_t end, int64_t column,
                       const uint32_t* panel) {
  int64_t configured = 0;
  for (; row < end; row += kAmxRows) {
    const int64_t rows = end - row < kAmxRows ? end - row : kAmxRows;
    if (rows != configured) configure_tiles(rows);
    configured = rows;
    tile_rows(a, row, rows, column, panel);
  }
  _tile_release();
}
#endif

template <class T>
void linear(const Linear& a) {
  const int64_t num_panels = panels(a.out);
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  const bool small = a.rows * a.in * a.out < kAloneMacs;
  const int64_t panel_units = a.in / kPerUnit<T> * kPanel;
  run_shares(num_panels * blocks, small ? 1 : a.threads, [&](int64_t task) {
    const int64_t p = task / blocks, row = task % blocks * kRowBlock;
    const int64_t end = row + kRowBlock < a.rows ? row + kRowBlock : a.rows;
    const int64_t column = p * kPanel;
    const uint32_t* panel = static_cast<const uint32_t*>(a.weight) + p * panel_units;
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bf16>)
      if (a.in % kAmxInputs == 0) return tile_block(a, row, end, column, panel);
#endif
    panel_block<T>(a, row, end, column, panel);
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
