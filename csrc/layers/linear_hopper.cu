// linear_rows and linear_silu_mul for more than 8 rows, or many weights, of float16 or bfloat16 on
// sm_90a, bit-identical to the decode kernel (order of the sum: linear.cuh), by tensor copies and
// wgmma.
//
// A tile is 64 or 128 weight rows (operand A, 64 to a warpgroup) x 64 to 160 rows of x (operand B).
// Two warps of one more warpgroup keep a ring of blocks of 64 elements of k filled: one with
// weights, which it loads before the prior kernels end, one with x. Two parts of K are multiplied
// side by side, so that 256 consecutive bytes of a row are requested together, which memory serves
// faster. A block loads its next tile while the last one is stored. For silu_mul a tensor copy
// interleaves 8 rows of gate and 8 of up in a tile.
//
// Tiles come in rounds of resident blocks. Where the last round has too few of them, a cluster
// shares the parts of K of each: a block sums a subtree of them, and the blocks' sums are added
// through distributed shared memory. `consider` chooses the tile and grid of a call.
#include <cooperative_groups.h>

#include <algorithm>
#include <optional>

#include "layers/hopper.cuh"

namespace tlt {
namespace {

template <typename T, typename Of>
__global__ void __launch_bounds__(Of::kThreads, Of::kPerSm)
    hopper_kernel(const __grid_constant__ LinearKernelParams params,
                  const __grid_constant__ Grid grid, const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap last_map) {
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
    for (int stage = 0; stage < grid.stages; ++stage) {
      init_barrier(&barriers.full[stage], 2);
      init_barrier(&barriers.empty[stage], Of::kGroups * 4);
    }
    fence_barriers();
    fence_copies();
  }
  if (lane == 0 && warp == kLoader) prefetch_map(&w_map);
  if (lane == 0 && warp == kLoader + 1) {
    prefetch_map(&x_map);
    prefetch_map(&last_map);
  }
  __syncthreads();

  if (warp >= kLoader) {
    give_registers<Of::kLoadRegisters>();
    Work work(p, grid);
    if (warp == kLoader && lane == 0) {
      load_operand<Of, true>(work, grid, params.silu_mul, &w_map, nullptr, ring, &barriers);
    }
    if (warp == kLoader + 1 && lane == 0) {
      load_operand<Of, false>(work, grid, false, &x_map, &last_map, ring, &barriers);
    }
    __syncwarp();
    if (work.share(grid)) cluster.sync();
  } else {
    take_registers<Of::kRegisters>();
    Work work(p, grid);
    float* turn = reinterpret_cast<float*>(ring + Of::kRingBytes);
    Multiplier<T, Of> multiplier(params, grid, work, ring, &barriers);
#pragma unroll 1
    for (int tile = work.tile; tile < grid.whole; tile += work.step) {
      float total[Of::kColumns / 8][4];
      wait_for_prior_grid();
      if (!Of::kSaves) multiplier.load_residual(tile, turn);
      multiplier.sum_tile(total, turn);
      if (Of::kSaves) multiplier.load_residual(tile, turn);
      if (multiplier.packs()) {
        multiplier.store_packed(total, tile, turn);
      } else {
        multiplier.store_tile(total, tile, turn);
      }
    }
    if (work.share(grid)) {
      multiplier.sum_share();
      wait_for_prior_grid();
      cluster.sync();
      multiplier.store_share(cluster);
    }
  }
  if (grid.split > 1) cluster.sync();  // no block exits while its sums are read
#endif
}

// ---- the grid -----------------------------------------------------------------------------------

struct Choice {
  int64_t cycles = INT64_MAX;
  Grid grid;
  void (*launch)(const LinearKernelParams& p, const Grid& grid, cudaStream_t stream) = nullptr;
};

using Small = Tile<1, 1, 64>;
using Long = Tile<1, 2, 80>;
using Medium = Tile<2, 1, 96>;
using Large = Tile<2, 1, 128>;

template <typename T, typename Of>
void launch(const LinearKernelParams& p, const Grid& grid, cudaStream_t stream) {
  const auto kernel = hopper_kernel<T, Of>;
  prefer_shared("linear", kernel);
  const LinearParams& linear = p.linear;
  const KernelShape shape{grid.blocks, Of::kThreads, Of::kSharedBytes,
                          static_cast<unsigned>(grid.split)};
  const CUtensorMap weights =
      p.silu_mul ? make_pair_map(linear.weight, linear.out_dim, p.apart, linear.in_dim,
                                 linear.weight_stride, grid.tile_rows)
                 : make_row_map(linear.weight, linear.out_dim, linear.in_dim, linear.weight_stride,
                                grid.tile_rows);
  const auto map_x = [&](int64_t rows) {
    return make_row_map(linear.x, linear.rows, linear.in_dim, linear.x_stride, rows);
  };
  launch_kernel("linear", kernel, shape, stream, linear.pdl, p, grid, weights, map_x(Of::kRows),
                map_x(grid.last_rows));
}

// Multiprocessors that clusters of so many blocks use: those of more than two do not use all.
int64_t usable_sms(const Card& card, int split) {
  const int64_t sms = split > 2 ? card.num_sms * 15 / 16 : card.num_sms;
  return std::max<int64_t>(sms - sms % split, split);
}

// The grid of a tile. Blocks sum whole tiles in rounds, and with split > 1 clusters share the parts
// of the tiles of the last round. std::nullopt if these are too many for one round.
template <typename Of>
std::optional<Grid> make_grid(const LinearParams& p, const Card& card, int split,
                              int64_t tile_rows) {
  const int64_t row_tiles = ceil_div(p.rows, Of::kRows);
  const int64_t tiles = ceil_div(p.out_dim, tile_rows) * row_tiles;
  const int64_t slots = usable_sms(card, split) * Of::kPerSm;
  const int64_t whole = split == 1 ? tiles : tiles / slots * slots;
  const int64_t blocks = whole + (tiles - whole) * split;
  if (split > 1 && blocks - whole > slots) return std::nullopt;
  const int64_t x_rows = std::min<int64_t>(Of::kRows, ceil_div(p.rows, 8) * 8);
  const int64_t stage_bytes = (tile_rows + x_rows) * kLineBytes;
  const auto as_int = [](int64_t n) { return static_cast<int>(n); };
  return Grid{as_int(row_tiles),
              as_int(tiles),
              as_int(std::min(blocks, slots)),
              as_int(whole),
              split,
              as_int(tile_rows),
              as_int(p.rows - (row_tiles - 1) * Of::kRows),
              as_int(std::min<int64_t>(kMaxStages, Of::kRingBytes / stage_bytes)),
              as_int(stage_bytes)};
}

// Considers one grid: takes it if its estimate beats the best so far. A round of blocks takes at
// least the time to read its weights from memory, and for each block of K the maximum of its loads
// from L2, its products, and what a tile takes at least. The constants are cycles, fitted to the
// times of grids on an H200 (profiling/kernels/grids.cu, docs/notes/layers.md).
template <typename T, typename Of>
void consider_grid(const LinearParams& p, const Card& card, int split, int64_t tile_rows,
                   Choice* best) {
  constexpr int kL2Bytes = 69, kMemoryBytes = 20;  // per cycle and multiprocessor
  constexpr int kRowCycles = 10;                   // to store a row of a tile
  constexpr int kFullCycles = 840;  // the next kernel has no room to start before this one ends
  constexpr int kSplitCycles = 900, kBlockSplitCycles = 710;  // of a cluster, and of each block
  // Of kTileCycles where additions run beside products (Multiplier::sum_all_parts). With one or two
  // row tiles nothing is saved: products wait for loads.
  constexpr int kOverlapCycles = 850;
  const std::optional<Grid> grid = make_grid<Of>(p, card, split, tile_rows);
  if (!grid) return;
  const int64_t sms = usable_sms(card, split), slots = sms * Of::kPerSm;
  const auto round_cycles = [&](int64_t blocks, int of) {  // of so many blocks, each 1 / `of` of K
    const int64_t steps = ceil_div(ceil_div(p.in_dim, kBlockK), of);
    const int64_t per_sm = ceil_div(blocks, sms);
    const int64_t loads = per_sm * (tile_rows + Of::kRows) * kLineBytes / kL2Bytes;
    const int64_t products = per_sm * ceil_div(tile_rows, 64) * 2 * Of::kRows;
    const int64_t step = std::max({loads, products + products / 12, int64_t{Of::kBlockCycles}});
    const int64_t weights = blocks * tile_rows * kLineBytes * steps / grid->row_tiles;
    const bool overlaps = Of::kAcross == 2 && of == 1 && p.parts >= 4 && grid->row_tiles > 2;
    const int tile_cycles = Of::kTileCycles - (overlaps ? kOverlapCycles : 0);
    return std::max(steps * step + tile_cycles, weights / (kMemoryBytes * card.num_sms)) +
           kRowCycles * Of::kRows;
  };
  const int64_t rounds = grid->whole / slots, rest = grid->whole % slots;
  const int64_t shared = grid->tiles - grid->whole;
  const int64_t cycles =
      rounds * round_cycles(slots, 1) + (rest > 0 ? round_cycles(rest, 1) : 0) +
      (shared > 0 ? round_cycles(shared * split, split) + kSplitCycles + split * kBlockSplitCycles
                  : 0) +
      (Of::kPerSm == 1 ? kFullCycles : 0);
  if (cycles < best->cycles) *best = {cycles, *grid, launch<T, Of>};
}

// Considers the grids of a tile: whole tiles, three quarters or half of their weight rows, and
// equal shares of the weights.
template <typename T, typename Of>
void consider(const LinearKernelParams& params, const Card& card, Choice* best) {
  const LinearParams& p = params.linear;
  const int64_t unit = params.silu_mul ? 16 : 8;  // weight rows
  const int64_t shares = std::max<int64_t>(card.num_sms / ceil_div(p.rows, Of::kRows), 1);
  const int64_t equal = ceil_div(ceil_div(p.out_dim, shares), unit) * unit;
  constexpr int64_t kWhole = Of::kWeightRows;
  for (const int split : {1, 2, 4, 8}) {
    if (split > p.parts) continue;
    for (const int64_t tile_rows : {kWhole, kWhole * 3 / 4, kWhole / 2}) {
      consider_grid<T, Of>(p, card, split, tile_rows, best);
    }
    if (split == 1 && equal < kWhole) consider_grid<T, Of>(p, card, split, equal, best);
  }
}

template <typename T>
Choice best_grid(const LinearKernelParams& p, const Card& card) {
  Choice best;
  consider<T, Small>(p, card, &best);
  if (p.linear.rows > Small::kRows) {
    consider<T, Long>(p, card, &best);
    consider<T, Medium>(p, card, &best);
    consider<T, Large>(p, card, &best);
  }
  return best;
}

template <typename T>
void launch_best(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  const Choice best = best_grid<T>(p, card);
  best.launch(p, best.grid, stream);
}

}  // namespace

bool has_hopper_kernel() {
  const auto* kernel = reinterpret_cast<const void*>(hopper_kernel<__half, Small>);
  const int has = recall("linear", kernel, 0, 0, [&](int cached) {
    if (cached >= 0) return cached;
    cudaFuncAttributes code;  // code for other cards is empty, without barriers
    check_cuda(cudaFuncGetAttributes(&code, kernel), "linear");
    return code.sharedSizeBytes > 0 ? 1 : 0;
  });
  return has == 1;
}

void launch_hopper(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  p.linear.dtype == DType::kFloat16 ? launch_best<__half>(p, card, stream)
                                    : launch_best<__nv_bfloat16>(p, card, stream);
}

}  // namespace tlt
