#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "layers/params.h"

namespace tlt {

void rms_norm(const Tensor& x, const Tensor& weight, const Tensor& out, double eps,
              uintptr_t stream);

void rms_norm_cpu(const RmsNormParams& params);
void rms_norm_cuda(const RmsNormParams& params, int device, uintptr_t stream);

}  // namespace tlt
