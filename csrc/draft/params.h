// Arguments of the kernels that assemble a drafter's input rows. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "common/tensor.h"

namespace tlt {

struct DraftInputsParams {
  const void* embedding;    // [vocab_size, dim], dtype
  const void* hidden;       // [hidden_rows, dim], dtype
  const void* input_norm;   // [dim], dtype: of the embedding
  const void* hidden_norm;  // [dim], dtype: of the hidden state
  void* out;                // [rows, 2 * dim], dtype: embedding | hidden state, both normed
  // Either the ids of the rows, or the arrays from which the rows of a level get theirs.
  const int32_t* ids;            // [rows]; null for a level
  const int32_t* node_token;     // [requests, capacity]; null without a level, like the rest
  const int32_t* frontier;       // [requests, width], store index; negative = inert, counts as 0
  const int32_t* row;            // [requests, width], row of `hidden`
  const int32_t* root_position;  // [requests]
  void* hidden_out;              // [rows, dim], dtype: the rows of `hidden`
  int32_t* position;             // [rows], root_position + depth
  int64_t rows, dim, vocab_size, hidden_rows, width, capacity, node_stride;
  int64_t embedding_stride, hidden_stride, out_stride, hidden_out_stride;  // of a row
  int32_t depth;
  float eps;
  DType dtype;
};

// Row of the embedding that row r reads; -1 if its id is invalid.
TLT_HD int64_t embedding_row(const DraftInputsParams& p, int64_t r) {
  int64_t id;
  if (p.ids != nullptr) {
    id = p.ids[r];
  } else {
    const int64_t node = p.frontier[r] < 0 ? 0 : p.frontier[r];
    id = node < p.capacity ? p.node_token[r / p.width * p.node_stride + node] : -1;
  }
  return 0 <= id && id < p.vocab_size ? id : -1;
}

// Row of `hidden` that row r reads; -1 if there is none.
TLT_HD int64_t hidden_row(const DraftInputsParams& p, int64_t r) {
  const int64_t row = p.row == nullptr ? r : p.row[r];
  return 0 <= row && row < p.hidden_rows ? row : -1;
}

}  // namespace tlt
