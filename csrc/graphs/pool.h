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

// A graph cannot be made or is not there; the caller can run the pass without one.
struct GraphError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Device memory that the budget counts for an executable: the average over many nodes, as measured
// (docs/notes/graphs.md).
inline int64_t graph_bytes(int64_t nodes, bool loop) {
  constexpr int64_t kNodeBytes = 2700, kGraphBytes = 40 << 10, kLoopBytes = 128 << 10;
  return nodes * kNodeBytes + kGraphBytes + (loop ? kLoopBytes : 0);
}

// The driver takes memory in blocks that graphs share and keeps what a graph gives back for the
// next, so the free memory shows a graph's own needs only on average over many nodes.
struct GraphUsage {
  int64_t charged_bytes;  // what the budget counts, by that average
  int64_t settled_bytes;  // by how much the device's free memory fell when the graph was made
  int64_t peak_bytes;     // the most that it fell meanwhile
  int64_t nodes, launches;
  bool loop;
};

// What one executable is made of: captured graphs (cudaGraph_t), run in this order; with `loop`
// again and again until control[GO], int32 on the device, is 0 or as many times as passes were
// armed. Graphs of a lower priority are evicted first.
struct GraphSource {
  const std::vector<uintptr_t>& parts;
  const Tensor& control;
  bool loop;
  int priority;
};

// All calls come from one thread.
class GraphPool {
 public:
  GraphPool(int device, int64_t budget_bytes);  // budget 0: no limit but the device's
  ~GraphPool();
  GraphPool(const GraphPool&) = delete;
  GraphPool& operator=(const GraphPool&) = delete;

  // Whether this build, the driver and the device can loop inside a graph.
  static bool supports_loop(int device);

  // Returns the keys of the graphs that were evicted. The parts may be destroyed afterwards. Where
  // it throws, an earlier graph of the same key is gone; others are only if the message names them.
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
