// Arguments of the cache kernels. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/paged.h"

namespace tlt {

struct AppendKvParams {
  const void* qkv;          // [rows, (num_heads + 2 * num_kv_heads) * head_dim], dtype
  void* q_out;              // [rows, num_heads, head_dim], dtype; may be the q part of qkv
  const float* cos_sin;     // [max_position, head_dim]: cosines, then sines, of the half dimensions
  const int32_t* position;  // [rows]
  const void* q_norm;       // [head_dim], dtype; may be null
  const void* k_norm;       // [head_dim], dtype; may be null
  PagedCache k, v;
  Sequences sequences;
  int64_t num_heads, num_kv_heads, head_dim, max_position;
  int64_t qkv_stride, q_row_stride, q_head_stride, cos_sin_stride;
  float eps;
  DType dtype;
};

// All layers of a cache: [num_layers, num_pages, page_size, num_kv_heads, head_dim].
struct LayeredCache {
  PagedCache layer;
  int64_t layer_stride;
};

struct CommitPathParams {
  LayeredCache k, v;
  char* features;              // [num_pages, page_size, feature_dim]; may be null
  const char* feature_rows;    // [rows, feature_dim]; null where features is
  const int32_t* path;         // [requests, path_len], in-flight slots kept, rising from 0
  const int32_t* num_emitted;  // [requests], how many of them
  int32_t* context_len;        // [requests], advanced by num_emitted
  Sequences sequences;
  int64_t num_layers, num_kv_heads, head_bytes, element_bytes;
  int64_t feature_bytes, feature_element_bytes;  // of a row, of an element
  int64_t feature_page_stride, feature_slot_stride, feature_row_stride;
  int64_t path_len, path_stride;
};

struct CopyPagesParams {
  char* cache;                 // [num_layers, num_pages, ...], dense inside a page
  const int32_t* source;       // [count], page ids
  const int32_t* destination;  // [count], page ids
  int64_t count, num_layers, num_pages;
  int64_t layer_bytes, page_stride_bytes, page_bytes;
};

// The entries that the drafter has yet to write for a request: t = context_len - num_new to
// context_len - 1, each the features of position t and the token of position t + 1.
struct GatherNewRowsParams {
  const char* features;    // [num_pages, page_size, feature_dim]
  const int32_t* tokens;   // [num_slots, token_len], by absolute position
  const int32_t* slot;     // [requests], row of `tokens`; negative = inert
  const int32_t* num_new;  // [requests]
  int32_t* row_start;      // [requests + 1]
  int32_t* ids;            // [requests * most], token of position t + 1; 0 where inert
  int32_t* position;       // [requests * most], t; 0 where inert
  int32_t* first;          // [requests], context_len - num_new
  int32_t* last;           // [requests], row of the request's newest entry; 0 where it has none
  char* rows;              // [requests * most, feature_dim]
  Sequences sequences;     // without row_start
  int64_t most;            // entries of a request
  int64_t num_slots, token_len, tokens_stride;
  int64_t feature_bytes, page_bytes, slot_bytes, row_bytes;  // of a row; strides
};

// The number of rows of a request; `bits` if its fields are invalid.
TLT_HD int64_t new_rows_of(const GatherNewRowsParams& p, int64_t request, int32_t* bits) {
  *bits = kStatusOk;
  const int64_t slot = p.slot[request];
  if (slot < 0) return 0;
  const int64_t count = p.num_new[request], context = p.sequences.context_len[request];
  const bool fits = 0 <= count && count <= p.most && count <= context;
  if (fits && slot < p.num_slots && context < p.token_len) return count;
  *bits = kStatusBadLength;
  return 0;
}

}  // namespace tlt
