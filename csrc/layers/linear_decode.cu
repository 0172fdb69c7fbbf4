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

template <int kTiles>  // of 16 weight rows
struct Decode {
  static constexpr int kCols = 16 * kTiles;
  static constexpr int kStages = kTiles == 1 ? 4 : 3;
  static constexpr int kChunks = 4 * kTiles;  // a lane's share of one step
  static constexpr int kRing = kWarps * kStages * kChunks * kWarpSize;
  static constexpr int kSharedBytes = kRing * 16 + kWarps * kDecodeRows * kCols * 4;
  static_assert(kSharedBytes <= 113 * 1024, "two blocks of an SM");
};

constexpr int blocks_per_sm(int tiles, Before before) {
  return tiles == 1 && before != Before::kSilu ? 3 : 2;
}

// A step of x for one lane: rows g and g + 8 of x, two chunks of 8 elements each.
template <typename T, Before kBefore>
struct Rows {
  Chunk<T> x[2][2];
  Chunk<T> up[kBefore == Before::kSilu ? 2 : 1][2];  // kSilu
};

// Where a lane's own sum of (x row, column) of a tile goes: lanes of a warp hit 32 banks.
template <int kCols>
__device__ __forceinline__ int sum_index(int row, int col) {
  return row * kCols + (col ^ (row / 2 % (kCols / 8)) * 8);
}

template <typename T, int kTiles, Before kBefore>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kTiles, kBefore))
    decode_kernel(const LinearKernelParams params) {
  using D = Decode<kTiles>;
  extern __shared__ uint4 ring[];
  float* sums = reinterpret_cast<float*>(ring + D::kRing);
  __shared__ float row_scale[kDecodeRows];  // kNorm
  const LinearParams& p = params.linear;
  const int in_dim = static_cast<int>(p.in_dim), rows = static_cast<int>(p.rows);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const int num_tiles = static_cast<int>((p.out_dim + D::kCols - 1) / D::kCols);
  const int steps = part_steps(num_blocks_of(p), warp);
  const int first_k = warp * kBlockK + t * 8, step_k = kParts * kBlockK;
  uint4* my_ring = ring + warp * D::kStages * D::kChunks * kWarpSize + lane;

  // Weights. Evict first: what the next kernels share should stay in L2.
  const uint64_t policy = evict_first_policy();
  const T* w_base = static_cast<const T*>(p.weight);
  int load_tile = blockIdx.x, load_step = 0;
  const auto load_stage = [&](int stage) {
    if (load_tile < num_tiles && load_step < steps) {
      uint4* to = my_ring + stage * D::kChunks * kWarpSize;
      const int64_t row = static_cast<int64_t>(load_tile) * D::kCols + g;
      const int rows_left = static_cast<int>(min(p.out_dim - row, static_cast<int64_t>(D::kCols)));
      const int k = first_k + load_step * step_k;
      const T* from = w_base + row * p.weight_stride;
#pragma unroll
      for (int m = 0; m < D::kChunks / 2; ++m) {  // rows g, g + 8, ...
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint4* slot = to + (m * 2 + h) * kWarpSize;
          const int at = k + h * 32;
          if (params.w_aligned) {
            const bool valid = m * 8 < rows_left && at < in_dim;
            copy_async(slot, valid ? from + at : w_base, valid, policy);
          } else {
            *slot = load_chunk(from, at, m * 8 < rows_left ? in_dim : 0, false).raw;
          }
        }
        from += 8 * p.weight_stride;
      }
      if (++load_step == steps) {
        load_step = 0;
        load_tile += gridDim.x;
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < D::kStages; ++stage) load_stage(stage);

  const T* x_base = static_cast<const T*>(p.x);
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

  const auto load_x = [&](Rows<T, kBefore>& to, int step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = i * 8 + g, dim = row < rows ? in_dim : 0;
      const T* from = x_base + row * p.x_stride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = first_k + step * step_k + h * 32;
        to.x[i][h] = load_chunk(from, k, dim, params.x_aligned);
        if constexpr (kBefore == Before::kSilu) {
          to.up[i][h] = load_chunk(from + in_dim, k, dim, params.x_aligned);
        }
      }
    }
  };
  const auto apply_before = [&](Rows<T, kBefore>& at, int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      [[maybe_unused]] Chunk<T> weight;
      if constexpr (kBefore == Before::kNorm) {
        weight = load_chunk(static_cast<const T*>(params.norm_weight),
                            first_k + step * step_k + h * 32, in_dim, params.x_aligned);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && rows <= 8) break;
        if constexpr (kBefore == Before::kNorm) norm_chunk(at.x[i][h], scale[i], weight);
        if constexpr (kBefore == Before::kSilu) silu_mul_chunk(at.x[i][h], at.up[i][h]);
      }
    }
  };

  Rows<T, kBefore> next;
  if (steps > 0) load_x(next, 0);
  int stage = 0;
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    float acc[kTiles][2][4] = {};
    for (int step = 0; step < steps; ++step) {
      Rows<T, kBefore> now = next;
      load_x(next, step + 1 < steps ? step + 1 : 0);  // the next tile reads the same rows
      apply_before(now, step);
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
    for (int i = threadIdx.x; i < rows * D::kCols; i += kThreads) {
      const int row = i / D::kCols, col = i % D::kCols;
      const int64_t out_col = static_cast<int64_t>(tile) * D::kCols + col;
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        part[w] = sums[w * kDecodeRows * D::kCols + sum_index<D::kCols>(row, col)];
      }
      if (out_col < p.out_dim) store_out<T>(p, row, out_col, sum_of_8(part));
    }
    __syncthreads();  // the sums are read before the next tile's are written
  }
}

template <typename T, int kTiles, Before kBefore>
void launch(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  using D = Decode<kTiles>;
  const auto kernel = decode_kernel<T, kTiles, kBefore>;
  allow_shared(kernel, D::kSharedBytes);
  const int64_t tiles = (p.linear.out_dim + D::kCols - 1) / D::kCols;
  const int64_t grid = std::min<int64_t>(tiles, card.num_sms * blocks_per_sm(kTiles, kBefore));
  kernel<<<static_cast<unsigned>(grid), kThreads, D::kSharedBytes, stream>>>(p);
}

template <typename T, int kTiles>
void launch_before(const LinearKernelParams& p, Before before, const Card& card,
                   cudaStream_t stream) {
  switch (before) {
    case Before::kNothing:
      return launch<T, kTiles, Before::kNothing>(p, card, stream);
    case Before::kNorm:
      return launch<T, kTiles, Before::kNorm>(p, card, stream);
    case Before::kSilu:
      return launch<T, kTiles, Before::kSilu>(p, card, stream);
  }
}

}  // namespace

void launch_decode(const LinearKernelParams& p, Before before, const Card& card,
                   cudaStream_t stream) {
  // Wide tiles halve the traffic of x, narrow ones fill the card: wide once they fill it twice.
  const bool wide = p.linear.out_dim >= 2 * card.num_sms * Decode<2>::kCols;
  if (p.linear.dtype == DType::kFloat16) {
    wide ? launch_before<__half, 2>(p, before, card, stream)
         : launch_before<__half, 1>(p, before, card, stream);
  } else {
    wide ? launch_before<__nv_bfloat16, 2>(p, before, card, stream)
         : launch_before<__nv_bfloat16, 1>(p, before, card, stream);
  }
}

}  // namespace tlt
