#pragma once

#include <cstdint>
#include <optional>

#include "attention/params.h"
#include "common/tensor.h"

namespace tlt {

void tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out, const Tensor& row_start, const Tensor& context_len,
                    const Tensor& position, const Tensor& block_table, const Tensor& status,
                    const Tensor& ancestors, const Tensor& slot_base, std::optional<double> scale,
                    const Tensor& lse, uintptr_t stream);

void tree_attention_cpu(const TreeAttentionParams& params);

}  // namespace tlt
