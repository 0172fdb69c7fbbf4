#pragma once

#include <cstdint>

#include "common/groups.h"
#include "draft/params.h"

namespace tlt {

void draft_inputs(const DraftWeightsArgs& weights, const Tensor& ids, const Tensor& hidden,
                  const Tensor& out, double eps, uintptr_t stream);

using LevelNodes = Part<NodesArgs, &NodesArgs::token>;
using LevelFrontier = Part<FrontierArgs, &FrontierArgs::node, &FrontierArgs::row>;
using LevelRows = Part<RowsArgs, &RowsArgs::position, &RowsArgs::context_len>;
void draft_level_inputs(const DraftWeightsArgs& weights, const LevelNodes& nodes,
                        const LevelFrontier& frontier, const Tensor& hidden, const LevelRows& rows,
                        const Tensor& out, const Tensor& hidden_out, int64_t depth, double eps,
                        uintptr_t stream);

void draft_inputs_cpu(const DraftInputsParams& params);
void draft_inputs_cuda(const DraftInputsParams& params, int device, uintptr_t stream);

}  // namespace tlt
