// The end of a pass: arguments of advance_batch, and the memory that device and host share.
#pragma once

#include <cstdint>

namespace tlt {

constexpr int kMaxEmitted = 32;  // tokens of a request in a pass, at most

// Words of `control`, int32 in the device's memory; tlt_ext.Control.
enum ControlWord {
  kControlGo,        // 1: another pass may run
  kControlPasses,    // passes made since they were armed
  kControlLimit,     // passes that were armed
  kControlReason,    // StopReason bits of the last pass
  kControlSequence,  // number of the next record in the ring
  kControlEnds,      // number of finished requests at which the passes stop
  kControlEnded,     // requests that finished since the passes were armed
  kControlLoops,     // iterations of a graph's loop since then: bounds a body that ends no pass
  kControlWords = 8
};

// Why passes stop; bits of control[kControlReason], tlt_ext.StopReason.
enum StopReason : int32_t {
  kStopFinished = 1 << 0,  // control[kControlEnds] requests finished
  kStopPages = 1 << 1,     // a request lacks slots that the next pass may write
  kStopLimit = 1 << 2,     // all armed passes ran, or the ring is full
  kStopStopped = 1 << 3,   // the host requested a stop
  kStopStalled = 1 << 4,   // an active request emitted nothing
};

// A ring of passes in host memory that the device can write. Record p has index p % passes.
struct RingView {
  uint64_t* state;       // [1], see below; written last
  int32_t* stop;         // [1], not 0: the host requests a stop
  int64_t* begin_ns;     // [1], when the passes were armed
  int64_t* time_ns;      // [passes], end of each
  int32_t* num_emitted;  // [passes, max_batch], and so the next two
  int32_t* finish;
  int32_t* status;
  // [passes, max_emitted, max_batch], garbage past num_emitted: the first tokens of all requests
  // lie side by side, as a GPU writes over the bus.
  int32_t* tokens;
  float* logprobs;  // the same
  int64_t passes, max_batch, max_emitted;
  uint32_t wrap;  // sequence numbers on the device are modulo this multiple of `passes`
};

// A ring's state: the sequence number of the next record, modulo `wrap`, and the stop reason of the
// last pass (0 if passes go on). One word, so that a reader gets both from the same pass.
constexpr uint64_t kReasonMask = 0xffffffff;
constexpr int kSequenceShift = 32;

struct AdvanceBatchParams {
  const int32_t* emitted;      // [batch, max_emitted]
  const float* logprobs;       // [batch, max_emitted]
  const int32_t* num_emitted;  // [batch]
  const int32_t* finish;       // [batch], not 0: the request finished
  int32_t* status;             // [batch]
  const int32_t* context_len;  // [batch], already advanced by num_emitted
  int32_t* slot;               // [batch], row of `tokens`; negative = inert
  int32_t* tokens;             // [slots, token_len], by absolute position
  int32_t* last_token;         // [batch]
  int32_t* remaining;          // [batch], decreased; 0 if the request finished
  int32_t* num_new;            // [batch], tokens taken in this pass
  const int32_t* granted;      // [batch], slots that the request's pages hold
  int32_t* control;            // [kControlWords]
  RingView ring;
  int64_t batch, max_emitted, emitted_stride, logprobs_stride;
  int64_t num_slots, token_len, tokens_stride;
  int64_t lookahead;  // slots past context_len that the next pass may write
};

struct ArmPassesParams {
  int32_t* control;  // [kControlWords]
  RingView ring;
  int32_t limit, ends;  // passes, finished requests
};

}  // namespace tlt
