// Device helpers of the kernels that rank and reduce over rows of logits.
//
// A *team* is the thread blocks that share one item: a cluster on Hopper, a single block elsewhere.
// Its reductions have one fixed order (lanes, warps, blocks), and every thread gets the result.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda.h"
#include "common/math.h"

namespace tlt {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kMaxTeam = 8;  // the largest portable cluster

// Order of floats as order of integers; -0 equals +0.
__device__ __forceinline__ uint32_t ascending(float x) {
  const uint32_t bits = as_bits(add_rn(x, 0.0f));
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ascending(uint32_t key) {
  return as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// Highest first, then the lower id: the largest of these words wins.
__device__ __forceinline__ uint64_t rank_key(float score, uint32_t id) {
  return static_cast<uint64_t>(ascending(score)) << 32 | ~id;
}

__device__ __forceinline__ float warp_max(float x) {
  return from_ascending(__reduce_max_sync(kFullWarp, ascending(x)));
}

struct Sum {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};

struct Max {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

template <typename V, typename Op>
__device__ __forceinline__ V warp_reduce(V v, Op op) {
#pragma unroll
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    v = op(v, __shfl_xor_sync(kFullWarp, v, lane));
  }
  return v;
}

// kThreads: threads of each block.
template <int kThreads>
class Team {
 public:
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kWarps <= kWarpSize);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ Team()
      : rank_(cooperative_groups::this_cluster().block_rank()),
        size_(cooperative_groups::this_cluster().num_blocks()) {}
  __device__ void sync() const { cooperative_groups::this_cluster().sync(); }
  template <typename V>
  __device__ V* remote(V* shared, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else
  __device__ Team() : rank_(0), size_(1) {}
  __device__ void sync() const { __syncthreads(); }
  template <typename V>
  __device__ V* remote(V* shared, int) const {
    return shared;
  }
#endif

  __device__ int rank() const { return rank_; }
  __device__ int size() const { return size_; }
  __device__ int item() const { return blockIdx.x / size_; }
  __device__ int thread() const { return rank_ * kThreads + threadIdx.x; }
  __device__ int threads() const { return size_ * kThreads; }

  template <typename V, typename Op>
  __device__ V reduce(V v, V identity, Op op) {
    __shared__ V of_warp[kWarps];
    __shared__ V of_block[2];  // used in turn: a slot is written again one barrier after its reads
    __shared__ V of_team;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    v = warp_reduce(v, op);
    if (lane == 0) of_warp[warp] = v;
    __syncthreads();
    if (warp == 0) {
      v = warp_reduce(lane < kWarps ? of_warp[lane] : identity, op);
      if (lane == 0) of_block[turn_] = v;
    }
    sync();
    if (warp == 0) {
      v = warp_reduce(lane < size_ ? *remote(&of_block[turn_], lane) : identity, op);
      if (lane == 0) of_team = v;
    }
    turn_ ^= 1;
    __syncthreads();
    return of_team;
  }

  template <typename V>
  __device__ V sum(V v) {
    return reduce(v, V(0), Sum());
  }

  template <typename V>
  __device__ V max(V v, V identity) {
    return reduce(v, identity, Max());
  }

 private:
  int rank_, size_, turn_ = 0;
};

// Launches one team an item. `after` is a hint: with it the launch may begin while the kernel
// before it on the stream ends, which that kernel and this one agree on by griddepcontrol.
template <typename... Params>
void launch_teams(const char* op, void (*kernel)(Params...), int64_t items, int threads,
                  size_t shared_bytes, bool after, cudaStream_t stream, const Params&... params) {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel), op);
  const bool hopper = attributes.binaryVersion >= 90;
  if (shared_bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               op);
  }
  const unsigned team = hopper ? kMaxTeam : 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(items) * team);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute list[2];
  list[0].id = cudaLaunchAttributeClusterDimension;
  list[0].val.clusterDim = {team, 1, 1};
  list[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  list[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = list;
  config.numAttrs = hopper ? 1 + after : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params...), op);
}

// The two halves of an overlapped launch: the first lets the next kernel be scheduled, the second
// waits until the writes of the kernel before are there.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace tlt
