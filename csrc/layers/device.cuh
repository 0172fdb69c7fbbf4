// Device code that the layer kernels share: 16-byte chunks of a row, and the element-wise maths of
// the norm and the activation, so that a fused op is bit-identical to the two separate ops.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/device.cuh"
#include "common/math.h"
#include "common/mma.cuh"
#include "common/tensor.h"

namespace tlt {

// Products of two pairs, rounded once.
template <typename T>
__device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair v = __hmul2_rn(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const uint32_t*>(&v);
}

// ---- chunks: 16 bytes of one row ----------------------------------------------------------------

template <typename T>
union Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 raw;
  uint32_t word[4];  // pairs of 16-bit values
  T at[kSize];
  __device__ Chunk() : raw() {}
};

// Elements [k, k + kSize) of a row of `dim`; zeros past its end, which is not read. The first form
// requires that every chunk starts at a multiple of 16 bytes and that the row has whole chunks. The
// second is slow. Callers keep it out of unrolled loops, because a cold start also fetches the
// instructions that it skips.
template <typename T>
__device__ __forceinline__ Chunk<T> load_whole(const T* row, int k, int dim) {
  Chunk<T> chunk;
  if (k < dim) chunk.raw = *reinterpret_cast<const uint4*>(row + k);
  return chunk;
}

template <typename T>
__device__ __forceinline__ Chunk<T> load_pieces(const T* row, int k, int dim) {
  Chunk<T> chunk;
  if constexpr (sizeof(T) == 2) {
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

// For tensor cores: 16-bit elements [k, k + 4) and [k + 16, k + 20), a lane's share of 32.
template <typename T>
__device__ __forceinline__ Chunk<T> load_split(const T* row, int k, int dim) {
  Chunk<T> chunk;
  uint2* half = reinterpret_cast<uint2*>(&chunk.raw);
  if (k < dim) half[0] = *reinterpret_cast<const uint2*>(row + k);
  if (k + 16 < dim) half[1] = *reinterpret_cast<const uint2*>(row + k + 16);
  return chunk;
}

template <typename T>
__device__ __forceinline__ Chunk<T> load_split_pieces(const T* row, int k, int dim) {
  const uint4 low = load_pieces(row, k, min(dim, k + 4)).raw;
  const uint4 high = load_pieces(row, k + 16, min(dim, k + 20)).raw;
  Chunk<T> chunk;
  chunk.raw = make_uint4(low.x, low.y, high.x, high.y);
  return chunk;
}

template <typename T>
__device__ __forceinline__ Chunk<T> load_chunk(const T* row, int k, int dim, bool aligned) {
  return aligned ? load_whole(row, k, dim) : load_pieces(row, k, dim);
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

// gate * sigmoid(gate) with the bits of the CPU.
__device__ __forceinline__ float silu(float gate) {
  const float e = exp_f32(-fabsf(gate));
  return __fmul_rn(gate, __fdiv_rn(gate < 0.0f ? e : 1.0f, __fadd_rn(1.0f, e)));
}

// The same in two special-function instructions, for types whose rounding hides their error.
__device__ __forceinline__ float fast_silu(float gate) {
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(gate * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + e));
  return gate * inverse;
}

__device__ __forceinline__ float silu_mul_one(float gate, float up) { return silu(gate) * up; }

// The same for two 16-bit values in a word.
template <typename T>
__device__ __forceinline__ uint32_t silu_mul_word(uint32_t gate, uint32_t up) {
  const float2 g = unpack<T>(gate);
  return multiply<T>(pack<T>(make_float2(fast_silu(g.x), fast_silu(g.y))), up);
}

template <typename T>
__device__ __forceinline__ void silu_mul_chunk(Chunk<T>& gate, const Chunk<T>& up) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate.at[i] = silu_mul_one(gate.at[i], up.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) gate.word[i] = silu_mul_word<T>(gate.word[i], up.word[i]);
  }
}

// The same for two sums, which are first rounded to T as an array of T would have been.
template <typename T>
__device__ __forceinline__ T silu_mul_sums(float gate, float up) {
  if constexpr (sizeof(T) == 4) {
    return silu_mul_one(gate, up);
  } else {
    const uint32_t both = pack<T>(make_float2(gate, up));
    const uint32_t gated = pack<T>(make_float2(fast_silu(unpack<T>(both).x), 0.0f));
    const auto product = static_cast<uint16_t>(multiply<T>(gated, both >> 16));
    return *reinterpret_cast<const T*>(&product);
  }
}

// ---- rms_norm -----------------------------------------------------------------------------------

__device__ __forceinline__ float norm_one(float x, float scale, float weight) {
  return x * scale * weight;
}

// Rounds to the storage type before the weight is applied, as in the models' training.
template <typename T>
__device__ __forceinline__ void norm_chunk(Chunk<T>& x, float scale, const Chunk<T>& weight) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x.at[i] = norm_one(x.at[i], scale, weight.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack<T>(x.word[i]);
      const uint32_t normed = pack<T>(make_float2(v.x * scale, v.y * scale));
      x.word[i] = multiply<T>(normed, weight.word[i]);
    }
  }
}

// 1 / sqrt(mean square + eps). float32 has the bits of the CPU. Types whose rounding hides the
// error use two special-function instructions, which are faster: the whole row waits for the
// result.
template <typename T>
__device__ __forceinline__ float norm_scale(float squares, int dim, float eps) {
  if constexpr (sizeof(T) == 4) {
    const float mean = __fdiv_rn(squares, static_cast<float>(dim));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  } else {
    return rsqrtf(__fadd_rn(__fdividef(squares, static_cast<float>(dim)), eps));
  }
}

// Adds the parts of one output as a binary tree.
__device__ __forceinline__ float sum_of_parts(const float* v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

__device__ __forceinline__ float fold(float v, int lanes) {
#pragma unroll
  for (int lane = lanes / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(kFullWarp, v, lane);
  return v;
}

// The squares of a 16-bit row are summed by tensor cores in the order of the linears (linear.cuh).
// Of each block of 64 elements of part w, the first 32 go to one sum and the others to another, 16
// at a time; the two sums are added, then the parts, pairwise.
constexpr int kBlockK = 64;  // elements of k in one step: 128 bytes of a row
constexpr int kParts = 8;    // interleaved parts of K

// Adds the squares of 32 elements of each row of a fragment to the diagonal of the accumulators.
template <typename T>
__device__ __forceinline__ void add_squares(float (&sum)[4], const Chunk<T>& x) {
  const uint32_t* w = x.word;
  mma_16816<T>(sum, {w[0], w[0], w[1], w[1]}, w[0], w[1]);
  mma_16816<T>(sum, {w[2], w[2], w[3], w[3]}, w[2], w[3]);
}

// The sum of squares of row g, in lane 4 g + g / 2, from the sums of the first and the other 32
// elements of blocks.
__device__ __forceinline__ float squares_of(const float (&sum)[2][4]) {
  const bool odd = threadIdx.x / 4 % 2 == 1;
  return odd ? sum[0][1] + sum[1][1] : sum[0][0] + sum[1][0];
}

// Adds the sums from squares_of of the parts of a row (each part is a row of the fragment); every
// lane gets the total.
__device__ __forceinline__ float fold_parts(float squares) {
  const int lane = threadIdx.x % kWarpSize;
  float sum = __shfl_sync(kFullWarp, squares, lane / 4 * 4 + lane / 8);
#pragma unroll
  for (int apart = 4; apart < kWarpSize; apart *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, apart);
  }
  return sum;
}

// The sum of squares of a row, by one warp, in every lane. float32: the order of csrc/layers/dot.h
// with one part, in both half-warps. kAhead steps of 512 elements are in flight: few suffice if
// loads of the row are in flight already.
template <int kAhead = 4, typename T>
__device__ __forceinline__ float warp_squares(const T* row, int dim, bool aligned) {
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (sizeof(T) == 4) {
    float squares = 0.0f;
#pragma unroll 8
    for (int k = lane % 16; k < (dim + 15) / 16 * 16; k += 16) {
      const float v = k < dim ? row[k] : 0.0f;
      squares = fmaf(v, v, squares);
    }
    return fold(squares, 16);
  } else {
    // Row g of a fragment is part g of the row, in lanes 4 g to 4 g + 3.
    constexpr int kStep = kParts * kBlockK;
    const int at = lane / 4 * kBlockK + lane % 4 * 4;
    float sum[2][4] = {};
    if (aligned) {
#pragma unroll 1
      for (int k = 0; k < dim; k += kAhead * kStep) {
        const T* from = row + k + at;
        Chunk<T> x[kAhead][2];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (k + i * kStep >= dim) break;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            x[i][h] = load_split(from, i * kStep + h * 32, dim - k - at);
          }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (k + i * kStep >= dim) break;
#pragma unroll
          for (int h = 0; h < 2; ++h) add_squares(sum[h], x[i][h]);
        }
      }
    } else {
#pragma unroll 1
      for (int k = at; k - at < dim; k += kStep) {
#pragma unroll
        for (int h = 0; h < 2; ++h) add_squares(sum[h], load_split_pieces(row, k + h * 32, dim));
      }
    }
    return fold_parts(squares_of(sum));
  }
}

// A row is normed by a block or, if rows are many, short and aligned, by a warp. Both have the
// order of warp_squares. kRowThreads is the number of threads of a row.
constexpr int kNormThreads = 256;  // of a block that owns a row
constexpr int kWarpRows = 4;       // rows of a block whose warps own them
constexpr int kWarpHeld = 6;       // chunks of such a row that a lane holds, at most

template <int kRowThreads>
constexpr int kNormBlock = kRowThreads == kWarpSize ? kWarpRows * kWarpSize : kRowThreads;

// A multiprocessor has the registers for 4 rows by blocks, at 64 a thread, and for 20 by warps, at
// 96. With up to one row per multiprocessor, a block is as fast.
template <typename T>
bool warps_own_rows(int64_t rows, int64_t dim, bool aligned) {
  constexpr int64_t kFewRows = 132;
  return aligned && rows > kFewRows && dim <= kWarpHeld * kWarpSize * Chunk<T>::kSize;
}

inline KernelShape norm_shape(int64_t rows, bool warps) {
  if (warps) return {(rows + kWarpRows - 1) / kWarpRows, kNormBlock<kWarpSize>};
  return {rows, kNormThreads};
}

// Prefetches the norm's weight into L2. Called by all threads of a block.
template <int kRowThreads, typename T>
__device__ __forceinline__ void prefetch_weight(const T* weight, int dim) {
  constexpr int kLine = 128 / sizeof(T), kStep = kNormBlock<kRowThreads> * kLine;
#pragma unroll 1
  for (int k = threadIdx.x * kLine; k < dim; k += kStep) prefetch_line(weight + k);
}

// The row of this thread.
template <int kRowThreads>
__device__ __forceinline__ int64_t norm_row_index() {
  const int64_t block = blockIdx.x;
  return kRowThreads == kWarpSize ? block * kWarpRows + threadIdx.x / kWarpSize : block;
}

// Norms the row of this thread, and copies x to `copy` unless that is null. `out` may be x.
template <int kRowThreads, typename T>
__device__ __forceinline__ void norm_row(const T* x, const T* weight, T* out, int dim, float eps,
                                         bool aligned, T* copy = nullptr) {
  constexpr bool kWarp = kRowThreads == kWarpSize;
  constexpr int kSize = Chunk<T>::kSize, kStep = kRowThreads * kSize;
  constexpr int kHeld = kWarp ? kWarpHeld : 2;
  aligned |= kWarp;
  // The first aligned chunks of a thread are loaded before the row is loaded for the squares.
  const int first = threadIdx.x % kRowThreads * kSize;
  const int held_end = aligned ? dim : 0;
  uint4 held[kHeld], held_weight[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = first + i * kStep;
    if (k >= held_end) break;
    held[i] = load_whole(x, k, held_end).raw;
    held_weight[i] = load_whole(weight, k, held_end).raw;
  }
  constexpr int kAhead = kWarp ? 2 : 3;  // what 96 and 64 registers allow
  float scale;
  if constexpr (kWarp) {
    scale = norm_scale<T>(warp_squares<kAhead>(x, dim, true), dim, eps);
  } else {
    __shared__ float shared_scale;
    if (threadIdx.x < kWarpSize) {
      const float squares = warp_squares<kAhead>(x, dim, aligned);
      if (threadIdx.x == 0) shared_scale = norm_scale<T>(squares, dim, eps);
    }
    __syncthreads();
    scale = shared_scale;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int k = first + i * kStep;
    if (k >= held_end) break;
    Chunk<T> chunk, of_weight;
    chunk.raw = held[i];
    of_weight.raw = held_weight[i];
    if (copy != nullptr) store_chunk(copy, k, held_end, true, chunk);
    norm_chunk(chunk, scale, of_weight);
    store_chunk(out, k, held_end, true, chunk);
  }
  if constexpr (!kWarp) {
#pragma unroll 1
    for (int k = first + (aligned ? kHeld * kStep : 0); k < dim; k += kStep) {
      Chunk<T> chunk = load_chunk(x, k, dim, aligned);
      if (copy != nullptr) store_chunk(copy, k, dim, aligned, chunk);
      norm_chunk(chunk, scale, load_chunk(weight, k, dim, aligned));
      store_chunk(out, k, dim, aligned, chunk);
    }
  }
}

}  // namespace tlt
