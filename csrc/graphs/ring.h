// The ring that carries the results of passes to the host while the device continues.
#pragma once

#include <cstdint>
#include <vector>

#include "graphs/params.h"

namespace tlt {

// The results of a request in some passes.
struct Collected {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<int32_t> counts;  // tokens of each pass, up to the one in which it finished
  int32_t finish = 0;           // not 0: it finished
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
  int32_t reason() const;    // stop reason since the passes were armed; 0 = passes go on
  void request_stop();
  void clear();  // called when passes are armed: resets the stop reason and the stop request

  // Waits until the passes stop and returns the reason; 0 after the timeout.
  int32_t wait(double timeout_s) const;

  // Results of the first `rows` rows in passes begin to end - 1, which the ring must still hold.
  std::vector<Collected> collect(int64_t begin, int64_t end, int64_t rows) const;

 private:
  int64_t sequence_of(uint64_t state) const;

  RingView view_;
  bool pinned_;
  int64_t armed_ = 0;  // sequence when passes were armed; only the device writes the state
  void* memory_ = nullptr;
};

}  // namespace tlt
