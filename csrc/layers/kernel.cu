// rms_norm: out[r, i] = x[r, i] / sqrt(mean(x[r]^2) + eps) * weight[i].
//
// One block owns one row, so a row's bits never depend on how many rows there are. Thread t sums
// elements t, t + kThreads, ...; warps fold by shuffles, then the first warp folds the warps: one
// fixed order. Moves 2 * rows * dim elements and reads the weight once per row from L2. The second
// read of x hits L1. Any dim; float32, float16, bfloat16.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/cuda.h"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
static_assert(kThreads % kWarpSize == 0 && kThreads / kWarpSize <= kWarpSize);

__device__ float load(const float* p) { return *p; }
__device__ float load(const __half* p) { return __half2float(*p); }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float v) { *p = v; }
__device__ void store(__half* p, float v) { *p = __float2half_rn(v); }
__device__ void store(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

template <typename T>
__device__ float rounded(float v) {
  T stored;
  store(&stored, v);
  return load(&stored);
}

__device__ float warp_sum(float v) {
#pragma unroll
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

__device__ float block_sum(float v) {
  __shared__ float partial[kThreads / kWarpSize];
  v = warp_sum(v);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  v = threadIdx.x % kWarpSize < kThreads / kWarpSize ? partial[threadIdx.x % kWarpSize] : 0.0f;
  return warp_sum(v);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const RmsNormParams p) {
  const T* x = static_cast<const T*>(p.x) + blockIdx.x * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.out_stride;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < p.dim; i += kThreads) {
    const float v = load(x + i);
    squares = fmaf(v, v, squares);
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(p.dim) + p.eps);
  for (int64_t i = threadIdx.x; i < p.dim; i += kThreads) {
    store(out + i, rounded<T>(load(x + i) * scale) * load(weight + i));
  }
}

template <typename T>
void launch(const RmsNormParams& p, cudaStream_t stream) {
  rms_norm_kernel<T><<<static_cast<unsigned>(p.rows), kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "rms_norm");
}

}  // namespace

void rms_norm_cuda(const RmsNormParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  switch (p.dtype) {
    case DType::kFloat32:
      return launch<float>(p, as_stream(stream));
    case DType::kFloat16:
      return launch<__half>(p, as_stream(stream));
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(p, as_stream(stream));
    default:
      throw DTypeError(std::string("rms_norm: no kernel for ") + name_of(p.dtype));
  }
}

}  // namespace tlt
