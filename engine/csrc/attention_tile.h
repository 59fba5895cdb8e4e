// What attention works on: tiles of queries, blocks of keys, and the tasks of a step.
#pragma once

#include "linear.h"

namespace manta::MANTA_ISA {

constexpr int64_t kBlock = 64;
constexpr int64_t kPart = 512;
constexpr int64_t kTileRows = 48;
constexpr int64_t kCopyRows = 5 * kRows;  // for fewer rows of a head, values are read from the pool
constexpr int64_t kMaxDim = kMaxHeadDim;

inline float infinity() { return __builtin_inff(); }

// Queries are multiplied as T is: in float32, or where the processor has it in pairs of bfloat16.
template <class T> struct Dot { using type = float; };
#if defined(__AVX512BF16__)
template <> struct Dot<bf16> { using type = bf16; };
#endif

template <class C>
struct Tile {
  // The state of the online softmax, by row.
  float top[kTileRows];
  alignas(64) float mass[kTileRows][kLanes];
  alignas(64) float sums[kTileRows][kMaxDim];
  alignas(64) C queries[kTileRows][kMaxDim];
  int64_t position[kTileRows];  // of each query in its request
  alignas(64) uint32_t keys[kMaxDim * kBlock];  // units of a block's keys: [dim / unit][kBlock]
  alignas(64) float values[kBlock][kMaxDim];
  alignas(64) float scores[kTileRows][kBlock];  // then weights
  float fade[kTileRows];  // what the sums so far are multiplied by
};

struct Step {
  int64_t row, first, count;  // tokens [first, first + count) of the step, all of batch row `row`
  int64_t low, high;          // keys that some of them see
};

struct Heads {
  int64_t first, count;  // as `Attend` counts them
};

// The keys and values of some heads that are needed next: bytes that lie side by side in each of
// `count` slots, of which a piece is asked for at a time.
struct Ahead {
  const int32_t* slots = nullptr;
  int64_t count = 0;
  int64_t slot_pieces = 1, pieces = 0;  // of a slot, and how many of this one are left
  const char *key = nullptr, *value = nullptr;  // the next piece of either
};

// A block's keys by their slots. No query of the step sees those before `first`: their values may be
// anything, and 0 times NaN is not 0.
struct Keys {
  const int32_t* slots;
  int64_t first, count;
  bool copied = false;  // whether the tile holds the values
};

struct Task {
  const Step* step;
  Heads heads;
  int64_t first, last;  // parts
  int64_t partial;      // where to leave a single part; -1: the task has all parts
};

}  // namespace manta::MANTA_ISA
