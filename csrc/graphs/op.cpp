#include "graphs/op.h"

#include <string>
#include <utility>

#include "common/dispatch.h"

namespace tlt {
namespace {

void check_control(const char* op, const Tensor& control, const PassRing& ring) {
  Arg(op, "control", control).is({DType::kInt32}).dense().shape({kControlWords});
  require(!control.is_cuda() || ring.pinned(), op,
          "ring: expected pinned memory for arrays on a CUDA device");
}

}  // namespace

void advance_batch(const AdvanceBatchArrays& a, PassRing& ring, int64_t lookahead,
                   uintptr_t stream) {
  constexpr const char* op = "advance_batch";
  const RingView& view = ring.view();
  check_control(op, a.control, ring);
  const Arg emitted(op, "emitted", a.emitted);
  emitted.on(a.control).is({DType::kInt32}).dense_last().shape({kAny, kAny});
  const int64_t batch = a.emitted.shape[0], width = a.emitted.shape[1];
  if (batch > view.max_batch || width > view.max_emitted) {
    emitted.fail("at most the ring's " + std::to_string(view.max_batch) + " rows of " +
                     std::to_string(view.max_emitted),
                 std::to_string(batch) + " of " + std::to_string(width));
  }
  const Arg logprobs(op, "logprobs", a.logprobs);
  logprobs.on(a.control).is({DType::kFloat32}).dense_last().shape({batch, width});
  const std::pair<const char*, const Tensor*> of_request[] = {
      {"num_emitted", &a.num_emitted}, {"finish", &a.finish},   {"status", &a.status},
      {"context_len", &a.context_len}, {"slot", &a.slot},       {"last_token", &a.last_token},
      {"remaining", &a.remaining},     {"num_new", &a.num_new}, {"granted", &a.granted}};
  for (const auto& [name, tensor] : of_request) {
    Arg(op, name, *tensor).on(a.control).is({DType::kInt32}).dense().shape({batch});
  }
  const Arg tokens(op, "tokens", a.tokens);
  tokens.on(a.control).is({DType::kInt32}).apart().shape({kAny, kAny});
  require(lookahead >= 0, op, "lookahead: expected 0 or more, got " + std::to_string(lookahead));
  const AdvanceBatchParams params{a.emitted.ptr<int32_t>(),
                                  a.logprobs.ptr<float>(),
                                  a.num_emitted.ptr<int32_t>(),
                                  a.finish.ptr<int32_t>(),
                                  a.status.ptr<int32_t>(),
                                  a.context_len.ptr<int32_t>(),
                                  a.slot.ptr<int32_t>(),
                                  a.tokens.ptr<int32_t>(),
                                  a.last_token.ptr<int32_t>(),
                                  a.remaining.ptr<int32_t>(),
                                  a.num_new.ptr<int32_t>(),
                                  a.granted.ptr<int32_t>(),
                                  a.control.ptr<int32_t>(),
                                  view,
                                  batch,
                                  width,
                                  a.emitted.stride[0],
                                  a.logprobs.stride[0],
                                  a.tokens.shape[0],
                                  a.tokens.shape[1],
                                  a.tokens.stride[0],
                                  lookahead};
  dispatch_device(
      op, a.control, [&] { advance_batch_cpu(params); },
      [&] { advance_batch_cuda(params, a.control.device.device_id, stream); });
}

void arm_passes(const Tensor& control, PassRing& ring, int64_t limit, int64_t ends,
                uintptr_t stream) {
  constexpr const char* op = "arm_passes";
  check_control(op, control, ring);
  const int64_t most = ring.view().passes;
  require(1 <= limit && limit <= most, op,
          "limit: expected 1 to " + std::to_string(most) +
              ", the passes that the ring holds, got " + std::to_string(limit));
  const int64_t rows = ring.view().max_batch;
  require(1 <= ends && ends <= rows, op,
          "ends: expected 1 to " + std::to_string(rows) + ", the rows of the ring, got " +
              std::to_string(ends));
  ring.clear();
  const ArmPassesParams params{control.ptr<int32_t>(), ring.view(), static_cast<int32_t>(limit),
                               static_cast<int32_t>(ends)};
  dispatch_device(
      op, control, [&] { arm_passes_cpu(params); },
      [&] { arm_passes_cuda(params, control.device.device_id, stream); });
}

}  // namespace tlt
