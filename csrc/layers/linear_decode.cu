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

// Block c of `count` owns the weight rows [begin, begin + rows): equal shares, for the card gives
// each SM an equal share of its bandwidth. It takes them in equal tiles.
struct Share {
  int64_t begin;
  int rows, tiles;
  __device__ Share(int64_t out_dim, int max_tile) {
    const int64_t c = blockIdx.x, count = gridDim.x;
    begin = out_dim * c / count;
    rows = static_cast<int>(out_dim * (c + 1) / count - begin);
    tiles = (rows + max_tile - 1) / max_tile;
  }
  __device__ int first(int tile) const {
    return static_cast<int>(static_cast<int64_t>(rows) * tile / tiles);
  }
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
    decode_kernel(const LinearKernelParams params) {
  using D = Decode<kTiles, kBefore>;
  extern __shared__ uint4 ring[];
  float* sums = reinterpret_cast<float*>(ring + D::kRing);
  __shared__ float row_scale[kDecodeRows];  // kNorm
  const LinearParams& p = params.linear;
  const int in_dim = static_cast<int>(p.in_dim), rows = static_cast<int>(p.rows);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const Share share(p.out_dim, D::kCols);
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
      const T* from = load_from + k;
#pragma unroll
      for (int m = 0; m < D::kChunks / 2; ++m) {  // rows g, g + 8, ...
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint4* slot = to + (m * 2 + h) * kWarpSize;
          if (params.w_aligned) {
            copy_async_once(slot, from + h * 32, m * 8 < rows_left && k + h * 32 < in_dim, policy);
          } else {
            *slot = load_chunk(from - k, k + h * 32, m * 8 < rows_left ? in_dim : 0, false).raw;
          }
        }
        from += row_step;
      }
      if (++load_step == steps) {
        load_step = 0;
        ++load_tile;
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < D::kStages; ++stage) load_stage(stage);

  const T* x_base = static_cast<const T*>(p.x);
  const auto load_x = [&](Rows<T>& to, int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = first_k + step * step_k + h * 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = i * 8 + g, dim = row < rows ? in_dim : 0;
        const T* from = x_base + row * p.x_stride;
        to.x[i][h] = load_chunk(from, k, dim, params.x_aligned);
        if constexpr (kBefore == Before::kSilu) {
          to.up[i][h] = load_chunk(from + in_dim, k, dim, params.x_aligned);
        }
      }
      if constexpr (kBefore == Before::kNorm) {
        const T* weight = static_cast<const T*>(params.norm_weight);
        to.norm_weight[h] = load_chunk(weight, k, in_dim, params.x_aligned);
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
  // A block's least: fewer weight rows, and more blocks, would read more of x than of the weights.
  const int64_t min_rows = p.linear.rows <= 8 ? 8 : 12;
  const int64_t shares = (p.linear.out_dim + min_rows - 1) / min_rows;
  int64_t grid = std::min<int64_t>(shares, card.num_sms * D::kBlocksPerSm);
  if (grid > card.num_sms) grid -= grid % card.num_sms;  // as many on every SM
  kernel<<<static_cast<unsigned>(grid), kThreads, D::kSharedBytes, stream>>>(p);
}

// Wide tiles read x half as often; narrow ones suit small shares. Neither changes a bit.
template <typename T, Before kBefore>
void launch_width(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  const int64_t narrow_rows = kBefore == Before::kNothing && p.linear.rows <= 8 ? 96 : 16;
  if (p.linear.out_dim > narrow_rows * 2 * card.num_sms) {
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
