// Tiles of the wgmma kernel (linear_hopper.cu), their assignment to blocks, and the loads.
#pragma once

#include <algorithm>

#include "common/tma.cuh"
#include "layers/linear.cuh"

namespace tlt {

constexpr int kGroup = 4 * kWarpSize;  // threads of a warpgroup
constexpr int kLineBytes = kBlockK * 2;
constexpr int kMaxStages = 32;
constexpr int kMaxShared = 227 * 1024;

template <int kGroups_, int kRows_, int kHeld_, bool kTurns_ = false>
struct Tile {
  static constexpr int kGroups = kGroups_;  // warpgroups that multiply
  static constexpr int kRows = kRows_;      // rows of x
  static constexpr int kHeld = kHeld_;      // parts of K summed at once
  // Parts are multiplied one after the other, the third of four while the first two are added.
  static constexpr bool kTurns = kTurns_;
  static constexpr bool kSaves = kTurns && kRows > 64;  // see Multiplier::save
  static constexpr int kPerSm = kGroups == 1 ? 2 : 1;   // blocks of a multiprocessor
  static constexpr int kWeightRows = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kSums = kWeightRows * kRows;
  static constexpr int kTurnRows = std::min(kRows, 32);  // rows transposed at once
  static constexpr int kTurn = (kSaves ? kRows : kTurnRows) * 64;
  static constexpr int kTurned = std::min(kRows, 2 * kTurnRows);  // the same for packed outputs
  static constexpr bool kAddsPacked = kTurned == kRows;           // a residual fits too
  static constexpr int kTurnBytes = kGroups * kTurn * 4;
  static constexpr int kRingBytes =
      (kMaxShared / kPerSm - 1024 * (kPerSm + 1) - kTurnBytes) / 1024 * 1024;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kTurnBytes;
  static constexpr int kBuffers = kTurns ? 3 : kHeld;  // sums of parts in registers
  static constexpr int kMaxSplitParts = kTurns ? 4 : std::min(kHeld, 4);  // of a cluster's block
  // Each thread starts with kStartRegisters; multiplying warps take the registers that others
  // release.
  static constexpr int kStartRegisters = 65536 / (kPerSm * kThreads) / 8 * 8;
  static constexpr int kRegisters = kGroups == 1 ? 208 : 232;
  // Cycles of a block of K at least; fitted as a part of the estimate of consider_grid.
  static constexpr int kBlockCycles = kGroups == 1  ? 341
                                      : kRows <= 32 ? 479
                                      : kRows <= 64 ? 552
                                                    : 562;
  static constexpr int kLoadRegisters = kGroups == 2 ? 40 : 48;
  static_assert(kGroups * kRegisters + kLoadRegisters <= (kGroups + 1) * kStartRegisters,
                "a warpgroup would wait for registers forever");
  static_assert(kSums * 4 <= kRingBytes, "sums reuse the ring");
  // A warpgroup multiplies 64 weight rows. Those past the end of a tile are not stored, but they
  // are read, from the next bytes of shared memory.
  static_assert((64 - 8 - kRows) * kLineBytes <= kTurnBytes, "the last stage reads too far");
};

struct Grid {
  int row_tiles, tiles, blocks;
  int split;      // blocks of a cluster that share the parts of a tile: 1, 2, 4 or 8
  int tile_rows;  // weight rows of a tile, a multiple of 8; of 16 for gates and ups
  int last_rows;  // rows of x of the last row tile
  // The ring: a stage holds a block of K of a tile's weight rows, then of its rows of x.
  int stages, stage_bytes;
};

// First rows of a tile. Tiles of the same weights are neighbours.
__device__ __forceinline__ int first_x_row(const Grid& g, int tile, int rows) {
  return tile % g.row_tiles * rows;
}

__device__ __forceinline__ int first_w_row(const Grid& g, int tile) {
  return tile / g.row_tiles * g.tile_rows;
}

// The work of a block: parts [begin, end) of tiles `tile`, `tile + step`, ...
struct Work {
  int num_blocks, parts, each, begin, end, tile, step;  // each: parts of a block of a cluster
  __device__ Work(const LinearParams& p, const Grid& grid)
      : num_blocks(num_blocks_of(p)),
        parts(p.parts),
        each(p.parts / grid.split),
        begin(static_cast<int>(blockIdx.x % grid.split) * each),
        end(begin + each),
        tile(blockIdx.x / grid.split),
        step(gridDim.x / grid.split) {}
};

// A stage of the ring, and the phase of its barriers.
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

// Called by one thread: fills the weights' half of the ring, or the half of x once the prior
// kernels have ended, in the order of sum_tile and sum_held.
// The last row tile has a map of its own without rows past the end, which would be filled with
// zeros. The sums of those rows are not stored, so they may read what is there.
template <typename Of, bool kWeights>
__device__ __forceinline__ void load_operand(const Work& work, const Grid& grid, bool pairs,
                                             const CUtensorMap* map, const CUtensorMap* last_map,
                                             char* ring, Barriers* barriers) {
  uint32_t base = shared_address(ring) + (kWeights ? 0 : grid.tile_rows * kLineBytes);
  uint32_t full = shared_address(barriers->full), empty = shared_address(barriers->empty);
  asm volatile("" : "+r"(base), "+r"(full), "+r"(empty));  // computed once, not for each block of K
  RingPosition at;
  for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
    int row = kWeights ? first_w_row(grid, tile) : first_x_row(grid, tile, Of::kRows);
    if (!kWeights && tile == work.tile) {
      asm volatile("" : "+r"(row));  // computed in advance
      wait_for_prior_grid();
    }
    const bool last = !kWeights && tile % grid.row_tiles == grid.row_tiles - 1;
    const CUtensorMap* const from = last ? last_map : map;
    const int rows = kWeights ? grid.tile_rows : last ? grid.last_rows : Of::kRows;
    const auto load = [&](int block) {
      const uint32_t barrier = full + at.stage * 8, to = base + at.stage * grid.stage_bytes;
      wait_barrier(empty + at.stage * 8, at.parity ^ 1);
      arrive_expecting(barrier, rows * kLineBytes);
      kWeights&& pairs ? copy_pairs(to, from, block * kBlockK, row, barrier)
                       : copy_rows(to, from, block * kBlockK, row, barrier);
      at.advance(grid.stages);
    };
    const int beside = Of::kTurns && work.each >= 4 ? 1 : Of::kHeld;
    for (int first = work.begin; first < work.end; first += beside) {
      const int held = min(beside, work.end - first);
      for (int block = first; block < work.num_blocks; block += work.parts) {
        const int end = min(block + held, work.num_blocks);
#pragma unroll 1
        for (int i = block; i < end; ++i) load(i);
      }
    }
  }
}

}  // namespace tlt
