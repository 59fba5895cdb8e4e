// Mixtures of experts on tensors: a part of bindings.cpp, which includes it behind what it uses.
#pragma once

namespace manta {
namespace {

constexpr int64_t kRoutedTokens = 64;  // that a thread takes at a time
constexpr int64_t kExpertRows = 256;  // of an expert that are multiplied at once

// A mixture's packed matrices: an expert is down(silu(gate) * up), its gate and up are `ups`,
// [2 * inner, size].
class ExpertWeights {
 public:
  ExpertWeights(std::vector<Tensor> ups, std::vector<Tensor> downs, int64_t inner)
      : inner(inner), ups_(std::move(ups)), downs_(std::move(downs)) {
    TORCH_CHECK(!ups_.empty() && ups_.size() == downs_.size(), "there are ", ups_.size(), " ups and ",
                downs_.size(), " downs");
    count = static_cast<int64_t>(ups_.size());
    size = ups_[0].dim() == 2 ? ups_[0].size(1) : 0;
    type = ups_[0].scalar_type();
    const int64_t per_unit = numbers_per_unit(type);
    TORCH_CHECK(inner > 0, "experts have no inner numbers");
    TORCH_CHECK(size % per_unit == 0 && inner % per_unit == 0, "inputs of 16 bits must be even");
    for (int64_t e = 0; e < count; e++) {
      check_cpu(ups_[e], downs_[e]);
      check_packed(ups_[e], 2 * inner);
      check_packed(downs_[e], size);
      TORCH_CHECK(ups_[e].size(1) == size && downs_[e].size(1) == inner, "expert ", e, " has other sizes");
      TORCH_CHECK(ups_[e].scalar_type() == type && downs_[e].scalar_type() == type, "expert ", e,
                  " has another type");
      up_data.push_back(ups_[e].data_ptr());
      down_data.push_back(downs_[e].data_ptr());
    }
  }

  // Of each expert quantized matrices, one below the other.
  ExpertWeights(std::vector<std::vector<GroupedWeight>> ups,
                std::vector<std::vector<GroupedWeight>> downs, bool short_inputs)
      : short_inputs(short_inputs), grouped_ups_(std::move(ups)), grouped_downs_(std::move(downs)) {
    TORCH_CHECK(!grouped_ups_.empty() && grouped_ups_.size() == grouped_downs_.size(), "there are ",
                grouped_ups_.size(), " ups and ", grouped_downs_.size(), " downs");
    count = static_cast<int64_t>(grouped_ups_.size());
    TORCH_CHECK(!grouped_ups_[0].empty() && !grouped_downs_[0].empty(), "experts have no matrices");
    size = grouped_ups_[0][0].matrix.in;
    inner = grouped_downs_[0][0].matrix.in;
    for (const auto& expert : grouped_ups_) add_parts(expert, 2 * inner, size, up_matrices_);
    for (const auto& expert : grouped_downs_) add_parts(expert, size, inner, down_matrices_);
    for (const auto& parts : up_matrices_) grouped_ups.push_back({parts.data(), size_of(parts)});
    for (const auto& parts : down_matrices_) grouped_downs.push_back({parts.data(), size_of(parts)});
  }
  ExpertWeights(const ExpertWeights&) = delete;
  ExpertWeights& operator=(const ExpertWeights&) = delete;

  void check() const {
    for (const auto* weights : {&grouped_ups_, &grouped_downs_})
      if (!weights->empty()) weights->front().front().check();
  }
  bool is_grouped() const { return !grouped_ups.empty(); }

  int64_t count, size, inner = 0;
  at::ScalarType type = at::kFloat;  // of plain ones
  std::vector<const void*> up_data, down_data;
  bool short_inputs = false;
  std::vector<GroupedParts> grouped_ups, grouped_downs;

 private:
  static int64_t size_of(const std::vector<GroupedMatrix>& parts) {
    return static_cast<int64_t>(parts.size());
  }
  static void add_parts(const std::vector<GroupedWeight>& expert, int64_t out, int64_t in,
                        std::vector<std::vector<GroupedMatrix>>& to) {
    std::vector<GroupedMatrix> parts;
    int64_t found = 0;
    for (const GroupedWeight& weight : expert) {
      TORCH_CHECK(weight.matrix.in == in, "expert ", to.size(), " has other sizes");
      parts.push_back(weight.matrix);
      found += weight.matrix.out;
    }
    TORCH_CHECK(found == out, "expert ", to.size(), " has other sizes");
    to.push_back(std::move(parts));
  }

  std::vector<Tensor> ups_, downs_;
  std::vector<std::vector<GroupedWeight>> grouped_ups_, grouped_downs_;
  std::vector<std::vector<GroupedMatrix>> up_matrices_, down_matrices_;
};

void check_hidden(const Tensor& hidden, const ExpertWeights& by) {
  check_cpu(hidden);
  check_rows(hidden, by.size);
  by.check();
  type_of(hidden);
  TORCH_CHECK(by.is_grouped() || hidden.scalar_type() == by.type,
              "hidden has another type than the experts");
}

// `out` = of each token the sum of its `k` experts, `numbers` and `factors` [tokens, k]. A number that
// is no expert's adds nothing.
void sum_experts(const Tensor& hidden, const int64_t* numbers, const float* factors, int64_t k,
                 const ExpertWeights& by, const Tensor& out) {
  const int64_t all = hidden.size(0) * k;
  std::vector<int64_t> starts(by.count + 1, 0);
  for (int64_t i = 0; i < all; i++)
    if (numbers[i] >= 0 && numbers[i] < by.count) starts[numbers[i] + 1]++;
  for (int64_t e = 0; e < by.count; e++) starts[e + 1] += starts[e];
  const int64_t rows = starts[by.count];
  std::vector<int64_t> next(starts.begin(), starts.end() - 1), tokens(rows);
  std::vector<float> weights(rows);
  for (int64_t i = 0; i < all; i++) {
    if (numbers[i] < 0 || numbers[i] >= by.count) continue;
    const int64_t row = next[numbers[i]]++;
    tokens[row] = i / k;
    weights[row] = factors[i];
  }
  std::vector<ExpertBlock> blocks;
  for (int64_t e = 0; e < by.count; e++)
    for (int64_t row = starts[e]; row < starts[e + 1]; row += kExpertRows)
      blocks.push_back({e, row, std::min(row + kExpertRows, starts[e + 1])});
  if (by.is_grouped()) {
    const Tensor sums = at::zeros({hidden.size(0), by.size}, hidden.options().dtype(at::kFloat));
    kernels().grouped_experts({type_of(hidden), hidden.data_ptr(), hidden.stride(0), by.short_inputs,
                               by.grouped_ups.data(), by.grouped_downs.data(), blocks.data(),
                               static_cast<int64_t>(blocks.size()), tokens.data(), weights.data(),
                               sums.data_ptr<float>(), by.size, by.inner, at::get_num_threads()});
    out.copy_(sums);
    return;
  }
  if (blocks.empty()) {
    out.zero_();
    return;
  }
  const Tensor middle = at::empty({rows, by.inner}, hidden.options());
  kernels().experts({type_of(hidden), hidden.data_ptr(), hidden.stride(0), by.up_data.data(),
                     by.down_data.data(), blocks.data(), static_cast<int64_t>(blocks.size()),
                     tokens.data(), weights.data(), middle.data_ptr(), out.data_ptr(), hidden.size(0),
                     by.size, by.inner, at::get_num_threads()});
}

// The same for the `chosen` experts int64 [tokens, k], by `weights` float32 [tokens, k].
Tensor experts(const Tensor& hidden, const Tensor& chosen, const Tensor& weights,
               const std::shared_ptr<ExpertWeights>& by) {
  check_hidden(hidden, *by);
  check_cpu(chosen, weights);
  TORCH_CHECK(chosen.dim() == 2 && chosen.size(0) == hidden.size(0) && chosen.is_contiguous() &&
                  chosen.scalar_type() == at::kLong, "chosen must be int64 [tokens, k], contiguous");
  TORCH_CHECK(weights.sizes() == chosen.sizes() && weights.is_contiguous() &&
                  weights.scalar_type() == at::kFloat,
              "weights must be float32 [tokens, k], contiguous");
  Tensor out = Recording::empty({hidden.size(0), by->size}, hidden.options());
  const auto call = [by, k = chosen.size(1), numbers = chosen.data_ptr<int64_t>(),
                     factors = weights.data_ptr<float>(), x = Recording::view(hidden),
                     y = Recording::view(out)] { sum_experts(x, numbers, factors, k, *by, y); };
  Recording::run_long(call, {&hidden, &chosen, &weights});
  return out;
}

// The `k` largest of `logits`, of equal ones the first, and their parts of the softmax.
void weigh_best(const float* logits, int64_t count, int64_t k, bool normalized, int64_t* best,
                float* weights) {
  bool is_nan = false;
  for (int64_t e = 0, kept = 0; e < count; e++) {
    is_nan |= std::isnan(logits[e]);
    if (kept == k && !(logits[e] > logits[best[k - 1]])) continue;
    int64_t i = kept < k ? kept++ : k - 1;
    for (; i > 0 && logits[e] > logits[best[i - 1]]; i--) best[i] = best[i - 1];
    best[i] = e;
  }
  const float top = logits[best[0]];
  float mass = is_nan ? NAN : 0.0f;
  if (normalized)
    for (int64_t i = 0; i < k; i++) mass += std::exp(logits[best[i]] - top);
  else
    for (int64_t e = 0; e < count; e++) mass += std::exp(logits[e] - top);
  for (int64_t i = 0; i < k; i++) weights[i] = std::exp(logits[best[i]] - top) / mass;
}

// The same for the `k` experts of `routes` whose logits are the largest, of equal ones the first, by
// the softmax of all logits, or of theirs if `normalized`. `router` is packed, [routes, size];
// `places` int64 [routes] says which expert here a route is; others are below 0, or beyond them.
// Logits and weights are rounded to the type of `hidden`. `counts` int64 [at least routes]: the
// tokens of each route are added to them.
Tensor mixture(const Tensor& hidden, const Tensor& router, int64_t routes, int64_t k, bool normalized,
               const Tensor& places, const c10::optional<Tensor>& counts,
               const std::shared_ptr<ExpertWeights>& by) {
  check_hidden(hidden, *by);
  TORCH_CHECK(k > 0 && k <= routes, "there are ", routes, " routes, not ", k);
  TORCH_CHECK(places.scalar_type() == at::kLong && places.is_contiguous() &&
                  places.device().is_cpu() && places.numel() == routes,
              "places must be int64 [routes], contiguous");
  TORCH_CHECK(!counts || (counts->scalar_type() == at::kLong && counts->is_contiguous() &&
                          counts->device().is_cpu() && counts->numel() >= routes),
              "counts must be int64 [routes] or more, contiguous");
  const Tensor logits = linear(hidden, router, c10::nullopt, routes, false);
  Tensor out = Recording::empty({hidden.size(0), by->size}, hidden.options());
  const auto call = [by, routes, k, normalized, place_of = places.data_ptr<int64_t>(),
                     sums = counts ? counts->data_ptr<int64_t>() : nullptr,
                     by_route = Recording::view(logits), x = Recording::view(hidden),
                     y = Recording::view(out)] {
    const Tensor rows = by_route.to(at::kFloat);
    const Tensor chosen = at::empty({x.size(0), k}, rows.options());
    std::vector<int64_t> numbers(chosen.numel());
    at::parallel_for(0, x.size(0), kRoutedTokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; token++) {
        int64_t* best = numbers.data() + token * k;
        weigh_best(rows.data_ptr<float>() + token * routes, routes, k, normalized, best,
                   chosen.data_ptr<float>() + token * k);
      }
    });
    if (sums)
      for (const int64_t number : numbers) sums[number]++;
    for (int64_t& number : numbers) number = place_of[number];
    const Tensor rounded = chosen.to(x.scalar_type()).to(at::kFloat);
    sum_experts(x, numbers.data(), rounded.data_ptr<float>(), k, *by, y);
  };
  Recording::run_long(call, {&hidden, &logits, &places, counts ? &*counts : &places});
  return out;
}

}  // namespace
}  // namespace manta
