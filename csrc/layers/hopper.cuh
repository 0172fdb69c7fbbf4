// Parts of the wgmma kernel (linear_hopper.cu): its tiles and who takes which, the loads, the
// products and what becomes of their sums.
#pragma once

#include <algorithm>

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "layers/columns.cuh"
#include "layers/decode.cuh"
#include "layers/products.cuh"

namespace tlt {

constexpr int kGroup = 4 * kWarpSize;  // threads of a warpgroup
constexpr int kLineBytes = kBlockK * 2;
constexpr int kMaxStages = 10;
constexpr int kMaxShared = 227 * 1024;

template <int kGroups_, int kRows_, int kHeld_>
struct Tile {
  static constexpr int kGroups = kGroups_;             // that multiply
  static constexpr int kRows = kRows_;                 // of x
  static constexpr int kHeld = kHeld_;                 // parts of K summed side by side
  static constexpr int kPerSm = kGroups == 1 ? 2 : 1;  // blocks that fit beside each other
  static constexpr int kWeightRows = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kSums = kWeightRows * kRows;
  static constexpr int kTurnRows = std::min(kRows, 32);  // turned from wgmma's layout at once
  static constexpr int kTurn = kTurnRows * 64;
  static constexpr int kStageBytes = (kWeightRows + kRows) * kLineBytes;
  static constexpr int kStages = std::min(
      kMaxStages, (kMaxShared / kPerSm - 1024 * (kPerSm + 1) - kGroups * kTurn * 4) / kStageBytes);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kTurn * 4;
  static constexpr int kMaxSplitParts = std::min(kHeld, 4);  // of a block, where a cluster shares
  // A block starts with kStartRegisters a thread; those that multiply take what the others give.
  static constexpr int kStartRegisters = 65536 / (kPerSm * kThreads) / 8 * 8;
  static constexpr int kRegisters = kGroups == 1 ? 208 : kGroups == 2 ? 232 : 160;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;
  static_assert(kGroups * kRegisters + kLoadRegisters <= (kGroups + 1) * kStartRegisters,
                "a warpgroup would wait for registers forever");
  static_assert(kMaxSplitParts * kSums * 4 <= kStages * kStageBytes, "sums reuse the ring");
};

struct Grid {
  int tile_rows;  // weight rows of a tile, a multiple of 8; of 16 where they are gates and ups
  int row_tiles, tiles, blocks;
  int split;  // blocks of a cluster that share the parts of a tile
};

// First rows of a tile; those of the same weights are neighbours.
__device__ __forceinline__ int first_x_row(const Grid& g, int tile, int rows) {
  return tile % g.row_tiles * rows;
}

__device__ __forceinline__ int first_w_row(const Grid& g, int tile) {
  return tile / g.row_tiles * g.tile_rows;
}

// What a block does: parts [begin, end) of tiles `tile`, `tile + step`, ...
struct Work {
  int num_blocks, begin, end, tile, step;
  __device__ Work(const LinearParams& p, const Grid& grid)
      : num_blocks(num_blocks_of(p)), tile(blockIdx.x / grid.split), step(gridDim.x / grid.split) {
    const int parts = (kParts + grid.split - 1) / grid.split;
    begin = static_cast<int>(blockIdx.x % grid.split) * parts;
    end = min(begin + parts, kParts);
  }
};

// A place in the ring, and the phase of its barriers.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

// By one thread: fills the weights' half of the ring, or that of x, in the order of sum_held.
template <typename Of, bool kWeights>
__device__ __forceinline__ void load_operand(const Work& work, const Grid& grid, bool pairs,
                                             const CUtensorMap* map, char* ring,
                                             Barriers* barriers) {
  const int rows = kWeights ? grid.tile_rows : Of::kRows;
  const uint32_t base = shared_address(ring) + (kWeights ? 0 : Of::kWeightRows * kLineBytes);
  RingPosition<Of::kStages> at;
  for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
    const int row = kWeights ? first_w_row(grid, tile) : first_x_row(grid, tile, Of::kRows);
    const auto load = [&](int block) {
      uint64_t* full = &barriers->full[at.stage];
      wait_barrier(&barriers->empty[at.stage], at.parity ^ 1);
      arrive_expecting(full, rows * kLineBytes);
      const uint32_t to = base + at.stage * Of::kStageBytes;
      kWeights&& pairs ? copy_pairs(to, map, block * kBlockK, row, full)
                       : copy_rows(to, map, block * kBlockK, row, full);
      at.advance();
    };
    for (int first = work.begin; first < work.end; first += Of::kHeld) {
      const int held = min(Of::kHeld, work.end - first);
      for (int block = first; block < work.num_blocks; block += kParts) {
        const int end = min(block + held, work.num_blocks);
#pragma unroll 1
        for (int i = block; i < end; ++i) load(i);
      }
    }
  }
}

// f(j, c) for each sum that a lane holds of one part: see products.cuh.
template <int kRows, typename F>
__device__ __forceinline__ void for_each_sum(F&& f) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) f(j, c);
  }
}

// What a warpgroup multiplies, and what becomes of its sums.
template <typename T, typename Of>
class Multiplier {
 public:
  __device__ Multiplier(const LinearKernelParams& params, const Grid& grid, const Work& work,
                        char* ring, Barriers* barriers)
      : params_(params),
        p_(params.linear),
        grid_(grid),
        work_(work),
        ring_(ring),
        barriers_(barriers),
        lane_(threadIdx.x % kWarpSize),
        group_(threadIdx.x / kGroup),
        multiplies_(group_ * 64 < grid.tile_rows) {}

  // Sums the next tile.
  __device__ __forceinline__ void sum_tile(float (&total)[Of::kRows / 8][4]) {
    for_each_sum<Of::kRows>([&](int j, int c) { total[j][c] = -0.0f; });  // -0 + x is x
#pragma unroll 1
    for (int first = 0; first < kParts; first += Of::kHeld) {
      float acc[Of::kHeld][Of::kRows / 8][4];
      sum_held(acc, first);
#pragma unroll
      for (int i = 0; i < Of::kHeld; ++i) {
        for_each_sum<Of::kRows>([&](int j, int c) { total[j][c] += acc[i][j][c]; });
      }
    }
  }

  // Where a cluster shares the parts: sums this block's, and keeps each in the ring's place.
  __device__ __forceinline__ void sum_parts() {
    float acc[Of::kHeld][Of::kRows / 8][4];
    sum_held(acc, work_.begin);
    asm volatile("bar.sync 1, %0;" ::"n"(Of::kGroups * kGroup) : "memory");  // the ring is read
    float* sums = reinterpret_cast<float*>(ring_) + group_ * 64;
    const int first = first_place<Of::kWeightRows>(threadIdx.x % kGroup);
#pragma unroll
    for (int i = 0; i < Of::kMaxSplitParts; ++i) {
      if (work_.begin + i >= work_.end) break;
      for_each_sum<Of::kRows>([&](int j, int c) {
        sums[i * Of::kSums + place<Of::kWeightRows>(first, j, c)] = acc[i][j][c];
      });
    }
  }

  // Stores a tile's sums, kTurnRows rows at a time turned through shared memory.
  __device__ __forceinline__ void store_tile(const float (&total)[Of::kRows / 8][4], int tile,
                                             float* turn) {
    int thread = threadIdx.x % kGroup;
    asm volatile("" : "+r"(thread));  // what follows from it is worked out here, not kept meanwhile
    const int log = params_.silu_mul ? 2 : 3, columns = 1 << log;  // threads of a row
    const int turn_col = (thread & (columns - 1)) << (6 - log), col = group_ * 64 + turn_col;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    turn += group_ * Of::kTurn;
    const int first = first_place<64>(thread);
    int x_row = first_x_row(grid_, tile, Of::kRows);
#pragma unroll 1
    for (int part = 0; part < Of::kRows / Of::kTurnRows; ++part, x_row += Of::kTurnRows) {
      if (x_row >= p_.rows) break;
      const int end = min(x_row + Of::kTurnRows, static_cast<int>(p_.rows));
      sync_group();  // the last rows are read
#pragma unroll
      for (int i = 0; i < Of::kRows / Of::kTurnRows; ++i) {
        if (i != part) continue;
        for_each_sum<Of::kTurnRows>([&](int j, int c) {
          turn[place<64>(first, j, c)] = total[i * Of::kTurnRows / 8 + j][c];
        });
      }
      sync_group();
      if (has_col) {
        store_columns<T>(params_, out_col(w_row + col), x_row + (thread >> log), end, kGroup >> log,
                         [&](int row, float (&sum)[8]) {
                           load_8<T>(turn, sum_index<64>(row - x_row, turn_col), true, sum);
                           if (params_.silu_mul) {
                             float up[8];
                             load_8<T>(turn, sum_index<64>(row - x_row, turn_col + 8), true, up);
                             activate_8<T>(sum, up);
                           }
                         });
      }
    }
  }

  // Adds the parts of all blocks of a cluster for its share of the rows.
  template <typename Cluster>
  __device__ __forceinline__ void store_parts(const Cluster& cluster) {
    float* sums = reinterpret_cast<float*>(ring_);
    const int parts = (kParts + grid_.split - 1) / grid_.split, rank = work_.begin / parts;
    const int width = params_.silu_mul ? 16 : 8, columns = Of::kWeightRows / width;
    const int pass = Of::kGroups * kGroup / columns;
    const int thread = threadIdx.x, col = thread % columns * width;
    const int64_t w_row = first_w_row(grid_, work_.tile);
    const int x_row = first_x_row(grid_, work_.tile, Of::kRows);
    const int end = min(x_row + Of::kRows, static_cast<int>(p_.rows));
    if (col >= grid_.tile_rows || w_row + col >= p_.out_dim) return;
    const auto add_parts = [&](int row, int at, float (&sum)[8]) {
      float* mine = sums + sum_index<Of::kWeightRows>(row - x_row, at);
      float part[kParts][8];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        const float* theirs = cluster.map_shared_rank(mine, w / parts);
        load_8<T>(theirs, w % parts * Of::kSums, true, part[w]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        sum[c] = part[0][c];
#pragma unroll
        for (int w = 1; w < kParts; ++w) sum[c] += part[w][c];
      }
    };
    const int first = x_row + rank + thread / columns * grid_.split;
    store_columns<T>(params_, out_col(w_row + col), first, end, pass * grid_.split,
                     [&](int row, float (&sum)[8]) {
                       add_parts(row, col, sum);
                       if (params_.silu_mul) {
                         float up[8];
                         add_parts(row, col + 8, up);
                         activate_8<T>(sum, up);
                       }
                     });
  }

 private:
  __device__ __forceinline__ int64_t out_col(int64_t w_row) const {
    return params_.silu_mul ? w_row / 2 : w_row;  // of eight gates
  }

  // Where sum (j, c) of this lane lies among kCols columns: sum_index of row 8 j + 2 t + c % 2 and
  // column 16 warp + g + 8 (c / 2), as one of two registers and a constant.
  template <int kCols>
  static __device__ __forceinline__ int first_place(int thread) {
    static_assert(kCols % 32 == 0, "rows leave the bits that sum_index changes alone");
    const int t = thread % 4, col = thread / kWarpSize * 16 + thread % kWarpSize / 4;
    return t * 2 * kCols + (col ^ t * 8);
  }
  template <int kCols>
  static __device__ __forceinline__ int place(int first, int j, int c) {
    return (first ^ c / 2 * 8) + (j * 8 + c % 2) * kCols;
  }

  // Parts `first` to `first` + kHeld of the next tile, those of them that are this block's.
  __device__ __forceinline__ void sum_held(float (&acc)[Of::kHeld][Of::kRows / 8][4], int first) {
#pragma unroll
    for (int i = 0; i < Of::kHeld; ++i) {
      for_each_sum<Of::kRows>([&](int j, int c) { acc[i][j][c] = 0.0f; });
    }
#pragma unroll 1
    for (int block = first; block < work_.num_blocks; block += kParts) {
#pragma unroll
      for (int i = 0; i < Of::kHeld; ++i) {
        if (first + i < work_.end && block + i < work_.num_blocks) multiply(acc[i]);
      }
    }
    group_wait_for_all_but<0>();
#pragma unroll
    for (int i = 0; i < Of::kHeld; ++i) {
      for_each_sum<Of::kRows>([&](int j, int c) {
        asm volatile("" : "+f"(acc[i][j][c])::"memory");
      });
    }
    release();
  }

  __device__ __forceinline__ void multiply(float (&acc)[Of::kRows / 8][4]) {
    wait_barrier(&barriers_->full[at_.stage], at_.parity);
    if (multiplies_) {
      const uint32_t stage = shared_address(ring_) + at_.stage * Of::kStageBytes;
      const SharedMatrix w(stage + group_ * 64 * kLineBytes);
      const SharedMatrix x(stage + Of::kWeightRows * kLineBytes);
      group_fence();
#pragma unroll
      for (int k = 0; k < kBlockK / 16; ++k) {
        multiply_64<T>(acc, w.at(k * 32), x.at(k * 32));
      }
      group_commit();
      group_wait_for_all_but<1>();
    }
    release();
    last_ = at_.stage;
    at_.advance();
  }

  // The stage before is read.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have seen the stage full: its barrier may turn again
    if (last_ >= 0 && lane_ == 0) arrive(&barriers_->empty[last_]);
    last_ = -1;
  }

  __device__ __forceinline__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group_), "n"(kGroup) : "memory");
  }

  const LinearKernelParams& params_;
  const LinearParams& p_;
  const Grid& grid_;
  const Work& work_;
  char* ring_;
  Barriers* barriers_;
  const int lane_, group_;
  const bool multiplies_;
  RingPosition<Of::kStages> at_;
  int last_ = -1;  // the stage of the products under way
};

}  // namespace tlt
