#pragma once

#include <cstdint>

#include "common/groups.h"
#include "graphs/params.h"
#include "graphs/ring.h"

namespace tlt {

using PassOutput = Part<VerifyOutputArgs, &VerifyOutputArgs::emitted, &VerifyOutputArgs::logprobs,
                        &VerifyOutputArgs::num_emitted, &VerifyOutputArgs::finish>;
using AdvanceTokens = Part<TokenTableArgs, &TokenTableArgs::tokens, &TokenTableArgs::slot>;
void advance_batch(const PassOutput& verified, const AdvanceTokens& table,
                   const RequestsArgs& requests, const Tensor& control, PassRing& ring,
                   int64_t lookahead, uintptr_t stream);
void arm_passes(const Tensor& control, PassRing& ring, int64_t limit, int64_t ends,
                uintptr_t stream);

void advance_batch_cpu(const AdvanceBatchParams& params);
void arm_passes_cpu(const ArmPassesParams& params);

void advance_batch_cuda(const AdvanceBatchParams& params, int device, uintptr_t stream);
void arm_passes_cuda(const ArmPassesParams& params, int device, uintptr_t stream);

}  // namespace tlt
