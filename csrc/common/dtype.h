// Storage types of the CPU kernels and dispatch over them. Arithmetic is always float32.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/tensor.h"

namespace tlt {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return as_float(uint32_t{value.bits} << 16); }

inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Scaling by 2^112 moves the exponent bias of half to that of float and makes subnormals exact.
  return as_float(sign | as_bits(as_float(magnitude << 13) * 0x1p112f));
}

template <typename T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = as_bits(value);
  if (value != value) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};      // keep NaN quiet
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};  // to nearest even
}

template <>
inline Float16 from_float<Float16>(float value) {
  const uint32_t bits = as_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to inf
  if (magnitude < 0x38800000u) {  // subnormal half: let the float adder round at 2^-24
    const float shifted = as_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (as_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

// Calls f with a null pointer of the storage type: dispatch_floating(dtype, [&](auto* tag) {...}).
template <typename F>
void dispatch_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Float16*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      throw DTypeError(std::string("no kernel for ") + name_of(dtype) +
                       "; supported: float32, float16, bfloat16");
  }
}

}  // namespace tlt
