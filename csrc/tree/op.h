#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/groups.h"
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

// Checks a node store of `num_requests` requests and returns a view of it.
NodeStore check_nodes(const char* op, const Tensor& first, int64_t num_requests,
                      const NodesArgs& nodes);

void require_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high);
void require_capacity(const char* op, int64_t capacity, int64_t needed);

using ExpandFrontier = Part<FrontierArgs, &FrontierArgs::node, &FrontierArgs::ancestors>;
using DraftSampling = Part<SamplingArgs, &SamplingArgs::temperature, &SamplingArgs::request>;
void expand_tree(const Tensor& draft_logits, const NodesArgs& nodes, const ExpandFrontier& frontier,
                 const FrontierArgs& next_frontier, const DraftSampling& sampling,
                 const Tensor& root_position, const Tensor& status, uint64_t seed,
                 int64_t vocab_size, int64_t slot_base, const Tensor& d2t, double score_temperature,
                 uintptr_t stream);

void select_nodes(const NodesArgs& nodes, const TreeArgs& tree, const Tensor& root_position,
                  const Tensor& position, const Tensor& row_start, const Tensor& source,
                  int64_t num_verify, uintptr_t stream);

void expand_tree_cpu(const ExpandTreeParams& params);
void select_nodes_cpu(const SelectNodesParams& params);

void expand_tree_cuda(const ExpandTreeParams& params, int device, uintptr_t stream);
void select_nodes_cuda(const SelectNodesParams& params, int device, uintptr_t stream);

}  // namespace tlt
