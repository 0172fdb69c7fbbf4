// Shared code of the linear kernels: arguments, tensor-core and asynchronous-copy instructions.
//
// A 16-bit linear has one order for every row count: K is cut into blocks of 64; part w (of 8)
// sums blocks w, w + 8, w + 16, ... in rising order, 16 elements at a time, on tensor cores with
// float32 accumulators; the parts are added as a binary tree, ((0 + 1) + (2 + 3)) + ((4 + 5) +
// (6 + 7)); bias, then residual, are added; one rounding. Of 16 elements lane t of an MMA row holds
// 4 consecutive ones, 4 t to 4 t + 3.
//
// A rank of a group of 2, 4 or 8 owns 4, 2 or 1 neighbouring parts, a subtree: `parts` of its
// linear, whose K is the rank's blocks of the whole K.
#pragma once

#include "common/cuda.h"
#include "kv/params.h"
#include "layers/device.cuh"
#include "layers/op.h"

namespace tlt {

struct LinearKernelParams {
  LinearParams
      linear;     // pdl: see launch_kernel; weight, norm_weight, bias are read before the wait
  bool silu_mul;  // weight rows are those of gate, then of up; out is silu_mul of their sums
  int64_t apart;  // weight rows from a gate to its up
  bool x_aligned, w_aligned;  // 16-byte chunks can be loaded whole
  bool out_aligned;  // 8 outputs from a multiple of 8 on, and their addends, are whole chunks
};

__device__ __forceinline__ int num_blocks_of(const LinearParams& p) {
  return static_cast<int>((p.in_dim + kBlockK - 1) / kBlockK);
}

// Blocks of part w; 0 if K is short.
__device__ __forceinline__ int part_steps(int num_blocks, int part) {
  return (num_blocks - part + kParts - 1) / kParts;
}

// Adds the parts of kCount outputs as a binary tree, as they come.
template <int kCount>
struct PartTree {
  float pending[3][kCount];

  // After the last part, `sums` are the totals.
  __device__ __forceinline__ void add(int part, float (&sums)[kCount]) {
#pragma unroll
    for (int level = 0; level < 3; ++level) {
      const bool waits = (part >> level & 1) == 0;  // for the next part
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (waits) {
          pending[level][i] = sums[i];
        } else {
          sums[i] = pending[level][i] + sums[i];
        }
      }
      if (waits) return;
    }
  }
};

// 32 elements of k, as load_split gives them: weight rows g (low) and g + 8 (high) of a tile of 16,
// x row g of a tile of 8.
template <typename T>
__device__ __forceinline__ void mma_k32(float (&c)[4], const uint4& low, const uint4& high,
                                        const uint4& x) {
  mma_16816<T>(c, {low.x, high.x, low.y, high.y}, x.x, x.y);
  mma_16816<T>(c, {low.z, high.z, low.w, high.w}, x.z, x.w);
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// copy_async_16 for data that is read once.
__device__ __forceinline__ void copy_async_once(void* to, const void* from, bool valid,
                                                uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)),
      "l"(from), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// An aligned 16-byte chunk of the first or second half of the input of load_split.
__device__ __forceinline__ uint4 join(uint2 first, uint2 second) {
  return make_uint4(first.x, first.y, second.x, second.y);
}

// out[row, col] = sum (+ bias) (+ residual), rounded once.
template <typename T, typename Out>
__device__ __forceinline__ void store_sum(const LinearParams& p, int64_t row, int64_t col,
                                          float sum) {
  if (p.bias) sum += as_float32(static_cast<const T*>(p.bias)[col]);
  if (p.residual)
    sum += as_float32(static_cast<const Out*>(p.residual)[row * p.residual_stride + col]);
  static_cast<Out*>(p.out)[row * p.out_stride + col] = as_storage<Out>(sum);
}

template <typename T>
__device__ __forceinline__ void store_out(const LinearParams& p, int64_t row, int64_t col,
                                          float sum) {
  if (p.out_dtype == DType::kFloat32) {
    store_sum<T, float>(p, row, col, sum);
  } else {
    store_sum<T, T>(p, row, col, sum);
  }
}

struct Card {
  int num_sms, max_shared;  // bytes of a block
};

constexpr int kPieceRows = 16;  // rows that the decode kernel takes at once
constexpr int kSmallRows = 8;   // rows that launch_small takes, unless they append

// Launchers, on the current device. Aligned rows; fast if rows or weights are few:
void launch_decode(const LinearKernelParams& p, const Card& card, cudaStream_t stream);
void launch_decode_append(const LinearKernelParams& p, const AppendKvParams& append,
                          const Card& card, cudaStream_t stream);
// Aligned rows of a small model's layer, few or more; tried first. They return false if they do not
// support these rows or weights:
bool launch_small(const LinearKernelParams& p, const Card& card, cudaStream_t stream);
bool launch_small_append(const LinearKernelParams& p, const AppendKvParams& append,
                         const Card& card, cudaStream_t stream);
bool launch_mid(const LinearKernelParams& p, const Card& card, cudaStream_t stream);
bool launch_mid_append(const LinearKernelParams& p, const AppendKvParams& append, const Card& card,
                       cudaStream_t stream);
// Aligned rows without a norm; with silu_mul a multiple of 8 columns:
bool has_hopper_kernel();  // whether this build and the current device have it
void launch_hopper(const LinearKernelParams& p, const Card& card, cudaStream_t stream);
void launch_tiles(const LinearKernelParams& p, cudaStream_t stream);  // any 16-bit rows
void launch_float32(const LinearKernelParams& p, cudaStream_t stream);
void launch_float32_append(const LinearKernelParams& p, const AppendKvParams& append,
                           cudaStream_t stream);

}  // namespace tlt
