#include "layers/op.h"

#include "common/dispatch.h"

namespace tlt {

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps,
              uintptr_t stream) {
  constexpr const char* op = "rms_norm";
  const Arg x_arg(op, "x", x), weight_arg(op, "weight", weight), out_arg(op, "out", out);
  weight_arg.on(x);
  out_arg.on(x);
  x_arg.is(kFloating);
  weight_arg.is_like("x", x);
  out_arg.is_like("x", x);
  x_arg.shape({kAny, kAny}).dense_last();
  weight_arg.shape({x.shape[1]}).dense();
  out_arg.shape({x.shape[0], x.shape[1]}).dense_last();
  require(eps >= 0, op, "eps: expected 0 or more, got " + std::to_string(eps));
  if (x.numel() == 0) return;
  const RmsNormParams params{x.data,     weight.data, out.data,      x.shape[0],
                             x.shape[1], x.stride[0], out.stride[0], static_cast<float>(eps),
                             x.dtype};
  dispatch_device(
      op, x, [&] { rms_norm_cpu(params); },
      [&] { rms_norm_cuda(params, x.device.device_id, stream); });
}

}  // namespace tlt
