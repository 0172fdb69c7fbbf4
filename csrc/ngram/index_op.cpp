#include <string>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "ngram/index.h"
#include "tree/op.h"

namespace tlt {

namespace {

void require_tokens(const char* op, const std::vector<int32_t>& tokens) {
  for (int32_t token : tokens) {
    require(token >= 0, op, "tokens: expected ids of 0 or more, got " + std::to_string(token));
  }
}

}  // namespace

NgramIndex::NgramIndex(int64_t max_order, int64_t capacity)
    : max_order_(max_order), capacity_(capacity) {
  require_range("NgramIndex", "max_order", max_order, 1, kMaxOrder);
  // A link's number, place * max_order + order, has to fit.
  require_range("NgramIndex", "capacity", capacity, 1, int64_t{1} << 30);
  clear();
}

void NgramIndex::check_handle(const char* op, int64_t handle) const {
  require(handle >= 0 && handle < next_handle_, op,
          "handle: expected one that start() returned, got " + std::to_string(handle));
}

int64_t NgramIndex::start(int64_t group, const std::vector<int32_t>& tokens) {
  require_tokens("NgramIndex.start", tokens);
  const auto [found, is_new] = groups_.try_emplace(group);
  if (is_new) found->second.key = next_group_key_++;
  const int64_t handle = next_handle_++;
  found->second.handles.push_back(handle);
  Sequence sequence;
  sequence.group = group;
  sequence.group_key = found->second.key;
  sequences_.emplace(handle, sequence);
  extend(handle, tokens);
  return handle;
}

void NgramIndex::extend(int64_t handle, const std::vector<int32_t>& tokens) {
  check_handle("NgramIndex.extend", handle);
  require_tokens("NgramIndex.extend", tokens);
  for (int32_t token : tokens) {
    auto found = sequences_.find(handle);
    if (found == sequences_.end()) return;  // forgotten
    found->second.touched = ++clock_;
    if (static_cast<int64_t>(token_.size()) == capacity_) {
      make_room();
      found = sequences_.find(handle);
      if (found == sequences_.end()) return;  // it alone filled the pool
    }
    append(handle, found->second, token);
  }
}

void NgramIndex::drop(int64_t group) {
  const auto found = groups_.find(group);
  if (found == groups_.end()) return;
  const std::vector<int64_t> handles = std::move(found->second.handles);
  for (int64_t handle : handles) {
    num_tokens_ -= sequences_.at(handle).length;
    sequences_.erase(handle);
  }
  groups_.erase(found);
}

void NgramIndex::propose(const Tensor& handles, const Tensor& node_token, const Tensor& node_parent,
                         const Tensor& node_score, const Tensor& node_depth,
                         const Tensor& node_count, const Tensor& temperature, const Tensor& request,
                         const Tensor& root_position, uint64_t seed, int64_t depth, int64_t top_k,
                         int64_t min_order) const {
  constexpr const char* op = "NgramIndex.propose";
  check_arrays(op, handles, {{"handles", handles, DType::kInt64, {kAny}}});
  const int64_t B = handles.shape[0];
  const NodeStore nodes =
      check_nodes(op, handles, B, node_token, node_parent, node_score, node_depth, node_count);
  check_arrays(op, handles,
               {{"temperature", temperature, DType::kFloat32, {B}},
                {"request", request, DType::kInt64, {B}},
                {"root_position", root_position, DType::kInt32, {B}}});
  require_range(op, "depth", depth, 1, kMaxDepth);
  require_range(op, "top_k", top_k, 1, kMaxTopK);
  require_range(op, "min_order", min_order, 1, max_order_);
  require_capacity(op, nodes.capacity, 1 + depth * top_k);
  const ProposeParams params{handles.ptr<int64_t>(),
                             nodes,
                             temperature.ptr<float>(),
                             request.ptr<int64_t>(),
                             root_position.ptr<int32_t>(),
                             B,
                             depth,
                             top_k,
                             min_order,
                             seed};
  dispatch_device(
      op, handles,
      [&] {
        for (int64_t b = 0; b < B; ++b) {
          if (params.handle[b] != -1) check_handle(op, params.handle[b]);
        }
        constexpr int64_t work = kMaxOccurrences * 300;  // rough cost of one proposal
        parallel_for(B, work, [&](int64_t begin, int64_t end) {
          for (int64_t b = begin; b < end; ++b) propose_one(params, b);
        });
      },
      [&] { no_cuda_kernel(op); });
}

}  // namespace tlt
