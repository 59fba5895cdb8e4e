// y = x W^T + bias, where W is whole numbers of 4, 5, 6 or 8 bits with a scale for each group of
// neighbouring inputs: weight = scale * (number - center) - minimum.
//
// A row's numbers become whole numbers, too, with a scale for each block of inputs. As precise as the
// type they have 14 bits for 16-bit types and 21 for float32: in base 128 two or three planes of
// digits in [-64, 64], and the scale is a power of two. Or they have 8 bits in one plane. So a block's
// sums are exact in int32 and the same with any instruction set; they are scaled and added as float32,
// block after block. A row's result is the same in any batch.
#pragma once

#include "linear.h"

namespace manta::MANTA_ISA {

constexpr int64_t kInputsPerUnit = 4;  // bytes in a lane
constexpr int64_t kHighUnits = 8;      // whose upper bits lie together
constexpr int64_t kScaled = 128;  // inputs of x with one scale, where it divides them; not in one plane
constexpr int64_t kDigitRows = 8;      // that a thread takes at a time

struct RowDigits;
struct RowScales;
struct RowCounts;
struct RowTakes;

template <class T>
constexpr int kPlanes = sizeof(T) == 4 ? 3 : 2;
constexpr float kMostDigit = 127.0f;    // of one plane
constexpr float kLeastScaled = 1e-30f;  // smaller numbers are 0 in one plane
// Rows that registers have room for beside vectors of a panel.
template <int planes>
constexpr int kGroupedRows = kLanes == 16 ? (planes == 1 ? 6 : planes == 2 ? 4 : 2) : 2;

// --- x as digits ------------------------------------------------------------------------------

// Of all rows: digits [rows][planes][in], scales [rows][blocks], sums of numbers [rows][parts], below 0
// in place of above.
struct Digits {
  int8_t* digits;
  float* scales;
  float* lower;
  int64_t in, blocks;
};

// The scale that makes numbers up to `most` whole ones, and its inverse.
template <int planes>
void scale_for(float most, float& scale, float& inverse) {
  if constexpr (planes == 1) {
    const bool is_any = most >= kLeastScaled;
    scale = is_any ? most / kMostDigit : 0.0f;
    inverse = is_any ? kMostDigit / most : 0.0f;
  } else {
    constexpr int kBits = planes == 3 ? 19 : 12;
    uint32_t exponent;
    std::memcpy(&exponent, &most, 4);
    exponent >>= 23;
    if (exponent < 40) exponent = 40;
    if (exponent > 254) exponent = 254;
    const uint32_t scale_bits = (exponent - kBits) << 23, inverse_bits = (254 + kBits - exponent) << 23;
    std::memcpy(&scale, &scale_bits, 4);
    std::memcpy(&inverse, &inverse_bits, 4);
  }
}

template <class T, int planes>
void make_digits(const T* x, int64_t part, int64_t row, const Digits& to) {
  const U magnitude = set1u(0x7fffffff);
  const int64_t block = to.in / to.blocks;
  int8_t* digits = to.digits + row * planes * to.in;
  float* lower = to.lower + row * (to.in / part);
  for (int64_t begin = 0; begin < to.in; begin += block) {
    V largest = zero(), poison = zero();
    for (int64_t i = begin; i < begin + block; i += kLanes) {
      const V v = load_as_float(x + i);
      largest = max(largest, as_float(bits_and(as_unit(v), magnitude)));
      poison = fma(v, zero(), poison);  // NaN, if a number is no finite one
    }
    float scale, inverse;
    scale_for<planes>(max_lane(largest), scale, inverse);
    for (int64_t first = begin; first < begin + block; first += part) {
      U count = set1u(0);
      for (int64_t i = first; i < first + part; i += kLanes) {
        U number = to_int(load_as_float(x + i) * set1(inverse));
        count = addu(count, number);
        for (int plane = 0; plane < planes - 1; plane++) {
          const U low = subu(bits_and(addu(number, set1u(64)), set1u(127)), set1u(64));
          store_low8(digits + plane * to.in + i, low);
          number = sar(subu(number, low), 7);
        }
        store_low8(digits + (planes - 1) * to.in + i, number);
      }
      lower[first / part] = static_cast<float>(-sum_lanes(count));
    }
    to.scales[row * to.blocks + begin / block] = scale + sum(poison);
  }
}

template <class T, int planes>
Digits digits_of(const GroupedLinear& a, int64_t part) {
  const int64_t block = planes > 1 && a.in % kScaled == 0 ? kScaled : part, blocks = a.in / block;
  Digits to{reinterpret_cast<int8_t*>(own_memory<RowDigits>(a.rows * planes * a.in / 4)),
            reinterpret_cast<float*>(own_memory<RowScales>(a.rows * blocks)),
            reinterpret_cast<float*>(own_memory<RowCounts>(a.rows * (a.in / part))), a.in, blocks};
  const bool small = a.rows * a.in < kAloneUnits;
  run_ranges(a.rows, kDigitRows, small ? 1 : a.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      make_digits<T, planes>(static_cast<const T*>(a.x) + row * a.x_stride, part, row, to);
  });
  return to;
}

// --- numbers ----------------------------------------------------------------------------------

// kLanes units of a panel, from its lane `lane` on. Unit k has inputs [4k, 4k + 4) of each output.
// Units 2k and 2k + 1 share bytes: lower and upper half. Upper bits of eight units share a word of
// 32 bits per lane (5 bits: one; 6 bits: two, of four units each).
template <int kBits>
inline U unit_at(const uint8_t* numbers, const uint32_t* high, int64_t k, int64_t lane) {
  if constexpr (kBits == 8) {
    return loadu(numbers + (k * kPanel + lane) * 4);
  } else {
    U both = loadu(numbers + ((k >> 1) * kPanel + lane) * 4);
    if (k & 1) both = shr(both, 4);
    const U low = bits_and(both, set1u(0x0f0f0f0f));
    const int n = static_cast<int>(k & (kHighUnits - 1));
    if constexpr (kBits == 5) {
      const U word = loadu(high + (k >> 3) * kPanel + lane);
      return bits_or(low, shl(bits_and(shr(word, n), set1u(0x01010101)), 4));
    } else if constexpr (kBits == 6) {
      const U word = loadu(high + (k >> 2) * kPanel + lane);
      return bits_or(low, shl(bits_and(shr(word, (n & 3) * 2), set1u(0x03030303)), 4));
    }
    return low;
  }
}

// The place of a number's byte, and of its upper bits.
inline void pack_numbers(int bits, const uint8_t* weight, int64_t out, int64_t in, uint8_t* numbers,
                         uint32_t* high) {
  const int64_t units = in / kInputsPerUnit, high_units = (units + kHighUnits - 1) / kHighUnits;
  const int64_t panel_bytes = bits == 8 ? in * kPanel : (units + 1) / 2 * kPanel * 4;
  const int64_t panel_words = high_units * (bits == 6 ? 2 : 1) * kPanel;
  for (int64_t row = 0; row < out; row++) {
    const uint8_t* from = weight + row * in;
    const int64_t lane = row % kPanel;
    uint8_t* to = numbers + row / kPanel * panel_bytes;
    uint32_t* words = high + row / kPanel * panel_words;
    for (int64_t k = 0; k < units; k++, from += 4) {
      if (bits == 8) {
        std::memcpy(to + (k * kPanel + lane) * 4, from, 4);
        continue;
      }
      uint32_t unit, both;
      std::memcpy(&unit, from, 4);
      uint8_t* place = to + (k / 2 * kPanel + lane) * 4;
      std::memcpy(&both, place, 4);
      both |= (unit & 0x0f0f0f0f) << (k % 2 * 4);
      std::memcpy(place, &both, 4);
      const int64_t n = k % kHighUnits;
      if (bits == 5) words[k / kHighUnits * kPanel + lane] |= (unit >> 4 & 0x01010101) << n;
      if (bits == 6)
        words[(k / kHighUnits * 2 + n / 4) * kPanel + lane] |= (unit >> 4 & 0x03030303) << (n % 4 * 2);
    }
  }
}

// A panel of a matrix.
struct GroupedPanel {
  const uint8_t* numbers;
  const uint32_t* high;
  int64_t index;
  const GroupedMatrix& of;
};

inline GroupedPanel panel_of(const GroupedMatrix& w, int64_t p) {
  const int64_t units = w.in / kInputsPerUnit, high_units = (units + kHighUnits - 1) / kHighUnits;
  const int64_t bytes = w.bits == 8 ? w.in * kPanel : (units + 1) / 2 * kPanel * 4;
  return {w.numbers + p * bytes, w.high + p * high_units * (w.bits == 6 ? 2 : 1) * kPanel, p, w};
}

inline V load_scales(Type type, const void* scales, int64_t at) {
  if (type == Type::f16) return load_as_float(static_cast<const f16*>(scales) + at);
  if (type == Type::bf16) return load_as_float(static_cast<const bf16*>(scales) + at);
  return load_as_float(static_cast<const float*>(scales) + at);
}

// Where the scales of a panel's sub-block are: of its larger group, and of its group.
struct ScalePlace {
  int64_t whole, group;
};

inline ScalePlace place_of(const GroupedPanel& panel, int64_t input) {
  const GroupedMatrix& w = panel.of;
  return {(panel.index * (w.in / w.whole) + input / w.whole) * kPanel,
          (panel.index * (w.in / w.group) + input / w.group) * kPanel};
}

// The places of one sub-block after the other: divisions take longer than its products.
class ScalePlaces {
 public:
  ScalePlaces(const GroupedPanel& panel, int64_t part) : at(place_of(panel, 0)) {
    whole_ = whole_left_ = panel.of.whole / part;
    group_ = group_left_ = panel.of.group / part;
  }

  void next() {
    if (--whole_left_ == 0) {
      whole_left_ = whole_;
      at.whole += kPanel;
    }
    if (--group_left_ == 0) {
      group_left_ = group_;
      at.group += kPanel;
    }
  }

  ScalePlace at;

 private:
  int64_t whole_, group_, whole_left_, group_left_;
};

// Scales (or minima) of kLanes outputs from `lane` on.
inline V scales_at(const GroupedPanel& panel, const void* scales, const int8_t* codes,
                   const ScalePlace& at, int64_t lane) {
  const V scale = load_scales(panel.of.scale_type, scales, at.whole + lane);
  if (codes == nullptr) return scale;
  return scale * to_float(widen8_signed(codes + at.group + lane));
}

// --- products ---------------------------------------------------------------------------------

// The dot products of a sub-block, [M][kWide], less the center's share: of each row a whole number of
// `taken`, or `share` for float32, whose sums times a center don't fit 32 bits.
template <int kBits, int planes, int M, int kWide, int64_t kPart>
inline __attribute__((always_inline)) void dots_of(const Digits& x, const GroupedPanel& panel,
                                                   const int8_t* digits, int64_t part, int64_t lane,
                                                   const int32_t* taken, int64_t parts,
                                                   const float* share,
                                                   V (&to)[M][kWide]) {
  constexpr int64_t units = kPart / kInputsPerUnit;
  U found[planes][M][kWide];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < kWide; v++)
      for (int plane = 0; plane < planes; plane++)
        found[plane][m][v] = plane == 0 && planes < 3 ? broadcast_unit(taken + m * parts) : set1u(0);
#pragma GCC unroll 8
  for (int64_t u = 0; u < units; u++) {
    const int64_t k = part * units + u;
    U unit[kWide];
#pragma GCC unroll 8
    for (int v = 0; v < kWide; v++)
      unit[v] = unit_at<kBits>(panel.numbers, panel.high, k, lane + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 3
      for (int plane = 0; plane < planes; plane++) {
        const U digit = broadcast_unit(digits + (m * planes + plane) * x.in + k * kInputsPerUnit);
#pragma GCC unroll 8
        for (int v = 0; v < kWide; v++)
          found[plane][m][v] = planes == 1 && kBits == 8
                                   ? dot_full_bytes(found[plane][m][v], unit[v], digit)
                                   : dot_bytes(found[plane][m][v], unit[v], digit);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    for (int v = 0; v < kWide; v++) {
      if constexpr (planes == 1) {
        to[m][v] = to_float(found[0][m][v]);
      } else if constexpr (planes == 2) {
        to[m][v] = to_float(addu(shl(found[1][m][v], 7), found[0][m][v]));
      } else {
        to[m][v] = fma(to_float(addu(shl(found[2][m][v], 7), found[1][m][v])), set1(128.0f),
                       to_float(found[0][m][v])) + set1(share[m]);
      }
    }
  }
}

// Asks for the memory of a sub-block's other lanes, which come next.
template <int kBits, int kWide, int64_t kPart>
inline void fetch_rest(const GroupedPanel& panel, int64_t part) {
  constexpr int64_t rows = kPart / kInputsPerUnit / (kBits == 8 ? 1 : 2);
  const uint8_t* from = panel.numbers + part * rows * kPanel * 4;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t lane = kWide * kLanes; lane < kPanel; lane += kLanes)
      __builtin_prefetch(from + (row * kPanel + lane) * 4, 0, 2);
}

template <class T>
void write_sums_as(const GroupedLinear& a, int64_t row, int64_t column, V x, int64_t n) {
  if (a.bias) x = x + load_part(static_cast<const T*>(a.bias) + column, n);
  const int64_t at = row * a.y_stride + column;
  if (a.y_float) store_part(static_cast<float*>(a.y) + at, x, n);
  else store_part(static_cast<T*>(a.y) + at, x, n);
}
inline void write_sums(const GroupedLinear& a, int64_t row, int64_t column, V x, int64_t n) {
  if (a.type == Type::f32) write_sums_as<float>(a, row, column, x, n);
  else if (a.type == Type::bf16) write_sums_as<bf16>(a, row, column, x, n);
  else write_sums_as<f16>(a, row, column, x, n);
}

// Sums of rows [row, row + M) for the outputs from `lane` on: those of the matrix from `column` on.
template <int planes, int kBits, int M, int kWide, int64_t kPart>
void grouped_rows(const GroupedLinear& a, const Digits& x, const GroupedPanel& panel,
                  const int32_t* taken, int64_t row, int64_t lane, int64_t column) {
  const GroupedMatrix& w = panel.of;
  const int8_t* digits = x.digits + row * planes * x.in;
  const int64_t parts = x.in / kPart, per_block = planes == 1 ? 1 : parts / x.blocks;
  const float* lower = x.lower + row * parts;
  ScalePlaces places(panel, kPart);
  taken += row * parts;
  V sums[M][kWide];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < kWide; v++) sums[m][v] = zero();
  for (int64_t b = 0; b < x.blocks; b++) {
    V inner[M][kWide];
    for (int m = 0; m < M; m++)
      for (int v = 0; v < kWide; v++) inner[m][v] = zero();
    for (int64_t part = b * per_block; part < (b + 1) * per_block; part++, places.next()) {
      float share[M] = {};
      if constexpr (planes == 3)
        for (int m = 0; m < M; m++)
          share[m] = static_cast<float>(w.center) * lower[m * parts + part];
      if (kWide < kVectors && lane == 0) fetch_rest<kBits, kWide, kPart>(panel, part);
      V dots[M][kWide];
      dots_of<kBits, planes, M, kWide, kPart>(x, panel, digits, part, lane, taken + part, parts, share,
                                              dots);
#pragma GCC unroll 8
      for (int v = 0; v < kWide; v++) {
        const int64_t at = lane + v * kLanes;
        const V scale = scales_at(panel, w.scales, w.scale_codes, places.at, at);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) inner[m][v] = fma(dots[m][v], scale, inner[m][v]);
        if (w.mins) {
          const V least = scales_at(panel, w.mins, w.min_codes, places.at, at);
#pragma GCC unroll 8
          for (int m = 0; m < M; m++)
            inner[m][v] = fma(least, set1(lower[m * parts + part]), inner[m][v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const V scale = set1(x.scales[(row + m) * x.blocks + b]);
      for (int v = 0; v < kWide; v++) sums[m][v] = fma(inner[m][v], scale, sums[m][v]);
    }
  }
  for (int v = 0; v < kWide; v++) {
    const int64_t n = w.out - (panel.index * kPanel + lane + v * kLanes);
    if (n <= 0) break;
    for (int m = 0; m < M; m++) write_sums(a, row + m, column + v * kLanes, sums[m][v], n);
  }
}

template <int planes, int kBits, int64_t kPart, int M>
void grouped_wide(const GroupedLinear& a, const Digits& x, const GroupedPanel& panel,
                  const int32_t* taken, int64_t row, int64_t column) {
  constexpr int kWide = M * kVectors <= 8 && planes < 3 ? kVectors : 2;
  for (int64_t lane = 0; lane < kPanel; lane += kWide * kLanes)
    grouped_rows<planes, kBits, M, kWide, kPart>(a, x, panel, taken, row, lane, column + lane);
}

template <int planes, int kBits, int64_t kPart, int M = kGroupedRows<planes>>
void grouped_rest(const GroupedLinear& a, const Digits& x, const GroupedPanel& panel,
                  const int32_t* taken, int64_t row, int64_t rows, int64_t column) {
  if (rows == M) return grouped_wide<planes, kBits, kPart, M>(a, x, panel, taken, row, column);
  if constexpr (M > 1)
    grouped_rest<planes, kBits, kPart, M - 1>(a, x, panel, taken, row, rows, column);
}

// Rows [row, end) by a panel, in blocks of nearly equal height.
template <int planes, int kBits, int64_t kPart>
void grouped_block(const GroupedLinear& a, const Digits& x, const GroupedPanel& panel,
                   const int32_t* taken, int64_t row, int64_t end, int64_t column) {
  constexpr int64_t most = kGroupedRows<planes>;
  for (int64_t blocks = (end - row + most - 1) / most; blocks > 0; blocks--) {
    const int64_t rows = (end - row + blocks - 1) / blocks;
    grouped_rest<planes, kBits, kPart>(a, x, panel, taken, row, rows, column);
    row += rows;
  }
}

template <int planes, int64_t kPart>
void grouped_by_bits(const GroupedLinear& a, const Digits& x, const GroupedPanel& panel,
                     const int32_t* taken, int64_t row, int64_t end, int64_t column) {
  switch (panel.of.bits) {
    case 4: return grouped_block<planes, 4, kPart>(a, x, panel, taken, row, end, column);
    case 5: return grouped_block<planes, 5, kPart>(a, x, panel, taken, row, end, column);
    case 6: return grouped_block<planes, 6, kPart>(a, x, panel, taken, row, end, column);
    default: return grouped_block<planes, 8, kPart>(a, x, panel, taken, row, end, column);
  }
}

// For each matrix what its center takes off the products of each sub-block of the rows, [rows][parts];
// neighbours with one center share it.
inline const int32_t* const* takes_of(const GroupedLinear& a, const Digits& x, int64_t num_takes) {
  auto** takes = reinterpret_cast<const int32_t**>(
      own_memory<RowTakes>(2 * a.num_parts + a.num_parts * num_takes));
  auto* next = reinterpret_cast<int32_t*>(takes + a.num_parts);
  for (int64_t i = 0; i < a.num_parts; i++) {
    const int32_t center = a.parts[i].center;
    if (i > 0 && center == a.parts[i - 1].center) {
      takes[i] = takes[i - 1];
      continue;
    }
    for (int64_t n = 0; n < num_takes; n++) next[n] = center * static_cast<int32_t>(x.lower[n]);
    takes[i] = next;
    next += num_takes;
  }
  return takes;
}

// The matrices of one input, side by side in y.
template <class T, int planes>
void grouped_products(const GroupedLinear& a) {
  bool is_fine = false;
  int64_t num_panels = 0, macs = 0;
  for (int64_t i = 0; i < a.num_parts; i++) {
    is_fine |= a.parts[i].group % 32 != 0;
    num_panels += panels(a.parts[i].out);
    macs += a.rows * a.in * a.parts[i].out;
  }
  const int64_t unit = is_fine ? 16 : 32;
  const Digits x = digits_of<T, planes>(a, unit);
  const auto* takes = takes_of(a, x, planes < 3 ? a.rows * (a.in / unit) : 0);
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  run_shares(num_panels * blocks, macs < kAloneMacs ? 1 : a.threads, [&](int64_t task) {
    int64_t p = task / blocks, part = 0, column = 0;
    for (; p >= panels(a.parts[part].out); part++) {
      p -= panels(a.parts[part].out);
      column += a.parts[part].out;
    }
    const int64_t row = task % blocks * kRowBlock, end = row + kRowBlock < a.rows ? row + kRowBlock : a.rows;
    const GroupedPanel panel = panel_of(a.parts[part], p);
    column += p * kPanel;
    if (is_fine) grouped_by_bits<planes, 16>(a, x, panel, takes[part], row, end, column);
    else grouped_by_bits<planes, 32>(a, x, panel, takes[part], row, end, column);
  });
}

template <class T>
void grouped_linear(const GroupedLinear& a) {
  if (a.short_inputs) return grouped_products<T, 1>(a);
  grouped_products<T, kPlanes<T>>(a);
}

// Rows of a matrix as floats of type T.
template <class T>
void grouped_row(const GroupedMatrix& w, int64_t id, T* y) {
  const GroupedPanel panel = panel_of(w, id / kPanel);
  const int64_t lane = id % kPanel / kLanes * kLanes, place = id % kLanes;
  for (int64_t k = 0; k < w.in / kInputsPerUnit; k++) {
    uint8_t bytes[4 * kLanes];
    float scale[kLanes], least[kLanes] = {};
    U unit;
    switch (w.bits) {
      case 4: unit = unit_at<4>(panel.numbers, panel.high, k, lane); break;
      case 5: unit = unit_at<5>(panel.numbers, panel.high, k, lane); break;
      case 6: unit = unit_at<6>(panel.numbers, panel.high, k, lane); break;
      default: unit = unit_at<8>(panel.numbers, panel.high, k, lane);
    }
    storeu(bytes, unit);
    const int64_t input = k * kInputsPerUnit;
    const ScalePlace at = place_of(panel, input);
    store(scale, scales_at(panel, w.scales, w.scale_codes, at, lane));
    if (w.mins) store(least, scales_at(panel, w.mins, w.min_codes, at, lane));
    float values[kLanes] = {};
    for (int i = 0; i < 4; i++)
      values[i] = static_cast<float>(bytes[4 * place + i] - w.center) * scale[place] - least[place];
    store_part(y + input, load(values), kInputsPerUnit);
  }
}

}  // namespace manta::MANTA_ISA
