#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "layers/params.h"

namespace tlt {

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps,
              uintptr_t stream);
void silu_mul(const Tensor& x, const Tensor& out, uintptr_t stream);
void linear_rows(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor& bias,
                 const Tensor& residual, uintptr_t stream);
void rms_norm_linear(const Tensor& x, const Tensor& norm_weight, const Tensor& weight,
                     const Tensor& out, double eps, const Tensor& bias, const Tensor& residual,
                     uintptr_t stream);
void silu_mul_linear(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor& bias,
                     const Tensor& residual, uintptr_t stream);

void rms_norm_cpu(const RmsNormParams& params);
void silu_mul_cpu(const SiluMulParams& params);
void linear_rows_cpu(const LinearParams& params);
void rms_norm_linear_cpu(const RmsNormParams& norm, const LinearParams& linear);
void silu_mul_linear_cpu(const SiluMulParams& act, const LinearParams& linear);

void rms_norm_cuda(const RmsNormParams& params, int device, uintptr_t stream);
void silu_mul_cuda(const SiluMulParams& params, int device, uintptr_t stream);
void linear_rows_cuda(const LinearParams& params, int device, uintptr_t stream);
void rms_norm_linear_cuda(const RmsNormParams& norm, const LinearParams& linear, int device,
                          uintptr_t stream);
void silu_mul_linear_cuda(const SiluMulParams& act, const LinearParams& linear, int device,
                          uintptr_t stream);

}  // namespace tlt
