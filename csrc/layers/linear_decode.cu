// linear_rows, rms_norm_linear, silu_mul_linear for 1 to 16 rows of float16 or bfloat16: the
// weights are read once, and that is all the time there is (order of the sum: linear.cuh).
//
// A block owns tiles of 16 or 32 weight rows; each of its 8 warps owns one part of K. A lane copies
// exactly the 16-byte weight chunks that its own MMA fragments need into its own ring slots, so the
// ring needs no barrier and stays full across tiles: 64 to 96 KB in flight a block. x (weights are
// MMA operand A, x rows operand B) comes from L2 a step ahead through registers, where the norm or
// the activation is applied. At a tile's end the warps' sums meet in shared memory. Bytes: the
// weights, plus rows / (16 or 32) of that from L2.
#include <algorithm>

#include "layers/linear.cuh"

namespace tlt {
namespace {

constexpr int kWarps = kParts;  // each has its own
constexpr int kThreads = kWarps * kWarpSize;

template <int kTiles, Before kBefore>
struct Decode {  // kTiles of 16 weight rows
  static constexpr int kCols = 16 * kTiles;
  static constexpr int kBlocksPerSm = kTiles == 1 && kBefore == Before::kNothing ? 3 : 2;
  static constexpr int kStages = kTiles == 2 ? 3 : kBlocksPerSm == 2 ? 6 : 4;
  static constexpr int kChunks = 4 * kTiles;  // a lane's share of one step
  static constexpr int kRing = kWarps * kStages * kChunks * kWarpSize;
  static constexpr int kSharedBytes = kRing * 16 + kWarps * kDecodeRows * kCols * 4;
  static_assert(kBlocksPerSm * (kSharedBytes + 1024) <= 228 * 1024, "shared memory of an SM");
};

// A block owns `base` weight rows, the first `extra` blocks one more: equal shares, since the card
// gives each SM an equal share of its bandwidth. It takes them in equal tiles.
struct Shares {
  int base, extra;
};

struct Share {
  int64_t begin;
  int rows, tiles, tile_rows;
  __device__ Share(const Shares& shares, int max_tile) {
    const int c = blockIdx.x;
    begin = static_cast<int64_t>(c) * shares.base + min(c, shares.extra);
    rows = shares.base + (c < shares.extra);
    tiles = (rows + max_tile - 1) / max_tile;
    tile_rows = tiles == 1 ? rows : (rows + tiles - 1) / tiles;
  }
  __device__ int first(int tile) const { return min(tile * tile_rows, rows); }
};

// A step of x for one lane: rows g and g + 8 of x, two chunks of 8 elements each.
template <typename T>
struct Rows {
  Chunk<T> x[2][2];
  Chunk<T> up[2][2];        // kSilu
  Chunk<T> norm_weight[2];  // kNorm
};

// Where a lane's own sum of (x row, column) of a tile goes: lanes of a warp hit 32 banks.
template <int kCols>
__device__ __forceinline__ int sum_index(int row, int col) {
  return row * kCols + (col ^ (row / 2 % (kCols / 8)) * 8);
}

template <typename T, int kTiles, Before kBefore>
__global__ void __launch_bounds__(kThreads, Decode<kTiles, kBefore>::kBlocksPerSm)
    decode_kernel(const LinearKernelParams params, const Shares shares) {
  using D = Decode<kTiles, kBefore>;
  extern __shared__ uint4 ring[];
  float* sums = reinterpret_cast<float*>(ring + D::kRing);
  __shared__ float row_scale[kDecodeRows];  // kNorm
  const LinearParams& p = params.linear;
  const int in_dim = static_cast<int>(p.in_dim), rows = static_cast<int>(p.rows);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const Share share(shares, D::kCols);
  const int steps = part_steps(num_blocks_of(p), warp);
  const int first_k = warp * kBlockK + t * 8, step_k = kParts * kBlockK;
  uint4* my_ring = ring + warp * D::kStages * D::kChunks * kWarpSize + lane;

  // Weights. Evict first: what the next kernels share should stay in L2.
  const uint64_t policy = evict_first_policy();
  const T* w_base = static_cast<const T*>(p.weight);
  const int64_t row_step = 8 * p.weight_stride;
  int load_tile = 0, load_step = 0, rows_left = 0;  // rows_left: of the tile, from this lane's on
  const T* load_from = nullptr;
  const auto load_stage = [&](int stage) {
    if (load_tile < share.tiles && load_step < steps) {
      if (load_step == 0) {
        const int first = share.first(load_tile);
        rows_left = share.first(load_tile + 1) - first - g;
        load_from = w_base + (share.begin + first + g) * p.weight_stride;
      }
      uint4* to = my_ring + stage * D::kChunks * kWarpSize;
      const int k = first_k + load_step * step_k;
      if (params.w_aligned) {
        const T* from = load_from + k;
#pragma unroll
        for (int m = 0; m < D::kChunks / 2; ++m) {  // rows g, g + 8, ...
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            copy_async_once(to + (m * 2 + h) * kWarpSize, from + h * 32,
                            m * 8 < rows_left && k + h * 32 < in_dim, policy);
          }
          from += row_step;
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < D::kChunks; ++i) {
          const T* from = load_from + i / 2 * row_step;
          const int dim = i / 2 * 8 < rows_left ? in_dim : 0;
          to[i * kWarpSize] = load_pieces(from, k + i % 2 * 32, dim).raw;
        }
      }
      if (++load_step == steps) {
        load_step = 0;
        ++load_tile;
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < D::kStages; ++stage) load_stage(stage);

  const T* x_base = static_cast<const T*>(p.x);
  const auto load_x = [&](Rows<T>& to, int step) {
    const T* norm_weight = static_cast<const T*>(params.norm_weight);
    const int first = first_k + step * step_k;
    const auto x_row = [&](int i) { return x_base + (i * 8 + g) * p.x_stride; };
    const auto dim = [&](int i) { return i * 8 + g < rows ? in_dim : 0; };
    if (params.x_aligned) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = first + h * 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          to.x[i][h] = load_whole(x_row(i), k, dim(i));
          if constexpr (kBefore == Before::kSilu) {
            to.up[i][h] = load_whole(x_row(i) + in_dim, k, dim(i));
          }
        }
        if constexpr (kBefore == Before::kNorm)
          to.norm_weight[h] = load_whole(norm_weight, k, in_dim);
      }
    } else {
      uint4 slow[4];  // indexed at run time: local memory
#pragma unroll 1
      for (int c = 0; c < 4; ++c) {
        slow[c] = load_pieces(x_row(c / 2), first + c % 2 * 32, dim(c / 2)).raw;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) to.x[c / 2][c % 2].raw = slow[c];
      if constexpr (kBefore == Before::kSilu) {
#pragma unroll 1
        for (int c = 0; c < 4; ++c) {
          slow[c] = load_pieces(x_row(c / 2) + in_dim, first + c % 2 * 32, dim(c / 2)).raw;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) to.up[c / 2][c % 2].raw = slow[c];
      }
      if constexpr (kBefore == Before::kNorm) {
#pragma unroll 1
        for (int h = 0; h < 2; ++h) slow[h] = load_pieces(norm_weight, first + h * 32, in_dim).raw;
        to.norm_weight[0].raw = slow[0];
        to.norm_weight[1].raw = slow[1];
      }
    }
  };
  Rows<T> next;
  if (steps > 0) load_x(next, 0);

  float scale[2] = {};
  if constexpr (kBefore == Before::kNorm) {
    for (int row = warp; row < rows; row += kWarps) {
      const float squares = warp_squares(x_base + row * p.x_stride, in_dim, params.x_aligned);
      if (lane == 0) row_scale[row] = norm_scale(squares, in_dim, params.eps);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = i * 8 + g < rows ? row_scale[i * 8 + g] : 0.0f;
  }
  const auto apply_before = [&](Rows<T>& at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && rows <= 8) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kBefore == Before::kNorm) {
          norm_chunk(at.x[i][h], scale[i], at.norm_weight[h]);
        }
        if constexpr (kBefore == Before::kSilu) silu_mul_chunk(at.x[i][h], at.up[i][h]);
      }
    }
  };

  int stage = 0;
  for (int tile = 0; tile < share.tiles; ++tile) {
    float acc[kTiles][2][4] = {};
    for (int step = 0; step < steps; ++step) {
      Rows<T> now = next;
      load_x(next, step + 1 < steps ? step + 1 : 0);  // the next tile reads the same rows
      apply_before(now);
      wait_copies<D::kStages - 1>();
      const uint4* from = my_ring + stage * D::kChunks * kWarpSize;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const uint4 low = from[(m * 4 + h) * kWarpSize];
          const uint4 high = from[(m * 4 + 2 + h) * kWarpSize];
#pragma unroll
          for (int i = 0; i < 2; ++i) mma_k32<T>(acc[m][i], low, high, now.x[i][h].raw);
        }
      }
      load_stage(stage);  // this lane alone reads the slot, and has
      stage = stage + 1 == D::kStages ? 0 : stage + 1;
    }

    float* mine = sums + warp * kDecodeRows * D::kCols;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          mine[sum_index<D::kCols>(i * 8 + t * 2 + c % 2, m * 16 + c / 2 * 8 + g)] = acc[m][i][c];
        }
      }
    }
    __syncthreads();
    const int first = share.first(tile), cols = share.first(tile + 1) - first;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * D::kCols; i += kThreads) {
      const int row = i / D::kCols, col = i % D::kCols;
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        part[w] = sums[w * kDecodeRows * D::kCols + sum_index<D::kCols>(row, col)];
      }
      if (col < cols) store_out<T>(p, row, share.begin + first + col, sum_of_8(part));
    }
    __syncthreads();  // the sums are read before the next tile's are written
  }
}

template <typename T, int kTiles, Before kBefore>
void launch(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  using D = Decode<kTiles, kBefore>;
  const auto kernel = decode_kernel<T, kTiles, kBefore>;
  allow_shared(kernel, D::kSharedBytes);
  const int64_t shares = (p.linear.out_dim + 15) / 16;  // smaller ones were not faster
  const int64_t grid = std::min<int64_t>(shares, card.num_sms * D::kBlocksPerSm);
  const Shares each = {static_cast<int>(p.linear.out_dim / grid),
                       static_cast<int>(p.linear.out_dim % grid)};
  kernel<<<static_cast<unsigned>(grid), kThreads, D::kSharedBytes, stream>>>(p, each);
}

// Wide tiles read x half as often; narrow ones suit small shares. Neither changes a bit.
template <typename T, Before kBefore>
void launch_width(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  if (p.linear.out_dim > 16 * 2 * card.num_sms) {
    launch<T, 2, kBefore>(p, card, stream);
  } else {
    launch<T, 1, kBefore>(p, card, stream);
  }
}

template <typename T>
void launch_before(const LinearKernelParams& p, Before before, const Card& card,
                   cudaStream_t stream) {
  switch (before) {
    case Before::kNothing:
      return launch_width<T, Before::kNothing>(p, card, stream);
    case Before::kNorm:
      return launch_width<T, Before::kNorm>(p, card, stream);
    case Before::kSilu:
      return launch_width<T, Before::kSilu>(p, card, stream);
  }
}

}  // namespace

void launch_decode(const LinearKernelParams& p, Before before, const Card& card,
                   cudaStream_t stream) {
  p.linear.dtype == DType::kFloat16 ? launch_before<__half>(p, before, card, stream)
                                    : launch_before<__nv_bfloat16>(p, before, card, stream);
}

}  // namespace tlt
