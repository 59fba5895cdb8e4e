// One token for each row, and log-probabilities: what engine/sampling/torch_backend.py and
// logprobs.py do, without their working memory.
//
// A token is drawn by the Gumbel-max trick in its exponential form: the largest p / E wins, with E
// the token's noise. E costs a logarithm, so it is computed only where the token may win.
//
// A row is cut into chunks at fixed places. If there are fewer rows than threads, these share the
// chunks of each row. Chunks are merged in order, so that a row's result depends on the row alone.
#pragma once

#include "noise.h"
#include "parallel.h"
#include "token_order.h"

namespace manta::MANTA_ISA {

constexpr int64_t kMaxChunks = 64;
constexpr int64_t kMinChunk = 16384;
// Far above the rounding error of a mass, far below any top_p's purpose.
constexpr double kMassMargin = 1e-4;
// How much longer a draw takes than an argmax, and from when on threads pay (about 50 us).
constexpr int64_t kDrawWork = 8;
constexpr int64_t kMinWork = 1 << 19;

// A logit and its token: a row's or a chunk's largest, or its first NaN.
struct Peak {
  float logit;
  int64_t id;
};

inline bool is_finite(float x) { return x - x == 0.0f; }

inline Peak find_peak(const float* logits, int64_t begin, int64_t end) {
  constexpr int kWays = 4;
  V tops[kWays], ids[kWays], nan = zero();
  for (int w = 0; w < kWays; w++) {
    tops[w] = set1(-__builtin_inff());
    ids[w] = as_float(set1u(static_cast<uint32_t>(begin)));
  }
  const U lanes = lane_numbers();
  for (int64_t i = begin; i < end; i += kWays * kLanes) {
#pragma GCC unroll 4
    for (int w = 0; w < kWays; w++) {
      const int64_t first = i + w * kLanes;
      const V x = load_logits(logits + first, end - first);
      const U id = addu(set1u(static_cast<uint32_t>(first)), lanes);
      ids[w] = where_less(tops[w], x, as_float(id), ids[w]);
      tops[w] = where_less(tops[w], x, x, tops[w]);
      nan = where_nan(x, set1(1.0f), nan);
    }
  }
  if (max_lane(nan) > 0.0f) {
    int64_t id = begin;
    while (logits[id] == logits[id]) id++;
    return {logits[id], id};
  }
  Peak peak{-__builtin_inff(), begin};
  for (int w = 0; w < kWays; w++) {
    float values[kLanes];
    uint32_t numbers[kLanes];
    store(values, tops[w]);
    storeu(numbers, as_unit(ids[w]));
    for (int i = 0; i < kLanes; i++)
      if (values[i] > peak.logit || (values[i] == peak.logit && numbers[i] < peak.id))
        peak = {values[i], numbers[i]};
  }
  return peak;
}

// A sum of floats, almost as precise as one in float64: `rest` collects what rounding takes from
// `total` (two-sum, Knuth).
struct Mass {
  V total = zero(), rest = zero();

  void add(V x) {
    const V sum = total + x;
    const V added = sum - total;
    rest = rest + ((total - (sum - added)) + (x - added));
    total = sum;
  }

  double value() const {
    float totals[kLanes], rests[kLanes];
    store(totals, total);
    store(rests, rest);
    double sum = 0;
    for (int i = 0; i < kLanes; i++)
      sum += static_cast<double>(totals[i]) + static_cast<double>(rests[i]);
    return sum;
  }
};

// The largest p / E of the tokens that have entered; of equal ones that of the lowest id.
struct Race {
  NoiseKey key;
  float score = 0.0f;
  int64_t id = 0;
  float least = 0.0f;  // no token with a lower log(p) can win

  void enter(V p, U ids) {
    const V u = uniform(key, ids);
    // E = -log(u) is at least 1 - u. The factor covers the rounding of E.
    if (!less((set1(1.0f) - u) * set1(score * (1.0f - 1e-5f)), p)) return;
    float scores[kLanes];
    uint32_t numbers[kLanes];
    store(scores, p / (zero() - log(u)));
    storeu(numbers, ids);
    for (int i = 0; i < kLanes; i++) take(scores[i], numbers[i]);
  }

  void take(float other, int64_t other_id) {
    if (other < score || (other == score && other_id >= id)) return;
    score = other;
    id = other_id;
    least = log(score) - 16.65f;  // E is at least 2^-24, whose logarithm is -16.64
  }
};

// A row whose largest logit is finite.
struct SampledRow {
  const float* logits;
  int64_t vocab;
  Peak peak;
  float inverse_temperature, min_p;
  NoiseKey key;

  V log_p(V logits) const {  // p of the likeliest token is 1
    return (logits - set1(peak.logit)) * set1(inverse_temperature);
  }
  V p_of(V log_p) const {
    const V p = exp(log_p);
    return where_less(p, set1(min_p), zero(), p);
  }

  // The likeliest token has entered, so that it sets a mark for the others.
  Race start() const {
    Race race{key};
    race.enter(set1(1.0f), set1u(static_cast<uint32_t>(peak.id)));
    return race;
  }

  // All tokens of a chunk enter. Returns the chunk's mass if it is wanted.
  template <bool wants_mass>
  double enter_all(Race& race, int64_t begin, int64_t end) const {
    Mass mass;
    // Just below log(min_p): lower tokens have no mass.
    const float floor = min_p > 1e-30f ? log(min_p) - 1e-3f : -__builtin_inff();
    for (int64_t i = begin; i < end; i += kLanes) {
      const V x = log_p(load_logits(logits + i, end - i));
      const bool may_win = less(set1(race.least), x);
      if (!(wants_mass || may_win) || !less(set1(floor), x)) continue;
      const V p = p_of(x);
      if (wants_mass) mass.add(p);
      if (may_win) race.enter(p, addu(set1u(static_cast<uint32_t>(i)), lane_numbers()));
    }
    return mass.value();
  }

  // Mass of a chunk's tokens of at most `rank`.
  double mass_up_to(U rank, int64_t begin, int64_t end) const {
    Mass mass;
    const V bound = as_float(rank);
    for (int64_t i = begin; i < end; i += kLanes) {
      const V values = load_logits(logits + i, end - i);
      const V distance = as_float(rank_of(values, set1(peak.logit)));
      if (less(bound, distance) == first_lanes(kLanes)) continue;
      mass.add(where_less(bound, distance, zero(), p_of(log_p(values))));
    }
    return mass.value();
  }

  // The weights of `tokens` become their p; returns the sum.
  double weigh(const Tokens& tokens) const {
    Mass mass;
    for (int64_t i = 0; i < tokens.count; i += kLanes) {
      const V distance = as_float(loadu(tokens.ranks + i));
      const V p = p_of((zero() - distance) * set1(inverse_temperature));
      store(tokens.weights + i, p);
      mass.add(load_part(tokens.weights + i, tokens.count - i));
    }
    return mass.value();
  }

  int64_t draw_from(const Tokens& tokens) const {
    Race race{key};
    for (int64_t i = 0; i < tokens.count; i += kLanes)
      race.enter(load_part(tokens.weights + i, tokens.count - i), loadu(tokens.ids + i));
    return race.id;
  }
};

struct Chunks {
  int64_t vocab, size, count;

  explicit Chunks(int64_t vocab) : vocab(vocab) {
    size = (vocab + kMaxChunks - 1) / kMaxChunks;
    size = size < kMinChunk ? kMinChunk : (size + kLanes - 1) / kLanes * kLanes;
    count = (vocab + size - 1) / size;
  }

  // Calls f(chunk, begin, end).
  template <class F>
  void run(int threads, F f) const {
    run_ranges(vocab, size, threads,
               [&](int64_t begin, int64_t end) { f(begin / size, begin, end); });
  }
};

inline Peak row_peak(const float* logits, const Chunks& chunks, int threads) {
  Peak peaks[kMaxChunks];
  chunks.run(threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    peaks[chunk] = find_peak(logits, begin, end);
  });
  Peak peak = peaks[0];
  for (int64_t i = 1; i < chunks.count && peak.logit == peak.logit; i++)
    if (!(peaks[i].logit <= peak.logit)) peak = peaks[i];
  return peak;
}

// A token drawn from the whole vocabulary; `mass` becomes the sum of p if it is not null.
inline int64_t draw_any(const SampledRow& row, const Chunks& chunks, int threads, double* mass) {
  const Race start = row.start();
  Race races[kMaxChunks];
  double masses[kMaxChunks];
  chunks.run(threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    Race race = start;
    masses[chunk] = mass ? row.enter_all<true>(race, begin, end)
                         : row.enter_all<false>(race, begin, end);
    races[chunk] = race;
  });
  Race best = start;
  for (int64_t i = 0; i < chunks.count; i++) {
    best.take(races[i].score, races[i].id);
    if (mass) *mass = (i ? *mass : 0.0) + masses[i];
  }
  return best.id;
}

// A token drawn under top_p. What wins among all tokens also wins in any set that holds it. So if
// it lies within the nucleus, the other tokens need no order. Otherwise the tokens that are at
// least as likely hold the nucleus.
inline int64_t draw_nucleus(const SampledRow& row, const Chunks& chunks, int threads, float top_p) {
  double mass;
  const int64_t id = draw_any(row, chunks, threads, &mass);
  const double limit = static_cast<double>(top_p) * mass;
  const U rank = rank_of(set1(row.logits[id]), set1(row.peak.logit));
  double masses[kMaxChunks], likelier = 0;
  chunks.run(threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    masses[chunk] = row.mass_up_to(rank, begin, end);
  });
  for (int64_t i = 0; i < chunks.count; i++) likelier += masses[i];
  const double own = static_cast<double>(max_lane(row.p_of(row.log_p(set1(row.logits[id])))));
  if (likelier - own < limit * (1.0 - kMassMargin)) return id;
  const bool holds_nucleus = likelier > limit * (1.0 + kMassMargin);
  Tokens tokens = own_tokens(row.vocab);
  find_up_to(tokens, row.logits, row.vocab, row.peak.logit,
             holds_nucleus ? rank : set1u(0x7fffffff));
  row.weigh(tokens);
  keep(tokens, find_cut<true>(tokens, limit));
  return row.draw_from(tokens);
}

// A token drawn under top_k, then top_p.
inline int64_t draw_top_k(const SampledRow& row, int64_t top_k, float top_p) {
  Tokens tokens = own_tokens(row.vocab);
  find_best(tokens, row.logits, row.vocab, row.peak.logit, top_k);
  const double mass = row.weigh(tokens);
  if (top_p <= 1.0f) keep(tokens, find_cut<true>(tokens, static_cast<double>(top_p) * mass));
  return row.draw_from(tokens);
}

inline void sample_row(const Sample& a, int64_t i, const Chunks& chunks, int threads) {
  const float* logits = a.logits + i * a.vocab;
  const Peak peak = row_peak(logits, chunks, threads);
  a.token_ids[i] = peak.id;
  a.row_max[i] = peak.logit;
  const auto draw = static_cast<Draw>(a.draws[i]);
  if (draw == Draw::greedy || !is_finite(peak.logit)) return;
  const float* floats = a.floats + a.slots[i] * a.float_columns;
  const int64_t* ints = a.ints + a.slots[i] * a.int_columns;
  const float inverse_temperature = floats[0], top_p = floats[1], min_p = floats[2];
  const int64_t mixed_seed = ints[0], top_k = ints[1];
  const SampledRow row{logits, a.vocab, peak, inverse_temperature, min_p,
                       noise_key(mixed_seed, a.positions[i])};
  if (draw == Draw::full) a.token_ids[i] = draw_any(row, chunks, threads, nullptr);
  else if (draw == Draw::nucleus) a.token_ids[i] = draw_nucleus(row, chunks, threads, top_p);
  else a.token_ids[i] = draw_top_k(row, top_k, top_p);
}

// Calls f(row, chunks, threads for the row). `work`: of all rows, in numbers read.
template <class F>
void run_rows(int64_t rows, int64_t vocab, int64_t work, int threads, F f) {
  const Chunks chunks(vocab);
  if (work < kMinWork) threads = 1;
  const bool by_row = rows >= threads || chunks.count == 1;
  run_tasks(rows, by_row ? threads : 1,
            [&](int64_t row) { f(row, chunks, by_row ? 1 : threads); });
}

inline void sample(const Sample& a) {
  int64_t work = 0;
  for (int64_t i = 0; i < a.rows; i++)
    work += static_cast<Draw>(a.draws[i]) == Draw::greedy ? a.vocab : kDrawWork * a.vocab;
  run_rows(a.rows, a.vocab, work, a.threads, [&](int64_t row, const Chunks& chunks, int threads) {
    sample_row(a, row, chunks, threads);
  });
}

inline void logprobs_of_row(const Logprobs& a, int64_t i, const Chunks& chunks, int threads) {
  const float* logits = a.logits + i * a.vocab;
  const Peak peak = row_peak(logits, chunks, threads);
  int64_t* ids = a.top_ids + i * a.count;
  float* top = a.top + i * a.count;
  if (!is_finite(peak.logit)) {
    a.token[i] = __builtin_nanf("");
    for (int64_t j = 0; j < a.count; j++) ids[j] = j, top[j] = __builtin_nanf("");
    return;
  }
  double masses[kMaxChunks], mass = 0;
  chunks.run(threads, [&](int64_t chunk, int64_t begin, int64_t end) {
    Mass sum;
    for (int64_t j = begin; j < end; j += kLanes)
      sum.add(exp(load_logits(logits + j, end - j) - set1(peak.logit)));
    masses[chunk] = sum.value();
  });
  for (int64_t j = 0; j < chunks.count; j++) mass += masses[j];
  const float log_mass = static_cast<float>(__builtin_log(mass));
  a.token[i] = logits[a.token_ids[i]] - peak.logit - log_mass;
  if (a.count == 0) return;
  Tokens tokens = own_tokens(a.vocab);
  find_best(tokens, logits, a.vocab, peak.logit, a.count);
  sort(tokens);
  for (int64_t j = 0; j < a.count; j++) {
    ids[j] = tokens.ids[j];
    top[j] = logits[ids[j]] - peak.logit - log_mass;
  }
}

inline void logprobs(const Logprobs& a) {
  const int64_t work = kDrawWork * a.rows * a.vocab;
  run_rows(a.rows, a.vocab, work, a.threads, [&](int64_t row, const Chunks& chunks, int threads) {
    logprobs_of_row(a, row, chunks, threads);
  });
}

}  // namespace manta::MANTA_ISA
