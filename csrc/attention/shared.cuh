// What a block of attention has in shared memory.
#pragma once

#include "attention/fold.cuh"
#include "attention/tail.cuh"
#include "attention/tiles.cuh"

namespace tlt {

// Tiles of the ring, by what a block may have: on sm_90 two blocks of four warps a multiprocessor
// or one of eight.
template <int kWarps, bool kHopper>
constexpr int kRingTiles = kWarps == 4 ? 5
                           : kHopper   ? 10
                                       : 6;

// Shared memory of a block: the ring of tiles, which the tails use after it, and the totals of
// splits done, kept out of the registers that the tiles need.
template <int kDim, int kWarps, bool kHopper, bool kCluster = false>
struct Shared {
  static constexpr int kRing = kRingTiles<kWarps, kHopper>;
  static constexpr int kFit = sizeof(Ring<kDim, kRing>) / sizeof(TailScratch<kDim>);
  static constexpr int kTails = kWarps < kFit ? kWarps : kFit;  // warps that do tails at once
  union {
    Ring<kDim, kRing> ring;
    TailScratch<kDim> tails[kTails];
    FoldStep steps[kWarps][kWarpSize];
  };
  // Accumulators of a lane, a column of its own; then a partial, which the cluster reads.
  struct Part {
    float2 total[kWarps][kDim / 4][kWarpSize];
    Softmax softmax[kWarps * kMmaRows];
  };
  static constexpr int kKeeps = kCluster ? kKept<kDim> : 1;
  Part parts[kKeeps];
  RingBarriers<kRing> barriers;
  float2 weighed[kWarps];    // of each warp (tiles.cuh)
  int bad_from[kTileSteps];  // first position whose page is bad, of each step of a tile
  uint32_t place[kKeeps > 1 ? kWarpSize : 1];  // where the cluster has the part of each partial
  int partials;                                // how many it has
};

// Waits for the warps that compute and those that load.
template <int kWarps>
__device__ __forceinline__ void sync_block() {
  meet_threads<1, (kWarps + (kHopper ? kProducerWarps : 0)) * kWarpSize>();
}

}  // namespace tlt
