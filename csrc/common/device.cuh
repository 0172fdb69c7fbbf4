// Device-side helpers that several families share: storage types, status words, barriers, warp
// folds.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda.h"
#include "common/paged.h"

namespace tlt {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float as_float32(float v) { return v; }
__device__ __forceinline__ float as_float32(__half v) { return __half2float(v); }
__device__ __forceinline__ float as_float32(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T as_storage(float v);
template <>
__device__ __forceinline__ float as_storage<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half as_storage<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 as_storage<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

__device__ __forceinline__ int64_t device_ns() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

// Waits for `kThreads` threads, whole warps, at barrier `kId`. All of them must execute the same
// call. __syncthreads uses barrier 0.
template <int kId, int kThreads>
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// The same, for threads that execute different calls.
template <int kId, int kThreads>
__device__ __forceinline__ void meet_threads() {
  asm volatile("barrier.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Butterfly folds: every lane ends with the same bits, since a + b and b + a are equal.
__device__ __forceinline__ float warp_sum_all(float v) {
#pragma unroll
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    v = add_rn(v, __shfl_xor_sync(kFullWarp, v, lane));
  }
  return v;
}

__device__ __forceinline__ float warp_max_all(float v) {
#pragma unroll
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, lane));
  }
  return v;
}

// Many blocks may report on one request; most of them report nothing.
__device__ __forceinline__ void report_on_device(const Sequences& s, int64_t request,
                                                 int32_t bits) {
  if (bits != kStatusOk) atomicOr(&s.status[request], bits);
}

// Calls f with a null pointer of the device's storage type, like dispatch_floating on the CPU.
template <typename F>
void dispatch_storage(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      throw DTypeError(std::string("no kernel for ") + name_of(dtype) +
                       "; supported: float32, float16, bfloat16");
  }
}

}  // namespace tlt
