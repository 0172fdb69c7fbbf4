// linear_rows for more than 8 rows of float16 or bfloat16 on sm_90a, with the bits of the decode
// kernel (order of the sum: linear.cuh), by tensor copies and wgmma.
//
// A tile is up to 128 or 192 weight rows (operand A, 64 to a warpgroup) x 16 to 128 rows of x
// (operand B). Two warps of one more warpgroup keep a ring of blocks of 64 elements of k filled:
// one with weights, which it asks for before the kernels before this one end, one with x. Several
// parts of K are summed side by side, so that a row's bytes are asked for 256 and more at a time,
// as memory likes it. A block goes on to its next tile while the last one is stored.
//
// With few tiles a cluster shares the parts of K, and its blocks' sums meet in distributed shared
// memory, part by part. With an even number of row tiles, two blocks of one weight tile each load
// half of it for both; four blocks share their two x tiles likewise. Which shape and grid a call
// gets: `consider`.
#include <cooperative_groups.h>

#include <algorithm>

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "layers/decode.cuh"
#include "layers/linear.cuh"
#include "layers/products.cuh"

namespace tlt {
namespace {

constexpr int kGroup = 4 * kWarpSize;  // threads of a warpgroup
constexpr int kLineBytes = kBlockK * 2;
constexpr int kMaxStages = 10;
constexpr int kMaxShared = 227 * 1024 - 2 * kMaxStages * 8;

template <int kGroups_, int kRows_, int kHeld_>
struct Tile {
  static constexpr int kGroups = kGroups_;  // that multiply
  static constexpr int kRows = kRows_;      // of x
  static constexpr int kHeld = kHeld_;      // parts of K summed side by side
  static constexpr int kWeightRows = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kSums = kWeightRows * kRows;
  static constexpr int kTurnRows = std::min(kRows, 32);  // turned from wgmma's layout at once
  static constexpr int kTurn = kTurnRows * 64;
  static constexpr int kStageBytes = (kWeightRows + kRows) * kLineBytes;
  static constexpr int kStages =
      std::min(kMaxStages, (kMaxShared - 1024 - kGroups * kTurn * 4) / kStageBytes);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kTurn * 4;
  static constexpr int kMaxSplitParts = std::min(kHeld, 4);  // of a block, where a cluster shares
  // A multiprocessor has 65536 registers: these for each thread that multiplies, of the others.
  static constexpr int kRegisters = kGroups == 2 ? 232 : 160;
  static constexpr int kLoadRegisters = kGroups == 2 ? 40 : 32;
  static_assert(kGroup * (kGroups * kRegisters + kLoadRegisters) <= 65536, "registers");
  static_assert(kMaxSplitParts * kSums * 4 <= kStages * kStageBytes, "sums reuse the ring");
};

struct Grid {
  int tile_rows;  // weight rows of a tile, a multiple of 8; of 16 where blocks share
  int row_tiles, tiles, blocks;
  int split;  // blocks of a cluster that share the parts of a tile
  int share;  // 2: of a weight tile, 4: two by two of a weight tile and of an x tile; else 1

  __host__ __device__ int cluster() const { return share > 1 ? share : split; }
};

// First rows of a tile. Blocks of a cluster have neighbouring tiles: bit 0 of their rank says which
// x tile, bit 1 of four which weight tile.
[[maybe_unused]] __device__ __forceinline__ int first_x_row(const Grid& g, int tile, int rows) {
  const int half = g.row_tiles / 2;
  return (g.share == 4 ? tile / 4 % half * 2 + tile % 2 : tile % g.row_tiles) * rows;
}

[[maybe_unused]] __device__ __forceinline__ int first_w_row(const Grid& g, int tile) {
  const int half = g.row_tiles / 2;
  return (g.share == 4 ? tile / 4 / half * 2 + tile / 2 % 2 : tile / g.row_tiles) * g.tile_rows;
}

// Blocks that fill a block's ring, itself among them: rank ^ 0, rank ^ 1, rank ^ 2.
[[maybe_unused]] __device__ __forceinline__ int fillers(const Grid& grid) {
  return min(grid.share, 3);
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
__device__ __forceinline__ void load_operand(const Work& work, const Grid& grid,
                                             const CUtensorMap* map, char* ring,
                                             Barriers* barriers) {
  // With others of the cluster, each loads a slice for all that share the tile.
  const int rank = blockIdx.x % grid.share, rows = kWeights ? grid.tile_rows : Of::kRows;
  const bool shares = kWeights ? grid.share > 1 : grid.share == 4;
  const int slice = shares ? (kWeights ? rank % 2 : rank / 2) * rows / 2 : 0;
  const uint16_t sharers = kWeights ? 3 << (rank & 2) : 5 << (rank & 1);
  const uint32_t base =
      shared_address(ring) + (slice + (kWeights ? 0 : Of::kWeightRows)) * kLineBytes;
  RingPosition<Of::kStages> at;
  for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
    const int row =
        slice + (kWeights ? first_w_row(grid, tile) : first_x_row(grid, tile, Of::kRows));
    const auto load = [&](int block) {
      const uint32_t to = base + at.stage * Of::kStageBytes;
      uint64_t* full = &barriers->full[at.stage];
      wait_barrier(&barriers->empty[at.stage], at.parity ^ 1);
      arrive_expecting(full, rows * kLineBytes);
      if (shares) {
        copy_rows_to_all(to, map, block * kBlockK, row, full, sharers);
      } else {
        copy_rows(to, map, block * kBlockK, row, full);
      }
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

// One column of out: rows `row`, `row + step`, ... before `end`. What is added is asked for ahead.
template <typename T, typename F>
__device__ __forceinline__ void store_column(const LinearParams& p, int64_t col, int row, int end,
                                             int step, F&& sum_of) {
  constexpr int kAhead = 8;
#pragma unroll 1
  for (; row < end; row += kAhead * step) {
    Added added[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row + i * step < end) added[i] = load_added<T>(p, row + i * step, col);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = row + i * step;
      if (at < end) store_added<T>(p, at, col, sum_of(at), added[i]);
    }
  }
}

// What a warpgroup multiplies, and what becomes of its sums.
template <typename T, typename Of>
class Multiplier {
 public:
  __device__ Multiplier(const LinearParams& p, const Grid& grid, const Work& work, char* ring,
                        Barriers* barriers)
      : p_(p),
        grid_(grid),
        work_(work),
        ring_(ring),
        barriers_(barriers),
        lane_(threadIdx.x % kWarpSize),
        group_(threadIdx.x / kGroup),
        multiplies_(group_ * 64 < grid.tile_rows) {}

  // Sums the next tile.
  __device__ __forceinline__ void sum_tile(float (&total)[Of::kRows / 8][4]) {
#pragma unroll 1
    for (int first = 0; first < kParts; first += Of::kHeld) {
      float acc[Of::kHeld][Of::kRows / 8][4];
      sum_held(acc, first);
#pragma unroll
      for (int i = 0; i < Of::kHeld; ++i) {
        for_each_sum<Of::kRows>([&](int j, int c) {
          total[j][c] = first + i == 0 ? acc[i][j][c] : total[j][c] + acc[i][j][c];
        });
      }
    }
  }

  // Where a cluster shares the parts: sums this block's, and keeps each in the ring's place.
  __device__ __forceinline__ void sum_parts() {
    float acc[Of::kHeld][Of::kRows / 8][4];
    sum_held(acc, work_.begin);
    asm volatile("bar.sync 1, %0;" ::"n"(Of::kGroups * kGroup) : "memory");  // the ring is read
    float* sums = reinterpret_cast<float*>(ring_);
#pragma unroll
    for (int i = 0; i < Of::kMaxSplitParts; ++i) {
      if (work_.begin + i >= work_.end) break;
      for_each_sum<Of::kRows>([&](int j, int c) {
        sums[i * Of::kSums + sum_index<Of::kWeightRows>(row_of(j, c), col_of(c))] = acc[i][j][c];
      });
    }
  }

  __device__ __forceinline__ void store_tile(const float (&total)[Of::kRows / 8][4], int tile,
                                             float* turn) {
    const int thread = threadIdx.x % kGroup, col = group_ * 64 + thread % 64;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    turn += group_ * Of::kTurn;
#pragma unroll
    for (int part = 0; part < Of::kRows / Of::kTurnRows; ++part) {
      const int x_row = first_x_row(grid_, tile, Of::kRows) + part * Of::kTurnRows;
      const int end = min(x_row + Of::kTurnRows, static_cast<int>(p_.rows));
      sync_group();  // the last rows are read
      for_each_sum<Of::kTurnRows>([&](int j, int c) {
        turn[sum_index<64>(row_of(j, c), col_of(c) % 64)] = total[part * Of::kTurnRows / 8 + j][c];
      });
      sync_group();
      if (has_col) {
        store_column<T>(p_, w_row + col, x_row + thread / 64, end, 2,
                        [&](int row) { return turn[sum_index<64>(row - x_row, thread % 64)]; });
      }
    }
  }

  // Adds the parts of all blocks of a cluster for its share of the rows.
  template <typename Cluster>
  __device__ __forceinline__ void store_parts(const Cluster& cluster) {
    float* sums = reinterpret_cast<float*>(ring_);
    const int parts = (kParts + grid_.split - 1) / grid_.split, rank = work_.begin / parts;
    const int col = threadIdx.x % Of::kWeightRows;
    const int64_t w_row = first_w_row(grid_, work_.tile);
    const int x_row = first_x_row(grid_, work_.tile, Of::kRows);
    const int end = min(x_row + Of::kRows, static_cast<int>(p_.rows));
    if (col >= grid_.tile_rows || w_row + col >= p_.out_dim) return;
    const int first = x_row + rank + static_cast<int>(threadIdx.x / Of::kWeightRows) * grid_.split;
    store_column<T>(p_, w_row + col, first, end, 2 * grid_.split, [&](int row) {
      float* mine = sums + sum_index<Of::kWeightRows>(row - x_row, col);
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        part[w] = cluster.map_shared_rank(mine, w / parts)[w % parts * Of::kSums];
      }
      return sum_of_parts(part);
    });
  }

 private:
  // Where sum (j, c) of this lane lies in the tile.
  __device__ __forceinline__ int row_of(int j, int c) const {
    return j * 8 + lane_ % 4 * 2 + c % 2;
  }
  __device__ __forceinline__ int col_of(int c) const {
    return static_cast<int>(threadIdx.x / kWarpSize) * 16 + lane_ / 4 + c / 2 * 8;
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
    wait_products<0>();
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
      const uint64_t w = describe_operand(stage + group_ * 64 * kLineBytes);
      const uint64_t x = describe_operand(stage + Of::kWeightRows * kLineBytes);
      start_products();
#pragma unroll
      for (int k = 0; k < kBlockK / 16; ++k) {
        multiply_64<T>(acc, w + k * kNextStep, x + k * kNextStep);
      }
      commit_products();
      wait_products<1>();
    }
    release();
    last_ = at_.stage;
    at_.advance();
  }

  // The stage before is read: says so to all blocks that fill it.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have seen the stage full: its barrier may turn again
    if (last_ >= 0 && lane_ < fillers(grid_)) {
      uint64_t* empty = &barriers_->empty[last_];
      grid_.share > 1 ? arrive_at(empty, blockIdx.x % grid_.share ^ lane_) : arrive(empty);
    }
    last_ = -1;
  }

  __device__ __forceinline__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group_), "n"(kGroup) : "memory");
  }

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

template <typename T, typename Of>
__global__ void __launch_bounds__(Of::kThreads, 1)
    hopper_kernel(const __grid_constant__ LinearKernelParams params,
                  const __grid_constant__ Grid grid, const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  __shared__ Barriers barriers;
  char* ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
  launch_dependents();
  const LinearParams& p = params.linear;
  const auto cluster = cooperative_groups::this_cluster();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  constexpr int kLoader = Of::kGroups * 4;  // the warp that loads weights; the next one loads x
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Of::kStages; ++stage) {
      init_barrier(&barriers.full[stage], 2);
      init_barrier(&barriers.empty[stage], Of::kGroups * 4 * fillers(grid));
    }
    fence_barriers();
    fence_copies();
  }
  if (lane == 0 && warp == kLoader) prefetch_map(&w_map);
  if (lane == 0 && warp == kLoader + 1) prefetch_map(&x_map);
  grid.share > 1 ? cluster.sync() : __syncthreads();

  if (warp >= kLoader) {
    give_registers<Of::kLoadRegisters>();
    const Work work(p, grid);
    if (warp == kLoader && lane == 0) {
      load_operand<Of, true>(work, grid, &w_map, ring, &barriers);
    }
    if (warp == kLoader + 1 && lane == 0) {
      wait_for_prior_grid();
      load_operand<Of, false>(work, grid, &x_map, ring, &barriers);
    }
    __syncwarp();
    if (grid.split > 1) cluster.sync();
  } else {
    take_registers<Of::kRegisters>();
    const Work work(p, grid);
    float* turn = reinterpret_cast<float*>(ring + Of::kStages * Of::kStageBytes);
    Multiplier<T, Of> multiplier(p, grid, work, ring, &barriers);
    if (grid.split > 1) {
      multiplier.sum_parts();
      wait_for_prior_grid();
      cluster.sync();
      multiplier.store_parts(cluster);
    } else {
#pragma unroll 1
      for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
        float total[Of::kRows / 8][4];
        multiplier.sum_tile(total);
        wait_for_prior_grid();
        multiplier.store_tile(total, tile, turn);
      }
    }
  }
  // Nobody's sums go away while they are read, nobody's barriers while others arrive at them.
  if (grid.cluster() > 1) cluster.sync();
#endif
}

// ---- the grid -----------------------------------------------------------------------------------

struct Choice {
  int64_t cycles = INT64_MAX;
  Grid grid;
  void (*launch)(const LinearKernelParams& p, const Grid& grid, const Card& card,
                 cudaStream_t stream);
};

template <typename T, typename Of>
void launch(const LinearKernelParams& p, const Grid& grid, const Card& card, cudaStream_t stream) {
  const auto kernel = hopper_kernel<T, Of>;
  allow_shared(kernel, Of::kSharedBytes);
  const LinearParams& linear = p.linear;
  const KernelShape shape{grid.blocks, Of::kThreads, Of::kSharedBytes,
                          static_cast<unsigned>(grid.cluster())};
  const int w_box = grid.share > 1 ? grid.tile_rows / 2 : grid.tile_rows;
  const int x_box = grid.share == 4 ? Of::kRows / 2 : Of::kRows;
  launch_kernel(
      "linear", kernel, shape, stream, p.early, p, grid,
      make_row_map(linear.weight, linear.out_dim, linear.in_dim, linear.weight_stride, w_box),
      make_row_map(linear.x, linear.rows, linear.in_dim, linear.x_stride, x_box));
}

// Takes a tile shape where it promises to be faster than the best so far. A block of K takes as
// long as its bytes come from L2 (kL2Bytes a cycle and multiprocessor), or as its products take.
template <typename T, typename Of>
void consider(const LinearParams& p, const Card& card, Choice* best) {
  constexpr int kL2Bytes = 30, kRoundCycles = 1000, kSplitCycles = 2500, kLeastCycles = 200;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t row_tiles = ceil_div(p.rows, Of::kRows);
  const int64_t steps = ceil_div(ceil_div(p.in_dim, kBlockK), kParts);
  struct {
    int split, share;
  } constexpr kinds[] = {{1, 1}, {1, 2}, {1, 4}, {2, 1}, {3, 1}, {4, 1}, {8, 1}};
  for (const auto& [split, share] : kinds) {
    const int cluster = split * share;
    // Clusters of more than two do not reach all multiprocessors.
    const int64_t reached = cluster > 2 ? card.num_sms * 15 / 16 : card.num_sms;
    const int64_t slots = std::max<int64_t>(reached - reached % cluster, cluster);
    const int64_t parts = ceil_div(kParts, split);
    const int64_t unit = share == 4 ? 2 : 1;  // of weight tiles
    const auto tiles_of = [&](int64_t tile_rows) {
      return ceil_div(ceil_div(p.out_dim, tile_rows), unit) * unit * row_tiles;
    };
    int64_t tile_rows = Of::kWeightRows;
    if (share > 1 && row_tiles % 2 != 0) continue;
    if (split > 1 && (parts > Of::kMaxSplitParts || tiles_of(tile_rows) * split > slots)) continue;
    const int64_t rounds = ceil_div(tiles_of(tile_rows) * split, slots);
    if (split == 1) {  // equal shares of the weights for all
      const int64_t shares = std::max(rounds * slots / row_tiles / unit * unit, unit);
      const int64_t multiple = share > 1 ? 16 : 8;
      const int64_t rows = ceil_div(ceil_div(p.out_dim, shares), multiple) * multiple;
      tile_rows = std::min(rows, tile_rows);
    }
    const int64_t tiles = tiles_of(tile_rows);
    const int64_t loaded = tile_rows / (share > 1 ? 2 : 1) + Of::kRows / (share == 4 ? 2 : 1);
    const int64_t products = ceil_div(tile_rows, 64) * 2 * Of::kRows;
    const int64_t block_cycles =
        std::max({loaded * kLineBytes / kL2Bytes, products, int64_t{kLeastCycles}});
    const int64_t cycles =
        rounds * (steps * parts * block_cycles + kRoundCycles) + (split > 1 ? kSplitCycles : 0);
    if (cycles >= best->cycles) continue;
    best->cycles = cycles;
    best->grid = {static_cast<int>(tile_rows),
                  static_cast<int>(row_tiles),
                  static_cast<int>(tiles),
                  static_cast<int>(split > 1 ? tiles * split : std::min(tiles, slots)),
                  split,
                  share};
    best->launch = launch<T, Of>;
  }
}

template <typename T>
void launch_best(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  Choice best;
  if (p.linear.rows <= 16) consider<T, Tile<2, 16, 8>>(p.linear, card, &best);
  if (p.linear.rows <= 32) consider<T, Tile<2, 32, 8>>(p.linear, card, &best);
  if (p.linear.rows <= 256) consider<T, Tile<2, 64, 4>>(p.linear, card, &best);
  if (p.linear.rows > 64) {
    consider<T, Tile<2, 128, 2>>(p.linear, card, &best);
    consider<T, Tile<3, 128, 1>>(p.linear, card, &best);
  }
  best.launch(p, best.grid, card, stream);
}

}  // namespace

bool has_hopper_kernel() {
  cudaFuncAttributes code;  // code for other cards is empty, without barriers
  check_cuda(cudaFuncGetAttributes(&code, hopper_kernel<__half, Tile<2, 64, 4>>), "linear");
  return code.sharedSizeBytes > 0;
}

void launch_hopper(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  p.linear.dtype == DType::kFloat16 ? launch_best<__half>(p, card, stream)
                                    : launch_best<__nv_bfloat16>(p, card, stream);
}

}  // namespace tlt
