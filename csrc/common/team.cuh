// Device helpers of the kernels that rank and reduce over rows of logits.
//
// A *team* is the thread blocks that share one item: a cluster on Hopper, a single block elsewhere.
// Its reductions have one fixed order (lanes, warps, blocks), and every thread gets the result.
#pragma once

#include <cooperative_groups.h>

#include <map>
#include <mutex>
#include <tuple>

#include "common/cuda.h"
#include "common/device.cuh"
#include "common/math.h"

namespace tlt {

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
  __device__ void arrive() const { cooperative_groups::this_cluster().barrier_arrive(); }
  __device__ void wait() const { cooperative_groups::this_cluster().barrier_wait(); }
  template <typename V>
  __device__ V* remote(V* shared, int rank) const {
    return cooperative_groups::this_cluster().map_shared_rank(shared, rank);
  }
#else
  __device__ Team() : rank_(0), size_(1) {}
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

struct LaunchShape {
  int64_t items;
  int threads;  // of a block
  size_t shared_bytes;
  int team;       // blocks an item where the card has clusters, else 1
  bool overlaps;  // the kernel waits for the one before by itself (griddepcontrol)
};

// What the runtime knows of a kernel, by (kernel, device, team): asking is slow.
template <typename F>
int ask_once(const char* op, const void* kernel, int team, F&& ask) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int>, int> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const std::tuple<const void*, int, int> key{kernel, device, team};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known[key] = ask();
}

// Whether the code that runs on the current card has clusters and launches that start early.
template <typename... Params>
bool has_teams(const char* op, void (*kernel)(Params...)) {
  return ask_once(op, reinterpret_cast<const void*>(kernel), 0, [&] {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), op);
    return attributes.binaryVersion >= 90 && attributes.ptxVersion >= 90 ? 1 : 0;
  });
}

// A launch and its attributes.
struct LaunchConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute list[2];

  template <typename... Params>
  LaunchConfig(const char* op, void (*kernel)(Params...), const LaunchShape& shape,
               cudaStream_t stream) {
    const bool hopper = has_teams(op, kernel);
    if (shape.shared_bytes > 0) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shape.shared_bytes)),
                 op);
    }
    const unsigned team = hopper ? static_cast<unsigned>(shape.team) : 1;
    config.gridDim = dim3(static_cast<unsigned>(shape.items) * team);
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = list;
    if (hopper && shape.overlaps) {
      list[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      list[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (team > kMaxTeam) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                 op);
    }
    if (team > 1) {
      list[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      list[config.numAttrs++].val.clusterDim = {team, 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

// Launches one team an item.
template <typename... Params>
void launch(const char* op, void (*kernel)(Params...), const LaunchShape& shape,
            cudaStream_t stream, const Params&... params) {
  const LaunchConfig launch(op, kernel, shape, stream);
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, params...), op);
}

// How many teams of a kernel the current card runs at once. Clusters do not fit everywhere: a card
// of 132 multiprocessors may hold 15 clusters of 8, and one of few multiprocessors none of 16.
template <typename... Params>
int64_t max_active_teams(const char* op, void (*kernel)(Params...), const LaunchShape& shape) {
  return ask_once(op, reinterpret_cast<const void*>(kernel), shape.team, [&] {
    int teams = 0;
    const LaunchConfig launch(op, kernel, shape, nullptr);
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&teams, kernel, &launch.config);
    if (error != cudaSuccess && shape.team > kMaxTeam) {
      cudaGetLastError();  // not of this card
      return 0;
    }
    check_cuda(error, op);
    return teams;
  });
}

}  // namespace tlt
