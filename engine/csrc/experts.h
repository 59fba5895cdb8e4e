// A mixture of experts (Shazeer et al. 2017): of each token the weighted sum of its experts'
// down(silu(gate) * up).
//
// Tokens are sorted by expert. First each expert's tokens go through gate and up, a block of them at
// a time, within the thread's cache. Then a thread takes some columns of the sums and goes through
// the experts in their order: nothing is added by two threads, and a token's sum is the same in any
// batch and with any number of threads.
#pragma once

#include "elementwise.h"
#include "grouped.h"
#include "linear.h"

namespace manta::MANTA_ISA {

constexpr int64_t kSumBytes = 1 << 19;  // of a thread's sums, if more than a panel of them: L2
constexpr int64_t kTasksPerThread = 2;
constexpr int64_t kAloneSums = 1 << 14;  // so few are added by one thread

struct GatheredRows;
struct GateAndUp;
struct DownRows;
struct ExpertSums;
struct Middle;

template <class T>
T* own_rows(uint32_t* memory) { return reinterpret_cast<T*>(memory); }

inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// silu(gate) * up of a block's tokens, `parts` tasks for each block. Only panels that are all gate
// or all up are divided.
template <class T>
void gate_and_up(const Experts& a) {
  const int64_t panel_bytes = kPanel * a.size * static_cast<int64_t>(sizeof(T));
  const int64_t whole = a.inner % kPanel == 0 ? a.inner / kPanel : 1;
  const int64_t wanted = a.threads > 1 ? divided_up(kTasksPerThread * a.threads, a.num_blocks) : 1;
  const int64_t parts = at_most(whole, wanted), step = divided_up(whole, parts);
  run_tasks(a.num_blocks * parts, a.threads, [&](int64_t task) {
    const ExpertBlock& block = a.blocks[task / parts];
    const int64_t first = task % parts * step, rows = block.end - block.begin;
    if (first >= whole) return;
    const int64_t width = whole == 1 ? a.inner : at_most(step, whole - first) * kPanel;
    constexpr int64_t unit = static_cast<int64_t>(sizeof(uint32_t) / sizeof(T));
    T* x = own_rows<T>(own_memory<GatheredRows>(rows * a.size / unit));
    T* found = own_rows<T>(own_memory<GateAndUp>(rows * 2 * width / unit));
    for (int64_t row = 0; row < rows; row++) {
      const T* from = static_cast<const T*>(a.x) + a.tokens[block.begin + row] * a.x_stride;
      __builtin_memcpy(x + row * a.size, from, static_cast<size_t>(a.size) * sizeof(T));
    }
    const char* up = static_cast<const char*>(a.ups[block.expert]);
    Linear product{a.type, x, a.size, up + first * panel_bytes, nullptr, found,
                   2 * width, false, rows, a.size, 2 * width, 1};
    if (whole > 1) product.out = width;
    linear<T>(product);
    if (whole > 1) {
      product.weight = up + (whole + first) * panel_bytes;
      product.y = found + width;
      linear<T>(product);
    }
    T* middle = static_cast<T*>(a.middle) + block.begin * a.inner + first * kPanel;
    silu_mul<T>({a.type, found, middle, rows, width, a.inner, 1});
  });
}

// The sums of `width` columns from `first`, a whole number of panels from the beginning.
template <class T>
void sum_columns(const Experts& a, int64_t first, int64_t width) {
  const int64_t panel_bytes = kPanel * a.inner * static_cast<int64_t>(sizeof(T));
  float* sums = own_rows<float>(own_memory<ExpertSums>(a.num_tokens * width));
  for (int64_t i = 0; i < a.num_tokens * width; i++) sums[i] = 0;
  for (int64_t b = 0; b < a.num_blocks; b++) {
    const ExpertBlock& block = a.blocks[b];
    const int64_t rows = block.end - block.begin;
    float* found = own_rows<float>(own_memory<DownRows>(rows * width));
    linear<T>({a.type, static_cast<const T*>(a.middle) + block.begin * a.inner, a.inner,
               static_cast<const char*>(a.downs[block.expert]) + first / kPanel * panel_bytes, nullptr,
               found, width, true, rows, a.inner, width, 1});
    for (int64_t row = 0; row < rows; row++) {
      float* sum = sums + a.tokens[block.begin + row] * width;
      const V by = set1(a.by[block.begin + row]);
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t n = width - i;
        store_part(sum + i, fma(by, load_part(found + row * width + i, n), load_part(sum + i, n)), n);
      }
    }
  }
  for (int64_t token = 0; token < a.num_tokens; token++) {
    T* y = static_cast<T*>(a.y) + token * a.size + first;
    for (int64_t i = 0; i < width; i += kLanes)
      store_part(y + i, load_part(sums + token * width + i, width - i), width - i);
  }
}

template <class T>
void experts(const Experts& a) {
  gate_and_up<T>(a);
  const int64_t num_panels = panels(a.size);
  int64_t each = kSumBytes / (a.num_tokens * kPanel * static_cast<int64_t>(sizeof(float)));
  if (a.threads > 1) each = at_most(each, divided_up(num_panels, kTasksPerThread * a.threads));
  if (each < 1) each = 1;
  run_tasks(divided_up(num_panels, each), a.threads, [&](int64_t task) {
    const int64_t first = task * each * kPanel;
    sum_columns<T>(a, first, at_most(each * kPanel, a.size - first));
  });
}

// Quantized experts: block after block, each product by all threads. Some columns of the sums belong
// to one thread, as above.
template <class T>
void grouped_experts(const GroupedExperts& a) {
  constexpr int64_t unit = static_cast<int64_t>(sizeof(uint32_t) / sizeof(T));
  for (int64_t b = 0; b < a.num_blocks; b++) {
    const ExpertBlock& block = a.blocks[b];
    const int64_t rows = block.end - block.begin;
    T* x = own_rows<T>(own_memory<GatheredRows>(divided_up(rows * a.size, unit)));
    T* found = own_rows<T>(own_memory<GateAndUp>(divided_up(rows * 2 * a.inner, unit)));
    T* middle = own_rows<T>(own_memory<Middle>(divided_up(rows * a.inner, unit)));
    float* downs = own_rows<float>(own_memory<DownRows>(rows * a.size));
    for (int64_t row = 0; row < rows; row++) {
      const T* from = static_cast<const T*>(a.x) + a.tokens[block.begin + row] * a.x_stride;
      __builtin_memcpy(x + row * a.size, from, static_cast<size_t>(a.size) * sizeof(T));
    }
    const GroupedParts &up = a.ups[block.expert], &down = a.downs[block.expert];
    grouped_linear<T>({a.type, x, a.size, a.short_inputs, up.parts, up.count, nullptr, found,
                       2 * a.inner, false, rows, a.size, a.threads});
    silu_mul<T>({a.type, found, middle, rows, a.inner, a.inner, a.threads});
    grouped_linear<T>({a.type, middle, a.inner, a.short_inputs, down.parts, down.count, nullptr, downs,
                       a.size, true, rows, a.inner, a.threads});
    const int64_t all = rows * a.size;
    run_tasks(panels(a.size), all < kAloneSums ? 1 : a.threads, [&](int64_t panel) {
      const int64_t first = panel * kPanel, width = at_most(kPanel, a.size - first);
      for (int64_t row = 0; row < rows; row++) {
        float* sum = a.y + a.tokens[block.begin + row] * a.size + first;
        const float* part = downs + row * a.size + first;
        const V by = set1(a.by[block.begin + row]);
        for (int64_t i = 0; i < width; i += kLanes) {
          const int64_t n = width - i;
          store_part(sum + i, fma(by, load_part(part + i, n), load_part(sum + i, n)), n);
        }
      }
    });
  }
}

}  // namespace manta::MANTA_ISA
