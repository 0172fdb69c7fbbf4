#include "layers/op.h"

#include "common/dispatch.h"
#include "kv/op.h"

namespace tlt {
namespace {

void check_x(const char* op, const Tensor& x) {
  Arg(op, "x", x).is(kFloating).shape({kAny, kAny}).separate();
}

float checked_eps(const char* op, double eps) {
  require(eps >= 0, op, "eps: expected 0 or more, got " + std::to_string(eps));
  return static_cast<float>(eps);
}

bool is_power_to_8(int64_t count) { return count == 1 || count == 2 || count == 4 || count == 8; }

// Checks what every linear reads, and fills that in; `out_dim`: rows of the weight, or kAny.
LinearParams check_linear(const char* op, const Tensor& x, const Tensor& weight, int64_t out_dim,
                          const Tensor& norm_weight, double eps, const Tensor& bias, bool pdl) {
  const Arg weight_arg(op, "weight", weight), norm_arg(op, "norm_weight", norm_weight),
      bias_arg(op, "bias", bias);
  weight_arg.on(x);
  if (norm_weight.defined()) norm_arg.on(x);
  if (bias.defined()) bias_arg.on(x);
  check_x(op, x);
  weight_arg.is_like("x", x).shape({out_dim, x.shape[1]}).separate();
  if (norm_weight.defined()) norm_arg.is_like("x", x).shape({x.shape[1]}).dense();
  if (bias.defined()) bias_arg.is_like("x", x).shape({weight.shape[0]}).dense();
  LinearParams p{};
  p.x = x.data;
  p.norm_weight = norm_weight.data;
  p.weight = weight.data;
  p.bias = bias.data;
  p.rows = x.shape[0];
  p.in_dim = x.shape[1];
  p.out_dim = weight.shape[0];
  p.x_stride = x.stride[0];
  p.weight_stride = weight.stride[0];
  p.eps = checked_eps(op, eps);
  p.parts = 8;
  p.dtype = p.out_dtype = x.dtype;
  p.pdl = pdl;
  return p;
}

void check_separate(const char* op, const char* name, const Tensor& out, const Tensor& x) {
  require(x.data == nullptr || out.data != x.data, op,
          std::string(name) + ": expected memory separate from x, got the same memory");
}

void set_out(const char* op, const Tensor& x, const Tensor& out, LinearParams* p) {
  check_separate(op, "out", out, x);
  p->out = out.data;
  p->out_stride = out.stride[0];
  p->out_dtype = out.dtype;
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
  out_arg.is_like("x", x).shape({x.shape[0], x.shape[1]}).separate();
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
  require(x.shape[1] % 2 == 0, op,
          "x: expected an even last axis (gate | up), got " + std::to_string(x.shape[1]));
  const int64_t dim = x.shape[1] / 2;
  out_arg.is_like("x", x).shape({x.shape[0], dim}).separate();
  if (x.numel() == 0) return;
  const SiluMulParams params{x.data,      out.data,      x.shape[0], dim,
                             x.stride[0], out.stride[0], x.dtype};
  dispatch_device(
      op, x, [&] { silu_mul_cpu(params); },
      [&] { silu_mul_cuda(params, x.device.device_id, stream); });
}

void linear_rows(const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor& norm_weight, double eps, const Tensor& bias, const Tensor& residual,
                 int parts, bool pdl, uintptr_t stream) {
  constexpr const char* op = "linear_rows";
  const Arg out_arg(op, "out", out), residual_arg(op, "residual", residual);
  out_arg.on(x);
  if (residual.defined()) residual_arg.on(x);
  LinearParams p = check_linear(op, x, weight, kAny, norm_weight, eps, bias, pdl);
  x.dtype == DType::kFloat32 ? out_arg.is_like("x", x) : out_arg.is({x.dtype, DType::kFloat32});
  if (residual.defined()) residual_arg.is_like("out", out);
  out_arg.shape({p.rows, p.out_dim}).separate();
  if (residual.defined()) residual_arg.shape({p.rows, p.out_dim}).dense_last();
  require(is_power_to_8(parts), op, "parts: expected 8, 4, 2 or 1, got " + std::to_string(parts));
  if (parts < 8) {
    out_arg.is({DType::kFloat32});
    require(!norm_weight.defined() && !bias.defined() && !residual.defined(), op,
            "norm_weight, bias, residual: expected none with parts=" + std::to_string(parts) +
                "; pass bias and residual to fold_partials");
  }
  p.parts = parts;
  set_out(op, x, out, &p);
  p.residual = residual.data;
  p.residual_stride = residual.stride[0];
  if (out.numel() == 0) return;
  dispatch_device(
      op, x, [&] { linear_rows_cpu(p); }, [&] { linear_rows_cuda(p, x.device.device_id, stream); });
}

void fold_partials(const std::vector<Tensor>& partials, const Tensor& out, const Tensor& bias,
                   const Tensor& residual, const std::vector<Tensor>& flags, int rank,
                   double timeout_s, uintptr_t stream) {
  constexpr const char* op = "fold_partials";
  require(is_power_to_8(static_cast<int64_t>(partials.size())), op,
          "partials: expected 1, 2, 4 or 8 arrays, got " + std::to_string(partials.size()));
  const Arg out_arg(op, "out", out), bias_arg(op, "bias", bias),
      residual_arg(op, "residual", residual);
  for (const Tensor& partial : partials) Arg(op, "partials", partial).on(out);
  if (bias.defined()) bias_arg.on(out);
  if (residual.defined()) residual_arg.on(out);
  for (const Tensor& partial : partials) Arg(op, "partials", partial).is({DType::kFloat32});
  out_arg.is(kFloating).shape({kAny, kAny}).separate();
  if (bias.defined()) bias_arg.is(kFloating).shape({out.shape[1]}).dense();
  if (residual.defined()) {
    residual_arg.is_like("out", out).shape({out.shape[0], out.shape[1]}).dense_last();
  }
  FoldParams p{};
  for (const Tensor& partial : partials) {
    Arg(op, "partials", partial).shape({out.shape[0], out.shape[1]}).dense_last();
    p.partial[p.ranks] = partial.ptr<float>();
    p.partial_stride[p.ranks++] = partial.stride[0];
  }
  if (!flags.empty()) {
    require(flags.size() == partials.size(), op,
            "flags: expected one array for each of " + std::to_string(p.ranks) + " ranks, got " +
                std::to_string(flags.size()));
    require(0 <= rank && rank < p.ranks, op,
            "rank: expected 0 to " + std::to_string(p.ranks - 1) + ", got " + std::to_string(rank));
    require(timeout_s > 0 && timeout_s <= 1e9, op,  // in nanoseconds it fits into 63 bits
            "timeout_s: expected more than 0, at most 1e9, got " + std::to_string(timeout_s));
    require(out.is_cuda(), op, "flags: expected none on a CPU");
    for (size_t r = 0; r < flags.size(); ++r) {
      const Arg flags_arg(op, "flags", flags[r]);
      flags_arg.on(out).is({DType::kInt32}).shape({kMaxFoldBlocks, p.ranks}).dense();
      p.flags[r] = flags[r].ptr<uint32_t>();
    }
    p.rank = rank;
    p.timeout_ns = static_cast<int64_t>(timeout_s * 1e9);
  }
  p.bias = bias.data;
  p.residual = residual.data;
  p.out = out.data;
  p.rows = out.shape[0];
  p.dim = out.shape[1];
  p.residual_stride = residual.stride[0];
  p.out_stride = out.stride[0];
  p.dtype = out.dtype;
  p.bias_dtype = bias.dtype;
  if (out.numel() == 0) return;
  dispatch_device(
      op, out, [&] { fold_partials_cpu(p); },
      [&] { fold_partials_cuda(p, out.device.device_id, stream); });
}

void linear_silu_mul(const Tensor& x, const Tensor& weight, const Tensor& out,
                     const Tensor& norm_weight, double eps, bool pdl, uintptr_t stream) {
  constexpr const char* op = "linear_silu_mul";
  const Arg out_arg(op, "out", out);
  out_arg.on(x);
  LinearParams p = check_linear(op, x, weight, kAny, norm_weight, eps, Tensor{}, pdl);
  require(p.out_dim % 2 == 0, op,
          "weight: expected as many rows of gate as of up, got " + std::to_string(p.out_dim));
  out_arg.is_like("x", x).shape({p.rows, p.out_dim / 2}).separate();
  set_out(op, x, out, &p);
  if (out.numel() == 0) return;
  dispatch_device(
      op, x, [&] { linear_silu_mul_cpu(p); },
      [&] { linear_silu_mul_cuda(p, x.device.device_id, stream); });
}

void linear_append(const Tensor& x, const Tensor& weight, const Tensor& q_out,
                   const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                   const RowsArgs& rows, const Tensor& norm_weight, double eps, const Tensor& bias,
                   bool pdl, bool pdl_tables, uintptr_t stream) {
  constexpr const char* op = "linear_append";
  check_x(op, x);
  const AppendKvParams append = check_append(op, "x", x, q_out, k_cache, v_cache, cos_sin, rows);
  const int64_t out_dim = (append.num_heads + 2 * append.num_kv_heads) * append.head_dim;
  LinearParams p = check_linear(op, x, weight, out_dim, norm_weight, eps, bias, pdl);
  check_separate(op, "q_out", q_out, x);
  p.pdl_tables = pdl_tables;
  if (p.rows == 0 || append.sequences.num_requests == 0) return;
  dispatch_device(
      op, x, [&] { linear_append_cpu(p, append); },
      [&] { linear_append_cuda(p, append, x.device.device_id, stream); });
}

}  // namespace tlt
