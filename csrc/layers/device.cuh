// What the layer kernels share on the device: 16-byte chunks of a row, and the element-wise maths
// of the norm and the activation, so that a fused op has the bits of the two ops.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/math.h"
#include "common/tensor.h"

namespace tlt {

constexpr int kWarpSize = 32;
constexpr int kThreads = 256;  // of every layer kernel
constexpr int kWarps = kThreads / kWarpSize;

__device__ __forceinline__ float to_f32(float v) { return v; }
__device__ __forceinline__ float to_f32(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_f32(float v) {
  if constexpr (sizeof(T) == 4) {
    return v;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else {
    return __float2bfloat16_rn(v);
  }
}

template <typename T>
__device__ __forceinline__ float rounded(float v) {
  return to_f32(from_f32<T>(v));
}

// ---- chunks: 16 bytes of one row ----------------------------------------------------------------

template <typename T>
union Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 raw;
  T at[kSize];
  __device__ Chunk() : raw() {}
};

// Elements [k, k + kSize) of a row of `dim`; zeros past its end, which is not read. `aligned` says
// that every chunk of the array starts at a multiple of 16 bytes and that none is cut by the end.
template <typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int k, int dim, bool aligned) {
  Chunk<T> chunk;
  if (aligned) {
    if (k < dim) chunk.raw = *reinterpret_cast<const uint4*>(row + k);
  } else if constexpr (sizeof(T) == 2) {
    // Rolled up, and by shifts: the slow path must not cost the fast one its registers.
    const uint16_t* from = reinterpret_cast<const uint16_t*>(row + k);
    uint64_t word[2] = {};
#pragma unroll 1
    for (int i = min(8, dim - k) - 1; i >= 0; --i) {
      word[1] = word[1] << 16 | word[0] >> 48;
      word[0] = word[0] << 16 | from[i];
    }
    chunk.raw = make_uint4(static_cast<uint32_t>(word[0]), static_cast<uint32_t>(word[0] >> 32),
                           static_cast<uint32_t>(word[1]), static_cast<uint32_t>(word[1] >> 32));
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) {
      if (k + i < dim) chunk.at[i] = row[k + i];
    }
  }
  return chunk;
}

template <typename T>
__device__ __forceinline__ void store_chunk(T* row, int k, int dim, bool aligned,
                                            const Chunk<T>& chunk) {
  if (aligned) {
    if (k < dim) *reinterpret_cast<uint4*>(row + k) = chunk.raw;
  } else {
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) {
      if (k + i < dim) row[k + i] = chunk.at[i];
    }
  }
}

// A row's columns are counted in int32, with room to step past the end.
inline void check_columns(const char* op, int64_t columns) {
  require(columns <= 1 << 30, op,
          "x: expected at most 2^30 columns on a CUDA device, got " + std::to_string(columns));
}

inline bool is_aligned(const void* base, int64_t stride_bytes, int64_t row_bytes) {
  return (reinterpret_cast<uintptr_t>(base) | static_cast<uintptr_t>(stride_bytes) |
          static_cast<uintptr_t>(row_bytes)) %
             16 ==
         0;
}

// ---- silu_mul -----------------------------------------------------------------------------------

// gate * sigmoid(gate). float32 has the bits of the CPU; 16-bit types round away what the fast
// exponential and division lose.
template <typename T>
__device__ __forceinline__ float silu(float gate) {
  if constexpr (sizeof(T) == 4) {
    const float e = exp_f32(-fabsf(gate));
    return __fmul_rn(gate, __fdiv_rn(gate < 0.0f ? e : 1.0f, __fadd_rn(1.0f, e)));
  } else {
    return __fdividef(gate, 1.0f + __expf(-gate));
  }
}

template <typename T>
__device__ __forceinline__ T silu_mul_one(T gate, T up) {
  return from_f32<T>(rounded<T>(silu<T>(to_f32(gate))) * to_f32(up));
}

template <typename T>
__device__ __forceinline__ void silu_mul_chunk(Chunk<T>& gate, const Chunk<T>& up) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) gate.at[i] = silu_mul_one(gate.at[i], up.at[i]);
}

// ---- rms_norm -----------------------------------------------------------------------------------

// Rounding to the storage type before the weight is what the models were trained with.
template <typename T>
__device__ __forceinline__ T norm_one(T x, float scale, T weight) {
  return from_f32<T>(rounded<T>(to_f32(x) * scale) * to_f32(weight));
}

template <typename T>
__device__ __forceinline__ void norm_chunk(Chunk<T>& x, float scale, const Chunk<T>& weight) {
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) x.at[i] = norm_one(x.at[i], scale, weight.at[i]);
}

__device__ __forceinline__ float norm_scale(float squares, int dim, float eps) {
  const float mean = __fdiv_rn(squares, static_cast<float>(dim));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

__device__ __forceinline__ float sum_of_8(const float* v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// float32: the order of csrc/layers/dot.h, by the 16 lanes of a half-warp (all 32 must call).
__device__ __forceinline__ float half_warp_fold(float v) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

__device__ __forceinline__ float half_warp_squares(const float* row, int dim) {
  float squares = 0.0f;
#pragma unroll 8
  for (int k = threadIdx.x % 16; k < (dim + 15) / 16 * 16; k += 16) {
    const float v = k < dim ? row[k] : 0.0f;
    squares = fmaf(v, v, squares);
  }
  return half_warp_fold(squares);
}

// 16-bit types: one order for a row, whoever calls: thread t of the block adds chunks t,
// t + kThreads, ... into eight sums, which fold within the thread, the warp (lane 0 writes
// partial[warp]), and, after a barrier of the caller's, by sum_of_8 over the warps.
template <typename T>
__device__ __forceinline__ void row_squares(const T* row, int dim, bool aligned, float* partial) {
  static_assert(Chunk<T>::kSize == 8 && kWarps == 8);
  float sum[8] = {};
  for (int k = threadIdx.x * 8; k < dim; k += kThreads * 8) {
    const Chunk<T> x = load_chunk(row, k, dim, aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(to_f32(x.at[i]), to_f32(x.at[i]), sum[i]);
  }
  float v = sum_of_8(sum);
#pragma unroll
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = v;
}

}  // namespace tlt
