#include "ngram/op.h"

#include <algorithm>
#include <string>

#include "common/dispatch.h"

namespace tlt {

void ngram_propose(const TokenTableArgs& table, const NodesArgs& nodes,
                   const DraftSampling& sampling, const Tensor& context_len, const Tensor& status,
                   uint64_t seed, int64_t depth, int64_t top_k, int64_t max_ngram,
                   int64_t min_ngram, bool keep_unmatched, uintptr_t stream) {
  constexpr const char* op = "ngram_propose";
  const Tensor &tokens = table.tokens, &group_slots = table.group_slots;
  check_arrays(op, tokens,
               {{"tokens", tokens, DType::kInt32, {kAny, kAny}},
                {"group_slots", group_slots, DType::kInt32, {kAny, kAny}}});
  const int64_t slots = tokens.shape[0], max_len = tokens.shape[1];
  const int64_t B = group_slots.shape[0], G = group_slots.shape[1];
  const NodeStore store = check_nodes(op, tokens, B, nodes);
  check_arrays(op, tokens,
               {{"length", table.length, DType::kInt32, {slots}},
                {"slot", table.slot, DType::kInt32, {B}},
                {"context_len", context_len, DType::kInt32, {B}},
                {"temperature", sampling.temperature, DType::kFloat32, {B}},
                {"request", sampling.request, DType::kInt64, {B}},
                {"status", status, DType::kInt32, {B}}});
  require_range(op, "group_slots' second axis", G, 0, kMaxGroup);
  require(std::max<int64_t>(G, 1) * max_len <= kMaxPlaces, op,
          "tokens: expected at most 2^28 tokens a group, got " + std::to_string(G) + " * " +
              std::to_string(max_len));
  require_range(op, "depth", depth, 1, kMaxDepth);
  require_range(op, "top_k", top_k, 1, kMaxTopK);
  require_range(op, "max_ngram", max_ngram, 1, kMaxNgram);
  require_range(op, "min_ngram", min_ngram, 1, max_ngram);
  require_capacity(op, store.capacity, 1 + depth * std::min<int64_t>(top_k, kMaxMatches));
  if (B == 0) return;
  const NgramProposeParams params{tokens.ptr<int32_t>(),
                                  table.length.ptr<int32_t>(),
                                  group_slots.ptr<int32_t>(),
                                  table.slot.ptr<int32_t>(),
                                  context_len.ptr<int32_t>(),
                                  store,
                                  sampling.temperature.ptr<float>(),
                                  sampling.request.ptr<int64_t>(),
                                  status.ptr<int32_t>(),
                                  B,
                                  G,
                                  slots,
                                  max_len,
                                  depth,
                                  top_k,
                                  max_ngram,
                                  min_ngram,
                                  keep_unmatched,
                                  seed};
  dispatch_device(
      op, tokens, [&] { ngram_propose_cpu(params); },
      [&] { ngram_propose_cuda(params, tokens.device.device_id, stream); });
}

}  // namespace tlt
