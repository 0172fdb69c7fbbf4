// The end of a pass for one request, shared by CPU and GPU.
#pragma once

#include "common/math.h"
#include "common/status.h"
#include "graphs/params.h"

namespace tlt {

struct RowAdvance {
  bool active;
  int32_t count;     // tokens taken
  int64_t position;  // absolute, of the first
  int32_t status;    // bits to report
  int32_t reason;    // to stop
  bool ended;
};

// Only the device knows the values read here, so their bounds are checked before they become
// addresses.
TLT_HD RowAdvance plan_row(const AdvanceBatchParams& p, int64_t b) {
  const int64_t slot = p.slot[b], count = p.num_emitted[b], context = p.context_len[b];
  if (slot < 0) return {false, 0, 0, kStatusOk, 0, false};
  const int64_t first = context - count + 1;
  if (slot >= p.num_slots || count < 0 || count > p.max_emitted || first < 0 ||
      context >= p.token_len) {
    return {true, 0, 0, kStatusBadLength, kStopStalled, false};
  }
  const bool ended = p.finish[b] != 0;
  int32_t reason = 0;
  if (count == 0) reason |= kStopStalled;
  if (!ended && context + p.lookahead > p.granted[b]) reason |= kStopPages;
  return {true, static_cast<int32_t>(count), first, kStatusOk, reason, ended};
}

// Writes token i of the row, i < row.count, to the store and the record.
TLT_HD void take_token(const AdvanceBatchParams& p, const RowAdvance& row, int64_t record,
                       int64_t b, int64_t i) {
  const int32_t token = p.emitted[b * p.emitted_stride + i];
  p.tokens[p.slot[b] * p.tokens_stride + row.position + i] = token;
  const int64_t at = (record * p.ring.max_emitted + i) * p.ring.max_batch + b;
  p.ring.tokens[at] = token;
  p.ring.logprobs[at] = p.logprobs[b * p.logprobs_stride + i];
  if (i == row.count - 1) p.last_token[b] = token;
}

// Writes the fields that have one word for each request.
TLT_HD void take_row(const AdvanceBatchParams& p, const RowAdvance& row, int64_t record,
                     int64_t b) {
  const int32_t status = p.status[b] | row.status;
  p.status[b] = status;
  p.remaining[b] -= row.count;
  p.num_new[b] = row.count;
  const int64_t at = record * p.ring.max_batch + b;
  p.ring.num_emitted[at] = row.count;
  p.ring.finish[at] = row.active ? p.finish[b] : 0;
  p.ring.status[at] = status;
}

// A finished request is inert from here on: later passes of the same graph emit nothing for it, so
// its lengths, pages and features stay unchanged until the host reads them.
TLT_HD void retire_row(const AdvanceBatchParams& p, int64_t b) {
  p.slot[b] = -1;
  p.remaining[b] = 0;
}

// Finishes the whole pass; returns the ring's new state.
TLT_HD uint64_t take_pass(const AdvanceBatchParams& p, int32_t reason, int32_t ended, bool stop) {
  int32_t* control = p.control;
  ended += control[kControlEnded];
  control[kControlEnded] = ended;
  if (ended > 0 && ended >= control[kControlEnds]) reason |= kStopFinished;
  const int32_t passes = control[kControlPasses] + 1;
  if (passes >= control[kControlLimit] || passes >= p.ring.passes) reason |= kStopLimit;
  if (stop) reason |= kStopStopped;
  control[kControlPasses] = passes;
  control[kControlReason] = reason;
  control[kControlGo] = reason == 0;
  uint32_t next = static_cast<uint32_t>(control[kControlSequence]) + 1;
  if (next == p.ring.wrap) next = 0;
  control[kControlSequence] = static_cast<int32_t>(next);
  return uint64_t{next} << kSequenceShift | static_cast<uint32_t>(reason);
}

TLT_HD int64_t record_of(const AdvanceBatchParams& p) {
  return static_cast<uint32_t>(p.control[kControlSequence]) % p.ring.passes;
}

TLT_HD void arm(const ArmPassesParams& p) {
  p.control[kControlGo] = 1;
  p.control[kControlPasses] = 0;
  p.control[kControlLimit] = p.limit;
  p.control[kControlReason] = 0;
  p.control[kControlSequence] = static_cast<int32_t>(*p.ring.state >> kSequenceShift);
  p.control[kControlEnds] = p.ends;
  p.control[kControlEnded] = 0;
  p.control[kControlLoops] = 0;
}

}  // namespace tlt
