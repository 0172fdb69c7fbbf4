#include "tree/op.h"

#include <string>

#include "common/dispatch.h"

namespace tlt {

void check_arrays(const char* op, const Tensor& first, std::initializer_list<ArrayCheck> arrays) {
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).on(first);
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).is({a.dtype});
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).dense();
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).shape(a.shape);
}

NodeStore check_nodes(const char* op, const Tensor& first, int64_t num_requests,
                      const Tensor& node_token, const Tensor& node_parent, const Tensor& node_score,
                      const Tensor& node_depth, const Tensor& node_count) {
  const int64_t capacity = node_token.ndim == 2 ? node_token.shape[1] : kAny;
  check_arrays(op, first,
               {{"node_token", node_token, DType::kInt32, {num_requests, kAny}},
                {"node_parent", node_parent, DType::kInt32, {num_requests, capacity}},
                {"node_score", node_score, DType::kFloat32, {num_requests, capacity}},
                {"node_depth", node_depth, DType::kInt32, {num_requests, capacity}},
                {"node_count", node_count, DType::kInt32, {num_requests}}});
  return {node_token.ptr<int32_t>(), node_parent.ptr<int32_t>(), node_score.ptr<float>(),
          node_depth.ptr<int32_t>(), node_count.ptr<int32_t>(),  capacity};
}

void require_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, op,
          std::string(name) + ": expected " + std::to_string(low) + " to " + std::to_string(high) +
              ", got " + std::to_string(value));
}

void require_capacity(const char* op, int64_t capacity, int64_t needed) {
  require(capacity >= needed, op,
          "node_token: expected room for " + std::to_string(needed) + " nodes a request, got " +
              std::to_string(capacity));
}

void expand_tree(const Tensor& draft_logits, const Tensor& frontier, const Tensor& node_token,
                 const Tensor& node_parent, const Tensor& node_score, const Tensor& node_depth,
                 const Tensor& node_count, const Tensor& next_frontier, const Tensor& next_row,
                 const Tensor& next_ancestors, const Tensor& temperature, const Tensor& request,
                 const Tensor& root_position, const Tensor& status, uint64_t seed,
                 const Tensor& d2t, const Tensor& frontier_ancestors, int64_t slot_base,
                 double score_temperature, int64_t vocab_size, uintptr_t stream) {
  constexpr const char* op = "expand_tree";
  const Arg logits_arg(op, "draft_logits", draft_logits);
  logits_arg.is(kFloating).dense_last().shape({kAny, kAny});
  check_arrays(op, draft_logits,
               {{"frontier", frontier, DType::kInt32, {kAny, kAny}},
                {"next_frontier", next_frontier, DType::kInt32, {kAny, kAny}}});
  const int64_t B = frontier.shape[0], F = frontier.shape[1], K = next_frontier.shape[1];
  const int64_t draft_vocab = draft_logits.shape[1];
  const NodeStore nodes =
      check_nodes(op, draft_logits, B, node_token, node_parent, node_score, node_depth, node_count);
  check_arrays(op, draft_logits,
               {{"next_frontier", next_frontier, DType::kInt32, {B, K}},
                {"next_row", next_row, DType::kInt32, {B, K}},
                {"next_ancestors", next_ancestors, DType::kUInt8, {B, K, kMaxDepth}},
                {"temperature", temperature, DType::kFloat32, {B}},
                {"request", request, DType::kInt64, {B}},
                {"root_position", root_position, DType::kInt32, {B}},
                {"status", status, DType::kInt32, {B}}});
  if (d2t.defined()) {
    check_arrays(op, draft_logits, {{"d2t", d2t, DType::kInt32, {draft_vocab}}});
  }
  if (frontier_ancestors.defined()) {
    check_arrays(op, draft_logits,
                 {{"frontier_ancestors", frontier_ancestors, DType::kUInt8, {B, F, kMaxDepth}}});
  }
  logits_arg.shape({B * F, kAny});
  require_range(op, "top_k (second axis of next_frontier)", K, 1, kMaxTopK);
  require(slot_base >= 0 && slot_base + F <= 256, op,
          "slot_base: expected drafter slots 0 to 255, got " + std::to_string(slot_base) + " to " +
              std::to_string(slot_base + F - 1));
  require(score_temperature == 0 || (score_temperature >= 1e-6 && score_temperature <= 1e6), op,
          "score_temperature: expected 0 or 1e-6 to 1e6, got " + std::to_string(score_temperature));
  require(vocab_size >= 1, op, "vocab_size: expected 1 or more, got " + std::to_string(vocab_size));
  require_capacity(op, nodes.capacity, 1 + F * K);
  if (B == 0) return;
  const ExpandTreeParams params{draft_logits.data,
                                frontier.ptr<int32_t>(),
                                nodes,
                                next_frontier.ptr<int32_t>(),
                                next_row.ptr<int32_t>(),
                                next_ancestors.ptr<uint8_t>(),
                                temperature.ptr<float>(),
                                request.ptr<int64_t>(),
                                root_position.ptr<int32_t>(),
                                status.ptr<int32_t>(),
                                d2t.ptr<int32_t>(),
                                frontier_ancestors.ptr<uint8_t>(),
                                B,
                                F,
                                K,
                                draft_vocab,
                                draft_logits.stride[0],
                                slot_base,
                                vocab_size,
                                static_cast<float>(score_temperature),
                                seed,
                                round_keys(seed),
                                draft_logits.dtype};
  dispatch_device(
      op, draft_logits, [&] { expand_tree_cpu(params); },
      [&] { expand_tree_cuda(params, draft_logits.device.device_id, stream); });
}

void select_nodes(const Tensor& node_token, const Tensor& node_parent, const Tensor& node_score,
                  const Tensor& node_depth, const Tensor& node_count, const Tensor& root_position,
                  const Tensor& tokens, const Tensor& parents, const Tensor& position,
                  const Tensor& ancestors, const Tensor& source, const Tensor& row_start,
                  int64_t num_verify, uintptr_t stream) {
  constexpr const char* op = "select_nodes";
  const int64_t B = node_token.ndim > 0 ? node_token.shape[0] : 0;
  const NodeStore nodes =
      check_nodes(op, node_token, B, node_token, node_parent, node_score, node_depth, node_count);
  require_range(op, "num_verify", num_verify, 1, kMaxVerifyRows);
  const int64_t rows = B * num_verify;
  check_arrays(op, node_token,
               {{"root_position", root_position, DType::kInt32, {B}},
                {"tokens", tokens, DType::kInt32, {rows}},
                {"parents", parents, DType::kInt32, {rows}},
                {"position", position, DType::kInt32, {rows}},
                {"ancestors", ancestors, DType::kUInt8, {rows, kMaxDepth}},
                {"source", source, DType::kInt32, {rows}},
                {"row_start", row_start, DType::kInt32, {B + 1}}});
  require_capacity(op, nodes.capacity, 1);
  const SelectNodesParams params{nodes,
                                 root_position.ptr<int32_t>(),
                                 tokens.ptr<int32_t>(),
                                 parents.ptr<int32_t>(),
                                 position.ptr<int32_t>(),
                                 ancestors.ptr<uint8_t>(),
                                 source.ptr<int32_t>(),
                                 row_start.ptr<int32_t>(),
                                 B,
                                 num_verify};
  dispatch_device(
      op, node_token, [&] { select_nodes_cpu(params); },
      [&] { select_nodes_cuda(params, node_token.device.device_id, stream); });
}

}  // namespace tlt
