// select_nodes on the GPU: the root and the best num_verify - 1 connected nodes of each request.
//
// The CPU takes nodes in rank order (score desc, index asc), each after its parent and never a
// second sibling with the same token. Here every node decides for itself, from ranks alone:
//   fit       linked, scored, ranked behind its parent, and first of the siblings of its token that
//             are ranked behind their parent
//   eligible  fit, and so are its ancestors
//   chosen    fewer than num_verify - 1 eligible nodes rank before it
// One block a request chooses, and leaves store indices at b * num_verify of `source` and a count
// in row_start; then one block packs the rows of all requests. count^2 comparisons in shared
// memory; stores of up to kMaxStore nodes.
#include "common/team.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kSelectThreads = 512;
constexpr int kPackThreads = 1024;
constexpr int kMaxStore = 16384;

// A request's nodes as its block sees them.
struct NodeView {
  const int32_t *token, *parent, *depth;
  const float* score;
  int32_t count;  // 0 if it cannot be believed

  __device__ NodeView(const NodeStore& nodes, int64_t b) {
    const int64_t first = b * nodes.capacity;
    token = nodes.token + first;
    parent = nodes.parent + first;
    depth = nodes.depth + first;
    score = nodes.score + first;
    count = nodes.count[b];
    if (count < 1 || count > nodes.capacity) count = 0;
  }

  // Root depth is 0 whatever the store says.
  __device__ int32_t depth_of(int32_t node) const { return node == 0 ? 0 : depth[node]; }

  __device__ bool is_linked(int32_t node) const {
    const int32_t up = parent[node];
    return up >= 0 && up < node && depth[node] <= kMaxDepth && depth[node] == depth_of(up) + 1 &&
           !isnan(score[node]);
  }
};

// Leaves the chosen nodes, ordered by (depth, index), in `chosen`; returns how many. key[i] is the
// rank of node i: larger is better, 0 never; `unfit[i]` marks nodes that no path may cross.
__device__ int32_t choose(const NodeView& nodes, int32_t num_verify, uint64_t* key, uint8_t* unfit,
                          int32_t* chosen) {
  __shared__ int32_t num_chosen;
  __shared__ int32_t taken[kMaxVerifyRows];
  const int t = threadIdx.x;
  if (nodes.count == 0) return 0;
  if (t == 0) num_chosen = 0;
  for (int32_t i = t; i < nodes.count; i += kSelectThreads) {
    key[i] = i == 0               ? ~uint64_t{0}
             : nodes.is_linked(i) ? rank_key(nodes.score[i], static_cast<uint32_t>(i))
                                  : 0;
  }
  __syncthreads();
  for (int32_t i = t; i < nodes.count; i += kSelectThreads) {
    const uint64_t mine = key[i];
    bool bad = mine == 0;
    if (i > 0 && !bad) {
      const int32_t parent = nodes.parent[i], token = nodes.token[i];
      bad = key[parent] <= mine;
      for (int32_t j = parent + 1; j < nodes.count && !bad; ++j) {
        bad = key[j] > mine && key[j] < key[parent] && nodes.parent[j] == parent &&
              nodes.token[j] == token;
      }
    }
    unfit[i] = bad;
  }
  __syncthreads();
  // An ancestor that is not fit ends a path: at most kMaxDepth steps, as depths fall by one.
  for (int32_t i = t; i < nodes.count; i += kSelectThreads) {
    bool bad = unfit[i];
    for (int32_t up = i; up > 0 && !bad; up = nodes.parent[up]) bad = unfit[up];
    if (bad) key[i] = 0;
  }
  __syncthreads();
  for (int32_t i = t; i < nodes.count; i += kSelectThreads) {
    const uint64_t mine = key[i];
    if (mine == 0) continue;
    int32_t better = 0;
    for (int32_t j = 0; j < nodes.count && better < num_verify; ++j) better += key[j] > mine;
    if (better < num_verify) taken[atomicAdd(&num_chosen, 1)] = i;
  }
  __syncthreads();
  if (t < num_chosen) {
    const int32_t node = taken[t], depth = nodes.depth_of(node);
    int32_t place = 0;
    for (int i = 0; i < num_chosen; ++i) {
      const int32_t other = taken[i], other_depth = nodes.depth_of(other);
      place += other_depth < depth || (other_depth == depth && other < node);
    }
    chosen[place] = node;
  }
  return num_chosen;
}

// Writes one packed row. `chosen` are the request's nodes by (depth, index).
__device__ void write_row(const SelectNodesParams& p, int64_t b, int64_t row, const int32_t* chosen,
                          int32_t count, int32_t node) {
  const NodeView nodes(p.nodes, b);
  const auto row_of = [&](int32_t wanted) {
    const int32_t depth = nodes.depth_of(wanted);
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      const int32_t other = chosen[middle], other_depth = nodes.depth_of(other);
      if (other_depth < depth || (other_depth == depth && other < wanted)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  const int32_t depth = nodes.depth_of(node);
  p.source[row] = node;
  p.tokens[row] = nodes.token[node];
  p.position[row] = p.root_position[b] + depth;
  p.parents[row] = node == 0 ? -1 : row_of(nodes.parent[node]);
  uint8_t* ancestors = p.ancestors + row * kMaxDepth;
  for (int d = depth; d < kMaxDepth; ++d) ancestors[d] = 0;
  int32_t up = node;
  for (int d = depth - 1; d >= 0; --d) {
    up = nodes.parent[up];
    ancestors[d] = static_cast<uint8_t>(row_of(up));
  }
}

// One block a request; with one request it writes the rows as well.
__global__ void __launch_bounds__(kSelectThreads) select_kernel(const SelectNodesParams p) {
  extern __shared__ uint64_t keys[];  // [capacity], then a byte a node
  __shared__ int32_t chosen[kMaxVerifyRows];
  const int64_t b = blockIdx.x;
  const NodeView nodes(p.nodes, b);
  const int32_t count = choose(nodes, static_cast<int32_t>(p.num_verify), keys,
                               reinterpret_cast<uint8_t*>(keys + p.nodes.capacity), chosen);
  __syncthreads();
  const int t = threadIdx.x;
  if (t == 0) {
    p.row_start[b + 1] = count;
    if (b == 0) p.row_start[0] = 0;
  }
  if (t >= count) return;
  if (p.num_requests == 1) {
    write_row(p, 0, t, chosen, count, chosen[t]);
  } else {
    p.source[b * p.num_verify + t] = chosen[t];
  }
}

// One block for all requests: counts become row_start, indices move down to it, rows are written.
__global__ void __launch_bounds__(kPackThreads) pack_kernel(const SelectNodesParams p) {
  __shared__ int32_t warp_sum[kWarpSize];
  __shared__ int32_t before;  // rows of the requests of earlier rounds
  const int t = threadIdx.x, warp = t / kWarpSize, lane = t % kWarpSize;
  if (t == 0) before = 0;
  for (int64_t base = 0; base < p.num_requests; base += kPackThreads) {
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
    if (t == kPackThreads - 1) before = sum;
    if (base + t < p.num_requests) p.row_start[base + t + 1] = sum;
    __syncthreads();
  }
  const int32_t rows = p.row_start[p.num_requests];
  const bool dense = rows == p.num_requests * p.num_verify;
  for (int64_t b = 0; b < p.num_requests && !dense; ++b) {  // rows land below all later ones
    const int32_t start = p.row_start[b], count = p.row_start[b + 1] - start;
    if (start == b * p.num_verify) continue;
    const int32_t node = t < count ? p.source[b * p.num_verify + t] : 0;
    __syncthreads();
    if (t < count) p.source[start + t] = node;
    __syncthreads();
  }
  __syncthreads();
  for (int32_t row = t; row < rows; row += kPackThreads) {
    int64_t low = 0,
            high = p.num_requests - 1;  // the last request that starts at or before the row
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (p.row_start[middle] <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int32_t start = p.row_start[low];
    write_row(p, low, row, p.source + start, p.row_start[low + 1] - start, p.source[row]);
  }
}

}  // namespace

void select_nodes_cuda(const SelectNodesParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "select_nodes";
  require(p.nodes.capacity <= kMaxStore, op,
          "node_token: the GPU takes at most " + std::to_string(kMaxStore) +
              " nodes a request, got " + std::to_string(p.nodes.capacity));
  const DeviceGuard guard(device);
  const size_t shared = p.nodes.capacity * (sizeof(uint64_t) + 1);
  if (shared > 44 * 1024) {
    check_cuda(cudaFuncSetAttribute(select_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared)),
               op);
  }
  select_kernel<<<static_cast<unsigned>(p.num_requests), kSelectThreads, shared,
                  as_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), op);
  if (p.num_requests == 1) return;
  pack_kernel<<<1, kPackThreads, 0, as_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), op);
}

}  // namespace tlt
