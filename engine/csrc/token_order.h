// A row's likeliest tokens, in the order of engine/sampling/token_order.py: by (row maximum -
// logit), then by id. That difference is not negative, so its float bits order as it does. They
// are called a token's rank here.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace manta::MANTA_ISA {

// Some tokens of a row by ascending id, in a thread's own memory.
struct Tokens {
  uint32_t* ranks;
  uint32_t* ids;
  float* weights;  // see `weigh`
  int64_t count;
  // Working memory of `find_cut`.
  uint32_t* some_ranks;
  float* some_weights;
};

// Room for all tokens of a row and a vector more.
inline Tokens own_tokens(int64_t vocab) {
  const int64_t room = vocab + kLanes;
  uint32_t* memory = own_memory<Tokens>(5 * room);
  const auto floats = [](uint32_t* p) { return reinterpret_cast<float*>(p); };
  return {memory, memory + room, floats(memory + 2 * room), 0, memory + 3 * room,
          floats(memory + 4 * room)};
}

// Keeps the tokens below `rank`, and of those at it the first `ties`.
struct Cut {
  uint32_t rank;
  int64_t ties;
};

inline void keep(Tokens& tokens, Cut cut) {
  int64_t kept = 0, ties = 0;
  for (int64_t i = 0; i < tokens.count; i++) {
    const uint32_t rank = tokens.ranks[i];
    if (rank > cut.rank || (rank == cut.rank && ++ties > cut.ties)) continue;
    tokens.ranks[kept] = rank;
    tokens.ids[kept] = tokens.ids[i];
    tokens.weights[kept++] = tokens.weights[i];
  }
  tokens.count = kept;
}

// The cut that keeps a token while there is less than `limit` before it: of the mass (the weights)
// or, without `by_mass`, of tokens. It looks for the token at the limit digit by digit.
template <bool by_mass>
Cut find_cut(const Tokens& tokens, double limit) {
  constexpr struct { int shift, bits; } kDigits[] = {{20, 11}, {10, 10}, {0, 10}};
  double held[1 << 11];
  const uint32_t* ranks = tokens.ranks;
  const float* weights = tokens.weights;
  int64_t count = tokens.count;
  double before = 0;
  for (const auto digit : kDigits) {
    const uint32_t size = 1u << digit.bits;
    for (uint32_t d = 0; d < size; d++) held[d] = 0;
    const auto digit_of = [&](uint32_t rank) { return rank >> digit.shift & (size - 1); };
    for (int64_t i = 0; i < count; i++) {
      if constexpr (by_mass) held[digit_of(ranks[i])] += static_cast<double>(weights[i]);
      else held[digit_of(ranks[i])] += 1.0;
    }
    // The digit at which the limit is reached. If rounding hides it, the last one.
    uint32_t found = size;
    double sum = before;
    for (uint32_t d = 0; d < size && sum < limit; d++) {
      if (held[d] == 0) continue;
      found = d;
      before = sum;
      sum += held[d];
    }
    if (found == size || (digit.shift == kDigits[0].shift && sum < limit)) return {~0u, 0};
    int64_t some = 0;
    for (int64_t i = 0; i < count; i++) {
      if (digit_of(ranks[i]) != found) continue;
      tokens.some_ranks[some] = ranks[i];
      if constexpr (by_mass) tokens.some_weights[some] = weights[i];
      some++;
    }
    ranks = tokens.some_ranks;
    weights = tokens.some_weights;
    count = some;
  }
  int64_t ties = 0;  // `count` tokens of one rank are left
  for (; ties < count && before < limit; ties++)
    before += by_mass ? static_cast<double>(weights[ties]) : 1.0;
  return {ranks[0], ties};
}

inline U lane_numbers() {
  alignas(64) static const uint32_t numbers[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                   8, 9, 10, 11, 12, 13, 14, 15};
  return loadu(numbers);
}

// A vector of logits; -inf from the `n`-th on.
inline V load_logits(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float buffer[kLanes];
  for (int i = 0; i < kLanes; i++) buffer[i] = i < n ? p[i] : -__builtin_inff();
  return load(buffer);
}

inline U rank_of(V logits, V top) { return bits_and(as_unit(top - logits), set1u(0x7fffffff)); }

// Appends those of kLanes tokens, `id` the first, whose bits in `chosen` are set.
inline void append(Tokens& tokens, uint32_t chosen, U ranks, int64_t id) {
  uint32_t lanes[kLanes];
  storeu(lanes, ranks);
  for (; chosen; chosen &= chosen - 1) {
    const int lane = __builtin_ctz(chosen);
    tokens.ranks[tokens.count] = lanes[lane];
    tokens.ids[tokens.count++] = static_cast<uint32_t>(id + lane);
  }
}

inline uint32_t first_lanes(int64_t n) {
  return n >= kLanes ? (1u << (kLanes - 1) << 1) - 1 : (1u << n) - 1;
}

// The `count` likeliest tokens of a row without NaN whose maximum, `top`, is finite.
inline void find_best(Tokens& tokens, const float* logits, int64_t vocab, float top,
                      int64_t count) {
  const int64_t room = count + (count > 1024 ? count : 1024);
  U limit = set1u(0x7fffffff);
  tokens.count = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const U ranks = rank_of(load_logits(logits + i, vocab - i), set1(top));
    // Of tokens at the limit, `count` with lower ids have been found.
    const uint32_t chosen = less(ranks, limit) & first_lanes(vocab - i);
    if (!chosen) continue;
    append(tokens, chosen, ranks, i);
    if (tokens.count < room) continue;
    const Cut cut = find_cut<false>(tokens, static_cast<double>(count));
    keep(tokens, cut);
    limit = set1u(cut.rank);
  }
  keep(tokens, find_cut<false>(tokens, static_cast<double>(count)));
}

// All tokens of at most `rank`.
inline void find_up_to(Tokens& tokens, const float* logits, int64_t vocab, float top, U rank) {
  tokens.count = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const U ranks = rank_of(load_logits(logits + i, vocab - i), set1(top));
    const uint32_t chosen = ~less(rank, ranks) & first_lanes(vocab - i);
    if (chosen) append(tokens, chosen, ranks, i);
  }
}

// Puts a few tokens in their order.
inline void sort(Tokens& tokens) {
  for (int64_t i = 1; i < tokens.count; i++) {
    const uint32_t rank = tokens.ranks[i], id = tokens.ids[i];
    int64_t j = i;
    for (; j > 0 && tokens.ranks[j - 1] > rank; j--) {  // equal ranks stay in order of their ids
      tokens.ranks[j] = tokens.ranks[j - 1];
      tokens.ids[j] = tokens.ids[j - 1];
    }
    tokens.ranks[j] = rank;
    tokens.ids[j] = id;
  }
}

}  // namespace manta::MANTA_ISA
