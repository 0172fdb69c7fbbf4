#include "tree/op.h"

#include <string>

#include "common/dispatch.h"

namespace tlt {

// The sums of exp_sum.h fit into 64 bits: a group of eight ids adds at most 2^30 * 8 e^8.
constexpr int64_t kMaxDraftVocab = 2'800'000;
static_assert(kMaxDraftVocab / 8 * (0x1p33 * 2981) < 0x1p63);

void check_arrays(const char* op, const Tensor& first, std::initializer_list<ArrayCheck> arrays) {
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).on(first);
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).is({a.dtype});
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).dense();
  for (const auto& a : arrays) Arg(op, a.name, a.tensor).shape(a.shape);
}

NodeStore check_nodes(const char* op, const Tensor& first, int64_t num_requests,
                      const NodesArgs& nodes) {
  const int64_t capacity = nodes.token.ndim == 2 ? nodes.token.shape[1] : kAny;
  check_arrays(op, first,
               {{"nodes.token", nodes.token, DType::kInt32, {num_requests, kAny}},
                {"nodes.parent", nodes.parent, DType::kInt32, {num_requests, capacity}},
                {"nodes.score", nodes.score, DType::kFloat32, {num_requests, capacity}},
                {"nodes.depth", nodes.depth, DType::kInt32, {num_requests, capacity}},
                {"nodes.count", nodes.count, DType::kInt32, {num_requests}}});
  return {nodes.token.ptr<int32_t>(), nodes.parent.ptr<int32_t>(), nodes.score.ptr<float>(),
          nodes.depth.ptr<int32_t>(), nodes.count.ptr<int32_t>(),  capacity};
}

void require_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, op,
          std::string(name) + ": expected " + std::to_string(low) + " to " + std::to_string(high) +
              ", got " + std::to_string(value));
}

void require_capacity(const char* op, int64_t capacity, int64_t needed) {
  require(capacity >= needed, op,
          "nodes.token: expected room for " + std::to_string(needed) + " nodes a request, got " +
              std::to_string(capacity));
}

void expand_tree(const Tensor& draft_logits, const NodesArgs& nodes, const ExpandFrontier& frontier,
                 const FrontierArgs& next_frontier, const DraftSampling& sampling,
                 const Tensor& root_position, const Tensor& status, uint64_t seed,
                 int64_t vocab_size, int64_t slot_base, const Tensor& d2t, double score_temperature,
                 uintptr_t stream) {
  constexpr const char* op = "expand_tree";
  const Arg logits_arg(op, "draft_logits", draft_logits);
  logits_arg.is(kFloating).dense_last().shape({kAny, kAny});
  check_arrays(op, draft_logits,
               {{"frontier.node", frontier.node, DType::kInt32, {kAny, kAny}},
                {"next_frontier.node", next_frontier.node, DType::kInt32, {kAny, kAny}}});
  const int64_t B = frontier.node.shape[0], F = frontier.node.shape[1],
                K = next_frontier.node.shape[1];
  const int64_t draft_vocab = draft_logits.shape[1];
  const NodeStore store = check_nodes(op, draft_logits, B, nodes);
  check_arrays(
      op, draft_logits,
      {{"next_frontier.node", next_frontier.node, DType::kInt32, {B, K}},
       {"next_frontier.row", next_frontier.row, DType::kInt32, {B, K}},
       {"next_frontier.ancestors", next_frontier.ancestors, DType::kUInt8, {B, K, kMaxDepth}},
       {"temperature", sampling.temperature, DType::kFloat32, {B}},
       {"request", sampling.request, DType::kInt64, {B}},
       {"root_position", root_position, DType::kInt32, {B}},
       {"status", status, DType::kInt32, {B}}});
  if (d2t.defined()) {
    check_arrays(op, draft_logits, {{"d2t", d2t, DType::kInt32, {draft_vocab}}});
  }
  if (frontier.ancestors.defined()) {
    check_arrays(op, draft_logits,
                 {{"frontier.ancestors", frontier.ancestors, DType::kUInt8, {B, F, kMaxDepth}}});
  }
  logits_arg.shape({B * F, kAny});
  require(draft_vocab <= kMaxDraftVocab, op,
          "draft_logits: expected at most " + std::to_string(kMaxDraftVocab) +
              " draft ids, whose sums of exponentials fit into 64 bits, got " +
              std::to_string(draft_vocab));
  require_range(op, "top_k (second axis of next_frontier.node)", K, 1, kMaxTopK);
  require(slot_base >= 0 && slot_base <= kMaxDraftSlots - F, op,
          "slot_base: expected drafter slots 0 to 255, got " + std::to_string(F) + " slots from " +
              std::to_string(slot_base));
  require(score_temperature == 0 ||
              (score_temperature >= kMinScoreTemperature && score_temperature <= 1e6),
          op,
          "score_temperature: expected 0 or 1e-6 to 1e6, got " + std::to_string(score_temperature));
  require(vocab_size >= 1, op, "vocab_size: expected 1 or more, got " + std::to_string(vocab_size));
  require_capacity(op, store.capacity, 1 + F * K);
  if (B == 0) return;
  const ExpandTreeParams params{draft_logits.data,
                                frontier.node.ptr<int32_t>(),
                                store,
                                next_frontier.node.ptr<int32_t>(),
                                next_frontier.row.ptr<int32_t>(),
                                next_frontier.ancestors.ptr<uint8_t>(),
                                sampling.temperature.ptr<float>(),
                                sampling.request.ptr<int64_t>(),
                                root_position.ptr<int32_t>(),
                                status.ptr<int32_t>(),
                                d2t.ptr<int32_t>(),
                                frontier.ancestors.ptr<uint8_t>(),
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

void select_nodes(const NodesArgs& nodes, const TreeArgs& tree, const Tensor& root_position,
                  const Tensor& position, const Tensor& row_start, const Tensor& source,
                  int64_t num_verify, uintptr_t stream) {
  constexpr const char* op = "select_nodes";
  const int64_t B = nodes.token.ndim > 0 ? nodes.token.shape[0] : 0;
  const NodeStore store = check_nodes(op, nodes.token, B, nodes);
  require_range(op, "num_verify", num_verify, 1, kMaxTreeRows);
  const int64_t rows = B * num_verify;
  check_arrays(op, nodes.token,
               {{"root_position", root_position, DType::kInt32, {B}},
                {"tokens", tree.tokens, DType::kInt32, {rows}},
                {"parents", tree.parents, DType::kInt32, {rows}},
                {"position", position, DType::kInt32, {rows}},
                {"ancestors", tree.ancestors, DType::kUInt8, {rows, kMaxDepth}},
                {"source", source, DType::kInt32, {rows}},
                {"row_start", row_start, DType::kInt32, {B + 1}}});
  require_capacity(op, store.capacity, 1);
  const SelectNodesParams params{store,
                                 root_position.ptr<int32_t>(),
                                 tree.tokens.ptr<int32_t>(),
                                 tree.parents.ptr<int32_t>(),
                                 position.ptr<int32_t>(),
                                 tree.ancestors.ptr<uint8_t>(),
                                 source.ptr<int32_t>(),
                                 row_start.ptr<int32_t>(),
                                 B,
                                 num_verify};
  dispatch_device(
      op, nodes.token, [&] { select_nodes_cpu(params); },
      [&] { select_nodes_cuda(params, nodes.token.device.device_id, stream); });
}

}  // namespace tlt
