// linear_rows for more than 16 rows of float16 or bfloat16 on sm_90a, with the bits of the decode
// kernel (order of the sum: linear.cuh), by tensor copies and wgmma.
//
// A block owns up to 128 weight rows (operand A, 64 to each of two warpgroups) x 64 or 128 rows of
// x (operand B). One more warp keeps a ring of blocks of 64 elements of k filled: weights in boxes
// of 8 rows, so that blocks can own equal shares; x in one box. The parts of K come one after the
// other. With few tiles a cluster of 4 or 8 blocks shares the parts, and its blocks' sums meet in
// distributed shared memory, part by part. Row tiles are neighbours in the grid, so the weights
// leave memory once and come from L2 after that.
#include <cooperative_groups.h>

#include <algorithm>

#include "common/tma.cuh"
#include "layers/linear.cuh"
#include "layers/products.cuh"

namespace tlt {
namespace {

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kThreads = (kGroups * 4 + 1) * kWarpSize;
constexpr int kTileRows = 64 * kGroups;  // weight rows of a tile, at most
constexpr int kBoxRows = 8;
constexpr int kLineBytes = kBlockK * 2;
constexpr int kPitch = kTileRows + 4;  // of the sums in shared memory: no bank conflicts

template <int kRows>  // of x
struct Tile {
  static constexpr int kBlocksPerSm = kRows == 64 ? 2 : 1;
  static constexpr int kStages = kRows == 64 ? 4 : 6;
  static constexpr int kStageBytes = (kTileRows + kRows) * kLineBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;  // to align it
  static constexpr int kSums = kRows * kPitch;
  static_assert(kBlocksPerSm * (kSharedBytes + 2048) <= 228 * 1024, "shared memory of an SM");
  static_assert((kRows == 64 ? 2 : 1) * kSums * 4 <= kStages * kStageBytes, "sums reuse the ring");
};

struct Grid {
  int tile_rows;  // weight rows of a tile, a multiple of kBoxRows
  unsigned row_tiles, cluster;
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

[[maybe_unused]] __device__ __forceinline__ void leave_stage(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// f(block) for the blocks of K of parts [begin, end), part by part; g(part) after each part.
template <typename F, typename G>
__device__ __forceinline__ void for_each_block(int num_blocks, int begin, int end, F&& f, G&& g) {
  for (int part = begin; part < end; ++part) {
    for (int block = part; block < num_blocks; block += kParts) f(block);
    g(part);
  }
}

// By one thread: fills the ring. Weights are asked for before the kernels before this one end.
template <int kRows>
__device__ __forceinline__ void load_operands(const LinearParams& p, const CUtensorMap* w_map,
                                              const CUtensorMap* x_map, const Grid& grid,
                                              int64_t w_row, int64_t x_row, int begin, int end,
                                              char* ring, uint64_t* full, uint64_t* empty) {
  using Of = Tile<kRows>;
  const int num_blocks = num_blocks_of(p);
  const int boxes = static_cast<int>(
      (min(static_cast<int64_t>(grid.tile_rows), p.out_dim - w_row) + kBoxRows - 1) / kBoxRows);
  const auto load_weight = [&](int stage, int block) {
    arrive_expecting(&full[stage], (boxes * kBoxRows + kRows) * kLineBytes);
    for (int i = 0; i < boxes; ++i) {
      copy_box(shared_address(ring + stage * Of::kStageBytes + i * kBoxRows * kLineBytes), w_map,
               block * kBlockK, static_cast<int>(w_row) + i * kBoxRows, 0, 0, 0, &full[stage]);
    }
  };
  const auto load_x = [&](int stage, int block) {
    copy_box(shared_address(ring + stage * Of::kStageBytes + kTileRows * kLineBytes), x_map,
             block * kBlockK, static_cast<int>(x_row), 0, 0, 0, &full[stage]);
  };
  const auto nothing = [](int) {};
  int count = 0;
  for_each_block(
      num_blocks, begin, end,
      [&](int block) {
        if (count < Of::kStages) load_weight(count, block);
        ++count;
      },
      nothing);
  wait_for_prior_grid();
  int done = 0;
  RingPosition<Of::kStages> at;
  for_each_block(
      num_blocks, begin, end,
      [&](int block) {
        if (done >= Of::kStages) {
          wait_barrier(&empty[at.stage], at.parity ^ 1);
          load_weight(at.stage, block);
        }
        load_x(at.stage, block);
        ++done;
        at.advance();
      },
      nothing);
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kThreads, Tile<kRows>::kBlocksPerSm)
    hopper_kernel(const __grid_constant__ LinearKernelParams params, const Grid grid,
                  const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ CUtensorMap x_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Of = Tile<kRows>;
  extern __shared__ char memory[];
  __shared__ uint64_t full[Of::kStages], empty[Of::kStages];
  char* ring = memory + (1024 - shared_address(memory) % 1024) % 1024;
  launch_dependents();
  const LinearParams& p = params.linear;
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(blockIdx.x % grid.cluster);
  const unsigned tile = blockIdx.x / grid.cluster;
  const int64_t x_row = static_cast<int64_t>(tile % grid.row_tiles) * kRows;
  const int64_t w_row = static_cast<int64_t>(tile / grid.row_tiles) * grid.tile_rows;
  const int parts = kParts / static_cast<int>(grid.cluster), begin = rank * parts;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Of::kStages; ++stage) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], kGroups * 4);
    }
    fence_copies();
  }
  __syncthreads();

  float* sums = reinterpret_cast<float*>(ring);
  if (warp == kGroups * 4) {
    if (lane == 0) {
      load_operands<kRows>(p, &w_map, &x_map, grid, w_row, x_row, begin, begin + parts, ring, full,
                           empty);
    }
    __syncwarp();
  } else {
    const int group = warp / 4;
    const bool multiplies = group * 64 < grid.tile_rows;
    float acc[kRows / 8][4], total[kRows / 8][4];
    const auto for_each = [](auto&& f) {
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) f(j, c);
      }
    };
    for_each([&](int j, int c) { acc[j][c] = total[j][c] = 0.0f; });
    RingPosition<Of::kStages> at;
    int last = -1;  // the stage of the products under way
    const auto release = [&] {
      __syncwarp();  // all lanes have seen the stage full: its barrier may turn again
      if (last >= 0 && lane == 0) leave_stage(&empty[last]);
    };
    for_each_block(
        num_blocks_of(p), begin, begin + parts,
        [&](int) {
          wait_barrier(&full[at.stage], at.parity);
          if (multiplies) {
            const uint32_t w =
                shared_address(ring + at.stage * Of::kStageBytes) + group * 64 * kLineBytes;
            const uint32_t x =
                shared_address(ring + at.stage * Of::kStageBytes) + kTileRows * kLineBytes;
            start_products();
#pragma unroll
            for (int k = 0; k < kBlockK / 16; ++k) {
              multiply_64<T>(acc, describe_operand(w + k * 32), describe_operand(x + k * 32));
            }
            commit_products();
            wait_products<1>();
          }
          release();
          last = at.stage;
          at.advance();
        },
        [&](int part) {
          wait_products<0>();
          for_each([&](int j, int c) { asm volatile("" : "+f"(acc[j][c])::"memory"); });
          release();
          last = -1;
          // Alone: all parts are added here. Of a pair of parts the first waits in `total`.
          if (grid.cluster == 1 || (parts == 2 && part == begin)) {
            for_each([&](int j, int c) {
              total[j][c] = part == begin ? acc[j][c] : total[j][c] + acc[j][c];
              acc[j][c] = 0.0f;
            });
          }
        });

    // The sums go where the ring was: one array, or two of a pair of parts.
    asm volatile("bar.sync 1, %0;" ::"n"(kGroups * 4 * kWarpSize) : "memory");
    const int g = lane / 4, t = lane % 4;
    for_each([&](int j, int c) {
      float* to = sums + (j * 8 + t * 2 + c % 2) * kPitch + warp * 16 + g + c / 2 * 8;
      if (parts == 1) {
        *to = acc[j][c];
      } else {
        *to = total[j][c];
        if (parts == 2) to[Of::kSums] = acc[j][c];
      }
    });
  }
  wait_for_prior_grid();
  grid.cluster == 1 ? __syncthreads() : cluster.sync();

  const int rows = kRows / static_cast<int>(grid.cluster);  // finished by this block
  const int cols = static_cast<int>(min(static_cast<int64_t>(grid.tile_rows), p.out_dim - w_row));
  for (int i = threadIdx.x; i < rows * kTileRows; i += kThreads) {
    const int row = rank * rows + i / kTileRows, col = i % kTileRows;
    if (x_row + row >= p.rows || col >= cols) continue;
    float* mine = sums + row * kPitch + col;
    float sum = *mine;
    if (grid.cluster > 1) {
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        part[w] = cluster.map_shared_rank(mine, w / parts)[w % parts * Of::kSums];
      }
      sum = sum_of_parts(part);
    }
    store_out<T>(p, x_row + row, w_row + col, sum);
  }
  if (grid.cluster > 1) cluster.sync();  // nobody's sums go away while they are read
#endif
}

// Rows of a matrix as a tensor map whose box is 64 elements of `box_rows` rows.
CUtensorMap map_rows(const void* data, int64_t rows, int64_t columns, int64_t stride,
                     int64_t box_rows) {
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t row_bytes = size(2 * stride);
  return make_tensor_map(data, {size(columns), size(rows), 1, 1, 1},
                         {row_bytes, row_bytes, row_bytes, row_bytes},
                         {kBlockK, static_cast<cuuint32_t>(box_rows), 1, 1, 1});
}

// How the tiles lie: whole ones where they are in flight at once, equal shares where they are not
// or do not fill the card, and clusters where they are few.
Grid plan_grid(const LinearParams& p, int64_t tile_x_rows, int64_t num_sms, int64_t slots) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  Grid grid = {kTileRows, static_cast<unsigned>(ceil_div(p.rows, tile_x_rows)), 1};
  const int64_t tiles = ceil_div(p.out_dim, kTileRows) * grid.row_tiles;
  if (tile_x_rows == 64) {
    if (tiles * 4 <= slots) grid.cluster = 4;
    if (tiles * 8 <= slots) grid.cluster = 8;
  }
  const int64_t wanted = tiles > slots ? ceil_div(tiles, slots) * slots : num_sms;
  if (grid.cluster == 1 && (tiles > slots || tiles < num_sms)) {
    const int64_t shares = std::max<int64_t>(1, wanted / grid.row_tiles);
    const int64_t rows = ceil_div(ceil_div(p.out_dim, shares), kBoxRows) * kBoxRows;
    grid.tile_rows = static_cast<int>(std::min<int64_t>(rows, kTileRows));
  }
  return grid;
}

template <typename T, int kRows>
void launch(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  using Of = Tile<kRows>;
  const auto kernel = hopper_kernel<T, kRows>;
  allow_shared(kernel, Of::kSharedBytes);
  const LinearParams& linear = p.linear;
  const Grid grid = plan_grid(linear, kRows, card.num_sms, card.num_sms * Of::kBlocksPerSm);
  const int64_t col_tiles = (linear.out_dim + grid.tile_rows - 1) / grid.tile_rows;
  const KernelShape shape{col_tiles * grid.row_tiles * grid.cluster, kThreads, Of::kSharedBytes,
                          grid.cluster};
  launch_kernel(
      "linear", kernel, shape, stream, p.early, p, grid,
      map_rows(linear.weight, linear.out_dim, linear.in_dim, linear.weight_stride, kBoxRows),
      map_rows(linear.x, linear.rows, linear.in_dim, linear.x_stride, kRows));
}

template <typename T>
void launch_rows(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  // 128 rows of x a tile read the weights half as often, where there are tiles enough.
  const int64_t tiles =
      (p.linear.out_dim + kTileRows - 1) / kTileRows * ((p.linear.rows + 127) / 128);
  p.linear.rows > 64 && tiles >= card.num_sms ? launch<T, 128>(p, card, stream)
                                              : launch<T, 64>(p, card, stream);
}

}  // namespace

bool has_hopper_kernel() {
  cudaFuncAttributes code;  // code for other cards is empty, without barriers
  check_cuda(cudaFuncGetAttributes(&code, hopper_kernel<__half, 64>), "linear");
  return code.sharedSizeBytes > 0;
}

void launch_hopper(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  p.linear.dtype == DType::kFloat16 ? launch_rows<__half>(p, card, stream)
                                    : launch_rows<__nv_bfloat16>(p, card, stream);
}

}  // namespace tlt
