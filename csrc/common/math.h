// Elementary functions with the same bits on CPU and GPU: library logs and exponentials differ in
// the last place between the two, and acceptance compares them. Every operation is one IEEE float32
// operation written out (fma where fma is meant); coefficients are our own Chebyshev fits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TLT_HD __host__ __device__ __forceinline__
#else
#define TLT_HD inline __attribute__((always_inline))
#endif

namespace tlt {

// For integers of 0 or more.
template <typename N, typename By>
TLT_HD N ceil_div(N n, By by) {
  return (n + by - 1) / by;
}

#if defined(__CUDA_ARCH__)
TLT_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
TLT_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
TLT_HD float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TLT_HD float as_float(uint32_t bits) { return __uint_as_float(bits); }
TLT_HD uint32_t as_bits(float value) { return __float_as_uint(value); }
#else
// The host is compiled with -ffp-contract=off, so these stay single operations.
TLT_HD float mul_rn(float a, float b) { return a * b; }
TLT_HD float add_rn(float a, float b) { return a + b; }
TLT_HD float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TLT_HD float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
TLT_HD uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
#endif

constexpr float kLn2High = 0x1.62e4p-1f;    // exact in 15 bits, so exponent * kLn2High is exact
constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // ln 2 - kLn2High
constexpr float kInvLn2 = 0x1.715476p+0f;

// exponent * ln 2 + log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]; relative error 2e-7 at most.
TLT_HD float log_parts(float exponent, float f) {
  float p = 0.0714975372f;
  p = fma_rn(p, f, -0.115712009f);
  p = fma_rn(p, f, 0.116615109f);
  p = fma_rn(p, f, -0.124110505f);
  p = fma_rn(p, f, 0.142499372f);
  p = fma_rn(p, f, -0.166684806f);
  p = fma_rn(p, f, 0.200007081f);
  p = fma_rn(p, f, -0.249999896f);
  p = fma_rn(p, f, 0.333333313f);
  p = fma_rn(p, f, -0.5f);
  const float tail = fma_rn(exponent, kLn2Low, mul_rn(mul_rn(f, f), p));
  return fma_rn(exponent, kLn2High, add_rn(tail, f));
}

// Splits a positive normal x into 2^exponent * (1 + f).
TLT_HD void split_float(float x, float* exponent, float* f) {
  const uint32_t bits = as_bits(x);
  const int32_t e = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  *exponent = static_cast<float>(e);
  *f = add_rn(as_float(bits - (static_cast<uint32_t>(e) << 23)), -1.0f);
}

// Natural log of a positive, finite, normal float32.
TLT_HD float log_f32(float x) {
  float exponent, f;
  split_float(x, &exponent, &f);
  return log_parts(exponent, f);
}

// exp(x) for x up to 88; 0 for x <= -87 and for NaN.
TLT_HD float exp_f32(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float shifted = fma_rn(clamped, kInvLn2, 0x1.8p23f);  // rounds x / ln 2 into the low bits
  const float n = add_rn(shifted, -0x1.8p23f);
  float r = fma_rn(n, -kLn2High, clamped);
  r = fma_rn(n, -kLn2Low, r);
  float p = 0.00139336521f;
  p = fma_rn(p, r, 0.00836318173f);
  p = fma_rn(p, r, 0.0416664667f);
  p = fma_rn(p, r, 0.166665763f);
  p = fma_rn(p, r, 0.5f);
  const float y = add_rn(fma_rn(mul_rn(r, r), p, r), 1.0f);
  const uint32_t scaled = as_bits(y) + (as_bits(shifted) << 23);  // y * 2^n
  return x > -87.0f ? as_float(scaled) : 0.0f;
}

}  // namespace tlt
