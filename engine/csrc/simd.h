// Vectors of floats and of 32-bit units. The only file with intrinsics.
//
// A unit is what one lane multiplies at a time: one float32, or two neighbouring 16-bit numbers.
// `mac` adds the product of two units to a float32 sum. All kernels add in the same order for any
// number of rows, so that a row's result does not depend on its batch.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace manta::MANTA_ISA {

#if defined(__AVX512F__)
using V = __m512;   // floats
using U = __m512i;  // units
inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline U set1u(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline U loadu(const void* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
inline void storeu(void* p, U x) { _mm512_storeu_si512(p, x); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT); }
inline V sqrt(V x) { return _mm512_sqrt_ps(x); }
inline U to_int(V x) { return _mm512_cvtps_epi32(x); }
inline V to_float(U x) { return _mm512_cvtepi32_ps(x); }
inline U shl(U x, int n) { return _mm512_slli_epi32(x, n); }
inline U shr(U x, int n) { return _mm512_srli_epi32(x, n); }
inline U addu(U a, U b) { return _mm512_add_epi32(a, b); }
inline U bits_and(U a, U b) { return _mm512_and_si512(a, b); }
inline U bits_or(U a, U b) { return _mm512_or_si512(a, b); }
inline U bits_xor(U a, U b) { return _mm512_xor_si512(a, b); }
inline U mulu(U a, U b) { return _mm512_mullo_epi32(a, b); }
inline U subu(U a, U b) { return _mm512_sub_epi32(a, b); }
inline int32_t sum_lanes(U x) { return _mm512_reduce_add_epi32(x); }
inline void store_low8(int8_t* p, U x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
// To each lane's sum the products of its four bytes: unsigned ones of `a`, signed ones of `b` in
// [-64, 64], so that no pair of products needs more than 16 bits.
inline U dot_bytes(U sum, U a, U b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const U pairs = _mm512_maddubs_epi16(a, b);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
// The same where b is in [-127, 127]: the other one needs it in [-64, 64], or a below 128.
inline U dot_full_bytes(U sum, U a, U b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const U highest = _mm512_set1_epi8(static_cast<char>(0x80));
  return dot_bytes(dot_bytes(sum, _mm512_andnot_si512(highest, a), b), _mm512_and_si512(highest, a), b);
#endif
}
inline U sar(U x, int n) { return _mm512_srai_epi32(x, n); }
inline V as_float(U x) { return _mm512_castsi512_ps(x); }
inline U as_unit(V x) { return _mm512_castps_si512(x); }
// Lanes of `yes` where a < b, else of `no`.
inline V where_less(V a, V b, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline V where_nan(V a, V yes, V no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), no, yes);
}
// A bit for each lane: whether a < b, as floats or as signed numbers.
inline uint32_t less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline uint32_t less(U a, U b) { return _mm512_cmplt_epi32_mask(a, b); }
inline U widen16(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline U widen8(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline U widen8_signed(const void* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void store_low16(void* p, U x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
inline V half_to_float(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline void float_to_half(void* p, V x) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float sum(V x) { return _mm512_reduce_add_ps(x); }
inline float max_lane(V x) { return _mm512_reduce_max_ps(x); }
inline V interleave_low(V a, V b) {
  const __m512i pick =
      _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, pick, b);
}
inline V interleave_high(V a, V b) {
  const __m512i pick =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, pick, b);
}
#else
using V = __m256;
using U = __m256i;
inline V zero() { return _mm256_setzero_ps(); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline U set1u(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline U loadu(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(float* p, V x) { _mm256_storeu_ps(p, x); }
inline void storeu(void* p, U x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline V round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V sqrt(V x) { return _mm256_sqrt_ps(x); }
inline U to_int(V x) { return _mm256_cvtps_epi32(x); }
inline V to_float(U x) { return _mm256_cvtepi32_ps(x); }
inline U shl(U x, int n) { return _mm256_slli_epi32(x, n); }
inline U shr(U x, int n) { return _mm256_srli_epi32(x, n); }
inline U addu(U a, U b) { return _mm256_add_epi32(a, b); }
inline U bits_and(U a, U b) { return _mm256_and_si256(a, b); }
inline U bits_or(U a, U b) { return _mm256_or_si256(a, b); }
inline U bits_xor(U a, U b) { return _mm256_xor_si256(a, b); }
inline U mulu(U a, U b) { return _mm256_mullo_epi32(a, b); }
inline U subu(U a, U b) { return _mm256_sub_epi32(a, b); }
inline int32_t sum_lanes(U x) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
inline void store_low8(int8_t* p, U x) {
  int32_t lanes[8];
  storeu(lanes, x);
  for (int i = 0; i < 8; i++) p[i] = static_cast<int8_t>(lanes[i]);
}
inline U dot_bytes(U sum, U a, U b) {
  const U pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline U dot_full_bytes(U sum, U a, U b) {
  const U highest = _mm256_set1_epi8(static_cast<char>(0x80));
  return dot_bytes(dot_bytes(sum, _mm256_andnot_si256(highest, a), b), _mm256_and_si256(highest, a), b);
}
inline U sar(U x, int n) { return _mm256_srai_epi32(x, n); }
inline V as_float(U x) { return _mm256_castsi256_ps(x); }
inline U as_unit(V x) { return _mm256_castps_si256(x); }
inline V where_less(V a, V b, V yes, V no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline V where_nan(V a, V yes, V no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
inline uint32_t less(V a, V b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}
inline uint32_t less(U a, U b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(as_float(_mm256_cmpgt_epi32(b, a))));
}
inline U widen16(const void* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline U widen8(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
inline U widen8_signed(const void* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
inline void store_low16(void* p, U x) {
  const U low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  const U packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0xd8);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline V half_to_float(const void* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline void float_to_half(void* p, V x) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline float sum(V x) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}
inline float max_lane(V x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
inline V interleave_low(V a, V b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
inline V interleave_high(V a, V b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
#endif

constexpr int kLanes = sizeof(V) / sizeof(float);

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct f8 { uint8_t bits; };  // e4m3, no infinities

// --- floats from and to each type, kLanes at a time -------------------------------------------

inline V load_as_float(const float* p) { return load(p); }
inline V load_as_float(const bf16* p) { return as_float(shl(widen16(p), 16)); }
inline V load_as_float(const f16* p) { return half_to_float(p); }
inline V load_as_float(const f8* p) {
  // Exponent and mantissa move to where float32 has them; 2^120 corrects the exponent's bias.
  const U x = widen8(p);
  const U sign = shl(bits_and(x, set1u(0x80)), 24);
  const U rest = bits_and(x, set1u(0x7f));
  const V value = as_float(shl(rest, 20)) * set1(0x1p120f);
  const V nan = as_float(set1u(0x7fc00000));
  const V checked = where_less(set1(126.5f), to_float(rest), nan, value);
  return as_float(bits_or(as_unit(checked), sign));
}

inline U round_to_bf16(V x) {  // in the low half of each unit
  const U bits = as_unit(x);
  const U odd = bits_and(shr(bits, 16), set1u(1));
  const U rounded = shr(addu(addu(bits, set1u(0x7fff)), odd), 16);
  return as_unit(where_nan(x, as_float(set1u(0x7fc0)), as_float(rounded)));
}
inline void store_as(float* p, V x) { store(p, x); }
inline void store_as(f16* p, V x) { float_to_half(p, x); }
inline void store_as(bf16* p, V x) { store_low16(p, round_to_bf16(x)); }
inline uint8_t to_f8(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7f;      // NaN
  if (bits >= 0x43e00000) return sign | 0x7e;     // 448 and above
  if (bits < 0x3c800000) {                        // below 2^-6: steps of 2^-9
    float value;
    std::memcpy(&value, &bits, 4);
    return sign | static_cast<uint8_t>(_mm_cvtss_si32(_mm_set_ss(value * 512.0f)));
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | static_cast<uint8_t>((bits >> 20) - (120 << 3));
}
inline void store_as(f8* p, V x) {
  float values[kLanes];
  store(values, x);
  for (int i = 0; i < kLanes; i++) p[i].bits = to_f8(values[i]);
}

// The first `n` of kLanes numbers; the others are 0 and are not touched in memory.
template <class T>
inline V load_part(const T* p, int64_t n) {
  if (n >= kLanes) return load_as_float(p);
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(T));
  return load_as_float(buffer);
}
template <class T>
inline void store_part(T* p, V x, int64_t n) {
  if (n >= kLanes) return store_as(p, x);
  T buffer[kLanes];
  store_as(buffer, x);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}

// --- units ------------------------------------------------------------------------------------

template <class T>
constexpr int kPerUnit = 4 / sizeof(T);

inline V mac(V sum, U a, U b, const float*) { return fma(as_float(a), as_float(b), sum); }
inline V mac(V sum, U a, U b, const bf16*) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const U high = set1u(0xffff0000);
  sum = fma(as_float(shl(a, 16)), as_float(shl(b, 16)), sum);
  return fma(as_float(bits_and(a, high)), as_float(bits_and(b, high)), sum);
#endif
}
inline V low_half(U x) {
  uint16_t halves[kLanes];
  store_low16(halves, x);
  return half_to_float(halves);
}
inline V mac(V sum, U a, U b, const f16*) {
  sum = fma(low_half(a), low_half(b), sum);
  return fma(low_half(shr(a, 16)), low_half(shr(b, 16)), sum);
}

template <class T>
inline U broadcast_unit(const T* p) {
  uint32_t unit;
  std::memcpy(&unit, p, 4);
  return set1u(unit);
}

// rows[i] lane j becomes rows[j] lane i.
inline __attribute__((always_inline)) void transpose(V (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    V next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; i++) {
      next[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) rows[i] = next[i];
  }
}

// kLanes units of C read from `p`, a row of type P with `n` numbers left; 0 beyond them.
template <class C, class P>
inline V read_units(const P* p, int64_t n) {
  if constexpr (sizeof(C) == 4) {
    return load_part(p, n);
  } else if constexpr (sizeof(P) == 2) {
    if (n >= 2 * kLanes) return as_float(loadu(p));
    C part[2 * kLanes] = {};
    std::memcpy(part, p, static_cast<size_t>(n) * 2);
    return as_float(loadu(part));
  } else {
    C part[2 * kLanes];
    store_as(part, load_part(p, n));
    store_as(part + kLanes, n > kLanes ? load_part(p + kLanes, n - kLanes) : zero());
    return as_float(loadu(part));
  }
}

// Units of kLanes rows by columns: unit k of row i goes to to[k * stride + i]. read(i, k) gives
// kLanes units of row i, from the k-th on.
template <class Read>
inline __attribute__((always_inline)) void transpose_units(
    int64_t units, uint32_t* to, int64_t stride, Read read) {
  for (int64_t first = 0; first < units; first += kLanes) {
    V block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) block[i] = read(i, first);
    transpose(block);
    if (units - first >= kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; i++) storeu(to + (first + i) * stride, as_unit(block[i]));
    } else {
      for (int64_t i = 0; i < units - first; i++) storeu(to + (first + i) * stride, as_unit(block[i]));
    }
  }
}

// e^x with a relative error below 2e-7 (Cephes); 0 below -87.3, at most 3.4e38, NaN of NaN.
inline V exp(V x) {
  x = min(set1(88.72f), x);
  const V n = round(x * set1(1.44269504f));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  const V scaled = as_float(addu(as_unit(p), shl(to_int(n), 23)));
  return where_less(x, set1(-87.3f), zero(), scaled);
}
inline float exp(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

}  // namespace manta::MANTA_ISA
