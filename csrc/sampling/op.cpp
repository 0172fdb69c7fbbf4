#include "sampling/op.h"

#include <vector>

#include "common/dispatch.h"

namespace tlt {
namespace {

// The scratch of sample and verify_tree; null where none was given.
void* check_workspace(const char* op, const Tensor& logits, const Tensor& workspace, int64_t rows,
                      int64_t vocab_size) {
  if (!workspace.defined()) return nullptr;
  const Arg arg(op, "workspace", workspace);
  arg.on(logits).is({DType::kUInt8}).dense().shape({kAny});
  const int64_t needed = sampling_workspace_bytes(rows, vocab_size);
  require(workspace.shape[0] >= needed, op,
          "workspace: expected at least " + std::to_string(needed) + " bytes, got " +
              std::to_string(workspace.shape[0]));
  require(reinterpret_cast<uintptr_t>(workspace.data) % 16 == 0, op,
          "workspace: expected an address that 16 divides");
  return workspace.data;
}

constexpr int64_t kMaxVocabulary = 1 << 22;  // keeps integer sums of weights inside 63 bits

struct Wanted {
  const char* name;
  const Tensor& tensor;
  DType dtype;
  std::vector<int64_t> shape;
  bool written = false;
};

// Checks the logits and every other array: device, dtype, layout, shape, in this order.
void check_arrays(const char* op, const Tensor& logits, const std::vector<Wanted>& others) {
  const Arg logits_arg(op, "logits", logits);
  for (const Wanted& w : others) Arg(op, w.name, w.tensor).on(logits);
  logits_arg.is(kFloating);
  for (const Wanted& w : others) Arg(op, w.name, w.tensor).is({w.dtype});
  logits_arg.dense_last();
  for (const Wanted& w : others) {
    const Arg arg(op, w.name, w.tensor);
    if (w.shape.size() == 1) {
      arg.dense();
    } else if (w.written) {
      arg.apart();
    } else {
      arg.dense_last();
    }
  }
  logits_arg.shape({kAny, kAny});
  for (const Wanted& w : others) {
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

template <typename Arrays>
SamplingArrays sampling_arrays(const Arrays& a, uint64_t seed) {
  return {a.temperature.template ptr<float>(),
          a.top_k.template ptr<int32_t>(),
          a.top_p.template ptr<float>(),
          a.request.template ptr<int64_t>(),
          seed,
          round_keys(seed)};
}

VerifyParams check_verify(const char* op, const VerifyArrays& a, uint64_t seed,
                          std::optional<int64_t> vocab_size, bool wants_draft) {
  const int64_t num_rows = a.logits.shape[0];
  const int64_t num_requests = a.limit.ndim == 1 ? a.limit.shape[0] : kAny;
  const int64_t max_emitted = a.emitted.ndim == 2 ? a.emitted.shape[1] : kAny;
  std::vector<Wanted> wanted = {
      {"limit", a.limit, DType::kInt32, {num_requests}},
      {"tokens", a.tokens, DType::kInt32, {num_rows}},
      {"parents", a.parents, DType::kInt32, {num_rows}},
      {"position", a.position, DType::kInt32, {num_rows}},
      {"row_start", a.row_start, DType::kInt32, {num_requests + 1}},
      {"temperature", a.temperature, DType::kFloat32, {num_requests}},
      {"top_k", a.top_k, DType::kInt32, {num_requests}},
      {"top_p", a.top_p, DType::kFloat32, {num_requests}},
      {"request", a.request, DType::kInt64, {num_requests}},
      {"stop_ids", a.stop_ids, DType::kInt32, {num_requests, kAny}},
      {"emitted", a.emitted, DType::kInt32, {num_requests, max_emitted}, true},
      {"logprobs", a.logprobs, DType::kFloat32, {num_requests, max_emitted}, true},
      {"num_emitted", a.num_emitted, DType::kInt32, {num_requests}},
      {"path", a.path, DType::kInt32, {num_requests, max_emitted}, true},
      {"finish", a.finish, DType::kInt32, {num_requests}},
      {"status", a.status, DType::kInt32, {num_requests}},
  };
  if (a.filtered_logprobs.defined()) {
    wanted.push_back({"filtered_logprobs",
                      a.filtered_logprobs,
                      DType::kFloat32,
                      {num_requests, max_emitted},
                      true});
  }
  if (wants_draft) {
    wanted.push_back({"draft_probs", a.draft_probs, DType::kFloat32, {num_rows, kAny}});
  }
  check_arrays(op, a.logits, wanted);
  const int64_t vocab = check_vocab_size(op, a.logits, vocab_size);
  require(max_emitted >= kMinEmitted, op,
          "emitted: expected at least " + std::to_string(kMinEmitted) + " columns, got " +
              std::to_string(max_emitted));
  require(!wants_draft || a.draft_probs.shape[1] >= vocab, op,
          "draft_probs: expected at least " + std::to_string(vocab) + " columns, got " +
              std::to_string(wants_draft ? a.draft_probs.shape[1] : 0));
  VerifyParams p{};
  p.logits = a.logits.data;
  p.logits_stride = a.logits.stride[0];
  p.dtype = a.logits.dtype;
  p.num_rows = num_rows;
  p.vocab_size = vocab;
  p.draft_probs = wants_draft ? a.draft_probs.ptr<float>() : nullptr;
  p.draft_stride = wants_draft ? a.draft_probs.stride[0] : 0;
  p.tokens = a.tokens.ptr<int32_t>();
  p.parents = a.parents.ptr<int32_t>();
  p.position = a.position.ptr<int32_t>();
  p.num_requests = num_requests;
  p.row_start = a.row_start.ptr<int32_t>();
  p.sampling = sampling_arrays(a, seed);
  p.stop_ids = a.stop_ids.ptr<int32_t>();
  p.stop_stride = a.stop_ids.stride[0];
  p.num_stop_ids = a.stop_ids.shape[1];
  p.limit = a.limit.ptr<int32_t>();
  p.emitted = a.emitted.ptr<int32_t>();
  p.logprobs = a.logprobs.ptr<float>();
  p.filtered_logprobs = a.filtered_logprobs.ptr<float>();
  p.path = a.path.ptr<int32_t>();
  p.emitted_stride = a.emitted.stride[0];
  p.logprobs_stride = a.logprobs.stride[0];
  p.filtered_stride = a.filtered_logprobs.stride[0];
  p.path_stride = a.path.stride[0];
  p.max_emitted = max_emitted;
  p.num_emitted = a.num_emitted.ptr<int32_t>();
  p.finish = a.finish.ptr<int32_t>();
  p.status = a.status.ptr<int32_t>();
  p.workspace = check_workspace(op, a.logits, a.workspace, num_rows, vocab);
  return p;
}

}  // namespace

int64_t sampling_workspace_bytes(int64_t rows, int64_t) { return rows * kNodeBytes; }

void sample(const SampleArrays& a, uint64_t seed, std::optional<int64_t> vocab_size,
            uintptr_t stream) {
  constexpr const char* op = "sample";
  const int64_t rows = a.logits.shape[0];
  std::vector<Wanted> wanted = {
      {"temperature", a.temperature, DType::kFloat32, {rows}},
      {"top_k", a.top_k, DType::kInt32, {rows}},
      {"top_p", a.top_p, DType::kFloat32, {rows}},
      {"request", a.request, DType::kInt64, {rows}},
      {"position", a.position, DType::kInt32, {rows}},
      {"tokens", a.tokens, DType::kInt32, {rows}},
      {"logprobs", a.logprobs, DType::kFloat32, {rows}},
      {"status", a.status, DType::kInt32, {rows}},
  };
  if (a.filtered_logprobs.defined()) {
    wanted.push_back({"filtered_logprobs", a.filtered_logprobs, DType::kFloat32, {rows}});
  }
  check_arrays(op, a.logits, wanted);
  const int64_t vocab = check_vocab_size(op, a.logits, vocab_size);
  check_workspace(op, a.logits, a.workspace, rows, vocab);
  if (rows == 0) return;
  const SampleParams params{a.logits.data,
                            a.logits.stride[0],
                            a.logits.dtype,
                            rows,
                            vocab,
                            sampling_arrays(a, seed),
                            a.position.ptr<int32_t>(),
                            a.tokens.ptr<int32_t>(),
                            a.logprobs.ptr<float>(),
                            a.filtered_logprobs.ptr<float>(),
                            a.status.ptr<int32_t>()};
  dispatch_device(
      op, a.logits, [&] { sample_cpu(params); },
      [&] { sample_cuda(params, a.logits.device.device_id, stream); });
}

void verify_tree(const VerifyArrays& a, uint64_t seed, std::optional<int64_t> vocab_size,
                 uintptr_t stream) {
  constexpr const char* op = "verify_tree";
  const VerifyParams params = check_verify(op, a, seed, vocab_size, false);
  if (params.num_requests == 0) return;
  dispatch_device(
      op, a.logits, [&] { verify_tree_cpu(params); },
      [&] { verify_tree_cuda(params, a.logits.device.device_id, stream); });
}

void verify_rejection(const VerifyArrays& a, uint64_t seed, std::optional<int64_t> vocab_size,
                      bool deterministic, uintptr_t stream) {
  constexpr const char* op = "verify_rejection";
  require(deterministic || a.draft_probs.defined(), op,
          "draft_probs: expected an array unless deterministic=True, got None");
  VerifyParams params = check_verify(op, a, seed, vocab_size, !deterministic);
  params.deterministic = deterministic;
  if (params.num_requests == 0) return;
  dispatch_device(
      op, a.logits, [&] { verify_rejection_cpu(params); },
      [&] { verify_rejection_cuda(params, a.logits.device.device_id, stream); });
}

}  // namespace tlt
