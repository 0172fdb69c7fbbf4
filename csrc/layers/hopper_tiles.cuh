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

// A tile of kAcross x kAlong warpgroups, of 64 weight rows x kColumns rows of x each. Every thread
// holds the sums of three parts of K.
template <int kAcross_, int kAlong_, int kColumns_>
struct Tile {
  static constexpr int kAcross = kAcross_, kAlong = kAlong_, kColumns = kColumns_;
  static constexpr int kGroups = kAcross * kAlong;  // warpgroups that multiply
  static constexpr int kWeightRows = kAcross * 64;
  static constexpr int kRows = kAlong * kColumns;      // rows of x
  static constexpr bool kSaves = kColumns > 96;        // see Multiplier::save
  static constexpr int kPerSm = kGroups == 1 ? 2 : 1;  // blocks of a multiprocessor
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kTurnRows = kSaves ? 32 : kColumns / 2;  // of x, transposed at once
  static constexpr int kTurn = (kSaves ? kColumns : kTurnRows) * 64;
  static constexpr int kTurnBytes = kGroups * kTurn * 4;
  static constexpr int kRingBytes =
      (kMaxShared / kPerSm - 1024 * (kPerSm + 1) - kTurnBytes) / 1024 * 1024;
  static constexpr int kSharedBytes = 1024 + kRingBytes + kTurnBytes;
  // Each thread starts with kStartRegisters; multiplying warps take the registers that others
  // release.
  static constexpr int kStartRegisters = 65536 / (kPerSm * kThreads) / 8 * 8;
  static constexpr int kRegisters = kGroups == 1 ? 208 : 232;
  static constexpr int kLoadRegisters = kGroups == 1 ? 48 : 40;
  // Least cycles of a block of K, and cycles of the end of a tile: terms of the estimate in
  // consider_grid.
  static constexpr int kBlockCycles = kGroups == 1     ? 350
                                      : kAlong == 2    ? 420
                                      : kColumns <= 96 ? 460
                                                       : 575;
  static constexpr int kTileCycles = kGroups == 1     ? 1550
                                     : kAlong == 2    ? 780
                                     : kColumns <= 96 ? 2440
                                                      : 3500;
  static_assert(kGroups * kRegisters + kLoadRegisters <= (kGroups + 1) * kStartRegisters,
                "a warpgroup would wait for registers forever");
  static_assert(kWeightRows * kRows * 4 <= kRingBytes, "sums reuse the ring");
  static_assert(kColumns % kTurnRows == 0 && kColumns % 16 == 0, "rows are transposed in pairs");
  static_assert(kTurn * 4 >= kColumns * 128, "packed outputs are transposed at once");
  // A block multiplies kWeightRows weight rows by kRows rows of x. A stage may hold only 8 of each
  // (Grid). The others are not stored, but they are read: from the following stages, and behind the
  // last stage from the memory where tiles are transposed. x begins after at least 8 weight rows.
  static_assert((std::max(kRows, kWeightRows - 8) - 8) * kLineBytes <= kTurnBytes,
                "the last stage reads too far");
};

constexpr int kPartsAtOnce = 2;  // parts of K that are multiplied side by side

struct Grid {
  int row_tiles, tiles, blocks;
  int whole;      // tiles that one block sums; of the others, a cluster shares the parts
  int split;      // blocks of a cluster: 1, 2, 4 or 8
  int tile_rows;  // weight rows of a tile, a multiple of 8; of 16 for gates and ups
  int last_rows;  // rows of x of the last row tile
  // The ring: a stage holds a block of K of `tile_rows` weight rows, then of up to kRows rows of x.
  // It has no room for absent ones: the smaller the stages, the more weights a block loads before
  // the prior kernels end.
  int stages, stage_bytes;
};

// First rows of a tile. Tiles of the same weights are neighbours.
__device__ __forceinline__ int first_x_row(const Grid& g, int tile, int rows) {
  return tile % g.row_tiles * rows;
}

__device__ __forceinline__ int first_w_row(const Grid& g, int tile) {
  return tile / g.row_tiles * g.tile_rows;
}

// The work of a block: tiles `tile`, `tile + step`, ... before grid.whole, then, of a tile of its
// cluster, parts [begin, end).
struct Work {
  int num_blocks, parts, each, begin, end, tile, step;  // each: parts of a block of a cluster
  __device__ Work(const LinearParams& p, const Grid& grid)
      : num_blocks(max(num_blocks_of(p), p.parts)),  // those past the end of K read as zeros
        parts(p.parts),
        each(p.parts),
        begin(0),
        end(p.parts),
        tile(blockIdx.x),
        step(gridDim.x) {}

  // Turns to the tile of the cluster; false: it has none.
  __device__ bool share(const Grid& grid) {
    tile = grid.whole + blockIdx.x / grid.split;
    each = parts / grid.split;
    begin = static_cast<int>(blockIdx.x % grid.split) * each;
    end = begin + each;
    return tile < grid.tiles;
  }
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

// Called by one thread: fills the weights' part of each stage, or the part of x once the prior
// kernels have ended, in the order of Multiplier::sum_parts.
//
// The last row tile has a map of its own without rows past the end, which would be filled with
// zeros. The sums of those rows are not stored, so they may read what is there.
template <typename Of, bool kWeights>
__device__ __forceinline__ void load_operand(Work work, const Grid& grid, bool pairs,
                                             const CUtensorMap* map, const CUtensorMap* last_map,
                                             char* ring, Barriers* barriers) {
  uint32_t base = shared_address(ring) + (kWeights ? 0 : grid.tile_rows * kLineBytes);
  uint32_t full = shared_address(barriers->full), empty = shared_address(barriers->empty);
  asm volatile("" : "+r"(base), "+r"(full), "+r"(empty));  // computed once, not for each block of K
  RingPosition at;
  bool waits = !kWeights;
  const auto load_tile = [&](int tile) {
    int row = kWeights ? first_w_row(grid, tile) : first_x_row(grid, tile, Of::kRows);
    if (waits) {
      asm volatile("" : "+r"(row));  // computed in advance
      wait_for_prior_grid();
      waits = false;
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
    for (int first = work.begin; first < work.end; first += kPartsAtOnce) {
      const int count = min(kPartsAtOnce, work.end - first);
      for (int block = first; block < work.num_blocks; block += work.parts) {
        const int end = min(block + count, work.num_blocks);
#pragma unroll 1
        for (int i = block; i < end; ++i) load(i);
      }
    }
  };
  for (int tile = work.tile; tile < grid.whole; tile += work.step) load_tile(tile);
  if (work.share(grid)) load_tile(work.tile);
}

}  // namespace tlt
