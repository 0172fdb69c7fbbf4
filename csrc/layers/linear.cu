// Which kernel runs a linear: float32 has its own; 16-bit types go by the number of rows, and both
// of their kernels give a row the same bits.
#include "layers/linear.cuh"

namespace tlt {
namespace {

Card card_of(int device) {
  int num_sms = 0, major = 0;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "device");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  return {num_sms, major >= 9};
}

void launch_linear(LinearKernelParams p, Before before, const char* op, int device,
                   uintptr_t stream) {
  check_columns(op, 2 * p.linear.in_dim);
  const DeviceGuard guard(device);
  const int64_t bytes = bytes_of(p.linear.dtype), row_bytes = p.linear.in_dim * bytes;
  p.x_aligned = is_aligned(p.linear.x, p.linear.x_stride * bytes, row_bytes) &&
                is_aligned(p.norm_weight, 0, 0);
  p.w_aligned = is_aligned(p.linear.weight, p.linear.weight_stride * bytes, row_bytes);
  if (p.linear.dtype == DType::kFloat32) {
    launch_float32(p, before, as_stream(stream));
  } else if (p.linear.rows <= kDecodeRows) {
    launch_decode(p, before, card_of(device), as_stream(stream));
  } else {
    launch_tiles(p, before, card_of(device), as_stream(stream));
  }
  check_cuda(cudaGetLastError(), op);
}

LinearKernelParams reading(const LinearParams& linear, const void* x, int64_t x_stride) {
  LinearKernelParams p = {linear, nullptr, 0.0f, false, false};
  p.linear.x = x;
  p.linear.x_stride = x_stride;
  return p;
}

}  // namespace

void linear_rows_cuda(const LinearParams& p, int device, uintptr_t stream) {
  launch_linear(reading(p, p.x, p.x_stride), Before::kNothing, "linear_rows", device, stream);
}

void rms_norm_linear_cuda(const RmsNormParams& norm, const LinearParams& linear, int device,
                          uintptr_t stream) {
  LinearKernelParams p = reading(linear, norm.x, norm.x_stride);
  p.norm_weight = norm.weight;
  p.eps = norm.eps;
  launch_linear(p, Before::kNorm, "rms_norm_linear", device, stream);
}

void silu_mul_linear_cuda(const SiluMulParams& act, const LinearParams& linear, int device,
                          uintptr_t stream) {
  launch_linear(reading(linear, act.x, act.x_stride), Before::kSilu, "silu_mul_linear", device,
                stream);
}

}  // namespace tlt
