// What the kernels take: plain pointers and sizes. No torch here.
#pragma once

#include <cstdint>

namespace manta {

enum class Type : int { f32, bf16, f16, f8 };

// The largest heads that attention takes.
constexpr int64_t kMaxHeadDim = 576;

// y = x W^T + bias. Strides in elements.
struct Linear {
  Type type;
  const void* x;  // [rows, in], stride x_stride
  int64_t x_stride;
  const void* weight;  // in panels of kPanel columns: [out / kPanel][in / unit][kPanel] units
  const void* bias;    // [out] of `type`, or null
  void* y;             // [rows, out] of `type`, or float if y_float
  int64_t y_stride;
  bool y_float;
  int64_t rows, in, out;
  int threads;
};

// A matrix [out, in] of whole numbers in panels; see grouped.h.
struct GroupedMatrix {
  int bits;  // of a number: 4, 5, 6 or 8
  int32_t center;
  int64_t out, in;
  int64_t group;  // inputs with one scale: 16, or a multiple of 32
  int64_t whole;  // inputs of one number in `scales`: `group` or, with codes, more
  const uint8_t* numbers;
  const uint32_t* high;  // upper bits, 5 and 6 bits only
  Type scale_type;
  const void *scales, *mins;                // [panels][in / whole][kPanel]; mins may be null
  const int8_t *scale_codes, *min_codes;  // [panels][in / group][kPanel], or null
};

// y = x W^T + bias for matrices of the same inputs, whose outputs are side by side.
struct GroupedLinear {
  Type type;
  const void* x;  // [rows, in], stride x_stride
  int64_t x_stride;
  bool short_inputs;  // x in 8 bits, instead of as precise as its type
  const GroupedMatrix* parts;
  int64_t num_parts;
  const void* bias;  // [out] of `type`, or null
  void* y;           // [rows, out] of `type`, or float if y_float
  int64_t y_stride;
  bool y_float;
  int64_t rows, in;
  int threads;
};

// Rows of a packed matrix, for an embedding that shares it with the output head.
struct UnpackRows {
  const uint32_t* packed;
  const int64_t* ids;  // [rows], below the matrix' `out`
  uint32_t* y;         // [rows, units]
  int64_t rows, units;
  int threads;
};

// Attention of a step's tokens over their requests' cached and new tokens.
struct Attention {
  Type type, pool_type;
  const void *q, *k, *v;  // q [tokens, heads, k_dim], k and v [new_tokens, ...], with token strides
  int64_t q_stride, k_stride, v_stride;
  void* out;  // [tokens, num_heads * v_dim], contiguous
  // [slots, num_kv_heads, k_dim or v_dim], contiguous; or both are one pool, of which values are the
  // first v_dim numbers of each key
  void *k_pool, *v_pool;
  const int64_t* slots;   // [new_tokens]: where the new keys and values go
  const int32_t* table;   // [rows, table_width]: slots of each request's tokens
  int64_t table_width;
  const int64_t* requests;  // [batch]: row of `table`
  const int64_t* starts;    // [batch + 1]: tokens of row i are [starts[i], starts[i + 1])
  const int64_t* lengths;   // [batch]: tokens in the cache once the step is done
  int64_t new_tokens, batch, num_heads, num_kv_heads, k_dim, v_dim;
  int64_t window;  // keys that a query sees, itself included; 0: all
  int64_t chunk;   // a query sees the keys of its own chunk of this size; 0: all
  float scale;
  float softcap;       // scores become softcap * tanh(score / softcap); 0: they stay
  const float* sinks;  // [num_heads]: score of a key without a value, or null
  int threads;
};

struct Norm {
  Type type;
  const void* x;  // [rows, heads, size] with strides
  int64_t x_stride, x_head_stride;
  void* residual;  // [rows, size] contiguous or null: residual += x, and that is normed
  const void* weight;
  void* y;  // [rows, heads, size], contiguous
  int64_t rows, heads, size;
  float eps;
  int threads;
};

struct Rope {
  Type type;
  void* x;  // [tokens, heads, dim] with strides, in place
  int64_t x_stride, x_head_stride;
  const int64_t* positions;
  const float* cos_sin;  // [positions, dim]: half a row of cosines, half a row of sines
  int64_t tokens, heads, dim;
};

struct SiluMul {
  Type type;
  const void* gate_up;  // [rows, 2 * size]
  void* y;              // [rows, size], stride y_stride
  int64_t rows, size, y_stride;
  int threads;
};

// Rows [begin, end) of a mixture's tokens sorted by expert, all of one expert.
struct ExpertBlock {
  int64_t expert, begin, end;
};

// Of each token the weighted sum of its experts.
struct Experts {
  Type type;
  const void* x;  // [num_tokens, size], stride x_stride
  int64_t x_stride;
  const void *const *ups, *const *downs;  // of each expert [2 * inner, size] and [size, inner], packed
  const ExpertBlock* blocks;              // in the order of the experts
  int64_t num_blocks;
  const int64_t* tokens;  // [rows]: a sorted row's token
  const float* by;        // [rows]: its expert's weight
  void* middle;           // [rows, inner]: room
  void* y;                // [num_tokens, size], contiguous
  int64_t num_tokens, size, inner;
  int threads;
};

// Quantized matrices one below the other.
struct GroupedParts {
  const GroupedMatrix* parts;
  int64_t count;
};

// The same for quantized experts. The sums are added to `y`.
struct GroupedExperts {
  Type type;
  const void* x;  // [num_tokens, size], stride x_stride
  int64_t x_stride;
  bool short_inputs;                 // see GroupedLinear
  const GroupedParts *ups, *downs;  // of each expert [2 * inner, size] and [size, inner]
  const ExpertBlock* blocks;         // in the order of the experts
  int64_t num_blocks;
  const int64_t* tokens;  // [rows]: a sorted row's token
  const float* by;        // [rows]: its expert's weight
  float* y;               // [num_tokens, size], contiguous
  int64_t size, inner;
  int threads;
};

// What an adapter adds to some neighbouring outputs: `out` of them from `start` on.
struct AdapterPart {
  int64_t rank;  // 0: nothing
  const void* a;  // [rank, in]
  const void* b;  // [rank, out]
  int64_t start, out;
};

// Up to 4 rows of one adapter, whose parts are those of one linear.
struct AdapterBlock {
  const AdapterPart* parts;
  int64_t num_parts;
  int count;
  int64_t rows[4];
};

// y += x A^T B, with the A and B of each row's adapter; x, y, A and B are of `type`.
struct Adapted {
  Type type;
  const void* x;  // [rows, in], stride x_stride
  int64_t x_stride, in;
  void* y;  // [rows, ...], stride y_stride
  int64_t y_stride;
  const AdapterBlock* blocks;
  int64_t num_blocks;
  int threads;
};

// How a row's token is chosen, as in engine/sampling/features/draw.py.
enum class Draw : int8_t { greedy, full, nucleus, top_k };

struct Sample {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int8_t* draws;       // [rows]: Draw
  const int64_t* slots;      // [rows]: the rows of `floats` and `ints`
  const int64_t* positions;  // [rows]
  const float* floats;       // columns: 1/temperature, top_p, min_p and others
  const int64_t* ints;       // columns: hashed seed, top_k and others
  int64_t float_columns, int_columns;
  int64_t* token_ids;  // [rows]
  float* row_max;      // [rows]: NaN if a logit is
  int threads;
};

struct Logprobs {
  const float* logits;  // [rows, vocab]
  int64_t rows, vocab;
  const int64_t* token_ids;  // [rows]
  int64_t count;             // of the likeliest tokens
  float* token;              // [rows]
  int64_t* top_ids;          // [rows, count], the best first
  float* top;                // [rows, count]
  int threads;
};

// One table for each instruction set; bindings.cpp chooses.
struct Kernels {
  int64_t panel;  // columns of a panel
  void (*pack)(Type type, const void* weight, int64_t out, int64_t in, void* packed);
  void (*linear)(const Linear&);
  void (*unpack_rows)(const UnpackRows&);
  void (*pack_numbers)(int bits, const uint8_t* weight, int64_t out, int64_t in, uint8_t* numbers,
                       uint32_t* high);
  void (*grouped_linear)(const GroupedLinear&);
  void (*grouped_row)(Type type, const GroupedMatrix& weight, int64_t row, void* y);
  void (*attention)(const Attention&);
  void (*norm)(const Norm&);
  void (*rope)(const Rope&);
  void (*silu_mul)(const SiluMul&);
  void (*experts)(const Experts&);
  void (*grouped_experts)(const GroupedExperts&);
  void (*adapt)(const Adapted&);
  void (*sample)(const Sample&);
  void (*logprobs)(const Logprobs&);
};

namespace avx2 { const Kernels& kernels(); }
namespace avx512 { const Kernels& kernels(); }
namespace avx512bf16 { const Kernels& kernels(); }
namespace amx { const Kernels& kernels(); }

}  // namespace manta
