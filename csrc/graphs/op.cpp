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

void advance_batch(const PassOutput& verified, const AdvanceTokens& table,
                   const RequestsArgs& requests, const Tensor& control, PassRing& ring,
                   int64_t lookahead, uintptr_t stream) {
  constexpr const char* op = "advance_batch";
  const RingView& view = ring.view();
  check_control(op, control, ring);
  const Arg emitted(op, "emitted", verified.emitted);
  emitted.on(control).is({DType::kInt32}).dense_last().shape({kAny, kAny});
  const int64_t batch = verified.emitted.shape[0], width = verified.emitted.shape[1];
  if (batch > view.max_batch || width > view.max_emitted) {
    emitted.fail("at most the ring's " + std::to_string(view.max_batch) + " rows of " +
                     std::to_string(view.max_emitted),
                 std::to_string(batch) + " of " + std::to_string(width));
  }
  const Arg logprobs(op, "logprobs", verified.logprobs);
  logprobs.on(control).is({DType::kFloat32}).dense_last().shape({batch, width});
  const std::pair<const char*, const Tensor*> of_request[] = {
      {"num_emitted", &verified.num_emitted},
      {"finish", &verified.finish},
      {"status", &requests.status},
      {"context_len", &requests.context_len},
      {"slot", &table.slot},
      {"last_token", &requests.last_token},
      {"remaining", &requests.remaining},
      {"num_new", &requests.num_new},
      {"granted", &requests.granted}};
  for (const auto& [name, tensor] : of_request) {
    Arg(op, name, *tensor).on(control).is({DType::kInt32}).dense().shape({batch});
  }
  const Arg tokens(op, "tokens", table.tokens);
  tokens.on(control).is({DType::kInt32}).separate().shape({kAny, kAny});
  require(lookahead >= 0 && lookahead <= INT32_MAX, op,
          "lookahead: expected 0 to 2^31 - 1, got " + std::to_string(lookahead));
  const AdvanceBatchParams params{verified.emitted.ptr<int32_t>(),
                                  verified.logprobs.ptr<float>(),
                                  verified.num_emitted.ptr<int32_t>(),
                                  verified.finish.ptr<int32_t>(),
                                  requests.status.ptr<int32_t>(),
                                  requests.context_len.ptr<int32_t>(),
                                  table.slot.ptr<int32_t>(),
                                  table.tokens.ptr<int32_t>(),
                                  requests.last_token.ptr<int32_t>(),
                                  requests.remaining.ptr<int32_t>(),
                                  requests.num_new.ptr<int32_t>(),
                                  requests.granted.ptr<int32_t>(),
                                  control.ptr<int32_t>(),
                                  view,
                                  batch,
                                  width,
                                  verified.emitted.stride[0],
                                  verified.logprobs.stride[0],
                                  table.tokens.shape[0],
                                  table.tokens.shape[1],
                                  table.tokens.stride[0],
                                  lookahead};
  dispatch_device(
      op, control, [&] { advance_batch_cpu(params); },
      [&] { advance_batch_cuda(params, control.device.device_id, stream); });
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
