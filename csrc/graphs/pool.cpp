#include "graphs/pool.h"

#include "graphs/params.h"

#if defined(TLT_WITH_CUDA)

#include <algorithm>
#include <list>

#include "common/range.h"
#include "graphs/condition.h"

namespace tlt {
namespace {

constexpr const char* kName = "GraphPool";
constexpr int kLoopDriver = 12040;  // the first driver version whose conditional nodes are used

struct GraphMemoryError : GraphError {
  using GraphError::GraphError;
};

// Clears the error state, which the next check would report, and throws.
void check_graph(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  const std::string message = "GraphPool: " + what + ": " + cudaGetErrorString(error);
  if (error == cudaErrorMemoryAllocation) throw GraphMemoryError(message);
  throw GraphError(message);
}

template <typename T, cudaError_t (*kDestroy)(T)>
struct Destroy {
  using pointer = T;
  void operator()(T handle) const { kDestroy(handle); }
};
using Graph = std::unique_ptr<cudaGraph_t, Destroy<cudaGraph_t, cudaGraphDestroy>>;
using Executable = std::unique_ptr<cudaGraphExec_t, Destroy<cudaGraphExec_t, cudaGraphExecDestroy>>;
using Event = std::unique_ptr<cudaEvent_t, Destroy<cudaEvent_t, cudaEventDestroy>>;

cudaGraph_t as_graph(uintptr_t graph) { return reinterpret_cast<cudaGraph_t>(graph); }

int64_t count_nodes(const GraphSource& source) {
  int64_t nodes = source.loop;
  for (const uintptr_t part : source.parts) {
    size_t count = 0;
    check_graph(cudaGraphGetNodes(as_graph(part), nullptr, &count), "the graph's nodes");
    nodes += static_cast<int64_t>(count);
  }
  return nodes;
}

// Adds copies of the parts, one after the other; returns the last one's node.
cudaGraphNode_t chain(cudaGraph_t graph, const std::vector<uintptr_t>& parts) {
  cudaGraphNode_t last = nullptr;
  for (const uintptr_t part : parts) {
    cudaGraphNode_t node;
    check_graph(cudaGraphAddChildGraphNode(&node, graph, &last, last != nullptr, as_graph(part)),
                "a captured graph");
    last = node;
  }
  return last;
}

// A WHILE node in `graph`; its handle and its empty body.
std::pair<cudaGraphConditionalHandle, cudaGraph_t> add_loop(cudaGraph_t graph) {
  cudaGraphConditionalHandle handle;
  check_graph(cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault),
              "the loop's condition");
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = cudaGraphCondTypeWhile;
  params.conditional.size = 1;
  cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
  check_graph(cudaGraphAddNode(&node, graph, nullptr, nullptr, 0, &params), "the loop");
#else
  check_graph(cudaGraphAddNode(&node, graph, nullptr, 0, &params), "the loop");
#endif
  return {handle, params.conditional.phGraph_out[0]};
}

Graph compose(const GraphSource& source) {
  cudaGraph_t whole = nullptr;
  check_graph(cudaGraphCreate(&whole, 0), "a new graph");
  Graph owner(whole);
  if (!source.loop) {
    chain(whole, source.parts);
    return owner;
  }
  const auto [handle, body] = add_loop(whole);
  int32_t* const control = source.control.ptr<int32_t>();
  check_graph(add_condition(body, chain(body, source.parts), handle, control),
              "the loop's condition");
  return owner;
}

int64_t free_bytes() {
  size_t free = 0, total = 0;
  check_graph(cudaMemGetInfo(&free, &total), "the device's memory");
  return static_cast<int64_t>(free);
}

}  // namespace

struct GraphPool::Entry {
  std::string key;
  int priority;
  Executable executable;
  Event launched;  // recorded after each launch
  GraphUsage usage;

  bool in_flight() const {
    if (cudaEventQuery(launched.get()) != cudaErrorNotReady) return false;
    cudaGetLastError();  // clears cudaErrorNotReady, which the next check would report
    return true;
  }
};

struct GraphPool::State {
  int device;
  int64_t budget;
  std::list<Entry> entries;  // least recently used first

  std::list<Entry>::iterator find(const std::string& key) {
    return std::find_if(entries.begin(), entries.end(),
                        [&](const Entry& entry) { return entry.key == key; });
  }

  std::list<Entry>::iterator at(const char* what, const std::string& key) {
    const auto found = find(key);
    if (found == entries.end()) {
      throw GraphError(std::string("GraphPool: ") + what + ": there is no graph '" + key + "'");
    }
    return found;
  }

  int64_t charged() const {
    int64_t bytes = 0;
    for (const Entry& entry : entries) bytes += entry.usage.charged_bytes;
    return bytes;
  }

  // The graphs that may be evicted for one of this priority, lowest priority first, then least
  // recently used. Graphs of a higher priority and graphs in flight are not evicted.
  std::vector<std::list<Entry>::iterator> evictable(int priority) {
    std::vector<std::list<Entry>::iterator> found;
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      if (entry->priority <= priority && !entry->in_flight()) found.push_back(entry);
    }
    std::stable_sort(found.begin(), found.end(),
                     [](auto a, auto b) { return a->priority < b->priority; });
    return found;
  }

  // Drops the first graph that may be evicted; false if there is none.
  bool evict(int priority, std::vector<std::string>* evicted) {
    const auto found = evictable(priority);
    if (found.empty()) return false;
    evicted->push_back(found.front()->key);
    entries.erase(found.front());
    return true;
  }
};

GraphPool::GraphPool(int device, int64_t budget_bytes) {
  require(budget_bytes >= 0, kName,
          "budget_bytes: expected 0 or more, got " + std::to_string(budget_bytes));
  int count = 0;
  check_graph(cudaGetDeviceCount(&count), "the devices");
  require(0 <= device && device < count, kName,
          "device: expected 0 to " + std::to_string(count - 1) + ", got " + std::to_string(device));
  state_ = std::make_unique<State>(State{device, budget_bytes, {}});
}

GraphPool::~GraphPool() {
  for (const Entry& entry : state_->entries) cudaEventSynchronize(entry.launched.get());
}

bool GraphPool::supports_loop(int device) {
  int driver = 0, count = 0;
  const bool valid = cudaDriverGetVersion(&driver) == cudaSuccess &&
                     cudaGetDeviceCount(&count) == cudaSuccess && 0 <= device && device < count;
  cudaGetLastError();
  return valid && driver >= kLoopDriver;
}

namespace {

Event new_event() {
  cudaEvent_t event = nullptr;
  check_graph(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
  return Event(event);
}

// Instantiates and uploads the executable, and measures how far the device's free memory fell.
Executable instantiate(cudaGraph_t graph, cudaStream_t stream, GraphUsage* usage) {
  const int64_t before = free_bytes();
  cudaGraphInstantiateParams params{};
  cudaGraphExec_t handle = nullptr;
  const cudaError_t error = cudaGraphInstantiateWithParams(&handle, graph, &params);
  Executable executable(handle);
  check_graph(error, "instantiation (result " + std::to_string(params.result_out) + ")");
  const int64_t made = before - free_bytes();
  check_graph(cudaGraphUpload(handle, stream), "upload");
  check_graph(cudaStreamSynchronize(stream), "upload");
  usage->resident_bytes = before - free_bytes();
  usage->peak_bytes = std::max(made, usage->resident_bytes);
  return executable;
}

void check_source(const GraphSource& source, int device) {
  require(!source.parts.empty(), kName, "graphs: expected one or more, got none");
  for (const uintptr_t part : source.parts) {
    require(part != 0, kName, "graphs: expected captured graphs, got a null handle");
  }
  Tensor of_pool;
  of_pool.device = {kDLCUDA, device};
  const Arg control(kName, "control", source.control);
  control.on(of_pool).is({DType::kInt32}).dense().shape({kControlWords});
}

}  // namespace

std::vector<std::string> GraphPool::add(const std::string& key, const GraphSource& source,
                                        uintptr_t stream) {
  check_source(source, state_->device);
  const DeviceGuard guard(state_->device);
  if (source.loop && !supports_loop(state_->device)) {
    throw GraphError("GraphPool: this driver has no loops in graphs; expected CUDA 12.4 or later");
  }
  Entry entry{key, source.priority, {}, new_event(), {}};
  const int64_t nodes = count_nodes(source), budget = state_->budget;
  const int64_t wanted = graph_bytes(nodes, source.loop);
  entry.usage = {wanted, 0, 0, nodes, 0, source.loop};
  const Graph graph = compose(source);
  if (contains(key)) remove(key);
  if (budget > 0) {
    int64_t least = state_->charged() + wanted;  // after all possible evictions
    for (const auto found : state_->evictable(source.priority)) least -= found->usage.charged_bytes;
    if (least > budget) {
      throw GraphError("GraphPool: '" + key + "' needs " + std::to_string(wanted) +
                       " bytes, the budget is " + std::to_string(budget) + " with " +
                       std::to_string(state_->charged()) + " in use");
    }
  }
  std::vector<std::string> evicted;
  while (budget > 0 && state_->charged() + wanted > budget &&
         state_->evict(source.priority, &evicted)) {
    continue;
  }
  while (true) {
    try {
      entry.executable = instantiate(graph.get(), as_stream(stream), &entry.usage);
      break;
    } catch (const GraphMemoryError& error) {
      if (state_->evict(source.priority, &evicted)) continue;
      std::string message = error.what();
      for (const std::string& other : evicted) {
        message += (&other == &evicted.front() ? "; evicted for it: '" : ", '") + other + "'";
      }
      throw GraphMemoryError(message);
    }
  }
  state_->entries.push_back(std::move(entry));
  return evicted;
}

void GraphPool::launch(const std::string& key, uintptr_t stream) {
  const DeviceGuard guard(state_->device);
  const auto entry = state_->at("launch", key);
  const Range range("graph", key.c_str());
  check_graph(cudaGraphLaunch(entry->executable.get(), as_stream(stream)), "launch of " + key);
  check_graph(cudaEventRecord(entry->launched.get(), as_stream(stream)), "launch of " + key);
  ++entry->usage.launches;
  state_->entries.splice(state_->entries.end(), state_->entries, entry);
}

void GraphPool::remove(const std::string& key) {
  const auto entry = state_->at("remove", key);
  check_graph(cudaEventSynchronize(entry->launched.get()), "remove");
  state_->entries.erase(entry);
}

bool GraphPool::contains(const std::string& key) const {
  return state_->find(key) != state_->entries.end();
}

std::vector<std::pair<std::string, GraphUsage>> GraphPool::usage() const {
  std::vector<std::pair<std::string, GraphUsage>> list;
  for (const Entry& entry : state_->entries) list.emplace_back(entry.key, entry.usage);
  return list;
}

}  // namespace tlt

#else

namespace tlt {
namespace {

[[noreturn]] void no_cuda() {
  throw GraphError(
      "GraphPool: this build has no CUDA graphs: reinstall with nvcc on PATH (TLT_CUDA=1)");
}

}  // namespace

struct GraphPool::State {};

GraphPool::GraphPool(int, int64_t) { no_cuda(); }
GraphPool::~GraphPool() = default;
bool GraphPool::supports_loop(int) { return false; }
std::vector<std::string> GraphPool::add(const std::string&, const GraphSource&, uintptr_t) {
  no_cuda();
}
void GraphPool::launch(const std::string&, uintptr_t) { no_cuda(); }
void GraphPool::remove(const std::string&) { no_cuda(); }
bool GraphPool::contains(const std::string&) const { no_cuda(); }
std::vector<std::pair<std::string, GraphUsage>> GraphPool::usage() const { no_cuda(); }

}  // namespace tlt

#endif
