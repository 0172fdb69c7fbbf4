// linear_rows and linear_silu_mul for more than 8 rows, or large wide weights, of float16 or
// bfloat16 on sm_90a, with the bits of the decode kernel (order of the sum: linear.cuh), by tensor
// copies and wgmma.
//
// A tile is up to 128 weight rows (operand A, 64 to a warpgroup) x 16 to 128 rows of x
// (operand B). Two warps of one more warpgroup keep a ring of blocks of 64 elements of k filled:
// one with weights, which it loads before the prior kernels end, one with x. Several parts of K are
// summed at once, so that 256 or more consecutive bytes of a row are requested together, which
// memory serves faster. With many rows, parts are multiplied one after the other. A block loads its
// next tile while the last one is stored. For silu_mul a tensor copy interleaves 8 rows of gate and
// 8 of up in a tile.
//
// With few tiles of long rows a cluster shares the parts of K: a block sums a subtree of them, and
// the blocks' sums are added through distributed shared memory. `consider` chooses the shape and
// grid of a call.
#include <cooperative_groups.h>

#include <algorithm>
#include <type_traits>

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
    const Work work(p, grid);
    if (warp == kLoader && lane == 0) {
      load_operand<Of, true>(work, grid, params.silu_mul, &w_map, nullptr, ring, &barriers);
    }
    if (warp == kLoader + 1 && lane == 0) {
      load_operand<Of, false>(work, grid, false, &x_map, &last_map, ring, &barriers);
    }
    __syncwarp();
    if (grid.split > 1) cluster.sync();
  } else {
    take_registers<Of::kRegisters>();
    const Work work(p, grid);
    float* turn = reinterpret_cast<float*>(ring + Of::kRingBytes);
    Multiplier<T, Of> multiplier(params, grid, work, ring, &barriers);
    if (grid.split > 1) {
      multiplier.sum_parts();
      wait_for_prior_grid();
      cluster.sync();
      multiplier.store_parts(cluster);
    } else {
#pragma unroll 1
      for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
        float total[Of::kRows / 8][4];
        wait_for_prior_grid();
        multiplier.load_residual(tile, turn);
        multiplier.sum_tile(total, turn);
        if (multiplier.packs()) {
          multiplier.store_packed(total, tile, turn);
        } else {
          multiplier.store_tile(total, tile, turn);
        }
      }
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

using Large = Tile<2, 128, 2, true>;

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

// Considers one grid: takes it if its estimate beats the best so far. Tiles come in rounds of
// resident blocks. A round takes at least the time to read its weights from memory, and for each
// block of K the maximum of its loads from L2, its products, and what a tile takes at least. The
// constants are cycles, fitted to the times of 4,179 grids on an H200
// (profiling/kernels/grids.cu, docs/notes/layers.md).
template <typename T, typename Of>
void consider_grid(const LinearParams& p, const Card& card, int split, int64_t tile_rows,
                   Choice* best) {
  constexpr int kL2Bytes = 59, kMemoryBytes = 17;  // per cycle and multiprocessor
  constexpr int kRowCycles = 27;                   // to store a row of a tile
  constexpr int kFullCycles = 600;    // the next kernel has no room to start before this one ends
  constexpr int kSplitCycles = 5600;  // for a cluster to start and to synchronise
  constexpr int kHalfCycles = 900;    // to add and save half of the parts: an estimate, not fitted
  const int64_t row_tiles = ceil_div(p.rows, Of::kRows);
  const int64_t tiles = ceil_div(p.out_dim, tile_rows) * row_tiles;
  // Clusters of more than two do not use all multiprocessors.
  const int64_t sms = split > 2 ? card.num_sms * 15 / 16 : card.num_sms;
  const int64_t slots = std::max<int64_t>(sms - sms % split, split) * Of::kPerSm;
  const int64_t blocks = tiles * split;
  if (split > 1 && blocks > slots) return;
  const int64_t steps = ceil_div(ceil_div(p.in_dim, kBlockK), split);
  const auto round_cycles = [&](int64_t count) {  // of so many blocks
    const int64_t beside = ceil_div(count, sms);  // per multiprocessor
    const int64_t loaded = beside * (tile_rows + Of::kRows) * kLineBytes;
    const int64_t products = beside * ceil_div(tile_rows, 64) * 2 * Of::kRows;
    const int64_t step_cycles =
        std::max({loaded / kL2Bytes, products + products / 12, int64_t{Of::kBlockCycles}});
    const int64_t weights = count * tile_rows * kLineBytes * steps / row_tiles;
    const int64_t between = Of::kSaves && split == 1 && p.parts == kParts ? kHalfCycles : 0;
    return std::max(steps * step_cycles + between, weights / (kMemoryBytes * card.num_sms));
  };
  const int64_t full_rounds = (blocks - 1) / slots, end = kRowCycles * Of::kRows;
  const int64_t cycles = full_rounds * (round_cycles(slots) + end) +
                         round_cycles(blocks - full_rounds * slots) + end +
                         (Of::kPerSm == 1 ? kFullCycles : 0) + (split > 1 ? kSplitCycles : 0);
  if (cycles >= best->cycles) return;
  const int stage_bytes = static_cast<int>(tile_rows + Of::kRows) * kLineBytes;
  best->cycles = cycles;
  best->grid = {static_cast<int>(row_tiles),
                static_cast<int>(tiles),
                static_cast<int>(std::min(blocks, slots)),
                split,
                static_cast<int>(tile_rows),
                static_cast<int>(p.rows - (row_tiles - 1) * Of::kRows),
                std::min(kMaxStages, Of::kRingBytes / stage_bytes),
                stage_bytes};
  best->launch = launch<T, Of>;
}

// Considers the grids of a tile: whole tiles, three quarters or half of their weight rows, and
// equal shares of the weights.
template <typename T, typename Of>
void consider(const LinearKernelParams& params, const Card& card, Choice* best) {
  const LinearParams& p = params.linear;
  const int64_t unit = params.silu_mul ? 16 : 8;  // weight rows
  // Parts in turns: there must be four or more, each with at least one block of K.
  if (Of::kTurns && (p.parts < 4 || ceil_div(p.in_dim, kBlockK) < p.parts)) return;
  // Two blocks of a multiprocessor have half a ring each.
  constexpr int64_t kFewRows = 32, kFewWeights = 12 << 20;
  if (Of::kPerSm == 2 && p.rows <= kFewRows && p.in_dim * p.out_dim > kFewWeights) return;
  const int64_t shares = std::max<int64_t>(card.num_sms / ceil_div(p.rows, Of::kRows), 1);
  const int64_t equal = ceil_div(ceil_div(p.out_dim, shares), unit) * unit;
  constexpr int64_t kWhole = Of::kWeightRows;
  for (const int split : {1, 8, 4, 2}) {
    if (split > p.parts || (split > 1 && p.parts / split > Of::kMaxSplitParts)) continue;
    if (Of::kPerSm == 2 && split > 1 && split < 8) continue;  // slower than estimated
    for (const int64_t tile_rows : {kWhole, kWhole * 3 / 4, kWhole / 2}) {
      consider_grid<T, Of>(p, card, split, tile_rows, best);
    }
    if (split == 1 && equal < kWhole) consider_grid<T, Of>(p, card, split, equal, best);
  }
}

template <typename T>
Choice best_grid(const LinearKernelParams& p, const Card& card) {
  Choice best;
  if (p.linear.rows <= 16) consider<T, Tile<2, 16, 8>>(p, card, &best);
  if (p.linear.rows <= 32) consider<T, Tile<2, 32, 8>>(p, card, &best);
  consider<T, Tile<2, 64, 4>>(p, card, &best);
  consider<T, Tile<1, 64, 2, true>>(p, card, &best);
  if (p.linear.rows > 64) consider<T, Large>(p, card, &best);
  return best;
}

// The linear of weight rows [begin, begin + count), a multiple of 8 from a multiple of 8 on; of
// gates and ups, in the order of tiles, multiples of 16.
LinearKernelParams columns_of(const LinearKernelParams& p, int64_t begin, int64_t count) {
  LinearKernelParams part = p;
  LinearParams& linear = part.linear;
  const auto move = [&](auto* array, int64_t elements, DType dtype) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(array)>>,
                                    const char, char>;
    return array ? static_cast<Byte*>(array) + elements * bytes_of(dtype) : nullptr;
  };
  const int64_t first = p.silu_mul ? begin / 2 : begin;
  linear.weight = move(linear.weight, first * linear.weight_stride, linear.dtype);
  linear.bias = move(linear.bias, first, linear.dtype);
  linear.residual = move(linear.residual, first, linear.out_dtype);
  linear.out = move(linear.out, first, linear.out_dtype);
  linear.out_dim = count;
  return part;
}

// If the last round of large tiles would leave most multiprocessors idle, whole rounds are launched
// first, and the rest of the weight rows in a grid of its own, where clusters may share the parts.
template <typename T>
void launch_best(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  constexpr int kLaunchCycles = 2000;
  const Choice whole = best_grid<T>(p, card);
  const int64_t round = std::max<int64_t>(card.num_sms / ceil_div(p.linear.rows, Large::kRows), 1) *
                        Large::kWeightRows;
  const int64_t first = p.linear.out_dim / round * round, rest = p.linear.out_dim - first;
  if (first > 0 && rest > 0 && p.linear.rows > 64) {
    const LinearKernelParams rounds = columns_of(p, 0, first);
    const LinearKernelParams others = columns_of(p, first, rest);
    Choice large;
    consider<T, Large>(rounds, card, &large);
    const Choice last = best_grid<T>(others, card);
    if (large.launch && large.cycles + last.cycles + kLaunchCycles < whole.cycles) {
      large.launch(rounds, large.grid, stream);
      last.launch(others, last.grid, stream);
      return;
    }
  }
  whole.launch(p, whole.grid, stream);
}

}  // namespace

bool has_hopper_kernel() {
  const auto* kernel = reinterpret_cast<const void*>(hopper_kernel<__half, Tile<2, 64, 4>>);
  const int has = recall("linear", kernel, 0, 0, [&](int known) {
    if (known >= 0) return known;
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
