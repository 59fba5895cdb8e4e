// Causal attention straight from the paged pool, for any mix of chunks (extend) and decodes.
//
// A request's keys are cut at fixed positions: parts of kPart keys, blocks of kBlock keys. Within a
// part the softmax runs online over its blocks (Milakov and Gimelshein 2018), and parts are merged
// in order. Blocks and parts that a query cannot see change nothing. So a query's result depends on
// its position and its keys alone: not on the chunk it came in, on other rows or on threads.
//
// A tile is up to kTileRows queries of one or more key/value heads (tokens x heads). A decode
// takes as many heads at once as fit, because its keys come from memory and lie side by side. Its
// parts are tasks of their own, so that a long row occupies all threads.
#pragma once

#include <type_traits>
#include <vector>

#include "attention_tile.h"

namespace manta::MANTA_ISA {

template <class T, class P>
struct Attend {
  using C = typename Dot<T>::type;
  const Attention& a;
  // Query heads of a key/value head are computed together, or in equal shares that fit a tile. Below
  // "head" means such a share: `shares` of them read the same keys.
  const int64_t shares = num_shares(a.num_heads / a.num_kv_heads);
  const int64_t num_heads = a.num_kv_heads * shares, group = a.num_heads / num_heads;
  const bool in_keys = a.k_pool == a.v_pool;
  const int64_t value_size = in_keys ? a.k_dim : a.v_dim;  // from one head's to the next one's
  const int64_t key_stride = a.num_kv_heads * a.k_dim, value_stride = a.num_kv_heads * value_size;

  static int64_t num_shares(int64_t group) {
    int64_t count = (group + kTileRows - 1) / kTileRows;
    while (group % count) count++;
    return count;
  }

  // The first position that a query sees.
  int64_t first_seen(int64_t position) const {
    if (a.chunk > 0) return position / a.chunk * a.chunk;
    const int64_t unseen = a.window > 0 ? position + 1 - a.window : 0;
    return unseen > 0 ? unseen : 0;
  }

  // Rows of the tile: head by head, and within a head token by token.
  void read_queries(const Step& step, Heads heads, Tile<C>& tile) const {
    for (int64_t h = 0, i = 0; h < heads.count; h++) {
      for (int64_t j = 0; j < step.count * group; j++, i++) {
        const int64_t token = step.first + j / group;
        const int64_t head = (heads.first + h) * group + j % group;
        const T* q = static_cast<const T*>(a.q) + token * a.q_stride + head * a.k_dim;
        for (int64_t d = 0; d < a.k_dim; d += kLanes)
          store_part(tile.queries[i] + d, load_part(q + d, a.k_dim - d), a.k_dim - d);
        tile.position[i] = a.lengths[step.row] - a.starts[step.row + 1] + token;
      }
    }
  }

  // Most models have no shares, and a division costs as much as what is done with a key.
  int64_t kv_head(int64_t head) const { return shares == 1 ? head : head / shares; }

  // The first numbers of a head's keys and values in the pools.
  const P* keys_of(int64_t head) const {
    return static_cast<const P*>(a.k_pool) + kv_head(head) * a.k_dim;
  }

  const P* values_of(int64_t head) const {
    return static_cast<const P*>(a.v_pool) + kv_head(head) * value_size;
  }

  void read_keys(const Keys& keys, int64_t head, Tile<C>& tile) const {
    const P* pool = keys_of(head);
    const int64_t units = a.k_dim / kPerUnit<C>;
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      if (j >= keys.count) break;
      const P* rows[kLanes];
      for (int i = 0; i < kLanes; i++)
        rows[i] = pool + keys.slots[j + i < keys.count ? j + i : keys.count - 1] * key_stride;
      transpose_units(units, tile.keys + j, kBlock, [&](int i, int64_t first) {
        return read_units<C>(rows[i] + first * kPerUnit<C>, a.k_dim - first * kPerUnit<C>);
      });
    }
  }

  template <int M>
  void score(Tile<C>& tile, int64_t row, int64_t count) const {
    const V scale = set1(a.scale);
    for (int64_t j = 0; j < count; j += kPanel) {
      V sums[M][kVectors];
      const int64_t units = a.k_dim / kPerUnit<C>;
      multiply<C, M, kBlock>(tile.queries[row], kMaxDim, tile.keys + j, units, sums);
      for (int m = 0; m < M; m++)
        for (int v = 0; v < kVectors; v++)
          store(tile.scores[row + m] + j + v * kLanes, sums[m][v] * scale);
    }
    if (a.softcap > 0.0f)
      for (int m = 0; m < M; m++) cap(tile.scores[row + m], count);
  }

#ifdef __AMX_BF16__
  // All rows of a head by tiles: a block of keys is a panel.
  void score_tiles(Tile<bf16>& tile, int64_t row, int64_t rows, int64_t count) const {
    static_assert(kBlock == kPanel);
    const V scale = set1(a.scale);
    int64_t configured = 0;
    for (const int64_t end = row + rows; row < end; row += kAmxRows) {
      const int64_t some = end - row < kAmxRows ? end - row : kAmxRows;
      if (some != configured) configure_tiles(some);
      configured = some;
      tile_product(tile.queries[row], kMaxDim, tile.keys, a.k_dim, tile.scores[row]);
      for (int64_t m = row; m < row + some; m++) {
        for (int64_t j = 0; j < kBlock; j += kLanes)
          store(tile.scores[m] + j, load(tile.scores[m] + j) * scale);
        if (a.softcap > 0.0f) cap(tile.scores[m], count);
      }
    }
    _tile_release();
  }
#endif

  // cap * tanh(score / cap)
  void cap(float* scores, int64_t count) const {
    const V one = set1(1.0f), two = set1(2.0f), limit = set1(a.softcap), by = set1(2.0f / a.softcap);
    for (int64_t j = 0; j < count; j += kLanes)
      store(scores + j, limit * (one - two / (exp(load(scores + j) * by) + one)));
  }

  // Scores of a row for keys that it cannot see become -infinity.
  void hide(Tile<C>& tile, int64_t row, int64_t first_key, int64_t count) const {
    const int64_t last = tile.position[row];
    const int64_t low = first_seen(last);
    if (first_key >= low && first_key + kBlock - 1 <= last && count == kBlock) return;
    for (int64_t j = 0; j < kBlock; j++)
      if (first_key + j < low || first_key + j > last || j >= count) tile.scores[row][j] = -infinity();
  }

  // Scores of rows [row, end) become weights; keys they cannot see get 0. Step by step over all
  // rows, so that none waits for the one before it.
  void weigh(Tile<C>& tile, int64_t row, int64_t end, int64_t first_key, int64_t count) const {
    alignas(64) float now[kTileRows + kLanes];
    for (int64_t i = row; i < end; i++) {
      hide(tile, i, first_key, count);
      const float* scores = tile.scores[i];
      V top = load(scores);
      for (int64_t j = kLanes; j < kBlock; j += kLanes) top = max(load(scores + j), top);
      now[i] = max_lane(top);
    }
    for (int64_t i = row; i < end; i += kLanes) {
      const int64_t n = end - i < kLanes ? end - i : kLanes;
      const V before = load_part(tile.top + i, n), block = load_part(now + i, n);
      const V top = where_less(before, block, block, before);
      store_part(now + i, top, n);
      store_part(tile.fade + i, exp(before - top), n);
      store_part(tile.top + i, top, n);
    }
    for (int64_t i = row; i < end; i++) {
      if (now[i] == -infinity()) {
        see_nothing(tile, i);
        continue;
      }
      float* scores = tile.scores[i];
      const V top = set1(now[i]);
      V mass = load(tile.mass[i]) * set1(tile.fade[i]);
      for (int64_t j = 0; j < kBlock; j += kLanes) {
        const V weight = exp(load(scores + j) - top);
        store(scores + j, weight);
        mass = mass + weight;
      }
      store(tile.mass[i], mass);
    }
  }

  // The weights of a row that sees none of the keys: 0, but a NaN is kept.
  void see_nothing(Tile<C>& tile, int64_t row) const {
    float* scores = tile.scores[row];
    tile.fade[row] = 1.0f;
    V mass = load(tile.mass[row]);
    for (int64_t j = 0; j < kBlock; j += kLanes) {
      const V weight = where_nan(load(scores + j), load(scores + j), zero());
      store(scores + j, weight);
      mass = mass + weight;
    }
    store(tile.mass[row], mass);
  }

  // Values of a block as float32, for tiles that read them more than once.
  void read_values(const Keys& keys, int64_t head, Tile<C>& tile) const {
    const P* pool = values_of(head);
    for (int64_t j = 0; j < keys.count; j++)
      for (int64_t d = 0; d < a.v_dim; d += kLanes)
        store(tile.values[j] + d, load_part(pool + keys.slots[j] * value_stride + d, a.v_dim - d));
  }

  // Adds the weighted values of a block, `N` vectors of each; value j is at `values` + offset(j, d).
  template <int M, int N, class Q, class Offset>
  void add_vectors(
      Tile<C>& tile, int64_t row, const Keys& keys, const Q* values, Offset offset, int64_t d) const {
    // All loops over `sums` are unrolled: with an index that varies it would lie in memory.
    V sums[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int v = 0; v < N; v++)
        sums[m][v] = load(tile.sums[row + m] + d + v * kLanes) * set1(tile.fade[row + m]);
    const int64_t left = a.v_dim - d, count = keys.count;
    const float* weights = tile.scores[row];
    const auto add = [&](auto whole) {
      for (int64_t j = keys.first; j < count; j++) {
        const Q* value = values + offset(j, d);
        V numbers[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; v++)
          numbers[v] = whole.value ? load_as_float(value + v * kLanes)
              : v * kLanes < left  ? load_part(value + v * kLanes, left - v * kLanes)
                                   : zero();
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const V weight = set1(weights[m * kBlock + j]);
#pragma GCC unroll 4
          for (int v = 0; v < N; v++) sums[m][v] = fma(weight, numbers[v], sums[m][v]);
        }
      }
    };
    left >= N * kLanes ? add(std::true_type()) : add(std::false_type());
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int v = 0; v < N; v++)
        if (v * kLanes < left) store(tile.sums[row + m] + d + v * kLanes, sums[m][v]);
  }

  template <int M, class Q, class Offset>
  void add_values(Tile<C>& tile, int64_t row, const Keys& keys, const Q* values, Offset offset) const {
    int64_t d = 0;
    for (; d + (keys.copied ? 0 : kPanel / 2) < a.v_dim; d += kPanel)
      add_vectors<M, kVectors>(tile, row, keys, values, offset, d);
    if (d < a.v_dim) add_vectors<M, kVectors / 2>(tile, row, keys, values, offset, d);
  }

  template <int M>
  void add_block(
      Tile<C>& tile, int64_t row, const Keys& keys, int64_t head, Heads heads, Ahead& ahead) const {
    if (keys.copied)
      return add_values<M>(tile, row, keys, tile.values[0],
                           [](int64_t j, int64_t d) { return j * kMaxDim + d; });
    // Copies, which the compiler keeps in registers: nothing that is written can change them.
    const int32_t* slots = keys.slots;
    const int64_t stride = value_stride;
    Ahead here = ahead;
    add_values<M>(tile, row, keys, values_of(head), [&](int64_t j, int64_t d) {
      fetch(heads, here);
      return slots[j] * stride + d;
    });
    ahead = here;
  }

  template <class F, int M = kRows>
  static void with_count(int64_t rows, F f) {
    if (rows == M) f(std::integral_constant<int, M>());
    else if constexpr (M > 1) with_count<F, M - 1>(rows, f);
  }

  // f(a row, how many from it on): groups that fit in registers.
  template <class F>
  static void for_rows(int64_t row, int64_t rows, F f) {
    for (const int64_t end = row + rows; row < end; row += kRows)
      with_count(end - row < kRows ? end - row : kRows, [&](auto count) { f(row, count); });
  }

  void score_rows(Tile<C>& tile, int64_t row, int64_t rows, int64_t count) const {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<C, bf16>)
      if (a.k_dim % kAmxInputs == 0) return score_tiles(tile, row, rows, count);
#endif
    for_rows(row, rows, [&](int64_t i, auto m) { score<decltype(m)::value>(tile, i, count); });
  }

  // Software prefetch of the next piece of keys and of values. It runs one block ahead, beside each
  // key: in bursts it would stall. In the order of the memory: then the processor's own follows.
  void fetch(Heads heads, Ahead& ahead) const {
    if (ahead.pieces == 0) {
      if (ahead.count == 0) return;
      ahead.count--;
      const int64_t slot = *ahead.slots++;
      ahead.key = reinterpret_cast<const char*>(keys_of(heads.first) + slot * key_stride);
      ahead.value = reinterpret_cast<const char*>(values_of(heads.first) + slot * value_stride);
      ahead.pieces = ahead.slot_pieces;
    }
    constexpr int64_t kBytes = kPanel * sizeof(P);
#pragma GCC unroll 4
    for (int64_t b = 0; b < kBytes; b += 64) __builtin_prefetch(ahead.key + b, 0, 2);
    if (!in_keys)
#pragma GCC unroll 4
      for (int64_t b = 0; b < kBytes; b += 64) __builtin_prefetch(ahead.value + b, 0, 2);
    ahead.key += kBytes;
    ahead.value += kBytes;
    ahead.pieces--;
  }

  const int32_t* slots_of(const Step& step) const {
    return a.table + a.requests[step.row] * a.table_width;
  }

  // The first keys of a decode task, to be fetched while the task before it ends.
  Ahead first_keys(const Task* task) const {
    if (!task || task->step->count > 1) return {};
    const int64_t from = task->first * kPart > task->step->low ? task->first * kPart : task->step->low;
    const int64_t low = from / kBlock * kBlock, left = task->step->high - low;
    return {slots_of(*task->step) + low, left < kBlock ? left : kBlock};
  }

  // One part: keys [low, high) that lie in it. Leaves the state of a fresh softmax in `tile`.
  void part(
      const Step& step, Heads heads, int64_t low, int64_t high, const Ahead& next, Tile<C>& tile) const {
    const int64_t rows = step.count * group;  // of one head
    for (int64_t i = 0; i < heads.count * rows; i++) {
      tile.top[i] = -infinity();
      store(tile.mass[i], zero());
      for (int64_t d = 0; d < a.v_dim; d += kLanes) store(tile.sums[i] + d, zero());
    }
    for (int64_t key = low / kBlock * kBlock; key < high; key += kBlock) {
      const int64_t left = high - key;
      const int32_t* slots = slots_of(step) + key;
      Keys keys{slots, key < low ? low - key : 0, left < kBlock ? left : kBlock};
      Ahead ahead = next;
      if (left > kBlock) ahead = {slots + kBlock, left < 2 * kBlock ? left - kBlock : kBlock};
      ahead.slot_pieces = (heads.count * a.v_dim + kPanel - 1) / kPanel;
      for (int64_t h = 0; h < heads.count; h++) {
        const int64_t row = h * rows, head = heads.first + h;
        read_keys(keys, head, tile);
        keys.copied = rows > kCopyRows;
        if (keys.copied) read_values(keys, head, tile);
        score_rows(tile, row, rows, keys.count);
        weigh(tile, row, row + rows, key, keys.count);
        for_rows(row, rows, [&](int64_t i, auto m) {
          add_block<decltype(m)::value>(tile, i, keys, head, heads, ahead);
        });
      }
    }
  }

  // total <- total and one more part; each is [rows][2 + v_dim]: top, mass, sums.
  void merge(const Tile<C>& tile, int64_t rows, float* total, bool first) const {
    for (int64_t i = 0; i < rows; i++) {
      float* to = total + i * (2 + a.v_dim);
      const float mass = sum(load(tile.mass[i]));
      if (first) {
        to[0] = tile.top[i];
        to[1] = mass;
        std::memcpy(to + 2, tile.sums[i], static_cast<size_t>(a.v_dim) * 4);
      } else {
        merge_row(to, tile.top[i], mass, tile.sums[i]);
      }
    }
  }

  void merge_row(float* to, float top, float mass, const float* sums) const {
    if (top == -infinity() && mass == 0.0f) return;
    const float now = top > to[0] ? top : to[0];
    const float old_factor = exp(to[0] - now), new_factor = exp(top - now);
    to[0] = now;
    to[1] = to[1] * old_factor + mass * new_factor;
    for (int64_t d = 0; d < a.v_dim; d++) to[2 + d] = to[2 + d] * old_factor + sums[d] * new_factor;
  }

  void write(const Step& step, Heads heads, const float* total) const {
    const int64_t rows = step.count * group;
    for (int64_t i = 0; i < heads.count * rows; i++) {
      const float* from = total + i * (2 + a.v_dim);
      const int64_t token = step.first + i % rows / group;
      const int64_t head = (heads.first + i / rows) * group + i % group;
      T* out = static_cast<T*>(a.out) + (token * a.num_heads + head) * a.v_dim;
      const V inverse = set1(a.sinks ? beside_sink(from[0], from[1], a.sinks[head]) : 1.0f / from[1]);
      for (int64_t d = 0; d < a.v_dim; d += kLanes)
        store_part(out + d, load_part(from + 2 + d, a.v_dim - d) * inverse, a.v_dim - d);
    }
  }

  // What the sums of a row are multiplied by if a key of score `sink` has a part of the mass.
  float beside_sink(float top, float mass, float sink) const {
    if (sink > top) return exp(top - sink) / (mass * exp(top - sink) + 1.0f);
    return 1.0f / (mass + exp(sink - top));
  }

  void store_new() const {
    const int64_t tokens = a.new_tokens;
    constexpr int64_t kTask = 32;
    run_ranges(tokens, kTask, tokens < 128 ? 1 : a.threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
        const T* v = static_cast<const T*>(a.v) + t * a.v_stride;
        P* k_to = static_cast<P*>(a.k_pool) + a.slots[t] * key_stride;
        P* v_to = static_cast<P*>(a.v_pool) + a.slots[t] * value_stride;
        for (int64_t i = 0; i < key_stride; i += kLanes)
          store_part(k_to + i, load_part(k + i, key_stride - i), key_stride - i);
        for (int64_t i = 0; i < value_stride && !in_keys; i += kLanes)
          store_part(v_to + i, load_part(v + i, value_stride - i), value_stride - i);
      }
    });
  }

  void run() const {
    store_new();
    const int64_t tokens_per_tile = group < kTileRows ? kTileRows / group : 1;
    std::vector<Step> steps;
    int64_t decodes = 0;
    for (int64_t row = 0; row < a.batch; row++) {
      decodes += a.starts[row + 1] - a.starts[row] == 1;
      for (int64_t t = a.starts[row]; t < a.starts[row + 1]; t += tokens_per_tile) {
        const int64_t left = a.starts[row + 1] - t;
        const int64_t count = left < tokens_per_tile ? left : tokens_per_tile;
        const int64_t position = a.lengths[row] - a.starts[row + 1] + t;
        steps.push_back({row, t, count, first_seen(position), position + count});
      }
    }
    int64_t together = decodes >= 2 * a.threads || a.threads == 1 ? kTileRows / group : 1;  // heads of a decode task
    if (together > num_heads) together = num_heads;
    if (shares > 1) together = 1;  // what is fetched ahead lies side by side
    std::vector<Task> tasks;
    int64_t partials = 0;  // rows of `partial`
    for (const Step& step : steps) {
      const int64_t first = step.low / kPart, last = (step.high - 1) / kPart;
      const int64_t heads = step.count == 1 ? together : 1;
      for (int64_t h = 0; h < num_heads; h += heads) {
        const Heads some{h, num_heads - h < heads ? num_heads - h : heads};
        if (step.count > 1 || first == last) {
          tasks.push_back({&step, some, first, last, -1});
          continue;
        }
        for (int64_t p = first; p <= last; p++) {
          tasks.push_back({&step, some, p, p, partials});
          partials += some.count * group;
        }
      }
    }
    float* partial = new float[static_cast<size_t>(partials * (2 + a.v_dim))];
    run_tasks(static_cast<int64_t>(tasks.size()), a.threads, [&](int64_t i) {
      const size_t number = static_cast<size_t>(i), later = number + static_cast<size_t>(a.threads);
      one_task(tasks[number], later < tasks.size() ? &tasks[later] : nullptr, partial);
    });
    for (size_t i = 0; i < tasks.size(); i++) {
      const Task& task = tasks[i];
      if (task.partial < 0 || task.first != task.step->low / kPart) continue;
      const int64_t rows = task.heads.count * group;
      float* total = partial + task.partial * (2 + a.v_dim);
      const int64_t more = (task.step->high - 1) / kPart - task.first;
      for (int64_t j = rows; j < (more + 1) * rows; j++) {
        const float* from = total + j * (2 + a.v_dim);
        merge_row(total + j % rows * (2 + a.v_dim), from[0], from[1], from + 2);
      }
      write(*task.step, task.heads, total);
    }
    delete[] partial;
  }

  // Parts [first, last] of a step, written out, or left at row `partial` of `partials`.
  void one_task(const Task& task, const Task* later, float* partials) const {
    static thread_local Tile<C> tile;
    static thread_local float own[kTileRows * (2 + kMaxDim)];
    const Step& step = *task.step;
    read_queries(step, task.heads, tile);
    float* total = task.partial < 0 ? own : partials + task.partial * (2 + a.v_dim);
    for (int64_t p = task.first; p <= task.last; p++) {
      const int64_t begin = p * kPart, end = begin + kPart;
      const int64_t low = begin > step.low ? begin : step.low, high = end < step.high ? end : step.high;
      const Ahead next = p == task.last ? first_keys(later) : Ahead{};
      part(step, task.heads, low, high, next, tile);
      merge(tile, task.heads.count * step.count * group, total, p == task.first);
    }
    if (task.partial < 0) write(step, task.heads, total);
  }
};

template <class T>
void attention(const Attention& a) {
  if (a.pool_type == Type::f8) Attend<T, f8>{a}.run();
  else Attend<T, T>{a}.run();
}

}  // namespace manta::MANTA_ISA
