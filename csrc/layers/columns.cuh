// The epilogue of the wgmma kernel: rows of out, eight columns at a time.
#pragma once

#include "layers/linear.cuh"

namespace tlt {

// Eight neighbours of an array of 16-bit or, where `wide`, of float32 elements.
template <typename T>
__device__ __forceinline__ void load_8(const void* from, int64_t at, bool wide, float (&to)[8]) {
  if (wide) {
    const float4* chunk = reinterpret_cast<const float4*>(static_cast<const float*>(from) + at);
    const float4 low = chunk[0], high = chunk[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
    Chunk<T> chunk;
    chunk.raw = *reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<T>(chunk.word[i]);
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_8(void* to, int64_t at, bool wide, const float (&from)[8]) {
  if (wide) {
    float4* chunk = reinterpret_cast<float4*>(static_cast<float*>(to) + at);
    chunk[0] = make_float4(from[0], from[1], from[2], from[3]);
    chunk[1] = make_float4(from[4], from[5], from[6], from[7]);
  } else {
    Chunk<T> chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      chunk.word[i] = pack<T>(make_float2(from[2 * i], from[2 * i + 1]));
    }
    *reinterpret_cast<uint4*>(static_cast<T*>(to) + at) = chunk.raw;
  }
}

// Replaces eight gates by silu_mul of them and their ups, rounded as arrays of T would have been.
template <typename T>
__device__ __forceinline__ void activate_8(float (&gate)[8], const float (&up)[8]) {
  Chunk<T> chunk, other;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    chunk.word[i] = pack<T>(make_float2(gate[2 * i], gate[2 * i + 1]));
    other.word[i] = pack<T>(make_float2(up[2 * i], up[2 * i + 1]));
  }
  silu_mul_chunk(chunk, other);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<T>(chunk.word[i]);
    gate[2 * i] = pair.x, gate[2 * i + 1] = pair.y;
  }
}

// Writes eight columns of out: rows `row`, `row + step`, ... before `end`. For gates and ups,
// load_sums gives the products. Loops are not unrolled: code that runs once a tile is cold in the
// instruction cache, so its size costs time.
template <typename T, typename F>
__device__ __forceinline__ void store_columns(const LinearKernelParams& params, int64_t col,
                                              int row, int end, int step, F&& load_sums) {
  constexpr int kAhead = 2;
  const LinearParams& p = params.linear;
  if (!params.out_aligned || col + 8 > p.out_dim) {
#pragma unroll 1
    for (; row < end; row += step) {
      float sum[8];
      load_sums(row, sum);
#pragma unroll 1
      for (int64_t at = col; at < min(col + 8, p.out_dim); ++at) {
        store_out<T>(p, row, at, sum[0]);
#pragma unroll
        for (int c = 0; c < 7; ++c) sum[c] = sum[c + 1];
      }
    }
    return;
  }
  const bool wide = p.out_dtype == DType::kFloat32;
  float bias[8];
  if (p.bias) load_8<T>(p.bias, col, false, bias);
#pragma unroll 1
  for (; row < end; row += kAhead * step) {
    float residual[kAhead][8];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = row + i * step;
      if (p.residual && at < end) {
        load_8<T>(p.residual, at * p.residual_stride + col, wide, residual[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = row + i * step;
      if (at >= end) break;
      float sum[8];
      load_sums(at, sum);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (p.bias) sum[c] += bias[c];
        if (p.residual) sum[c] += residual[i][c];
      }
      store_8<T>(p.out, at * p.out_stride + col, wide, sum);
    }
  }
}

}  // namespace tlt
