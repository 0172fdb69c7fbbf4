#include "graphs/ring.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <thread>

#include "common/tensor.h"

#if defined(TLT_WITH_CUDA)
#include "common/cuda.h"
#endif

namespace tlt {
namespace {

constexpr const char* kName = "PassRing";
constexpr int64_t kLine = 128;  // bytes; arrays do not share one
constexpr int64_t kMostSequence = int64_t{1} << 31;

void* allocate(size_t bytes, bool pinned) {
  if (!pinned) {
    void* memory = std::aligned_alloc(kLine, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
#if defined(TLT_WITH_CUDA)
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
             "PassRing: cudaHostAlloc");
  return memory;
#else
  require(false, kName, "pinned: this build has no CUDA: reinstall with nvcc on PATH (TLT_CUDA=1)");
  return nullptr;
#endif
}

}  // namespace

PassRing::PassRing(int64_t passes, int64_t max_batch, int64_t max_emitted, bool pinned)
    : pinned_(pinned) {
  const auto check = [](const char* name, int64_t value, int64_t most) {
    require(1 <= value && value <= most, kName,
            std::string(name) + ": expected 1 to " + std::to_string(most) + ", got " +
                std::to_string(value));
  };
  check("passes", passes, 1 << 20);
  check("max_batch", max_batch, 1 << 16);
  check("max_emitted", max_emitted, kMaxEmitted);
  int64_t bytes = 0;
  const auto place = [&](int64_t count, int64_t size) {
    const int64_t offset = bytes;
    bytes += (count * size + kLine - 1) / kLine * kLine;
    return offset;
  };
  const int64_t rows = passes * max_batch, entries = rows * max_emitted;
  const int64_t state = place(1, 8), stop = place(1, 4), begin = place(1, 8);
  const int64_t time = place(passes, 8);
  const int64_t count = place(rows, 4), finish = place(rows, 4), status = place(rows, 4);
  const int64_t tokens = place(entries, 4), logprobs = place(entries, 4);
  memory_ = allocate(static_cast<size_t>(bytes), pinned);
  std::memset(memory_, 0, static_cast<size_t>(bytes));
  char* base = static_cast<char*>(memory_);
  const auto ints = [&](int64_t offset) { return reinterpret_cast<int32_t*>(base + offset); };
  const auto longs = [&](int64_t offset) { return reinterpret_cast<int64_t*>(base + offset); };
  view_ = {reinterpret_cast<uint64_t*>(base + state),
           ints(stop),
           longs(begin),
           longs(time),
           ints(count),
           ints(finish),
           ints(status),
           ints(tokens),
           reinterpret_cast<float*>(base + logprobs),
           passes,
           max_batch,
           max_emitted,
           static_cast<uint32_t>(kMostSequence / passes * passes)};
}

PassRing::~PassRing() {
#if defined(TLT_WITH_CUDA)
  if (pinned_) {
    cudaFreeHost(memory_);  // waits for the device, so no kernel still writes here
    return;
  }
#endif
  std::free(memory_);
}

// At most `passes` records were made since arming, so the difference is unambiguous.
int64_t PassRing::sequence_of(uint64_t state) const {
  const int64_t wrap = view_.wrap;
  const int64_t now = static_cast<int64_t>(state >> kSequenceShift);
  return armed_ + (now - armed_ % wrap + wrap) % wrap;
}

int64_t PassRing::sequence() const {
  return sequence_of(__atomic_load_n(view_.state, __ATOMIC_ACQUIRE));
}

int32_t PassRing::reason() const {
  const uint64_t state = __atomic_load_n(view_.state, __ATOMIC_ACQUIRE);
  return sequence_of(state) != armed_ ? static_cast<int32_t>(state & kReasonMask) : 0;
}

void PassRing::request_stop() { __atomic_store_n(view_.stop, 1, __ATOMIC_RELEASE); }

void PassRing::clear() {
  armed_ = sequence();
  __atomic_store_n(view_.stop, 0, __ATOMIC_RELEASE);
}

int32_t PassRing::wait(double timeout_s) const {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(timeout_s);
  // A sleep ends about 60 us late, the length of a short pass; most waits end before the first one.
  const auto spin_until = Clock::now() + std::chrono::milliseconds(50);
  int32_t why;
  while ((why = reason()) == 0) {
    const auto now = Clock::now();
    if (now >= end) return 0;
    if (now < spin_until) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return why;
}

std::vector<Collected> PassRing::collect(int64_t begin, int64_t end, int64_t rows) const {
  const int64_t recorded = sequence();
  require(0 <= begin && begin <= end && end <= recorded && recorded - begin <= view_.passes, kName,
          "collect: expected passes that the ring holds, up to " + std::to_string(recorded) +
              ", got " + std::to_string(begin) + " to " + std::to_string(end));
  require(0 <= rows && rows <= view_.max_batch, kName,
          "collect: rows: expected 0 to " + std::to_string(view_.max_batch) + ", got " +
              std::to_string(rows));
  std::vector<Collected> all(static_cast<size_t>(rows));
  for (int64_t pass = begin; pass < end; ++pass) {
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t record = pass % view_.passes;
      const int64_t word = record * view_.max_batch + b;
      const int32_t count = view_.num_emitted[word];
      Collected& row = all[static_cast<size_t>(b)];
      if (row.finish != 0) continue;
      row.counts.push_back(count);
      row.finish = view_.finish[word];
      row.status = view_.status[word];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = (record * view_.max_emitted + i) * view_.max_batch + b;
        row.tokens.push_back(view_.tokens[at]);
        row.logprobs.push_back(view_.logprobs[at]);
      }
    }
  }
  return all;
}

}  // namespace tlt
