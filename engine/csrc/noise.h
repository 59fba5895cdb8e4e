// The noise of engine/sampling/hash_noise.py: the same bits, so that all backends draw the same.
#pragma once

#include "simd.h"

namespace manta::MANTA_ISA {

struct NoiseKey {
  uint32_t low, high;
};

// splitmix64's finaliser, with arithmetic shifts.
inline NoiseKey noise_key(int64_t mixed_seed, int64_t position) {
  uint64_t z = static_cast<uint64_t>(position) * 0x9E3779B97F4A7C15u;
  z += static_cast<uint64_t>(mixed_seed);
  z = (z ^ static_cast<uint64_t>(static_cast<int64_t>(z) >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ static_cast<uint64_t>(static_cast<int64_t>(z) >> 27)) * 0x94D049BB133111EBu;
  z ^= static_cast<uint64_t>(static_cast<int64_t>(z) >> 31);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// u of the tokens `ids`, in [2^-31, 1 - 2^-24]: lowbias32 without its last xor-shift.
inline V uniform(NoiseKey key, U ids) {
  U x = bits_and(mulu(ids, set1u(0x9E3779B1)), set1u(0x7fffffff));
  x = bits_xor(x, set1u(key.low));
  x = mulu(bits_xor(x, sar(x, 16)), set1u(0x7FEB352D));
  x = bits_xor(x, set1u(key.high));
  x = mulu(bits_xor(x, sar(x, 15)), set1u(0x846CA68B));
  x = bits_or(x, set1u(0x80000001));
  return to_float(x) * set1(-(1.0f - 0x1p-24f) * 0x1p-31f);
}

// log(x) of a normal positive x with a relative error below 2e-7 (Cephes), also next to 1.
inline V log(V x) {
  // x = 2^n (1 + r), and 1 + r lies between the roots of 1/2 and 2.
  const U root = set1u(0x3f3504f3), above = addu(as_unit(x), set1u(0u - 0x3f3504f3u));
  const V n = to_float(sar(above, 23));
  const V r = as_float(addu(bits_and(above, set1u(0x7fffff)), root)) - set1(1.0f);
  V p = set1(7.0376836292e-2f);
  p = fma(p, r, set1(-1.1514610310e-1f));
  p = fma(p, r, set1(1.1676998740e-1f));
  p = fma(p, r, set1(-1.2420140846e-1f));
  p = fma(p, r, set1(1.4249322787e-1f));
  p = fma(p, r, set1(-1.6668057665e-1f));
  p = fma(p, r, set1(2.0000714765e-1f));
  p = fma(p, r, set1(-2.4999993993e-1f));
  p = fma(p, r, set1(3.3333331174e-1f));
  const V square = r * r;
  p = fma(n, set1(-2.12194440e-4f), p * r * square);
  p = fma(set1(-0.5f), square, p);
  return fma(n, set1(0.693359375f), r + p);
}
inline float log(float x) {
  float lanes[kLanes];
  store(lanes, log(set1(x)));
  return lanes[0];
}

}  // namespace manta::MANTA_ISA
