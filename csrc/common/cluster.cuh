// The blocks of a cluster (sm_90): the halves of the cluster barrier, and reads of another block's
// shared memory. Most kernels use `Cluster` of rows.cuh instead.
#pragma once

#include "common/cuda.h"

namespace tlt {

// Publishes this thread's writes to its block's shared memory to the cluster. Every thread of every
// block that has not exited arrives, then waits. A wider fence would wait for global writes.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
#endif
}

// The same for a thread that has only read.
__device__ __forceinline__ void arrive_after_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The cluster address, in block `rank`, of the variable at `shared` in this block.
__device__ __forceinline__ uint32_t remote_address(const void* shared, int rank) {
  uint32_t address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
#endif
  return address;
}

// Two floats at a cluster address.
__device__ __forceinline__ float2 read_remote(uint32_t address) {
  float2 value{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address));
#endif
  return value;
}

}  // namespace tlt
