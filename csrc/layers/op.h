#pragma once

#include <cstdint>
#include <vector>

#include "common/tensor.h"
#include "kv/params.h"
#include "layers/params.h"

namespace tlt {

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps,
              uintptr_t stream);
void silu_mul(const Tensor& x, const Tensor& out, uintptr_t stream);
void linear_rows(const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor& norm_weight, double eps, const Tensor& bias, const Tensor& residual,
                 int parts, bool pdl, uintptr_t stream);
void fold_partials(const std::vector<Tensor>& partials, const Tensor& out, const Tensor& bias,
                   const Tensor& residual, const std::vector<Tensor>& flags, int rank,
                   double timeout_s, uintptr_t stream);
void linear_silu_mul(const Tensor& x, const Tensor& weight, const Tensor& out,
                     const Tensor& norm_weight, double eps, bool pdl, uintptr_t stream);
void linear_append(const Tensor& x, const Tensor& weight, const Tensor& q_out,
                   const Tensor& k_cache, const Tensor& v_cache, const Tensor& cos_sin,
                   const RowsArgs& rows, const Tensor& norm_weight, double eps, const Tensor& bias,
                   bool pdl, bool pdl_tables, uintptr_t stream);

void rms_norm_cpu(const RmsNormParams& params);
void silu_mul_cpu(const SiluMulParams& params);
void linear_rows_cpu(const LinearParams& params);
void fold_partials_cpu(const FoldParams& params);
void linear_silu_mul_cpu(const LinearParams& params);
void linear_append_cpu(const LinearParams& params, const AppendKvParams& append);

void rms_norm_cuda(const RmsNormParams& params, int device, uintptr_t stream);
void silu_mul_cuda(const SiluMulParams& params, int device, uintptr_t stream);
void linear_rows_cuda(const LinearParams& params, int device, uintptr_t stream);
void fold_partials_cuda(const FoldParams& params, int device, uintptr_t stream);
void linear_silu_mul_cuda(const LinearParams& params, int device, uintptr_t stream);
void linear_append_cuda(const LinearParams& params, const AppendKvParams& append, int device,
                        uintptr_t stream);

}  // namespace tlt
