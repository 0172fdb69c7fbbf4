#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/tensor.h"
#include "tree/params.h"

namespace tlt {

// What one dense array of an op has to be.
struct ArrayCheck {
  const char* name;
  const Tensor& tensor;
  DType dtype;
  std::initializer_list<int64_t> shape;
};

// Checks all arrays for device (that of `first`), then all for dtype, layout and shape.
void check_arrays(const char* op, const Tensor& first, std::initializer_list<ArrayCheck> arrays);

// Checks the five arrays of a node store of `num_requests` requests and returns a view of them.
NodeStore check_nodes(const char* op, const Tensor& first, int64_t num_requests,
                      const Tensor& node_token, const Tensor& node_parent, const Tensor& node_score,
                      const Tensor& node_depth, const Tensor& node_count);

void require_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high);
void require_capacity(const char* op, int64_t capacity, int64_t needed);

void expand_tree(const Tensor& draft_logits, const Tensor& frontier, const Tensor& node_token,
                 const Tensor& node_parent, const Tensor& node_score, const Tensor& node_depth,
                 const Tensor& node_count, const Tensor& next_frontier, const Tensor& next_row,
                 const Tensor& next_ancestors, const Tensor& temperature, const Tensor& request,
                 const Tensor& root_position, const Tensor& status, uint64_t seed,
                 const Tensor& d2t, const Tensor& frontier_ancestors, int64_t slot_base,
                 double score_temperature, int64_t vocab_size, uintptr_t stream);

void select_nodes(const Tensor& node_token, const Tensor& node_parent, const Tensor& node_score,
                  const Tensor& node_depth, const Tensor& node_count, const Tensor& root_position,
                  const Tensor& tokens, const Tensor& parents, const Tensor& position,
                  const Tensor& ancestors, const Tensor& source, const Tensor& row_start,
                  int64_t num_verify, uintptr_t stream);

void expand_tree_cpu(const ExpandTreeParams& params);
void select_nodes_cpu(const SelectNodesParams& params);

void expand_tree_cuda(const ExpandTreeParams& params, int device, uintptr_t stream);
void select_nodes_cuda(const SelectNodesParams& params, int device, uintptr_t stream);

}  // namespace tlt
