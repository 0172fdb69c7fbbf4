// The blocks of the small and the mid linear: eight warps multiply, a part of K each; in the
// appending forms two more, the finishers, find out meanwhile where the sums go.
#pragma once

#include "layers/linear.cuh"
#include "layers/pairs.cuh"

namespace tlt {

constexpr int kMultipliers = kParts * kWarpSize;
constexpr int kFinishers = 2 * kWarpSize;

template <typename After>
constexpr int kBlockThreads = kMultipliers + kAppends<After> * kFinishers;

// The barriers of the multipliers, and of the finishers, alone; 0 is __syncthreads.
constexpr int kMultipliersBarrier = 1, kFinishersBarrier = 2, kSumsBarrier = 3;

// Waits until the sums are there, and known where they go. Finishers and multipliers come to it at
// different places of the code, which __syncthreads does not allow.
template <typename After>
__device__ __forceinline__ void sync_sums() {
  if constexpr (kAppends<After>) {
    sync_threads<kSumsBarrier, kBlockThreads<After>>();
  } else {
    __syncthreads();
  }
}

}  // namespace tlt
