#include "layers/op.h"

#include "common/dispatch.h"
#include "kv/op.h"

namespace tlt {
namespace {

// Checks what follows x in every linear op and fills all but x.
LinearParams check_linear(const char* op, const Tensor& x, int64_t in_dim, const Tensor& weight,
                          const Tensor& out, const Tensor& bias, const Tensor& residual,
                          bool early) {
  const Arg weight_arg(op, "weight", weight), out_arg(op, "out", out), bias_arg(op, "bias", bias),
      residual_arg(op, "residual", residual);
  weight_arg.on(x);
  out_arg.on(x);
  if (bias.defined()) bias_arg.on(x);
  if (residual.defined()) residual_arg.on(x);
  weight_arg.is_like("x", x);
  x.dtype == DType::kFloat32 ? out_arg.is_like("x", x) : out_arg.is({x.dtype, DType::kFloat32});
  if (bias.defined()) bias_arg.is_like("x", x);
  if (residual.defined()) residual_arg.is_like("out", out);
  weight_arg.shape({kAny, in_dim}).dense_last();
  const int64_t rows = x.shape[0], out_dim = weight.shape[0];
  out_arg.shape({rows, out_dim}).dense_last();
  if (bias.defined()) bias_arg.shape({out_dim}).dense();
  if (residual.defined()) residual_arg.shape({rows, out_dim}).dense_last();
  require(x.data == nullptr || out.data != x.data, op,
          "out: expected other memory than x, got the same");
  return {nullptr, weight.data, bias.data,   residual.data,    out.data,           rows,
          in_dim,  out_dim,     x.stride[0], weight.stride[0], residual.stride[0], out.stride[0],
          x.dtype, out.dtype,   early};
}

void check_x(const char* op, const Tensor& x) {
  Arg(op, "x", x).is(kFloating).shape({kAny, kAny}).dense_last();
}

int64_t half_of(const char* op, const Tensor& x) {
  require(x.shape[1] % 2 == 0, op,
          "x: expected an even last axis (gate | up), got " + std::to_string(x.shape[1]));
  return x.shape[1] / 2;
}

float checked_eps(const char* op, double eps) {
  require(eps >= 0, op, "eps: expected 0 or more, got " + std::to_string(eps));
  return static_cast<float>(eps);
}

void check_norm_before(const char* op, const Tensor& x, const Tensor& norm_weight) {
  const Arg norm_arg(op, "norm_weight", norm_weight);
  norm_arg.on(x);
  check_x(op, x);
  norm_arg.is_like("x", x).shape({x.shape[1]}).dense();
}

RmsNormParams norm_before(const char* op, const Tensor& x, const Tensor& norm_weight, double eps) {
  return {x.data, norm_weight.data,     nullptr, x.shape[0], x.shape[1], x.stride[0],
          0,      checked_eps(op, eps), x.dtype};
}

}  // namespace

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps,
              uintptr_t stream) {
  constexpr const char* op = "rms_norm";
  const Arg weight_arg(op, "weight", weight), out_arg(op, "out", out);
  weight_arg.on(x);
  out_arg.on(x);
  check_x(op, x);
  weight_arg.is_like("x", x).shape({x.shape[1]}).dense();
  out_arg.is_like("x", x).shape({x.shape[0], x.shape[1]}).dense_last();
  const float checked = checked_eps(op, eps);
  if (x.numel() == 0) return;
  const RmsNormParams params{x.data,      weight.data,   out.data, x.shape[0], x.shape[1],
                             x.stride[0], out.stride[0], checked,  x.dtype};
  dispatch_device(
      op, x, [&] { rms_norm_cpu(params); },
      [&] { rms_norm_cuda(params, x.device.device_id, stream); });
}

void silu_mul(const Tensor& x, const Tensor& out, uintptr_t stream) {
  constexpr const char* op = "silu_mul";
  const Arg out_arg(op, "out", out);
  out_arg.on(x);
  check_x(op, x);
  const int64_t dim = half_of(op, x);
  out_arg.is_like("x", x).shape({x.shape[0], dim}).dense_last();
  if (x.numel() == 0) return;
  const SiluMulParams params{x.data,      out.data,      x.shape[0], dim,
                             x.stride[0], out.stride[0], x.dtype};
  dispatch_device(
      op, x, [&] { silu_mul_cpu(params); },
      [&] { silu_mul_cuda(params, x.device.device_id, stream); });
}

void linear_rows(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor& bias,
                 const Tensor& residual, bool early, uintptr_t stream) {
  constexpr const char* op = "linear_rows";
  check_x(op, x);
  LinearParams params = check_linear(op, x, x.shape[1], weight, out, bias, residual, early);
  if (out.numel() == 0) return;
  params.x = x.data;
  dispatch_device(
      op, x, [&] { linear_rows_cpu(params); },
      [&] { linear_rows_cuda(params, x.device.device_id, stream); });
}

void rms_norm_linear(const Tensor& x, const Tensor& norm_weight, const Tensor& weight,
                     const Tensor& out, double eps, const Tensor& bias, const Tensor& residual,
                     bool early, uintptr_t stream) {
  constexpr const char* op = "rms_norm_linear";
  check_norm_before(op, x, norm_weight);
  const LinearParams linear = check_linear(op, x, x.shape[1], weight, out, bias, residual, early);
  const RmsNormParams norm = norm_before(op, x, norm_weight, eps);
  if (out.numel() == 0) return;
  dispatch_device(
      op, x, [&] { rms_norm_linear_cpu(norm, linear); },
      [&] { rms_norm_linear_cuda(norm, linear, x.device.device_id, stream); });
}

void silu_mul_linear(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor& bias,
                     const Tensor& residual, bool early, uintptr_t stream) {
  constexpr const char* op = "silu_mul_linear";
  check_x(op, x);
  const int64_t dim = half_of(op, x);
  const LinearParams linear = check_linear(op, x, dim, weight, out, bias, residual, early);
  const SiluMulParams act{x.data, nullptr, x.shape[0], dim, x.stride[0], 0, x.dtype};
  if (out.numel() == 0) return;
  dispatch_device(
      op, x, [&] { silu_mul_linear_cpu(act, linear); },
      [&] { silu_mul_linear_cuda(act, linear, x.device.device_id, stream); });
}

void rms_norm_linear_append(const Tensor& x, const Tensor& norm_weight, const Tensor& weight,
                            const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& cos_sin, const Tensor& row_start,
                            const Tensor& context_len, const Tensor& position,
                            const Tensor& block_table, const Tensor& status, int64_t num_heads,
                            int64_t num_kv_heads, const Tensor& slot_base, double eps,
                            const Tensor& bias, bool early, uintptr_t stream) {
  constexpr const char* op = "rms_norm_linear_append";
  check_norm_before(op, x, norm_weight);
  const AppendKvParams append =
      check_append(op, "x", x, q_out, k_cache, v_cache, cos_sin, row_start, context_len, position,
                   block_table, status, num_heads, num_kv_heads, slot_base);
  const int64_t rows = x.shape[0], in_dim = x.shape[1];
  const int64_t out_dim = (num_heads + 2 * num_kv_heads) * append.head_dim;
  const Arg weight_arg(op, "weight", weight), bias_arg(op, "bias", bias);
  weight_arg.on(x).is_like("x", x).shape({out_dim, in_dim}).dense_last();
  if (bias.defined()) bias_arg.on(x).is_like("x", x).shape({out_dim}).dense();
  const RmsNormParams norm = norm_before(op, x, norm_weight, eps);
  if (rows == 0 || append.sequences.num_requests == 0) return;
  const LinearParams linear{nullptr, weight.data, bias.data, nullptr,     nullptr,
                            rows,    in_dim,      out_dim,   x.stride[0], weight.stride[0],
                            0,       0,           x.dtype,   x.dtype,     early};
  dispatch_device(
      op, x, [&] { rms_norm_linear_append_cpu(norm, linear, append); },
      [&] { rms_norm_linear_append_cuda(norm, linear, append, x.device.device_id, stream); });
}

}  // namespace tlt
