#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "graphs/params.h"
#include "graphs/ring.h"

namespace tlt {

struct AdvanceBatchArrays {
  const Tensor &emitted, &logprobs, &num_emitted, &finish, &status, &context_len, &slot, &tokens,
      &last_token, &remaining, &num_new, &granted, &control;
};

void advance_batch(const AdvanceBatchArrays& arrays, PassRing& ring, int64_t lookahead,
                   uintptr_t stream);
void arm_passes(const Tensor& control, PassRing& ring, int64_t limit, int64_t ends,
                uintptr_t stream);

void advance_batch_cpu(const AdvanceBatchParams& params);
void arm_passes_cpu(const ArmPassesParams& params);

void advance_batch_cuda(const AdvanceBatchParams& params, int device, uintptr_t stream);
void arm_passes_cuda(const ArmPassesParams& params, int device, uintptr_t stream);

}  // namespace tlt
