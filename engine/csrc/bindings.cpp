// The kernels as Python functions on tensors: checks, outputs, and the choice of instruction set.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace manta {
namespace {

using at::Tensor;

}  // namespace
}  // namespace manta

#include "recording.h"

namespace manta {
namespace {

struct Isa {
  const char* name;
  bool here;  // whether this processor has it
  const Kernels& (*kernels)();
};

#ifndef MANTA_WITHOUT_AMX
// Whether the processor has AMX for bfloat16 and the system lets this process use its tiles.
bool may_use_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<Isa> find_isas() {  // the best first
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  std::vector<Isa> found;
#ifndef MANTA_WITHOUT_AMX
  found.push_back({"amx", avx512 && __builtin_cpu_supports("avx512bf16") && may_use_tiles(),
                   amx::kernels});
#endif
#ifndef MANTA_WITHOUT_AVX512BF16
  found.push_back({"avx512bf16", avx512 && __builtin_cpu_supports("avx512bf16"), avx512bf16::kernels});
#endif
#ifndef MANTA_WITHOUT_AVX512
  found.push_back({"avx512", avx512, avx512::kernels});
#endif
  found.push_back({"avx2", avx2, avx2::kernels});
  return found;
}

const std::vector<Isa>& isas() {
  static const std::vector<Isa> all = find_isas();
  return all;
}

const Isa* chosen = nullptr;

std::vector<std::string> available() {
  std::vector<std::string> names;
  for (const Isa& isa : isas())
    if (isa.here) names.push_back(isa.name);
  return names;
}

// Weights packed before a change of the instruction set are no longer valid: it is for tests.
void use(const std::string& name) {
  for (const Isa& isa : isas())
    if (isa.here && name == isa.name) {
      chosen = &isa;
      return;
    }
  TORCH_CHECK(false, "the instruction set '", name, "' is not available");
}

const Kernels& kernels() {
  if (!chosen) {
    const auto names = available();
    TORCH_CHECK(!names.empty(), "the processor has no AVX2");
    use(names.front());
  }
  return chosen->kernels();
}

std::string isa() {
  kernels();
  return chosen->name;
}

// `args` for as many threads as torch has now.
template <class Args>
Args on_threads(Args args) {
  args.threads = at::get_num_threads();
  return args;
}

// Of numbers that are computed with; 8 bits are for pools only.
Type type_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Type::f32;
    case at::kBFloat16: return Type::bf16;
    case at::kHalf: return Type::f16;
    default: TORCH_CHECK(false, "no kernel for ", x.scalar_type());
  }
}

template <class... Tensors>
void check_cpu(const Tensors&... tensors) {
  TORCH_CHECK((tensors.is_cpu() && ...), "the tensors must be on the CPU");
}

int64_t numbers_per_unit(at::ScalarType type) { return type == at::kFloat ? 1 : 2; }

int64_t panels(int64_t out) { return (out + kernels().panel - 1) / kernels().panel; }

void check_rows(const Tensor& x, int64_t size) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == size && x.stride(1) == 1, "x must be [rows, ", size,
              "] with a contiguous last dimension, not ", x.sizes());
}

// Memory of huge pages, where the system has them: a step reads every weight once, and with pages of
// 4 KiB the processor looks up addresses instead. Matrices lie one after the other in it; it is
// given back with the last of them, but for the newest, which takes the next ones.
class WeightMemory {
 public:
  explicit WeightMemory(size_t size) : size_((size + kPage - 1) / kPage * kPage) {
    // A page more than is used, of which the ends beside the whole pages are given back.
    void* memory = mmap(nullptr, size_ + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "no memory for ", size_ >> 20, " MiB of weights: ", strerror(errno));
    const size_t before = (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
    base_ = static_cast<char*>(memory) + before;
    if (before) munmap(memory, before);
    munmap(base_ + size_, kPage - before);
    madvise(base_, size_, MADV_HUGEPAGE);  // a wish: small pages do, too
  }
  ~WeightMemory() { munmap(base_, size_); }
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  static Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
    static std::mutex lock;
    static std::shared_ptr<WeightMemory> shared;
    size_t bytes = options.dtype().itemsize();
    for (const int64_t size : sizes) bytes *= static_cast<size_t>(size);
    bytes = (bytes + kAlign - 1) / kAlign * kAlign;
    const std::lock_guard<std::mutex> guard(lock);
    if (!shared || shared->used_ + bytes > shared->size_)
      shared = std::make_shared<WeightMemory>(std::max(bytes, kShared));
    const std::shared_ptr<WeightMemory> memory = shared;
    const size_t at = memory->used_;
    memory->used_ += bytes;
    return at::from_blob(memory->base_ + at, sizes, [memory](void*) {}, options);
  }

 private:
  static constexpr size_t kPage = 2 << 20, kAlign = 64, kShared = 64 << 20;
  char* base_ = nullptr;
  size_t size_, used_ = 0;
};

Tensor pack(const Tensor& weight) {
  check_cpu(weight);
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "a weight must be [out, in], contiguous");
  const int64_t out = weight.size(0), in = weight.size(1);
  TORCH_CHECK(in % numbers_per_unit(weight.scalar_type()) == 0, "inputs of 16 bits must be even");
  Tensor packed = WeightMemory::empty({panels(out) * kernels().panel, in}, weight.options());
  kernels().pack(type_of(weight), weight.data_ptr(), out, in, packed.data_ptr());
  return packed;
}

void check_packed(const Tensor& weight, int64_t out) {
  TORCH_CHECK(weight.dim() == 2, "a weight must be [out, in]");
  TORCH_CHECK(weight.is_contiguous() && weight.size(0) == panels(out) * kernels().panel,
              "the weight is not packed for ", out, " outputs");
}

Tensor linear(const Tensor& x, const Tensor& packed, const c10::optional<Tensor>& bias, int64_t out,
              bool as_float) {
  check_cpu(x, packed, bias ? *bias : x);
  check_packed(packed, out);
  check_rows(x, packed.size(1));
  TORCH_CHECK(x.size(1) % numbers_per_unit(x.scalar_type()) == 0, "inputs of 16 bits must be even");
  TORCH_CHECK(packed.scalar_type() == x.scalar_type(), "x is ", x.scalar_type(), " and the weight ",
              packed.scalar_type());
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == out &&
                        bias->scalar_type() == x.scalar_type()), "a bias must be like x, [out]");
  Tensor y = Recording::empty({x.size(0), out}, as_float ? x.options().dtype(at::kFloat) : x.options());
  const Linear linear{type_of(x), x.data_ptr(), x.stride(0), packed.data_ptr(),
                      bias ? bias->data_ptr() : nullptr, y.data_ptr(), out, as_float, x.size(0),
                      x.size(1), out, 0};
  Recording::run_long([=] { kernels().linear(on_threads(linear)); }, {&x, &packed, bias ? &*bias : &x});
  return y;
}

const int64_t* index(const Tensor& x, int64_t size) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous() && x.numel() == size,
              "an index must be int64 [", size, "], contiguous, not ", x.sizes());
  return x.data_ptr<int64_t>();
}

void check_below(const int64_t* ids, int64_t size, int64_t end) {
  for (int64_t i = 0; i < size; i++)
    TORCH_CHECK(ids[i] >= 0 && ids[i] < end, "an index is ", ids[i], ", not in [0, ", end, ")");
}

const int64_t* index_below(const Tensor& x, int64_t size, int64_t end) {
  const int64_t* ids = index(x, size);
  check_below(ids, size, end);
  return ids;
}

// A packed matrix of whole numbers, as `GroupedMatrix` says.
class GroupedWeight {
 public:
  // numbers: uint8 [out, in]; scales and mins: [out, in / whole]; codes: int8 [out, in / group].
  GroupedWeight(const Tensor& numbers, int64_t bits, int64_t center, int64_t group, const Tensor& scales,
                const c10::optional<Tensor>& scale_codes, const c10::optional<Tensor>& mins,
                const c10::optional<Tensor>& min_codes)
      : panel_(kernels().panel) {
    check_cpu(numbers, scales, mins ? *mins : scales, scale_codes ? *scale_codes : scales,
              min_codes ? *min_codes : scales);
    TORCH_CHECK(numbers.dim() == 2 && numbers.is_contiguous() && numbers.scalar_type() == at::kByte,
                "numbers must be uint8 [out, in], contiguous");
    const int64_t out = numbers.size(0), in = numbers.size(1);
    TORCH_CHECK(bits == 4 || bits == 5 || bits == 6 || bits == 8, "there are no numbers of ", bits, " bits");
    TORCH_CHECK(center >= 0 && center < 256, "the center is ", center);
    TORCH_CHECK(group > 0 && (group == 16 || group % 32 == 0) && in % group == 0 && out > 0 && in > 0,
                "groups of ", group, " don't divide ", in, " inputs");
    TORCH_CHECK(scales.dim() == 2 && scales.size(0) == out && scales.size(1) > 0 &&
                in % scales.size(1) == 0, "scales must be [out, in / whole]");
    const int64_t whole = in / scales.size(1);
    TORCH_CHECK(scale_codes ? whole % group == 0 : whole == group, "a scale for ", whole,
                " inputs doesn't go with groups of ", group);
    TORCH_CHECK(!mins || (mins->sizes() == scales.sizes() && mins->scalar_type() == scales.scalar_type() &&
                          scale_codes.has_value() == min_codes.has_value()), "mins must be as scales");
    for (const auto* codes : {&scale_codes, &min_codes})
      TORCH_CHECK(!*codes || ((*codes)->scalar_type() == at::kChar && (*codes)->dim() == 2 &&
                              (*codes)->size(0) == out && (*codes)->size(1) == in / group),
                  "codes must be int8 [out, in / group]");
    const int64_t rows = panels(out) * panel_, high = (in + 31) / 32;
    numbers_ = WeightMemory::empty({rows * (bits == 8 ? in : (in + 7) / 8 * 4)}, numbers.options());
    if (bits == 5 || bits == 6)
      high_ = WeightMemory::empty({rows * high * (bits == 6 ? 2 : 1)}, numbers.options().dtype(at::kInt));
    kernels().pack_numbers(static_cast<int>(bits), numbers.data_ptr<uint8_t>(), out, in,
                           numbers_.data_ptr<uint8_t>(), high_data());
    scales_ = in_panels(scales);
    if (scale_codes) scale_codes_ = in_panels(*scale_codes);
    if (mins) mins_ = in_panels(*mins);
    if (min_codes) min_codes_ = in_panels(*min_codes);
    matrix = {static_cast<int>(bits), static_cast<int32_t>(center), out, in, group, whole,
              numbers_.data_ptr<uint8_t>(), high_data(), type_of(scales_), scales_.data_ptr(),
              mins ? mins_.data_ptr() : nullptr,
              scale_codes ? scale_codes_.data_ptr<int8_t>() : nullptr,
              min_codes ? min_codes_.data_ptr<int8_t>() : nullptr};
  }

  void check() const {
    TORCH_CHECK(panel_ == kernels().panel, "the matrix was packed for another instruction set");
  }

  void keep() const {
    for (const Tensor* part : {&numbers_, &high_, &scales_, &scale_codes_, &mins_, &min_codes_})
      Recording::keep(*part);
  }

  int64_t num_bytes() const {
    int64_t bytes = 0;
    for (const Tensor* part : {&numbers_, &high_, &scales_, &scale_codes_, &mins_, &min_codes_})
      if (part->defined()) bytes += static_cast<int64_t>(part->nbytes());
    return bytes;
  }

  // Rows `ids` as numbers of the type of the empty tensor `like`.
  Tensor rows(const Tensor& ids, const Tensor& like) const {
    check();
    check_cpu(ids);
    const int64_t* each = index_below(ids, ids.size(0), matrix.out);
    Tensor y = at::empty({ids.size(0), matrix.in}, like.options());
    for (int64_t i = 0; i < ids.size(0); i++)
      kernels().grouped_row(type_of(y), matrix, each[i],
                            static_cast<char*>(y.data_ptr()) + i * matrix.in * y.itemsize());
    return y;
  }

  GroupedMatrix matrix;

 private:
  // [out, n] -> [panels][n][panel]
  Tensor in_panels(const Tensor& values) const {
    const int64_t out = values.size(0), n = values.size(1), count = panels(out);
    Tensor padded = at::zeros({count * panel_, n}, values.options());
    padded.narrow(0, 0, out).copy_(values);
    Tensor to = WeightMemory::empty({count, n, panel_}, values.options());
    to.copy_(padded.view({count, panel_, n}).transpose(1, 2));
    return to;
  }
  uint32_t* high_data() {
    return high_.defined() ? reinterpret_cast<uint32_t*>(high_.data_ptr<int32_t>()) : nullptr;
  }

  int64_t panel_;
  Tensor numbers_, high_, scales_, scale_codes_, mins_, min_codes_;
};

// The matrices multiply the same x; their outputs are side by side.
Tensor linear_grouped(const Tensor& x, const std::vector<const GroupedWeight*>& weights,
                      const c10::optional<Tensor>& bias, bool short_inputs, bool as_float) {
  check_cpu(x, bias ? *bias : x);
  TORCH_CHECK(!weights.empty(), "there is no matrix");
  std::vector<GroupedMatrix> parts;
  int64_t out = 0;
  const int64_t in = weights[0]->matrix.in;
  for (const GroupedWeight* weight : weights) {
    weight->check();
    weight->keep();
    TORCH_CHECK(weight->matrix.in == in, "the matrices differ in their inputs");
    parts.push_back(weight->matrix);
    out += weight->matrix.out;
  }
  check_rows(x, in);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == out &&
                        bias->scalar_type() == x.scalar_type()), "a bias must be like x, [out]");
  Tensor y = Recording::empty({x.size(0), out}, as_float ? x.options().dtype(at::kFloat) : x.options());
  if (x.size(0) == 0) return y;
  const GroupedLinear linear{type_of(x), x.data_ptr(), x.stride(0), short_inputs, nullptr,
                             static_cast<int64_t>(parts.size()), bias ? bias->data_ptr() : nullptr,
                             y.data_ptr(), out, as_float, x.size(0), in, 0};
  auto call = [linear, parts = std::move(parts)] {
    GroupedLinear now = on_threads(linear);
    now.parts = parts.data();
    kernels().grouped_linear(now);
  };
  Recording::run_long(std::move(call), {&x, bias ? &*bias : &x});
  return y;
}

void check_heads(const Tensor& x, int64_t tokens, int64_t heads, int64_t dim, at::ScalarType type) {
  TORCH_CHECK(x.dim() == 3 && x.size(0) == tokens && x.size(1) == heads && x.size(2) == dim &&
                  x.stride(2) == 1 && (x.stride(1) == dim || heads == 1) && x.scalar_type() == type,
              "q, k and v must be [tokens, heads, dim] with contiguous heads, of one type");
}

// Rows `ids` of the matrix [out, in] that `pack` was given.
Tensor unpack_rows(const Tensor& packed, const Tensor& ids, int64_t out) {
  check_cpu(packed, ids);
  type_of(packed);
  check_packed(packed, out);
  const int64_t in = packed.size(1), per_unit = numbers_per_unit(packed.scalar_type());
  TORCH_CHECK(in % per_unit == 0, "inputs of 16 bits must be even");
  TORCH_CHECK(ids.dim() == 1, "ids must be int64 [rows], not ", ids.sizes());
  const int64_t* rows = index_below(ids, ids.size(0), out);
  Tensor y = at::empty({ids.size(0), in}, packed.options());
  kernels().unpack_rows({static_cast<const uint32_t*>(packed.data_ptr()), rows,
                         static_cast<uint32_t*>(y.data_ptr()), y.size(0), in / per_unit,
                         at::get_num_threads()});
  return y;
}

// Row i of a step has tokens [starts[i], starts[i + 1]), the last of its lengths[i] tokens.
void check_steps(const int64_t* starts, const int64_t* lengths, int64_t batch, int64_t tokens,
                 int64_t longest) {
  TORCH_CHECK(starts[0] == 0 && starts[batch] == tokens, "the rows have ", starts[batch],
              " tokens, q has ", tokens);
  for (int64_t i = 0; i < batch; i++)
    TORCH_CHECK(starts[i] <= starts[i + 1] && starts[i + 1] - starts[i] <= lengths[i] &&
                    lengths[i] <= longest, "row ", i, " has ", starts[i + 1] - starts[i], " of ",
                lengths[i], " tokens, and the table has room for ", longest);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_pool,
                 const Tensor& v_pool, const Tensor& slots, const Tensor& table,
                 const Tensor& requests, const Tensor& starts, const Tensor& lengths, double scale,
                 int64_t window, int64_t chunk, double softcap, const c10::optional<Tensor>& sinks) {
  check_cpu(q, k, v, k_pool, v_pool, slots, table, requests, starts, lengths);
  TORCH_CHECK(q.dim() == 3 && k_pool.dim() == 3, "queries and pools must have 3 dimensions");
  TORCH_CHECK(v_pool.dim() == 3, "queries and pools must have 3 dimensions");
  const int64_t tokens = q.size(0), heads = q.size(1), k_dim = q.size(2), kv_heads = k_pool.size(1);
  const int64_t v_dim = v_pool.size(2), new_tokens = slots.numel();
  check_heads(q, tokens, heads, k_dim, q.scalar_type());
  check_heads(k, new_tokens, kv_heads, k_dim, q.scalar_type());
  check_heads(v, new_tokens, kv_heads, v_dim, q.scalar_type());
  for (const int64_t dim : {k_dim, v_dim})
    TORCH_CHECK(dim > 0 && dim <= kMaxHeadDim && dim % 2 == 0 && heads > 0 && kv_heads > 0 &&
                    heads % kv_heads == 0,
                "no kernel for ", heads, " query heads, ", kv_heads, " key heads of ", dim);
  const bool in_keys = k_pool.data_ptr() == v_pool.data_ptr();
  TORCH_CHECK(!in_keys || (v_dim <= k_dim && v_pool.strides() == k_pool.strides()),
              "values within keys must be the first numbers of each");
  TORCH_CHECK(k_pool.is_contiguous() && (in_keys || v_pool.is_contiguous()) &&
                  k_pool.size(2) == k_dim &&
                  k_pool.size(0) == v_pool.size(0) && v_pool.size(1) == kv_heads &&
                  k_pool.scalar_type() == v_pool.scalar_type(),
              "the pools must be [slots, heads, dim], contiguous");
  TORCH_CHECK(!sinks || (sinks->scalar_type() == at::kFloat && sinks->is_contiguous() &&
                         sinks->device().is_cpu() && sinks->numel() == heads),
              "sinks must be float32 [heads]");
  TORCH_CHECK(k_pool.scalar_type() == q.scalar_type() || k_pool.scalar_type() == at::kFloat8_e4m3fn,
              "the pool must be of the queries' type or float8_e4m3fn");
  TORCH_CHECK(table.scalar_type() == at::kInt && table.is_contiguous() && table.dim() == 2,
              "the table must be int32 [rows, positions]");
  const int64_t batch = requests.numel();
  Tensor out = Recording::empty({tokens, heads * v_dim}, q.options());
  const bool in_8_bits = k_pool.scalar_type() == at::kFloat8_e4m3fn;
  const Attention args{type_of(q), in_8_bits ? Type::f8 : type_of(k_pool), q.data_ptr(),
                       k.data_ptr(), v.data_ptr(), q.stride(0), k.stride(0), v.stride(0),
                       out.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(),
                       index(slots, new_tokens), table.data_ptr<int32_t>(), table.size(1),
                       index(requests, batch), index(starts, batch + 1), index(lengths, batch),
                       new_tokens, batch, heads, kv_heads, k_dim, v_dim, window, chunk,
                       static_cast<float>(scale), static_cast<float>(softcap),
                       sinks ? sinks->data_ptr<float>() : nullptr, 0};
  const auto call = [args, tokens, end = k_pool.size(0), rows = table.size(0)] {
    check_below(args.slots, args.new_tokens, end);
    check_below(args.requests, args.batch, rows);
    check_steps(args.starts, args.lengths, args.batch, tokens, args.table_width);
    kernels().attention(on_threads(args));
  };
  Recording::run_long(call, {&q, &k, &v, &k_pool, &v_pool, &slots, &table, &requests, &starts,
                             &lengths, sinks ? &*sinks : &q});
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check_cpu(x, weight);
  TORCH_CHECK(x.dim() == 2 || x.dim() == 3, "x must be [rows, size] or [rows, heads, size]");
  const int64_t size = x.size(-1), heads = x.dim() == 3 ? x.size(1) : 1;
  TORCH_CHECK(x.stride(-1) == 1 && weight.is_contiguous() && weight.numel() == size &&
                  weight.scalar_type() == x.scalar_type(), "x and the weight don't fit");
  Tensor y = Recording::empty(x.sizes(), x.options());
  const Norm norm{type_of(x), x.data_ptr(), x.stride(0), x.dim() == 3 ? x.stride(1) : 0, nullptr,
                  weight.data_ptr(), y.data_ptr(), x.size(0), heads, size, static_cast<float>(eps), 0};
  Recording::run([=] { kernels().norm(on_threads(norm)); }, {&x, &weight});
  return y;
}

// residual += x; x = norm(residual).
void add_rms_norm_(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check_cpu(x, residual, weight);
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && residual.is_contiguous() &&
                  x.sizes() == residual.sizes() && residual.scalar_type() == x.scalar_type() &&
                  weight.is_contiguous() && weight.numel() == x.size(1) &&
                  weight.scalar_type() == x.scalar_type(), "x, residual and weight don't fit");
  const Norm norm{type_of(x), x.data_ptr(), x.stride(0), 0, residual.data_ptr(), weight.data_ptr(),
                  x.data_ptr(), x.size(0), 1, x.size(1), static_cast<float>(eps), 0};
  Recording::run([=] { kernels().norm(on_threads(norm)); }, {&x, &residual, &weight});
}

void rotate_(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& cos_sin) {
  check_cpu(positions, q, k, cos_sin);
  for (const Tensor& x : {q, k}) {
    TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && x.size(2) % 2 == 0, "x must be [tokens, heads, dim]");
    TORCH_CHECK(cos_sin.scalar_type() == at::kFloat && cos_sin.is_contiguous() &&
                    cos_sin.dim() == 2 && cos_sin.size(1) == x.size(2),
                "cos_sin must be float32 [positions, dim]");
    const Rope rope{type_of(x), x.data_ptr(), x.stride(0), x.stride(1), index(positions, x.size(0)),
                    cos_sin.data_ptr<float>(), x.size(0), x.size(1), x.size(2)};
    const auto call = [rope, end = cos_sin.size(0)] {
      check_below(rope.positions, rope.tokens, end);
      kernels().rope(rope);
    };
    Recording::run(call, {&x, &positions, &cos_sin});
  }
}

Tensor silu_and_mul(const Tensor& gate_up) {
  check_cpu(gate_up);
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0,
              "gate_up must be [rows, 2 * size], contiguous");
  const int64_t size = gate_up.size(1) / 2;
  Tensor y = Recording::empty({gate_up.size(0), size}, gate_up.options());
  const SiluMul mul{type_of(gate_up), gate_up.data_ptr(), y.data_ptr(), y.size(0), size, size, 0};
  Recording::run([=] { kernels().silu_mul(on_threads(mul)); }, {&gate_up});
  return y;
}

}  // namespace
}  // namespace manta

#include "adapter_bindings.h"
#include "mixture_bindings.h"

namespace manta {
namespace {

void check_logits(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous() && logits.size(1) > 0 &&
                  logits.scalar_type() == at::kFloat,
              "logits must be float32 [rows, vocab], contiguous, not ", logits.sizes());
}

// Token ids int64 [rows], and the rows' largest logits.
std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& draws, const Tensor& slots,
                                  const Tensor& positions, const Tensor& floats,
                                  const Tensor& ints) {
  check_cpu(logits, draws, slots, positions, floats, ints);
  check_logits(logits);
  const int64_t rows = logits.size(0);
  TORCH_CHECK(draws.scalar_type() == at::kChar && draws.is_contiguous() && draws.numel() == rows,
              "draws must be int8 [", rows, "]");
  TORCH_CHECK(floats.dim() == 2 && floats.is_contiguous() && floats.size(1) >= 3 &&
                  floats.scalar_type() == at::kFloat && ints.dim() == 2 && ints.is_contiguous() &&
                  ints.size(1) >= 2 && ints.scalar_type() == at::kLong &&
                  ints.size(0) == floats.size(0), "the parameters don't fit");
  Tensor token_ids = at::empty({rows}, logits.options().dtype(at::kLong));
  Tensor row_max = at::empty({rows}, logits.options());
  const Sample args{logits.data_ptr<float>(), rows, logits.size(1), draws.data_ptr<int8_t>(),
                    index_below(slots, rows, floats.size(0)), index(positions, rows),
                    floats.data_ptr<float>(), ints.data_ptr<int64_t>(), floats.size(1),
                    ints.size(1), token_ids.data_ptr<int64_t>(), row_max.data_ptr<float>(),
                    at::get_num_threads()};
  pybind11::gil_scoped_release release;
  kernels().sample(args);
  return {token_ids, row_max};
}

// Log-probabilities [rows] of `token_ids`; ids and log-probabilities [rows, count] of the likeliest
// tokens.
std::tuple<Tensor, Tensor, Tensor> logprobs(const Tensor& logits, const Tensor& token_ids,
                                            int64_t count) {
  check_cpu(logits, token_ids);
  check_logits(logits);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  TORCH_CHECK(count >= 0 && count <= vocab, "there are no ", count, " tokens");
  Tensor token = at::empty({rows}, logits.options());
  Tensor top = at::empty({rows, count}, logits.options());
  Tensor top_ids = at::empty({rows, count}, logits.options().dtype(at::kLong));
  const Logprobs args{logits.data_ptr<float>(), rows, vocab, index_below(token_ids, rows, vocab),
                      count, token.data_ptr<float>(), top_ids.data_ptr<int64_t>(),
                      top.data_ptr<float>(), at::get_num_threads()};
  pybind11::gil_scoped_release release;
  kernels().logprobs(args);
  return {token, top_ids, top};
}

}  // namespace
}  // namespace manta

PYBIND11_MODULE(manta_cpu_kernels, m) {
  m.def("isa", &manta::isa, "The instruction set in use.");
  m.def("available", &manta::available, "Instruction sets of this processor, the best first.");
  m.def("use", &manta::use, "Use another one (for tests).");
  pybind11::class_<manta::Recording, std::shared_ptr<manta::Recording>>(m, "Recording")
      .def(pybind11::init<>())
      .def("begin", &manta::Recording::begin)
      .def("end", &manta::Recording::end)
      .def("replay", &manta::Recording::replay)
      .def_property_readonly("others", &manta::Recording::others)
      .def_property_readonly("num_calls", &manta::Recording::num_calls)
      .def_property_readonly("num_bytes", &manta::Recording::num_bytes);
  m.def("pack", &manta::pack);
  m.def("linear", &manta::linear);
  m.def("unpack_rows", &manta::unpack_rows);
  pybind11::class_<manta::GroupedWeight>(m, "GroupedWeight")
      .def(pybind11::init<const at::Tensor&, int64_t, int64_t, int64_t, const at::Tensor&,
                          const c10::optional<at::Tensor>&, const c10::optional<at::Tensor>&,
                          const c10::optional<at::Tensor>&>())
      .def("rows", &manta::GroupedWeight::rows)
      .def_property_readonly("num_bytes", &manta::GroupedWeight::num_bytes);
  m.def("linear_grouped", &manta::linear_grouped);
  m.def("attention", &manta::attention);
  m.def("rms_norm", &manta::rms_norm);
  m.def("add_rms_norm_", &manta::add_rms_norm_);
  m.def("rotate_", &manta::rotate_);
  m.def("silu_and_mul", &manta::silu_and_mul);
  pybind11::class_<manta::ExpertWeights, std::shared_ptr<manta::ExpertWeights>>(m, "ExpertWeights")
      .def(pybind11::init<std::vector<at::Tensor>, std::vector<at::Tensor>, int64_t>())
      .def(pybind11::init<std::vector<std::vector<manta::GroupedWeight>>,
                          std::vector<std::vector<manta::GroupedWeight>>, bool>())
      .def_readonly("inner", &manta::ExpertWeights::inner);
  m.def("experts", &manta::experts);
  m.def("mixture", &manta::mixture);
  pybind11::class_<manta::AdapterWeights, std::shared_ptr<manta::AdapterWeights>>(m, "AdapterWeights")
      .def(pybind11::init<int64_t, std::vector<int64_t>, int64_t>())
      .def("set", &manta::AdapterWeights::set)
      .def("clear", &manta::AdapterWeights::clear);
  m.def("adapt_", &manta::adapt_);
  m.def("sample", &manta::sample);
  m.def("logprobs", &manta::logprobs);
}
