#pragma once

#include <cstdint>

#include "common/groups.h"
#include "kv/params.h"

namespace tlt {

void append_kv(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& cos_sin, const RowsArgs& rows, const Tensor& q_norm,
               const Tensor& k_norm, double eps, uintptr_t stream);

// Checks all of these but qkv and the norms, which stay null. `like`: [rows, ...], named
// `like_name`.
AppendKvParams check_append(const char* op, const char* like_name, const Tensor& like,
                            const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& cos_sin, const RowsArgs& rows);

using CommitRows = Part<RowsArgs, &RowsArgs::row_start, &RowsArgs::status, &RowsArgs::context_len,
                        &RowsArgs::block_table>;
void commit_path(const Tensor& k_cache, const Tensor& v_cache, const CommitRows& rows,
                 const Tensor& path, const Tensor& num_emitted, const Tensor& features,
                 const Tensor& feature_rows, uintptr_t stream);

void copy_pages(const Tensor& cache, const Tensor& source, const Tensor& destination,
                uintptr_t stream);

using GatherRows = Part<RowsArgs, &RowsArgs::row_start, &RowsArgs::position, &RowsArgs::status,
                        &RowsArgs::context_len, &RowsArgs::block_table>;
using GatherTokens = Part<TokenTableArgs, &TokenTableArgs::tokens, &TokenTableArgs::slot>;
void gather_new_rows(const Tensor& features, const GatherRows& rows, const GatherTokens& table,
                     const Tensor& num_new, const NewRowsArgs& out, uintptr_t stream);

void append_kv_cpu(const AppendKvParams& params);
void commit_path_cpu(const CommitPathParams& params);
void copy_pages_cpu(const CopyPagesParams& params);
void gather_new_rows_cpu(const GatherNewRowsParams& params);

void append_kv_cuda(const AppendKvParams& params, int device, uintptr_t stream);
void commit_path_cuda(const CommitPathParams& params, int device, uintptr_t stream);
void copy_pages_cuda(const CopyPagesParams& params, int device, uintptr_t stream);
void gather_new_rows_cuda(const GatherNewRowsParams& params, int device, uintptr_t stream);

}  // namespace tlt
