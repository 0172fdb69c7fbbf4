// fold_partials: out[row, c] = tree of partial[r][row, c] (+ bias[c]) (+ residual[row, c]), rounded
// once.
//
// A thread owns kWidth neighbouring columns of a row: 4, or 1 where a row does not start at a
// multiple of 16 bytes. It issues all loads at once. Bytes: ranks * 4 + 2 to 8 an output.
//
// Partial sums may be in the memory of other GPUs. With flags a block first writes the number of
// its launches into a word of every rank, which says that this rank's sums are complete, and waits
// for that number from all other ranks. Word (block, r) of a rank's flags is written by rank r; a
// rank counts the launches of a block in its own word. Every rank launches the same grid, of at
// most kMaxFoldBlocks blocks. A wait that exceeds its time ends the kernel with an error.
#include <algorithm>

#include "common/cuda.h"
#include "layers/device.cuh"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 128;

// Bypasses L1, which may hold old values of another GPU's memory.
template <int kWidth>
__device__ __forceinline__ void load_partial(const float* from, float (&to)[kWidth]) {
  if constexpr (kWidth == 4) {
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
                 : "l"(from));
  } else {
    asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(to[0]) : "l"(from));
  }
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Waits until this block has begun on every rank, after the earlier kernels of that rank.
__device__ __forceinline__ void meet_ranks(const FoldParams& p) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < p.ranks) {
    const int64_t words = static_cast<int64_t>(blockIdx.x) * p.ranks;
    uint32_t* const mine = p.flags[p.rank] + words;
    const uint32_t launch = load_acquire(mine + p.rank) + 1;
    __syncwarp((1u << p.ranks) - 1);  // all have read the count
    store_release(p.flags[thread] + words + p.rank, launch);
    const int64_t begun = device_ns();
    // The word of a rank that is ahead exceeds `launch`.
    while (static_cast<int32_t>(load_acquire(mine + thread) - launch) < 0) {
      if (device_ns() - begun > p.timeout_ns) __trap();
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float load_one(const void* from, int64_t at, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[at];
  if (dtype == DType::kFloat16) return as_float32(static_cast<const __half*>(from)[at]);
  return as_float32(static_cast<const __nv_bfloat16*>(from)[at]);
}

// The sums of kWidth columns from `col` on.
template <typename T, int kWidth>
__device__ __forceinline__ void fold_columns(const FoldParams& p, int64_t row, int64_t col) {
  float sum[kMaxRanks][kWidth];
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r < p.ranks) load_partial(p.partial[r] + row * p.partial_stride[r] + col, sum[r]);
  }
#pragma unroll
  for (int apart = 1; apart < kMaxRanks; apart *= 2) {
    if (apart >= p.ranks) break;
#pragma unroll
    for (int r = 0; r < kMaxRanks; r += 2 * apart) {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) sum[r][c] += sum[r + apart][c];
    }
  }
  union {
    T at[kWidth];
    uint4 four_wide;
    uint2 four;
  } out;
#pragma unroll
  for (int c = 0; c < kWidth; ++c) {
    float value = sum[0][c];
    if (p.bias) value += load_one(p.bias, col + c, p.bias_dtype);
    if (p.residual) {
      value += as_float32(static_cast<const T*>(p.residual)[row * p.residual_stride + col + c]);
    }
    out.at[c] = as_storage<T>(value);
  }
  T* to = static_cast<T*>(p.out) + row * p.out_stride + col;
  if constexpr (kWidth == 1) {
    to[0] = out.at[0];
  } else if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<uint4*>(to) = out.four_wide;
  } else {
    *reinterpret_cast<uint2*>(to) = out.four;
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    fold_kernel(const __grid_constant__ FoldParams p, const int64_t row_blocks) {
  launch_dependents();
  wait_for_prior_grid();
  if (p.flags[0] != nullptr) meet_ranks(p);
  const int64_t units = p.rows * row_blocks;
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t col = (unit % row_blocks * kThreads + threadIdx.x) * kWidth;
    if (col < p.dim) fold_columns<T, kWidth>(p, unit / row_blocks, col);
  }
}

template <typename T, int kWidth>
void launch(const FoldParams& p, cudaStream_t stream) {
  const int64_t row_blocks = ceil_div(p.dim, kThreads * kWidth);
  const int64_t units = p.rows * row_blocks;
  const int64_t blocks = p.flags[0] ? std::min<int64_t>(units, kMaxFoldBlocks) : units;
  launch_kernel("fold_partials", fold_kernel<T, kWidth>, {blocks, kThreads}, stream, true, p,
                row_blocks);
}

}  // namespace

void fold_partials_cuda(const FoldParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    bool aligned = p.dim % 4 == 0 && is_aligned(p.out, p.out_stride * sizeof(T), 0);
    for (int r = 0; r < p.ranks; ++r) {
      aligned = aligned && is_aligned(p.partial[r], p.partial_stride[r] * sizeof(float), 0);
    }
    aligned ? launch<T, 4>(p, as_stream(stream)) : launch<T, 1>(p, as_stream(stream));
  });
}

}  // namespace tlt
