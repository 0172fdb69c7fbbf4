// The end of a pass on the CPU.
#include <chrono>

#include "graphs/advance.h"
#include "graphs/op.h"

namespace tlt {
namespace {

int64_t now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::nanoseconds(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void advance_batch_cpu(const AdvanceBatchParams& p) {
  const int64_t record = record_of(p);
  int32_t reason = 0, ended = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const RowAdvance row = plan_row(p, b);
    for (int64_t i = 0; i < row.count; ++i) take_token(p, row, record, b, i);
    take_row(p, row, record, b);
    reason |= row.reason;
    if (row.ended) {
      retire_row(p, b);
      ++ended;
    }
  }
  p.ring.time_ns[record] = now_ns();
  const bool stop = __atomic_load_n(p.ring.stop, __ATOMIC_RELAXED) != 0;
  __atomic_store_n(p.ring.state, take_pass(p, reason, ended, stop), __ATOMIC_RELEASE);
}

void arm_passes_cpu(const ArmPassesParams& p) {
  arm(p);
  *p.ring.begin_ns = now_ns();
}

}  // namespace tlt
