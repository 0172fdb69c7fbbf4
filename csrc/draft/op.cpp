#include "draft/op.h"

#include <string>

#include "common/dispatch.h"
#include "common/limits.h"

namespace tlt {
namespace {

// Checks and fills in the arguments that both ops share. The number of rows is that of `out`.
DraftInputsParams check_inputs(const char* op, const DraftWeightsArgs& weights,
                               const Tensor& hidden, const Tensor& out, double eps) {
  const auto& [embedding, input_norm, hidden_norm] = weights;
  Arg(op, "embedding", embedding).is(kFloating).dense_last().shape({kAny, kAny});
  const int64_t dim = embedding.shape[1];
  const auto check = [&](const char* name, const Tensor& tensor) {
    return Arg(op, name, tensor).on(embedding).is_like("embedding", embedding).dense_last();
  };
  check("hidden", hidden).shape({kAny, dim});
  check("input_norm", input_norm).shape({dim});
  check("hidden_norm", hidden_norm).shape({dim});
  check("out", out).separate().shape({kAny, 2 * dim});
  require(eps >= 0, op, "eps: expected 0 or more, got " + std::to_string(eps));
  DraftInputsParams params{};
  params.embedding = embedding.data;
  params.hidden = hidden.data;
  params.input_norm = input_norm.data;
  params.hidden_norm = hidden_norm.data;
  params.out = out.data;
  params.rows = out.shape[0];
  params.dim = dim;
  params.vocab_size = embedding.shape[0];
  params.hidden_rows = hidden.shape[0];
  params.embedding_stride = embedding.stride[0];
  params.hidden_stride = hidden.stride[0];
  params.out_stride = out.stride[0];
  params.eps = static_cast<float>(eps);
  params.dtype = embedding.dtype;
  return params;
}

void dispatch(const char* op, const Tensor& like, const DraftInputsParams& params,
              uintptr_t stream) {
  if (params.rows == 0 || params.dim == 0) return;
  dispatch_device(
      op, like, [&] { draft_inputs_cpu(params); },
      [&] { draft_inputs_cuda(params, like.device.device_id, stream); });
}

}  // namespace

void draft_inputs(const DraftWeightsArgs& weights, const Tensor& ids, const Tensor& hidden,
                  const Tensor& out, double eps, uintptr_t stream) {
  constexpr const char* op = "draft_inputs";
  DraftInputsParams params = check_inputs(op, weights, hidden, out, eps);
  const Tensor& embedding = weights.embedding;
  Arg(op, "ids", ids).on(embedding).is({DType::kInt32}).dense().shape({params.rows});
  Arg(op, "hidden", hidden).shape({params.rows, params.dim});
  params.ids = ids.ptr<int32_t>();
  dispatch(op, embedding, params, stream);
}

void draft_level_inputs(const DraftWeightsArgs& weights, const LevelNodes& nodes,
                        const LevelFrontier& frontier, const Tensor& hidden, const LevelRows& rows,
                        const Tensor& out, const Tensor& hidden_out, int64_t depth, double eps,
                        uintptr_t stream) {
  constexpr const char* op = "draft_level_inputs";
  DraftInputsParams params = check_inputs(op, weights, hidden, out, eps);
  const Tensor& embedding = weights.embedding;
  const auto ints = [&](const char* name, const Tensor& tensor) {
    return Arg(op, name, tensor).on(embedding).is({DType::kInt32});
  };
  ints("frontier.node", frontier.node).dense().shape({kAny, kAny});
  const int64_t requests = frontier.node.shape[0], width = frontier.node.shape[1];
  ints("frontier.row", frontier.row).dense().shape({requests, width});
  ints("nodes.token", nodes.token).dense_last().shape({requests, kAny});
  ints("context_len", rows.context_len).dense().shape({requests});
  Arg(op, "out", out).shape({requests * width, 2 * params.dim});
  const Arg hidden_out_arg(op, "hidden_out", hidden_out);
  hidden_out_arg.on(embedding).is_like("embedding", embedding).separate();
  hidden_out_arg.shape({params.rows, params.dim});
  ints("position", rows.position).dense().shape({params.rows});
  require(hidden_out.data != hidden.data || params.rows == 0, op,
          "hidden_out: expected memory separate from hidden, got the same memory");
  require(depth >= 0 && depth <= kMaxDepth, op,
          "depth: expected 0 to " + std::to_string(kMaxDepth) + ", got " + std::to_string(depth));
  params.node_token = nodes.token.ptr<int32_t>();
  params.frontier = frontier.node.ptr<int32_t>();
  params.row = frontier.row.ptr<int32_t>();
  params.root_position = rows.context_len.ptr<int32_t>();
  params.hidden_out = hidden_out.data;
  params.position = rows.position.ptr<int32_t>();
  params.width = width;
  params.capacity = nodes.token.shape[1];
  params.node_stride = nodes.token.stride[0];
  params.hidden_out_stride = hidden_out.stride[0];
  params.depth = static_cast<int32_t>(depth);
  dispatch(op, embedding, params, stream);
}

}  // namespace tlt
