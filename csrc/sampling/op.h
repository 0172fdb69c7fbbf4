#pragma once

#include <cstdint>
#include <optional>

#include "common/groups.h"
#include "sampling/params.h"

namespace tlt {

// Further inputs and outputs of `sample`, by row; params.h has their shapes.
struct SampleArrays {
  const Tensor &position, &tokens, &logprobs, &status, &filtered_logprobs;
};
void sample(const Tensor& logits, const SamplingArgs& sampling, const SampleArrays& arrays,
            uint64_t seed, std::optional<int64_t> vocab_size, uintptr_t stream);

using VerifyRows = Part<RowsArgs, &RowsArgs::row_start, &RowsArgs::position, &RowsArgs::status>;
using VerifyNodes = Part<TreeArgs, &TreeArgs::tokens, &TreeArgs::parents>;

// The arguments that the two verify ops share.
struct VerifyArrays {
  const Tensor& logits;
  const TreeArgs& tree;
  const RowsArgs& rows;
  const SamplingArgs& sampling;
  const VerifyOutputArgs& out;
  const Tensor &stop_ids, &limit;
};
void verify_tree(const VerifyArrays& arrays, uint64_t seed, std::optional<int64_t> vocab_size,
                 const Tensor& workspace, uintptr_t stream);
void verify_rejection(const VerifyArrays& arrays, const Tensor& draft_probs, uint64_t seed,
                      std::optional<int64_t> vocab_size, bool deterministic, uintptr_t stream);

// Bytes of scratch with which verify_tree draws the rows of a wave at once on a GPU.
int64_t sampling_workspace_bytes(int64_t rows);

void sample_cpu(const SampleParams& params);
void verify_tree_cpu(const VerifyParams& params);
void verify_rejection_cpu(const VerifyParams& params);

void sample_cuda(const SampleParams& params, int device, uintptr_t stream);
void verify_tree_cuda(const VerifyParams& params, int device, uintptr_t stream);
void verify_rejection_cuda(const VerifyParams& params, int device, uintptr_t stream);

}  // namespace tlt
