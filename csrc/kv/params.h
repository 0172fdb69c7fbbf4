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

}  // namespace tlt
