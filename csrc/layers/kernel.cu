// rms_norm: out[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * weight[i].
// silu_mul: out[r, i] = silu(x[r, i]) * x[r, dim + i].
//
// One block owns one row of the norm, or one warp a short one, so its bits never depend on how many
// rows there are; the order of its sum is in device.cuh (float32: the CPU's). The second read of x
// hits L1; a warp holds its row. One thread
// owns one 16-byte chunk of the activation. Both move what they read and write once: 2 (norm) and 3
// (activation) times rows * dim elements. Rows that are not 16-byte aligned go element by element,
// in the same order. Any dim; float32, float16, bfloat16.
#include "common/cuda.h"
#include "layers/device.cuh"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 256;
constexpr int kRowWarps = 4;  // rows of a block, where each is a warp's

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const RmsNormParams p, const bool aligned) {
  launch_dependents();
  wait_for_prior_grid();
  const int dim = static_cast<int>(p.dim);
  const T* x = static_cast<const T*>(p.x) + blockIdx.x * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride;
  __shared__ float shared_scale;
  if (threadIdx.x < kWarpSize) {
    const float squares = warp_squares(x, dim, aligned);
    if (threadIdx.x == 0) shared_scale = norm_scale<T>(squares, dim, p.eps);
  }
  __syncthreads();
  const float scale = shared_scale;
  constexpr int kSize = Chunk<T>::kSize;
  for (int k = threadIdx.x * kSize; k < dim; k += kThreads * kSize) {
    Chunk<T> chunk = load_chunk(x, k, dim, aligned);
    norm_chunk(chunk, scale, load_chunk(weight, k, dim, aligned));
    store_chunk(out, k, dim, aligned, chunk);
  }
}

// Aligned 16-bit rows of at most kSteps * 512 elements: x and the weight are asked for at once, and
// stay in registers as the sum of squares takes them.
template <typename T, int kSteps>
__global__ void __launch_bounds__(kRowWarps* kWarpSize)
    rms_norm_rows_kernel(const RmsNormParams p) {
  launch_dependents();
  constexpr int kStep = kParts * kBlockK;
  const int dim = static_cast<int>(p.dim), lane = threadIdx.x % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / kWarpSize;
  const T* from = static_cast<const T*>(p.x) + row * p.x_stride;
  const auto place = [&](int step, int h) { return first_of_part(lane) + step * kStep + h * 32; };
  wait_for_prior_grid();
  if (row >= p.rows) return;
  Chunk<T> x[kSteps][2], weight[kSteps][2];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) x[i][h] = load_split(from, place(i, h), dim);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight[i][h] = load_split(static_cast<const T*>(p.weight), place(i, h), dim);
    }
  }
  float sum[2][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (i * kStep >= dim) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) add_squares(sum[h], x[i][h]);
  }
  const float scale = norm_scale<T>(fold_parts(squares_of(sum)), dim, p.eps);
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      norm_chunk(x[i][h], scale, weight[i][h]);
      store_split(out, place(i, h), dim, x[i][h]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    silu_mul_kernel(const SiluMulParams p, const int row_blocks, const bool aligned) {
  launch_dependents();
  wait_for_prior_grid();
  const int64_t row = blockIdx.x / row_blocks;
  const int dim = static_cast<int>(p.dim);
  const int k = (blockIdx.x % row_blocks * kThreads + threadIdx.x) * Chunk<T>::kSize;
  if (k >= dim) return;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  Chunk<T> gate = load_chunk(x, k, dim, aligned);
  silu_mul_chunk(gate, load_chunk(x + dim, k, dim, aligned));
  store_chunk(static_cast<T*>(p.out) + row * p.out_stride, k, dim, aligned, gate);
}

}  // namespace

void rms_norm_cuda(const RmsNormParams& p, int device, uintptr_t stream) {
  check_columns("rms_norm", p.dim);
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int64_t kBytes = sizeof(T);
    const bool aligned = is_aligned(p.x, p.x_stride * kBytes, p.dim * kBytes) &&
                         is_aligned(p.out, p.out_stride * kBytes, p.dim * kBytes) &&
                         is_aligned(p.weight, 0, 0);
    if constexpr (sizeof(T) == 2) {
      constexpr int64_t kStep = kParts * kBlockK;
      if (aligned && p.dim <= 4 * kStep) {
        const auto kernel =
            p.dim <= 2 * kStep ? rms_norm_rows_kernel<T, 2> : rms_norm_rows_kernel<T, 4>;
        const KernelShape shape{(p.rows + kRowWarps - 1) / kRowWarps, kRowWarps * kWarpSize};
        return launch_kernel("rms_norm", kernel, shape, as_stream(stream), true, p);
      }
    }
    launch_kernel("rms_norm", rms_norm_kernel<T>, {p.rows, kThreads}, as_stream(stream), true, p,
                  aligned);
  });
}

void silu_mul_cuda(const SiluMulParams& p, int device, uintptr_t stream) {
  check_columns("silu_mul", 2 * p.dim);
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int64_t kBytes = sizeof(T), kBlock = kThreads * Chunk<T>::kSize;
    const bool aligned = is_aligned(p.x, p.x_stride * kBytes, p.dim * kBytes) &&
                         is_aligned(p.out, p.out_stride * kBytes, p.dim * kBytes);
    const int row_blocks = static_cast<int>((p.dim + kBlock - 1) / kBlock);
    launch_kernel("silu_mul", silu_mul_kernel<T>, {p.rows * row_blocks, kThreads},
                  as_stream(stream), true, p, row_blocks, aligned);
  });
}

}  // namespace tlt
