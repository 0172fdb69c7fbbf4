// Device helpers of the kernels that rank and reduce over rows of logits.
//
// The thread blocks of a `Cluster` share one item. Before sm_90 a cluster is a single block. Its
// reductions have one fixed order, and every thread gets the result.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda.h"
#include "common/device.cuh"
#include "common/math.h"

namespace tlt {

// Maps floats to integers of the same order; -0 equals +0.
__device__ __forceinline__ uint32_t ascending(float x) {
  const uint32_t bits = as_bits(add_rn(x, 0.0f));
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ascending(uint32_t key) {
  return as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// The largest word has the highest score; of equal scores, the lowest id.
__device__ __forceinline__ uint64_t rank_key(float score, uint32_t id) {
  return static_cast<uint64_t>(ascending(score)) << 32 | ~id;
}

__device__ __forceinline__ float warp_max(float x) {
  return from_ascending(__reduce_max_sync(kFullWarp, ascending(x)));
}

// The largest of the lanes' keys.
__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t highest = __reduce_max_sync(kFullWarp, high);
  const uint32_t low = high == highest ? static_cast<uint32_t>(key) : 0;
  return static_cast<uint64_t>(highest) << 32 | __reduce_max_sync(kFullWarp, low);
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
class Cluster {
 public:
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kWarps <= kWarpSize);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ Cluster()
      : rank_(cooperative_groups::this_cluster().block_rank()),
        size_(cooperative_groups::this_cluster().num_blocks()) {}
  __device__ int item() const { return size_ == 1 ? blockIdx.x : __clusterIdx().x; }
  __device__ void arrive() const { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ void wait() const { cooperative_groups::this_cluster().barrier_wait(); }
  template <typename V>
  __device__ V* remote(V* shared, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else
  __device__ Cluster() : rank_(0), size_(1) {}
  __device__ int item() const { return blockIdx.x; }
  __device__ void arrive() const {}
  __device__ void wait() const { __syncthreads(); }
  template <typename V>
  __device__ V* remote(V* shared, int) const {
    return shared;
  }
#endif

  // A barrier, in one piece or with work between its halves.
  __device__ void sync() const {
    arrive();
    wait();
  }

  __device__ int rank() const { return rank_; }
  __device__ int size() const { return size_; }
  __device__ int thread() const { return rank_ * kThreads + threadIdx.x; }
  __device__ int threads() const { return size_ * kThreads; }

  // Each warp writes its part to all blocks (at most kPortableCluster), waits at one barrier, and
  // folds the parts of all warps.
  template <typename V, typename Op>
  __device__ V reduce(V v, V identity, Op op) {
    // Two, used in turn: a barrier lies between reading one and writing it again.
    __shared__ V of_warp[2][kPortableCluster * kWarps];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    v = warp_reduce(v, op);
    if (lane < size_) remote(of_warp[turn_], lane)[rank_ * kWarps + warp] = v;
    sync();
    v = identity;
#pragma unroll 1
    for (int i = lane; i < size_ * kWarps; i += kWarpSize) v = op(v, of_warp[turn_][i]);
    turn_ ^= 1;
    return warp_reduce(v, op);
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

struct ClusterShape {
  int64_t items;
  int threads;  // of a block
  int shared_bytes;
  unsigned cluster;  // blocks of an item on sm_90; before that it is 1
  bool pdl;          // see launch_kernel

  template <typename... Params>
  KernelShape of(const char* op, void (*kernel)(Params...)) const {
    const unsigned blocks = has_hopper_code(op, kernel) ? cluster : 1;
    return {items * blocks, threads, shared_bytes, blocks};
  }
};

// Launches one cluster for each item.
template <typename... Params>
void launch_cluster_per_item(const char* op, void (*kernel)(Params...), const ClusterShape& shape,
                             cudaStream_t stream, const Params&... params) {
  launch_kernel(op, kernel, shape.of(op, kernel), stream, shape.pdl, params...);
}

// Number of clusters of a kernel that run on the current card at once. A card of 132
// multiprocessors may hold 15 clusters of 8, and a small card none of 16.
template <typename... Params>
int64_t max_active_clusters(const char* op, void (*kernel)(Params...), const ClusterShape& shape) {
  const auto* of = reinterpret_cast<const void*>(kernel);
  return recall(op, of, shape.cluster, shape.shared_bytes, [&](int cached) {
    if (cached >= 0) return cached;
    int clusters = 0;
    const LaunchConfig launch(op, kernel, shape.of(op, kernel), nullptr, shape.pdl);
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
    if (error == cudaErrorInvalidClusterSize ||
        (error != cudaSuccess && shape.cluster > kPortableCluster)) {
      cudaGetLastError();  // clears the error: the card does not support this cluster size
      return 0;
    }
    check_cuda(error, op);
    return clusters;
  });
}

}  // namespace tlt
