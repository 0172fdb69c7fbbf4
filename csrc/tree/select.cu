// select_nodes on the GPU: the root and the best num_verify - 1 connected nodes of each request.
//
// The CPU takes nodes in rank order (score desc, index asc), each after its parent and never a
// second sibling with the same token. Here each node is decided independently, from ranks alone:
//   valid     linked, scored, ranked after its parent, and the first of the siblings with its
//             token that are ranked after their parent
//   eligible  valid, and so are its ancestors
//   chosen    fewer than num_verify - 1 eligible nodes rank before it
//
// One block per request loads its nodes into shared memory, where several threads share the count
// of better nodes, and chooses. With one request it also writes the rows. Otherwise it stores one
// PackedNode per row at b * num_verify of `source` and a count in row_start, from which one more
// block packs the rows of all requests. count^2 comparisons; stores of up to kMaxStore nodes.
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "tree/ancestors.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxStore = 16384;
constexpr int kSharedTokens = 8192;  // the tokens of larger stores stay in global memory
constexpr uint32_t kRootKey = 0xffffffffu;
constexpr uint16_t kExcluded = 0x8000;  // flag in a link
constexpr int kHelpers = 8;             // threads that find the row of one chosen node
constexpr int kPacked = 4096;           // rows that pack_kernel processes together
static_assert(kMaxStore <= kExcluded && kHelpers * kMaxTreeRows <= kThreads);

// A chosen node in one word: its store index, its depth, and the row of its parent in the request.
struct PackedNode {
  uint32_t word;

  __device__ static PackedNode of(int32_t node, int32_t depth, int32_t parent) {
    return {static_cast<uint32_t>(node | depth << 16 | parent << 24)};
  }
  __device__ int32_t node() const { return word & 0xffff; }
  __device__ int32_t depth() const { return word >> 16 & 0xff; }
  __device__ int32_t parent() const { return word >> 24; }
};

// The nodes of a request in shared memory. `key` orders scores: larger is better, 0 is never
// chosen. `link` is the parent's index and the flag kExcluded; `row_of` is the row of a chosen
// node.
struct Nodes {
  const int32_t* token;
  uint32_t* key;
  uint16_t* link;
  uint8_t *depth, *row_of;
  int32_t count;

  static int64_t bytes(int64_t capacity) {
    return capacity * (8 + (capacity <= kSharedTokens ? 4 : 0));
  }

  __device__ int32_t parent(int32_t node) const { return link[node] & ~kExcluded; }
  // Two nodes with keys; ties go to the lower index.
  __device__ bool better(int32_t i, int32_t j) const {
    return key[i] > key[j] || (key[i] == key[j] && i < j);
  }
};

// Loads the nodes of a request; an invalid count gives none. Ends with a barrier.
__device__ Nodes load_nodes(const NodeStore& store, int64_t b, uint32_t* shared) {
  const int32_t capacity = static_cast<int32_t>(store.capacity);
  const int64_t first = b * capacity;
  int32_t* const token = reinterpret_cast<int32_t*>(shared + capacity);
  const bool keeps_tokens = capacity <= kSharedTokens;
  Nodes nodes;
  nodes.key = shared;
  nodes.token = keeps_tokens ? token : store.token + first;
  nodes.link = reinterpret_cast<uint16_t*>(shared + (keeps_tokens ? 2 : 1) * capacity);
  nodes.depth = reinterpret_cast<uint8_t*>(nodes.link + capacity);
  nodes.row_of = nodes.depth + capacity;
  nodes.count = store.count[b];
  if (nodes.count < 1 || nodes.count > capacity) nodes.count = 0;
  const auto load = [&](int32_t i) {
    const int32_t parent = store.parent[first + i], depth = store.depth[first + i];
    const float score = store.score[first + i];
    const int32_t node_token = keeps_tokens ? store.token[first + i] : 0;
    const bool linked = parent >= 0 && parent < i && depth >= 1 && depth <= kMaxDepth;
    nodes.key[i] = i == 0 ? kRootKey : linked && !isnan(score) ? ascending(score) : 0;
    nodes.link[i] = linked ? static_cast<uint16_t>(parent) : 0;
    // 0 at the root, whatever the store holds.
    nodes.depth[i] = linked ? static_cast<uint8_t>(depth) : 0;
    if (keeps_tokens) token[i] = node_token;
  };
  // Entries past the count are memory too, so the first loads need not wait for the count.
  int32_t i = threadIdx.x;
  if (i < capacity) load(i);
  for (i += kThreads; i < nodes.count; i += kThreads) load(i);
  __syncthreads();
  return nodes;
}

// How the comparisons of a node are shared: threads of one `slice` have different nodes; all
// threads of a warp have the same slice.
struct Slices {
  int32_t first, stride;  // nodes of this thread
  int32_t slice, count;

  __device__ explicit Slices(int32_t nodes) {
    stride = min(kThreads, (nodes + kWarpSize - 1) / kWarpSize * kWarpSize);
    count = kThreads / stride;
    slice = threadIdx.x / stride;
    first = slice < count ? threadIdx.x % stride : nodes;
  }
};

// Marks nodes that no path may contain: not linked, not ranked after their parent, or a duplicate
// of a sibling.
__device__ void mark_excluded(const Nodes& nodes, const Slices& slices) {
  __shared__ uint8_t excluded[kThreads];  // of nodes that several threads share
  const bool shares = slices.count > 1;
  if (shares) {
    excluded[threadIdx.x] = 0;
    __syncthreads();
  }
  for (int32_t i = slices.first; i < nodes.count; i += slices.stride) {
    const int32_t parent = nodes.parent(i);
    bool bad = i > 0 && (nodes.key[i] == 0 || nodes.depth[i] != nodes.depth[parent] + 1 ||
                         !nodes.better(parent, i));
    if (i > 0 && !bad) {
      const int32_t token = nodes.token[i];
      for (int32_t j = 1 + slices.slice; j < nodes.count && !bad; j += slices.count) {
        if (nodes.parent(j) != parent || nodes.token[j] != token) continue;
        bad = nodes.better(j, i) && nodes.better(parent, j) && nodes.depth[j] == nodes.depth[i];
      }
    }
    if (!bad) continue;
    if (shares) {
      excluded[i] = 1;
    } else {
      nodes.link[i] |= kExcluded;
    }
  }
  __syncthreads();
  if (shares) {
    if (slices.slice == 0 && slices.first < nodes.count && excluded[slices.first]) {
      nodes.link[slices.first] |= kExcluded;
    }
    __syncthreads();
  }
}

// Writes the chosen nodes, ordered by (depth, index), to `chosen`; returns how many.
__device__ int32_t choose(const Nodes& nodes, int32_t num_verify, PackedNode* chosen) {
  __shared__ int32_t num_chosen;
  __shared__ int32_t better_than[kThreads];
  __shared__ int32_t taken[kMaxTreeRows];  // by (depth, index)
  if (nodes.count == 0) return 0;
  const int t = threadIdx.x;
  const Slices slices(nodes.count);
  if (t == 0) num_chosen = 0;
  better_than[t] = 0;
  mark_excluded(nodes, slices);
  // An excluded ancestor ends a path: at most kMaxDepth steps, as depths decrease by one.
  for (int32_t i = t; i < nodes.count; i += kThreads) {
    uint16_t link = nodes.link[i];
    for (int step = 0; step < kMaxDepth && link != 0 && link < kExcluded; ++step) {
      link = nodes.link[link];
    }
    if (link >= kExcluded) nodes.key[i] = 0;
  }
  __syncthreads();
  const bool shares = slices.count > 1;
  for (int32_t i = slices.first; i < nodes.count; i += slices.stride) {
    const uint32_t mine = nodes.key[i];
    int32_t better = mine == 0 ? num_verify : 0;
    for (int32_t j = slices.slice; j < nodes.count && better < num_verify; j += slices.count) {
      const uint32_t other = nodes.key[j];
      better += other > mine || (other == mine && j < i);
    }
    if (shares) {
      atomicAdd(&better_than[i], better);
    } else if (better < num_verify) {
      taken[atomicAdd(&num_chosen, 1)] = nodes.depth[i] << 16 | i;
    }
  }
  __syncthreads();
  if (shares) {
    if (t < nodes.count && better_than[t] < num_verify) {
      taken[atomicAdd(&num_chosen, 1)] = nodes.depth[t] << 16 | t;
    }
    __syncthreads();
  }
  const int32_t mine = t / kHelpers < num_chosen ? taken[t / kHelpers] : 0;
  int32_t row_of = 0;
  for (int i = t % kHelpers; i < num_chosen; i += kHelpers) row_of += taken[i] < mine;
#pragma unroll
  for (int lane = kHelpers / 2; lane > 0; lane /= 2) {
    row_of += __shfl_xor_sync(kFullWarp, row_of, lane);
  }
  const int32_t node = mine & 0xffff;
  const bool writes = t / kHelpers < num_chosen && t % kHelpers == 0;
  if (writes) nodes.row_of[node] = static_cast<uint8_t>(row_of);
  __syncthreads();
  if (writes) chosen[row_of] = PackedNode::of(node, mine >> 16, nodes.row_of[nodes.parent(node)]);
  __syncthreads();
  return num_chosen;
}

// Writes packed row `first` + t of a request whose chosen nodes are given.
__device__ void write_row(const SelectNodesParams& p, int64_t b, int64_t first, int t,
                          const PackedNode* chosen, int32_t token, int32_t root_position) {
  const int64_t row = first + t;
  const PackedNode mine = chosen[t];
  p.source[row] = mine.node();
  p.tokens[row] = token;
  p.position[row] = root_position + mine.depth();
  p.parents[row] = t == 0 ? -1 : mine.parent();
  uint64_t low = 0, high = 0;  // one byte per depth, the root's is the lowest
  int32_t up = mine.parent();
  for (int d = mine.depth(); d > 0; --d) {
    high = high << 8 | low >> 56;
    low = low << 8 | static_cast<uint64_t>(up);
    up = chosen[up].parent();
  }
  write_ancestors(p.ancestors + row * kMaxDepth, low, high);
}

// One block per request; with one request it also writes the rows.
__global__ void __launch_bounds__(kThreads)
    select_kernel(const __grid_constant__ SelectNodesParams p) {
  extern __shared__ uint32_t shared[];
  __shared__ PackedNode chosen[kMaxTreeRows];
  const int64_t b = blockIdx.x;
  const int t = threadIdx.x;
  wait_for_prior_grid();
  launch_dependents();
  const int32_t root_position = t < kMaxTreeRows ? p.root_position[b] : 0;  // loaded early
  const Nodes nodes = load_nodes(p.nodes, b, shared);
  const int32_t count = choose(nodes, static_cast<int32_t>(p.num_verify), chosen);
  if (t == 0) {
    p.row_start[b + 1] = count;
    if (b == 0) p.row_start[0] = 0;
  }
  if (t >= count) {
    if (p.num_requests == 1 && t < p.num_verify) p.source[t] = -1;
    return;
  }
  if (p.num_requests == 1) {
    write_row(p, 0, 0, t, chosen, nodes.token[chosen[t].node()], root_position);
  } else {
    p.source[b * p.num_verify + t] = static_cast<int32_t>(chosen[t].word);
  }
}

// Turns the counts of the requests into row_start. Called by all threads; ends with a barrier.
__device__ void scan_counts(const SelectNodesParams& p) {
  __shared__ int32_t warp_sum[kWarpSize];
  __shared__ int32_t before;  // rows of the requests of previous rounds
  const int t = threadIdx.x, warp = t / kWarpSize, lane = t % kWarpSize;
  if (t == 0) before = 0;
  for (int64_t base = 0; base < p.num_requests; base += kThreads) {
    int32_t sum = base + t < p.num_requests ? p.row_start[base + t + 1] : 0;
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int32_t lower = __shfl_up_sync(kFullWarp, sum, step);
      if (lane >= step) sum += lower;
    }
    if (lane == kWarpSize - 1) warp_sum[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += warp_sum[w];
    sum += before;
    __syncthreads();
    if (t == kThreads - 1) before = sum;
    if (base + t < p.num_requests) p.row_start[base + t + 1] = sum;
    __syncthreads();
  }
}

// One block for all requests. Rows are written below all entries that were not read yet.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ SelectNodesParams p) {
  __shared__ PackedNode chosen[kPacked];
  const int32_t num_verify = static_cast<int32_t>(p.num_verify), many = kPacked / num_verify;
  wait_for_prior_grid();
  launch_dependents();
  for (int64_t base = 0; base < p.num_requests; base += many) {
    const int32_t requests = static_cast<int32_t>(min(int64_t{many}, p.num_requests - base));
    for (int32_t i = threadIdx.x; i < requests * num_verify; i += kThreads) {
      chosen[i].word = static_cast<uint32_t>(p.source[base * num_verify + i]);
    }
    if (base == 0) scan_counts(p);
    __syncthreads();
    for (int32_t i = threadIdx.x; i < requests * num_verify; i += kThreads) {
      const int64_t b = base + i / num_verify;
      const int32_t t = i % num_verify, start = p.row_start[b];
      if (t >= p.row_start[b + 1] - start) continue;
      const int32_t token = p.nodes.token[b * p.nodes.capacity + chosen[i].node()];
      write_row(p, b, start, t, chosen + i - t, token, p.root_position[b]);
    }
    __syncthreads();
  }
  const int64_t rows = p.num_requests * p.num_verify;
  for (int64_t i = p.row_start[p.num_requests] + threadIdx.x; i < rows; i += kThreads) {
    p.source[i] = -1;
  }
}

}  // namespace

void select_nodes_cuda(const SelectNodesParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "select_nodes";
  require(p.nodes.capacity <= kMaxStore, op,
          "nodes.token: expected at most " + std::to_string(kMaxStore) +
              " nodes a request on a GPU, got " + std::to_string(p.nodes.capacity));
  const DeviceGuard guard(device);
  if (p.num_requests == 0) {
    check_cuda(cudaMemsetAsync(p.row_start, 0, sizeof(int32_t), as_stream(stream)), op);
    return;
  }
  const auto shared = static_cast<int>(Nodes::bytes(p.nodes.capacity));
  launch_kernel(op, select_kernel, {p.num_requests, kThreads, shared}, as_stream(stream), true, p);
  if (p.num_requests == 1) return;
  launch_kernel(op, pack_kernel, {1, kThreads}, as_stream(stream), true, p);
}

}  // namespace tlt
