// rms_norm: out[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * weight[i].
// silu_mul: out[r, i] = silu(x[r, i]) * x[r, dim + i].
//
// One block or one warp owns one row of the norm. One warp sums its squares in the order of
// device.cuh (float32: the CPU's), so the bits never depend on how many rows there are. Threads
// load the row and the weight before and hold them until the sum is complete. One thread owns one
// 16-byte chunk of the activation. Both read and write each element once: 2 (norm) and 3
// (activation) times rows * dim elements. Rows that are not 16-byte aligned are read element by
// element, in the same order. Any dim; float32, float16, bfloat16.
#include "common/cuda.h"
#include "layers/device.cuh"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 256;

template <typename T, int kRowThreads>
__global__ void __launch_bounds__(kNormBlock<kRowThreads>)
    rms_norm_kernel(const RmsNormParams p, const bool aligned) {
  launch_dependents();
  const int dim = static_cast<int>(p.dim);
  const T* weight = static_cast<const T*>(p.weight);
  prefetch_weight<kRowThreads>(weight, dim);
  wait_for_prior_grid();
  const int64_t row = norm_row_index<kRowThreads>();
  if (row >= p.rows) return;
  norm_row<kRowThreads>(static_cast<const T*>(p.x) + row * p.x_stride, weight,
                        static_cast<T*>(p.out) + row * p.out_stride, dim, p.eps, aligned);
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
    const bool warps = warps_own_rows<T>(p.rows, p.dim, aligned);
    launch_kernel("rms_norm",
                  warps ? rms_norm_kernel<T, kWarpSize> : rms_norm_kernel<T, kNormThreads>,
                  norm_shape(p.rows, warps), as_stream(stream), true, p, aligned);
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
