// The ring through which passes leave for the host while the device runs on.
#pragma once

#include <cstdint>
#include <vector>

#include "graphs/params.h"

namespace tlt {

// What a request got in some passes.
struct Collected {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> counts;  // tokens of each pass, up to the one that it ended with
  int32_t finish = 0;           // not 0: it ended
  int32_t status = 0;           // as of its last pass
};

class PassRing {
 public:
  // pinned: page-locked memory that the GPU can write; else plain memory.
  PassRing(int64_t passes, int64_t max_batch, int64_t max_emitted, bool pinned);
  ~PassRing();
  PassRing(const PassRing&) = delete;
  PassRing& operator=(const PassRing&) = delete;

  const RingView& view() const { return view_; }
  bool pinned() const { return pinned_; }

  int64_t sequence() const;  // passes recorded since the ring was made
  int32_t reason() const;    // of the last pass since they were armed; 0 = passes run on
  void request_stop();
  void clear();  // as passes are armed: no reason yet, no stop asked for

  // Waits until the passes stop; 0 after the timeout.
  int32_t wait(double timeout_s) const;

  // Of the first `rows` rows, in passes begin to end - 1, which the ring must still hold.
  std::vector<Collected> collect(int64_t begin, int64_t end, int64_t rows) const;

 private:
  int64_t sequence_of(uint64_t state) const;

  RingView view_;
  bool pinned_;
  int64_t armed_ = 0;  // sequence at that time; the state is the device's alone to write
  void* memory_ = nullptr;
};

}  // namespace tlt
