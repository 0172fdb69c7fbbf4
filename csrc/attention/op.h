#pragma once

#include <cstdint>
#include <optional>

#include "attention/params.h"
#include "common/groups.h"
#include "common/tensor.h"

namespace tlt {

void tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out, const RowsArgs& rows, const Tensor& ancestors,
                    std::optional<double> scale, const Tensor& lse, const Tensor& workspace,
                    bool pdl, uintptr_t stream);

// Bytes of workspace that a launch of these shapes makes use of; 0: none.
int64_t attention_workspace_bytes(int64_t num_requests, int64_t num_rows, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t max_slots);

void tree_attention_cpu(const TreeAttentionParams& params);

// `workspace` may be null.
void tree_attention_cuda(const TreeAttentionParams& params, void* workspace, int device,
                         uintptr_t stream);
void tree_attention_float_cuda(const TreeAttentionParams& params, uintptr_t stream);

}  // namespace tlt
