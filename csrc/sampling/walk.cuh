// The walk through a draft tree on the GPU, as walk.h does it on the CPU. A whole block walks
// together: every thread holds the same node, and one reports.
#pragma once

#include "common/status.h"
#include "sampling/filter.cuh"

namespace tlt {

// The request that owns a row, and what a draw must know of it.
struct Owner {
  int64_t b = -1;  // if none owns the row; the last one where a broken row_start names two
  int32_t limit = 0, top_k = 0;
  float temperature = 0.0f, top_p = 1.0f;
  int64_t request = 0;

  // Called by whole warps. Each lane asks for all words of a request at once, so that no read waits
  // for another.
  __device__ __forceinline__ Owner(const VerifyParams& p, int64_t row) {
#pragma unroll 1
    for (int64_t base = 0; base < p.num_requests; base += kWarpSize) {
      const int64_t lane_b = min(base + threadIdx.x % kWarpSize, p.num_requests - 1);
      const SamplingArrays& s = p.sampling;
      const int32_t first = p.row_start[lane_b], end = p.row_start[lane_b + 1];
      const int32_t its_limit = p.limit[lane_b], its_top_k = s.top_k[lane_b];
      const float its_temperature = s.temperature[lane_b], its_top_p = s.top_p[lane_b];
      const int64_t its_request = s.request[lane_b];
      const bool mine = first >= 0 && first <= row && row < end;
      const unsigned owners = __ballot_sync(kFullWarp, mine);
      if (owners == 0) continue;
      const int owner = 31 - __clz(owners);
      b = min(base + owner, p.num_requests - 1);
      limit = __shfl_sync(kFullWarp, its_limit, owner);
      top_k = __shfl_sync(kFullWarp, its_top_k, owner);
      temperature = __shfl_sync(kFullWarp, its_temperature, owner);
      top_p = __shfl_sync(kFullWarp, its_top_p, owner);
      request = __shfl_sync(kFullWarp, its_request, owner);
    }
  }
};

// The rows of one request in shared memory.
struct TreeRows {
  int32_t tokens[kMaxTreeRows], parents[kMaxTreeRows];
  int64_t first;
  int32_t num_rows;

  // Returns status bits; every thread of a block of kMaxTreeRows or more calls it. A request that
  // cannot be has no rows.
  __device__ int32_t load(const VerifyParams& p, int64_t b) {
    const int64_t begin = p.row_start[b], end = p.row_start[b + 1];
    const bool fits = begin == end || (begin >= 0 && end > begin && end <= p.num_rows &&
                                       end - begin <= kMaxTreeRows);
    const int32_t rows = fits ? static_cast<int32_t>(end - begin) : 0;
    const int32_t node = threadIdx.x;
    if (node == 0) {
      first = rows > 0 ? begin : 0;
      num_rows = rows;
    }
    int32_t bad_tree = 0, bad_token = 0;
    if (node < rows) {
      const int32_t token = p.tokens[begin + node], parent = p.parents[begin + node];
      tokens[node] = token;
      parents[node] = parent;
      bad_tree = node == 0 ? parent != -1 : parent < 0 || parent >= node;
      bad_token = node > 0 && (token < 0 || token >= p.vocab_size);
    }
    bad_tree = __syncthreads_or(bad_tree);
    bad_token = __syncthreads_or(bad_token);
    return (fits ? 0 : kStatusBadLength) | (bad_tree ? kStatusBadTree : 0) |
           (bad_token ? kStatusBadToken : 0);
  }

  // The first child of a node that carries the token, -1 if none does. Called by whole warps.
  __device__ int find_child(int node, int32_t token) const {
    for (int base = 0; base < num_rows; base += kWarpSize) {
      const int child = base + threadIdx.x % kWarpSize;
      const bool right =
          child > node && child < num_rows && parents[child] == node && tokens[child] == token;
      const unsigned found = __ballot_sync(kFullWarp, right);
      if (found != 0) return base + __ffs(found) - 1;
    }
    return -1;
  }
};

struct Step {
  Drawn drawn;  // the target's token at this node
  int child;    // the node that carries it, -1 if none was drafted
};

__device__ __forceinline__ bool is_stop_id(const VerifyParams& p, int64_t b, int32_t token) {
  const int32_t* stop = p.stop_ids + b * p.stop_stride;
  bool found = false;
  for (int64_t base = 0; base < p.num_stop_ids && !found; base += kWarpSize) {
    const int64_t i = base + threadIdx.x % kWarpSize;
    found = __any_sync(kFullWarp, i < p.num_stop_ids && stop[i] == token);
  }
  return found;
}

// Token `i` of a request, drawn at `node`.
__device__ __forceinline__ void write_step(const VerifyParams& p, int64_t b, int64_t i, int node,
                                           const Drawn& drawn) {
  p.emitted[b * p.emitted_stride + i] = drawn.token;
  p.logprobs[b * p.logprobs_stride + i] = drawn.logprob;
  if (p.filtered_logprobs != nullptr) {
    p.filtered_logprobs[b * p.filtered_stride + i] = drawn.filtered_logprob;
  }
  p.path[b * p.path_stride + i] = node;
}

// What a walk of `count` tokens ended with.
__device__ __forceinline__ void write_end(const VerifyParams& p, int64_t b, const TreeRows& tree,
                                          int64_t limit, int64_t count, int32_t finish,
                                          int32_t status) {
  if (finish == kRunning && tree.num_rows > 0 && count == limit) finish = kLimit;
  p.finish[b] = finish;
  p.num_emitted[b] = static_cast<int32_t>(count);
  if (status != kStatusOk) p.status[b] |= status;
}

// Emits tokens along the path on which next(node, &status) leads, up to a stop id, the limit or the
// width of the outputs. `reports`: this thread writes.
template <typename F>
__device__ void walk(const VerifyParams& p, int64_t b, const TreeRows& tree, bool reports,
                     int32_t status, F&& next) {
  const int64_t limit = max(p.limit[b], 0);
  const int64_t most = limit < p.max_emitted ? limit : p.max_emitted;
  int64_t count = 0;
  int32_t finish = kRunning;
  for (int node = tree.num_rows > 0 ? 0 : -1; node >= 0 && count < most; ++count) {
    const Step step = next(node, &status);
    if (reports) write_step(p, b, count, node, step.drawn);
    if (is_stop_id(p, b, step.drawn.token)) {
      finish = kStopId;
      ++count;
      break;
    }
    node = step.child;
  }
  if (reports) write_end(p, b, tree, limit, count, finish, status);
}

}  // namespace tlt
