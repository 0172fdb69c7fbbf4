#pragma once

#include <cstdint>

#include "common/tensor.h"
#include "kv/params.h"

namespace tlt {

void append_kv(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& cos_sin, const Tensor& row_start, const Tensor& context_len,
               const Tensor& position, const Tensor& block_table, const Tensor& status,
               int64_t num_heads, int64_t num_kv_heads, const Tensor& slot_base,
               const Tensor& q_norm, const Tensor& k_norm, double eps, uintptr_t stream);

// Checks all of the above but qkv and the norms, which stay null; `like`: [rows, ...], named so.
AppendKvParams check_append(const char* op, const char* like_name, const Tensor& like,
                            const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& cos_sin, const Tensor& row_start,
                            const Tensor& context_len, const Tensor& position,
                            const Tensor& block_table, const Tensor& status, int64_t num_heads,
                            int64_t num_kv_heads, const Tensor& slot_base);

void commit_path(const Tensor& k_cache, const Tensor& v_cache, const Tensor& features,
                 const Tensor& feature_rows, const Tensor& row_start, const Tensor& path,
                 const Tensor& num_emitted, const Tensor& context_len, const Tensor& block_table,
                 const Tensor& status, uintptr_t stream);

void copy_pages(const Tensor& cache, const Tensor& source, const Tensor& destination,
                uintptr_t stream);

void gather_new_rows(const Tensor& features, const Tensor& tokens, const Tensor& slot,
                     const Tensor& context_len, const Tensor& num_new, const Tensor& block_table,
                     const Tensor& status, const Tensor& row_start, const Tensor& ids,
                     const Tensor& position, const Tensor& first, const Tensor& last,
                     const Tensor& rows, uintptr_t stream);

void append_kv_cpu(const AppendKvParams& params);
void commit_path_cpu(const CommitPathParams& params);
void copy_pages_cpu(const CopyPagesParams& params);
void gather_new_rows_cpu(const GatherNewRowsParams& params);

void append_kv_cuda(const AppendKvParams& params, int device, uintptr_t stream);
void commit_path_cuda(const CommitPathParams& params, int device, uintptr_t stream);
void copy_pages_cuda(const CopyPagesParams& params, int device, uintptr_t stream);
void gather_new_rows_cuda(const GatherNewRowsParams& params, int device, uintptr_t stream);

}  // namespace tlt
