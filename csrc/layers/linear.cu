// Which kernel runs a linear: float32 has its own; 16-bit types go by the number of rows, and all
// of their kernels give a row the same bits.
#include "layers/linear.cuh"

namespace tlt {
namespace {

Card card_of(int device) {
  int num_sms = 0;
  check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device), "device");
  return {num_sms};
}

void set_alignment(LinearKernelParams* p, const char* op) {
  check_columns(op, 2 * p->linear.in_dim);
  const int64_t bytes = bytes_of(p->linear.dtype), row_bytes = p->linear.in_dim * bytes;
  p->x_aligned = is_aligned(p->linear.x, p->linear.x_stride * bytes, row_bytes) &&
                 is_aligned(p->norm_weight, 0, 0);
  p->w_aligned = is_aligned(p->linear.weight, p->linear.weight_stride * bytes, row_bytes);
  const int64_t out_bytes = bytes_of(p->linear.out_dtype);
  p->out_aligned = is_aligned(p->linear.out, p->linear.out_stride * out_bytes, 0) &&
                   (!p->linear.residual ||
                    is_aligned(p->linear.residual, p->linear.residual_stride * out_bytes, 0)) &&
                   is_aligned(p->linear.bias, 0, 0);
}

// Whether the decode kernel takes aligned rows: 8 always, more where it costs less to read the
// weights again for each piece than another kernel takes to start.
bool decodes(const LinearParams& p, Before before) {
  constexpr int64_t kFewRows = 8, kFewFusedRows = 64, kFewPieces = 64, kFewWeights = 4 << 20;
  if (before != Before::kNothing) return p.rows <= kFewFusedRows;
  const int64_t pieces = (p.rows + kPieceRows - 1) / kPieceRows;
  const int64_t weights = p.in_dim * p.out_dim;
  return p.rows <= kFewRows || (pieces == 1 && weights <= 4 * kFewWeights) ||
         (pieces <= kFewPieces && pieces * weights <= kFewWeights);
}

void launch_linear(LinearKernelParams p, Before before, const char* op, int device,
                   uintptr_t stream) {
  set_alignment(&p, op);
  const DeviceGuard guard(device);
  const bool aligned = p.x_aligned && p.w_aligned;
  const bool hopper =
      before == Before::kNothing && aligned && p.linear.in_dim > 0 && has_hopper_kernel();
  if (p.linear.dtype == DType::kFloat32) {
    launch_float32(p, before, as_stream(stream));
  } else if (aligned && (decodes(p.linear, before) || (p.linear.rows <= kPieceRows && !hopper))) {
    launch_decode(p, before, card_of(device), as_stream(stream));
  } else if (hopper) {
    launch_hopper(p, card_of(device), as_stream(stream));
  } else {
    launch_tiles(p, before, as_stream(stream));
  }
  check_cuda(cudaGetLastError(), op);
}

LinearKernelParams reading(const LinearParams& linear, const void* x, int64_t x_stride) {
  LinearKernelParams p = {linear, nullptr, 0.0f, false, false, false, linear.early};
  p.linear.x = x;
  p.linear.x_stride = x_stride;
  return p;
}

LinearKernelParams reading_normed(const RmsNormParams& norm, const LinearParams& linear) {
  LinearKernelParams p = reading(linear, norm.x, norm.x_stride);
  p.norm_weight = norm.weight;
  p.eps = norm.eps;
  return p;
}

}  // namespace

void linear_rows_cuda(const LinearParams& p, int device, uintptr_t stream) {
  launch_linear(reading(p, p.x, p.x_stride), Before::kNothing, "linear_rows", device, stream);
}

void rms_norm_linear_cuda(const RmsNormParams& norm, const LinearParams& linear, int device,
                          uintptr_t stream) {
  launch_linear(reading_normed(norm, linear), Before::kNorm, "rms_norm_linear", device, stream);
}

void silu_mul_linear_cuda(const SiluMulParams& act, const LinearParams& linear, int device,
                          uintptr_t stream) {
  launch_linear(reading(linear, act.x, act.x_stride), Before::kSilu, "silu_mul_linear", device,
                stream);
}

void rms_norm_linear_append_cuda(const RmsNormParams& norm, const LinearParams& linear,
                                 const AppendKvParams& append, int device, uintptr_t stream) {
  constexpr const char* op = "rms_norm_linear_append";
  LinearKernelParams p = reading_normed(norm, linear);
  set_alignment(&p, op);
  const DeviceGuard guard(device);
  if (linear.dtype == DType::kFloat32) return launch_float32_append(p, append, as_stream(stream));
  require(
      p.x_aligned && p.w_aligned, op,
      "x, norm_weight, weight: expected 16-bit rows that start at and span multiples of 16 bytes "
      "on a CUDA device");
  launch_decode_append(p, append, card_of(device), as_stream(stream));
}

}  // namespace tlt
