#include "sampling/op.h"

#include <vector>

#include "common/dispatch.h"

namespace tlt {
namespace {

// The scratch of verify_tree; null if there is none.
void* check_workspace(const char* op, const Tensor& logits, const Tensor& workspace) {
  if (!workspace.defined()) return nullptr;
  const Arg arg(op, "workspace", workspace);
  arg.on(logits).is({DType::kUInt8}).dense().shape({kAny});
  const int64_t needed = sampling_workspace_bytes(logits.shape[0]);
  require(workspace.shape[0] >= needed, op,
          "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
              std::to_string(workspace.shape[0]));
  require(reinterpret_cast<uintptr_t>(workspace.data) % 16 == 0, op,
          "workspace: expected an address that 16 divides");
  return workspace.data;
}

constexpr int64_t kMaxVocabulary = 1 << 22;  // keeps integer sums of weights within 63 bits

struct ArrayCheck {
  const char* name;
  const Tensor& tensor;
  DType dtype;
  std::vector<int64_t> shape;
  bool written = false;
};

// Checks the logits and all other arrays: device, dtype, layout and shape, in this order.
void check_arrays(const char* op, const Tensor& logits, const std::vector<ArrayCheck>& others) {
  const Arg logits_arg(op, "logits", logits);
  for (const ArrayCheck& w : others) Arg(op, w.name, w.tensor).on(logits);
  logits_arg.is(kFloating);
  for (const ArrayCheck& w : others) Arg(op, w.name, w.tensor).is({w.dtype});
  logits_arg.dense_last();
  for (const ArrayCheck& w : others) {
    const Arg arg(op, w.name, w.tensor);
    if (w.shape.size() == 1) {
      arg.dense();
    } else if (w.written) {
      arg.separate();
    } else {
      arg.dense_last();
    }
  }
  logits_arg.shape({kAny, kAny});
  for (const ArrayCheck& w : others) {
    const Arg arg(op, w.name, w.tensor);
    w.shape.size() == 1 ? arg.shape({w.shape[0]}) : arg.shape({w.shape[0], w.shape[1]});
  }
}

int64_t check_vocab_size(const char* op, const Tensor& logits, std::optional<int64_t> vocab_size) {
  const int64_t width = logits.shape[1], wanted = vocab_size.value_or(width);
  require(wanted >= 1 && wanted <= width, op,
          "vocab_size: expected 1 .. " + std::to_string(width) + " (the width of logits), got " +
              std::to_string(wanted));
  require(wanted <= kMaxVocabulary, op,
          "vocab_size: expected at most " + std::to_string(kMaxVocabulary) + ", got " +
              std::to_string(wanted));
  return wanted;
}

SamplingArrays sampling_arrays(const SamplingArgs& a, uint64_t seed) {
  return {a.temperature.ptr<float>(),
          a.top_k.ptr<int32_t>(),
          a.top_p.ptr<float>(),
          a.request.ptr<int64_t>(),
          seed,
          round_keys(seed)};
}

// `draft_probs`: undefined where the op reads none.
VerifyParams check_verify(const char* op, const VerifyArrays& a, const Tensor& draft_probs,
                          uint64_t seed, std::optional<int64_t> vocab_size) {
  const bool wants_draft = draft_probs.defined();
  const int64_t num_rows = a.logits.shape[0];
  const int64_t num_requests = a.limit.ndim == 1 ? a.limit.shape[0] : kAny;
  const int64_t max_emitted = a.out.emitted.ndim == 2 ? a.out.emitted.shape[1] : kAny;
  std::vector<ArrayCheck> wanted = {
      {"limit", a.limit, DType::kInt32, {num_requests}},
      {"tokens", a.tree.tokens, DType::kInt32, {num_rows}},
      {"parents", a.tree.parents, DType::kInt32, {num_rows}},
      {"position", a.rows.position, DType::kInt32, {num_rows}},
      {"row_start", a.rows.row_start, DType::kInt32, {num_requests + 1}},
      {"temperature", a.sampling.temperature, DType::kFloat32, {num_requests}},
      {"top_k", a.sampling.top_k, DType::kInt32, {num_requests}},
      {"top_p", a.sampling.top_p, DType::kFloat32, {num_requests}},
      {"request", a.sampling.request, DType::kInt64, {num_requests}},
      {"stop_ids", a.stop_ids, DType::kInt32, {num_requests, kAny}},
      {"emitted", a.out.emitted, DType::kInt32, {num_requests, max_emitted}, true},
      {"logprobs", a.out.logprobs, DType::kFloat32, {num_requests, max_emitted}, true},
      {"num_emitted", a.out.num_emitted, DType::kInt32, {num_requests}},
      {"path", a.out.path, DType::kInt32, {num_requests, max_emitted}, true},
      {"finish", a.out.finish, DType::kInt32, {num_requests}},
      {"status", a.rows.status, DType::kInt32, {num_requests}},
  };
  if (a.out.filtered_logprobs.defined()) {
    wanted.push_back({"filtered_logprobs",
                      a.out.filtered_logprobs,
                      DType::kFloat32,
                      {num_requests, max_emitted},
                      true});
  }
  if (wants_draft) {
    wanted.push_back({"draft_probs", draft_probs, DType::kFloat32, {num_rows, kAny}});
  }
  check_arrays(op, a.logits, wanted);
  const int64_t vocab = check_vocab_size(op, a.logits, vocab_size);
  require(max_emitted >= kMaxPassTokens, op,
          "emitted: expected at least " + std::to_string(kMaxPassTokens) + " columns, got " +
              std::to_string(max_emitted));
  require(!wants_draft || draft_probs.shape[1] >= vocab, op,
          "draft_probs: expected at least " + std::to_string(vocab) + " columns, got " +
              std::to_string(wants_draft ? draft_probs.shape[1] : 0));
  VerifyParams p{};
  p.logits = a.logits.data;
  p.logits_stride = a.logits.stride[0];
  p.dtype = a.logits.dtype;
  p.num_rows = num_rows;
  p.vocab_size = vocab;
  p.draft_probs = wants_draft ? draft_probs.ptr<float>() : nullptr;
  p.draft_stride = wants_draft ? draft_probs.stride[0] : 0;
  p.tree.tokens = a.tree.tokens.ptr<int32_t>();
  p.tree.parents = a.tree.parents.ptr<int32_t>();
  p.position = a.rows.position.ptr<int32_t>();
  p.num_requests = num_requests;
  p.row_start = a.rows.row_start.ptr<int32_t>();
  p.sampling = sampling_arrays(a.sampling, seed);
  p.stop_ids = a.stop_ids.ptr<int32_t>();
  p.stop_stride = a.stop_ids.stride[0];
  p.num_stop_ids = a.stop_ids.shape[1];
  p.limit = a.limit.ptr<int32_t>();
  p.out.emitted = a.out.emitted.ptr<int32_t>();
  p.out.logprobs = a.out.logprobs.ptr<float>();
  p.out.filtered_logprobs = a.out.filtered_logprobs.ptr<float>();
  p.out.path = a.out.path.ptr<int32_t>();
  p.out.emitted_stride = a.out.emitted.stride[0];
  p.out.logprobs_stride = a.out.logprobs.stride[0];
  p.out.filtered_stride = a.out.filtered_logprobs.stride[0];
  p.out.path_stride = a.out.path.stride[0];
  p.out.max_emitted = max_emitted;
  p.out.num_emitted = a.out.num_emitted.ptr<int32_t>();
  p.out.finish = a.out.finish.ptr<int32_t>();
  p.status = a.rows.status.ptr<int32_t>();
  return p;
}

}  // namespace

int64_t sampling_workspace_bytes(int64_t rows) { return rows * kNodeBytes; }

void sample(const Tensor& logits, const SamplingArgs& sampling, const SampleArrays& a,
            uint64_t seed, std::optional<int64_t> vocab_size, uintptr_t stream) {
  constexpr const char* op = "sample";
  const int64_t rows = logits.shape[0];
  std::vector<ArrayCheck> wanted = {
      {"temperature", sampling.temperature, DType::kFloat32, {rows}},
      {"top_k", sampling.top_k, DType::kInt32, {rows}},
      {"top_p", sampling.top_p, DType::kFloat32, {rows}},
      {"request", sampling.request, DType::kInt64, {rows}},
      {"position", a.position, DType::kInt32, {rows}},
      {"tokens", a.tokens, DType::kInt32, {rows}},
      {"logprobs", a.logprobs, DType::kFloat32, {rows}},
      {"status", a.status, DType::kInt32, {rows}},
  };
  if (a.filtered_logprobs.defined()) {
    wanted.push_back({"filtered_logprobs", a.filtered_logprobs, DType::kFloat32, {rows}});
  }
  check_arrays(op, logits, wanted);
  const int64_t vocab = check_vocab_size(op, logits, vocab_size);
  if (rows == 0) return;
  const SampleParams params{logits.data,
                            logits.stride[0],
                            logits.dtype,
                            rows,
                            vocab,
                            sampling_arrays(sampling, seed),
                            a.position.ptr<int32_t>(),
                            a.tokens.ptr<int32_t>(),
                            a.logprobs.ptr<float>(),
                            a.filtered_logprobs.ptr<float>(),
                            a.status.ptr<int32_t>()};
  dispatch_device(
      op, logits, [&] { sample_cpu(params); },
      [&] { sample_cuda(params, logits.device.device_id, stream); });
}

void verify_tree(const VerifyArrays& a, uint64_t seed, std::optional<int64_t> vocab_size,
                 const Tensor& workspace, uintptr_t stream) {
  constexpr const char* op = "verify_tree";
  VerifyParams params = check_verify(op, a, Tensor{}, seed, vocab_size);
  params.workspace = check_workspace(op, a.logits, workspace);
  if (params.num_requests == 0) return;
  dispatch_device(
      op, a.logits, [&] { verify_tree_cpu(params); },
      [&] { verify_tree_cuda(params, a.logits.device.device_id, stream); });
}

void verify_rejection(const VerifyArrays& a, const Tensor& draft_probs, uint64_t seed,
                      std::optional<int64_t> vocab_size, bool deterministic, uintptr_t stream) {
  constexpr const char* op = "verify_rejection";
  require(deterministic || draft_probs.defined(), op,
          "draft_probs: expected an array unless deterministic=True, got None");
  const Tensor& read = deterministic ? Tensor{} : draft_probs;
  VerifyParams params = check_verify(op, a, read, seed, vocab_size);
  params.deterministic = deterministic;
  if (params.num_requests == 0) return;
  dispatch_device(
      op, a.logits, [&] { verify_rejection_cpu(params); },
      [&] { verify_rejection_cuda(params, a.logits.device.device_id, stream); });
}

}  // namespace tlt
