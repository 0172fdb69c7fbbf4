#pragma once

#include <cstdint>
#include <optional>

#include "common/tensor.h"
#include "sampling/params.h"

namespace tlt {

// Arrays of one call, as they came; params.h has their shapes.
struct SampleArrays {
  const Tensor &logits, &temperature, &top_k, &top_p, &request, &position, &tokens, &logprobs,
      &status, &filtered_logprobs, &workspace;
};

struct VerifyArrays {
  const Tensor &logits, &draft_probs, &tokens, &parents, &position, &row_start, &temperature,
      &top_k, &top_p, &request, &stop_ids, &limit, &emitted, &logprobs, &num_emitted, &path,
      &finish, &status, &filtered_logprobs, &workspace;
};

void sample(const SampleArrays& arrays, uint64_t seed, std::optional<int64_t> vocab_size,
            uintptr_t stream);
void verify_tree(const VerifyArrays& arrays, uint64_t seed, std::optional<int64_t> vocab_size,
                 uintptr_t stream);
void verify_rejection(const VerifyArrays& arrays, uint64_t seed, std::optional<int64_t> vocab_size,
                      bool deterministic, uintptr_t stream);

// Bytes of scratch that sample and verify_tree use on a GPU to spread a row over several blocks.
int64_t sampling_workspace_bytes(int64_t rows, int64_t vocab_size);

void sample_cpu(const SampleParams& params);
void verify_tree_cpu(const VerifyParams& params);
void verify_rejection_cpu(const VerifyParams& params);

void sample_cuda(const SampleParams& params, int device, uintptr_t stream);
void verify_tree_cuda(const VerifyParams& params, int device, uintptr_t stream);
void verify_rejection_cuda(const VerifyParams& params, int device, uintptr_t stream);

}  // namespace tlt
