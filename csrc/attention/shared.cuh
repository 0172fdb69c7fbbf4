// The shared memory of an attention block.
#pragma once

#include "attention/few.cuh"
#include "attention/fold.cuh"
#include "attention/tail.cuh"
#include "attention/tiles.cuh"

namespace tlt {

// What shares a multiprocessor with a block. kPacked: another block, if blocks have four warps;
// kFewPairs: the same, in the kernel of blocks that share keys and have few pairs of 128
// dimensions; kAlone: only a block of the merge; kCluster: another block of a cluster.
enum class Residency { kPacked, kFewPairs, kAlone, kCluster };

// Tiles of the ring, from the shared memory available to a block.
template <int kWarps, bool kHopper, Residency kResidency>
constexpr int kRingTiles = kWarps == 4 ? (kHopper && kResidency == Residency::kAlone ? 8 : 5)
                           : kHopper   ? 10
                                       : 6;

// The ring of tiles, whose memory the tails use afterwards, and the totals of finished splits,
// which would take registers that the tiles need.
template <int kDim, int kWarps, bool kHopper, Residency kResidency>
struct Shared {
  static constexpr int kRing = kRingTiles<kWarps, kHopper, kResidency>;
  static constexpr int kFit = sizeof(Ring<kDim, kRing>) / sizeof(TailScratch<kDim>);
  static constexpr int kTails =
      kWarps < kFit ? kWarps : kFit;  // warps that compute tails at the same time
  union {
    Ring<kDim, kRing> ring;
    TailScratch<kDim> tails[kTails];
    FoldStep steps[kWarps][kWarpSize];
  };
  // The accumulators of a lane, one column each; later a partial that the cluster reads.
  struct Part {
    union {
      float2 total[kWarps][kDim / 4][kWarpSize];
      struct {
        float2 first[kDim / 4][kWarpSize];  // total[0]
        FewExchange exchange;
      } few;
    };
    Softmax softmax[kWarps * kMmaRows];
  };
  static constexpr int kNumPartials = kResidency == Residency::kCluster ? kBlockPartials<kDim> : 1;
  Part parts[kNumPartials];
  RingBarriers<kRing> barriers;
  float2 sink[kWarps];       // of each warp (tiles.cuh)
  int bad_from[kTileSteps];  // first position with a bad page, for each step of a tile
  // Where in the cluster the part of each partial is, and the number of partials.
  uint32_t partial_address[kNumPartials > 1 ? kWarpSize : 1];
  int partials;
};

// Barrier of the warps that compute and those that load.
template <int kWarps>
__device__ __forceinline__ void sync_block() {
  meet_threads<1, (kWarps + (kHopper ? kProducerWarps : 0)) * kWarpSize>();
}

}  // namespace tlt
