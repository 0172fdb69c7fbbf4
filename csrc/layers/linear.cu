// Selects the kernel of a linear. float32 has one kernel. For 16-bit types rows, sizes and
// alignment decide, and all of their kernels give a row the same bits.
#include "layers/linear.cuh"

namespace tlt {
namespace {

Card card_of(int device) {
  Card card = {};
  const auto query = [&](int* value, cudaDeviceAttr attribute) {
    check_cuda(cudaDeviceGetAttribute(value, attribute, device), "device");
  };
  query(&card.num_sms, cudaDevAttrMultiProcessorCount);
  query(&card.max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return card;
}

LinearKernelParams kernel_params(const char* op, const LinearParams& p, bool silu_mul) {
  check_columns(op, p.in_dim);
  const int64_t bytes = bytes_of(p.dtype), row_bytes = p.in_dim * bytes;
  const int64_t out_bytes = bytes_of(p.out_dtype);
  LinearKernelParams params = {p, silu_mul, p.out_dim / 2};
  params.x_aligned =
      is_aligned(p.x, p.x_stride * bytes, row_bytes) && is_aligned(p.norm_weight, 0, 0);
  params.w_aligned = is_aligned(p.weight, p.weight_stride * bytes, row_bytes);
  params.out_aligned = is_aligned(p.out, p.out_stride * out_bytes, 0) && is_aligned(p.bias, 0, 0) &&
                       (!p.residual || is_aligned(p.residual, p.residual_stride * out_bytes, 0));
  return params;
}

// Whether aligned rows are few. With a norm, up to 128 are. Without one, up to 8 are, except for
// many weights, which the larger copies of wgmma read faster, and for narrow weights with long
// rows, whose parts clusters share. More than 8 are if reading the weights again for each piece
// costs less than starting another kernel.
bool decodes(const LinearParams& p, const Card& card) {
  constexpr int64_t kFewRows = 8, kFewNormedRows = 128, kFewPieces = 64, kFewWeights = 4 << 20;
  if (p.norm_weight) return p.rows <= kFewNormedRows;
  const int64_t pieces = (p.rows + kPieceRows - 1) / kPieceRows;
  const int64_t weights = p.in_dim * p.out_dim;
  const bool many = weights > (p.out_dim > p.in_dim && p.rows > 4 ? 2 : 8) * kFewWeights;
  const bool narrow =
      p.out_dim < 16 * card.num_sms && p.in_dim > 2 * p.out_dim && weights > kFewWeights;
  return (p.rows <= kFewRows && !many && !narrow) ||
         (pieces <= kFewPieces && pieces * weights <= kFewWeights);
}

void launch_linear(const char* op, const LinearParams& linear, bool silu_mul, int device,
                   uintptr_t stream) {
  const LinearKernelParams p = kernel_params(op, linear, silu_mul);
  const DeviceGuard guard(device);
  if (linear.dtype == DType::kFloat32) return launch_float32(p, as_stream(stream));
  const Card card = card_of(device);
  const bool aligned = p.x_aligned && p.w_aligned, norms = linear.norm_weight != nullptr;
  const bool hopper = !norms && aligned && linear.in_dim > 0 && has_hopper_kernel() &&
                      (!silu_mul || linear.out_dim % 16 == 0);
  const bool few = decodes(linear, card) || (linear.rows <= kPieceRows && !hopper);
  // The kernels whose warps own a part each take eight parts only.
  const bool whole = aligned && linear.parts == kParts;
  if (whole && launch_small(p, card, as_stream(stream))) return;
  if (whole && launch_mid(p, card, as_stream(stream))) return;
  if (whole && few && (norms || !silu_mul || !hopper)) {
    launch_decode(p, card, as_stream(stream));
  } else if (hopper) {
    launch_hopper(p, card, as_stream(stream));
  } else {
    launch_tiles(p, as_stream(stream));
  }
}

}  // namespace

void linear_rows_cuda(const LinearParams& p, int device, uintptr_t stream) {
  launch_linear("linear_rows", p, false, device, stream);
}

void linear_silu_mul_cuda(const LinearParams& p, int device, uintptr_t stream) {
  launch_linear("linear_silu_mul", p, true, device, stream);
}

void linear_append_cuda(const LinearParams& linear, const AppendKvParams& append, int device,
                        uintptr_t stream) {
  constexpr const char* op = "linear_append";
  const LinearKernelParams p = kernel_params(op, linear, false);
  const DeviceGuard guard(device);
  if (linear.dtype == DType::kFloat32) return launch_float32_append(p, append, as_stream(stream));
  require(
      p.x_aligned && p.w_aligned, op,
      "x, norm_weight, weight: expected 16-bit rows that start at and span multiples of 16 bytes "
      "on a CUDA device");
  const Card card = card_of(device);
  if (launch_small_append(p, append, card, as_stream(stream))) return;
  if (launch_mid_append(p, append, card, as_stream(stream))) return;
  grid_axis(op, "pieces of 16 rows", (linear.rows + kPieceRows - 1) / kPieceRows);
  launch_decode_append(p, append, card, as_stream(stream));
}

}  // namespace tlt
