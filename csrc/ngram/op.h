#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "ngram/params.h"

namespace tlt {

void ngram_propose(const Tensor& tokens, const Tensor& length, const Tensor& group_slots,
                   const Tensor& slot, const Tensor& context_len, const Tensor& node_token,
                   const Tensor& node_parent, const Tensor& node_score, const Tensor& node_depth,
                   const Tensor& node_count, const Tensor& temperature, const Tensor& request,
                   const Tensor& status, uint64_t seed, int64_t depth, int64_t top_k,
                   int64_t max_ngram, int64_t min_ngram, bool keep_unmatched, uintptr_t stream);

void ngram_propose_cpu(const NgramProposeParams& params);
void ngram_propose_cuda(const NgramProposeParams& params, int device, uintptr_t stream);

}  // namespace tlt
