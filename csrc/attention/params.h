// Arguments of the attention kernels. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/paged.h"

namespace tlt {

struct TreeAttentionParams {
  const void* q;             // [rows, num_heads, head_dim], dtype
  void* out;                 // like q
  float* lse;                // [rows, num_heads], natural log; may be null
  const int32_t* position;   // [rows], absolute
  const uint8_t* ancestors;  // [rows, kMaxDepth], in-flight slots in position order; null = a chain
  PagedCache k, v;
  Sequences sequences;
  int64_t num_heads, num_kv_heads, head_dim;
  int64_t q_row_stride, q_head_stride, out_row_stride, out_head_stride;
  int64_t lse_stride, ancestor_stride;
  float scale;
  DType dtype;
  bool pdl;  // programmatic dependent launch: all but q and the rows in flight are read before
             // prior kernels end
};

}  // namespace tlt
