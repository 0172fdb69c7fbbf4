// Executable graphs of captured passes: made, launched, accounted for and evicted here.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace tlt {

// A graph cannot be made or does not exist; the caller can run the pass without one.
struct GraphError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Device memory that the budget counts for an executable: the average over many nodes, as measured
// (docs/notes/graphs.md).
inline int64_t graph_bytes(int64_t nodes, bool loop) {
  constexpr int64_t kNodeBytes = 2700, kGraphBytes = 40 << 10, kLoopBytes = 128 << 10;
  return nodes * kNodeBytes + kGraphBytes + (loop ? kLoopBytes : 0);
}

// The driver allocates memory in blocks that graphs share, and reuses the memory of destroyed
// graphs. So the free memory shows what one graph needs only on average over many nodes.
struct GraphUsage {
  int64_t charged_bytes;   // counted against the budget, by that average
  int64_t resident_bytes;  // decrease of the device's free memory once the graph is uploaded
  int64_t peak_bytes;      // largest decrease until then
  int64_t nodes, launches;
  bool loop;
};

// The source of one executable: captured graphs (cudaGraph_t), run in this order. With `loop` they
// repeat until control[kControlGo] is 0, and at most as often as passes were armed. Graphs of a
// lower priority are evicted first.
struct GraphSource {
  const std::vector<uintptr_t>& parts;
  const Tensor& control;
  bool loop;
  int priority;
};

// All calls come from one thread.
class GraphPool {
 public:
  GraphPool(int device, int64_t budget_bytes);  // budget 0: only the device's memory is a limit
  ~GraphPool();
  GraphPool(const GraphPool&) = delete;
  GraphPool& operator=(const GraphPool&) = delete;

  // Whether this build, the driver and the device can loop inside a graph.
  static bool supports_loop(int device);

  // Returns the keys of the evicted graphs. The parts may be destroyed afterwards. If it throws, an
  // earlier graph of the same key may be removed; the message names other evicted graphs.
  std::vector<std::string> add(const std::string& key, const GraphSource& source, uintptr_t stream);
  void launch(const std::string& key, uintptr_t stream);
  void remove(const std::string& key);
  bool contains(const std::string& key) const;
  std::vector<std::pair<std::string, GraphUsage>> usage() const;  // least recently used first

 private:
  struct Entry;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tlt
