#pragma once

#include <cstdint>

#include "common/groups.h"
#include "ngram/params.h"
#include "tree/op.h"

namespace tlt {

void ngram_propose(const TokenTableArgs& table, const NodesArgs& nodes,
                   const DraftSampling& sampling, const Tensor& context_len, const Tensor& status,
                   uint64_t seed, int64_t depth, int64_t top_k, int64_t max_ngram,
                   int64_t min_ngram, bool keep_unmatched, uintptr_t stream);

void ngram_propose_cpu(const NgramProposeParams& params);
void ngram_propose_cuda(const NgramProposeParams& params, int device, uintptr_t stream);

}  // namespace tlt
