// The float32 linears, with the bits of the CPU (csrc/layers/dot.h): element k goes to lane k % 16
// by a fused multiply-add in rising k, and the 16 lanes fold pairwise. For comparing engines; the
// 16-bit kernels are for speed.
//
// A block owns 8 rows of x and 64 weight rows. Each of its 16 half-warps owns 4 weight rows, and a
// lane of it reads its elements of k directly from global memory (64 bytes a half-warp). Every
// half-warp applies the norm to x as it loads it.
#include "layers/linear.cuh"
#include "layers/pairs.cuh"

namespace tlt {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 16;
constexpr int kRows = 8;
constexpr int kCols = 4;
constexpr int kBlockCols = kThreads / kLanes * kCols;
static_assert(kThreads / kWarpSize == kRows, "a warp sums the squares of one row");

template <typename After>
__global__ void __launch_bounds__(kThreads)
    float32_kernel(const __grid_constant__ LinearKernelParams params,
                   const __grid_constant__ After after) {
  const LinearParams& p = params.linear;
  const int in_dim = static_cast<int>(p.in_dim);
  const int64_t row_tiles = (p.rows + kRows - 1) / kRows;
  const int64_t row_begin = blockIdx.x % row_tiles * kRows;
  const int64_t col_begin = blockIdx.x / row_tiles * kBlockCols + threadIdx.x / kLanes * kCols;
  const int lane = threadIdx.x % kLanes;
  const float* x = static_cast<const float*>(p.x) + row_begin * p.x_stride;
  const float* w = static_cast<const float*>(p.weight);
  const float* norm_weight = static_cast<const float*>(p.norm_weight);
  const int rows = static_cast<int>(min(static_cast<int64_t>(kRows), p.rows - row_begin));
  const int cols = static_cast<int>(
      max(static_cast<int64_t>(0), min(static_cast<int64_t>(kCols), p.out_dim - col_begin)));

  int64_t weight_row[kCols];  // grouped in pairs if the epilogue takes pairs
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    weight_row[c] = col_begin + c;
    if constexpr (kPairs<After>) {
      weight_row[c] = low_row(after, (col_begin + c) / 2) + c % 2 * rows_apart(p, after);
    }
  }
  __shared__ std::conditional_t<kAppends<After>, RowPlaces<kRows>, char> places;
  if constexpr (kAppends<After>) {
    if (threadIdx.x < kWarpSize) {
      find_places(after, row_begin, rows, blockIdx.x < row_tiles, &places);
    }
    __syncthreads();
  }

  __shared__ float scale[kRows];
  if (norm_weight) {
    const int row = threadIdx.x / kWarpSize;  // one for each warp
    if (row < rows) {
      const float squares = warp_squares(x + row * p.x_stride, in_dim, true);
      if (threadIdx.x % kWarpSize == 0) scale[row] = norm_scale<float>(squares, in_dim, p.eps);
    }
    __syncthreads();
  }
  const auto load_x = [&](int row, int k) {
    if (row >= rows || k >= in_dim) return 0.0f;
    const float v = x[row * p.x_stride + k];
    return norm_weight ? norm_one(v, scale[row], norm_weight[k]) : v;
  };

  float acc[kRows][kCols] = {};
#pragma unroll 2
  for (int k = lane; k < (in_dim + kLanes - 1) / kLanes * kLanes; k += kLanes) {
    float w_k[kCols];
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      w_k[c] = c < cols && k < in_dim ? w[weight_row[c] * p.weight_stride + k] : 0.0f;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float x_k = load_x(r, k);
#pragma unroll
      for (int c = 0; c < kCols; ++c) acc[r][c] = fmaf(x_k, w_k[c], acc[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) acc[r][c] = fold(acc[r][c], kLanes);
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      if (lane != (r * kCols + c) % kLanes || r >= rows || c >= cols) continue;
      if constexpr (kAppends<After>) {
        if (c % 2 == 1 || places.request[r] < 0) continue;
        const RowPlace& at = places.at[r];
        const HeadPair pair = head_pair(after, (col_begin + c) / 2);
        const auto biased = [&](int i) {
          return p.bias ? acc[r][c + i] + static_cast<const float*>(p.bias)[weight_row[c + i]]
                        : acc[r][c + i];
        };
        const float2 angle = at.status ? float2{} : angle_of(after, at.position, pair.i);
        store_pair(pair_out<float>(after, row_begin + r, pair, at),
                   static_cast<int>(after.head_dim / 2), biased(0), biased(1), angle);
      } else if constexpr (kPairs<After>) {
        if (c % 2 == 1) continue;
        const int64_t at = (row_begin + r) * p.out_stride + (col_begin + c) / 2;
        static_cast<float*>(p.out)[at] = silu_mul_one(acc[r][c], acc[r][c + 1]);
      } else {
        store_sum<float, float>(p, row_begin + r, col_begin + c, acc[r][c]);
      }
    }
  }
}

template <typename After>
void launch(const LinearKernelParams& p, const After& after, cudaStream_t stream) {
  const int64_t row_tiles = (p.linear.rows + kRows - 1) / kRows;
  const int64_t col_tiles = (p.linear.out_dim + kBlockCols - 1) / kBlockCols;
  launch_kernel("linear", float32_kernel<After>, {row_tiles * col_tiles, kThreads}, stream, false,
                p, after);
}

}  // namespace

void launch_float32(const LinearKernelParams& p, cudaStream_t stream) {
  p.silu_mul ? launch(p, SiluMul{}, stream) : launch(p, Nothing{}, stream);
}

void launch_float32_append(const LinearKernelParams& p, const AppendKvParams& append,
                           cudaStream_t stream) {
  launch(p, append, stream);
}

}  // namespace tlt
