#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "draft/params.h"

namespace tlt {

void draft_inputs(const Tensor& embedding, const Tensor& ids, const Tensor& hidden,
                  const Tensor& input_norm, const Tensor& hidden_norm, const Tensor& out,
                  double eps, uintptr_t stream);

void draft_level_inputs(const Tensor& embedding, const Tensor& node_token, const Tensor& frontier,
                        const Tensor& row, const Tensor& root_position, const Tensor& hidden,
                        const Tensor& input_norm, const Tensor& hidden_norm, const Tensor& out,
                        const Tensor& hidden_out, const Tensor& position, int64_t depth, double eps,
                        uintptr_t stream);

void draft_inputs_cpu(const DraftInputsParams& params);
void draft_inputs_cuda(const DraftInputsParams& params, int device, uintptr_t stream);

}  // namespace tlt
