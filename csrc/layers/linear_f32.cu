// The float32 linears, bit-identical to the CPU (csrc/layers/dot.h): in each part of K, element k
// goes to lane k % 16 by a fused multiply-add in rising k, and the 16 lanes fold pairwise; the
// parts are added as a binary tree. For comparing engines; the 16-bit kernels are for speed.
//
// A block owns 8 rows of x and 64 weight rows. Each of its 16 half-warps owns 4 weight rows, and a
// lane of it reads its elements of k directly from global memory (64 bytes a half-warp). Every
// half-warp applies the norm to x as it loads it. With each fold of lanes a lane keeps half of its
// sums, so that it ends with two: of one row of x and two neighbouring weight rows.
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
static_assert(kRows * kCols == 2 * kLanes, "folds leave a lane two sums");

// Adds the sums of lanes that are kApart apart: the upper lane keeps `high`, the lower one `low`.
template <int kApart>
__device__ __forceinline__ float fold_lanes(float low, float high) {
  const bool upper = (threadIdx.x & kApart) != 0;
  return (upper ? high : low) + __shfl_xor_sync(kFullWarp, upper ? low : high, kApart);
}

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

  PartTree<2> tree;
  float sum[2];
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    float acc[kRows][kCols] = {};
#pragma unroll 1
    for (int block = part * kBlockK; block < in_dim; block += p.parts * kBlockK) {
      const int end = min(block + kBlockK, in_dim);
#pragma unroll 2
      for (int first = block; first < end; first += kLanes) {
        const int k = first + lane;
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
    }
    float of_rows[4 * kCols], of_two[2 * kCols], of_row[kCols];
#pragma unroll
    for (int i = 0; i < 4 * kCols; ++i) {
      of_rows[i] = fold_lanes<8>(acc[i / kCols][i % kCols], acc[4 + i / kCols][i % kCols]);
    }
#pragma unroll
    for (int i = 0; i < 2 * kCols; ++i) {
      of_two[i] = fold_lanes<4>(of_rows[i], of_rows[2 * kCols + i]);
    }
#pragma unroll
    for (int c = 0; c < kCols; ++c) of_row[c] = fold_lanes<2>(of_two[c], of_two[kCols + c]);
#pragma unroll
    for (int c = 0; c < 2; ++c) sum[c] = fold_lanes<1>(of_row[c], of_row[2 + c]);
    tree.add(part, sum);
  }
  const int row = lane / 2;
  const bool second = lane % 2 == 1;  // of the pairs of weight rows
  const int64_t out_row = row_begin + row, col = col_begin + second * 2;
  if (row >= rows) return;
  if constexpr (kAppends<After>) {
    if (second * 2 >= cols || places.request[row] < 0) return;
    if (p.bias) {
      const float* bias = static_cast<const float*>(p.bias);
      sum[0] += bias[second ? weight_row[2] : weight_row[0]];
      sum[1] += bias[second ? weight_row[3] : weight_row[1]];
    }
    const RowPlace& at = places.at[row];
    const HeadPair pair = head_pair(after, col / 2);
    const float2 angle = at.status ? float2{} : angle_of(after, at.position, pair.i);
    store_pair(pair_out<float>(after, out_row, pair, at), static_cast<int>(after.head_dim / 2),
               sum[0], sum[1], angle);
  } else if constexpr (kPairs<After>) {
    if (second * 2 >= cols) return;
    static_cast<float*>(p.out)[out_row * p.out_stride + col / 2] = silu_mul_one(sum[0], sum[1]);
  } else {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (second * 2 + c < cols) store_sum<float, float>(p, out_row, col + c, sum[c]);
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
