// Follows the verification path through a draft tree on the GPU, as path.h does on the CPU. Every
// thread of a block holds the same node; one thread writes the results.
#pragma once

#include "common/status.h"
#include "sampling/filter.cuh"

namespace tlt {

// The fields of a request that a draw needs. Each lane of a warp loads one request, all fields at
// once, so that no load waits for another.
struct RequestFields {
  int32_t first, end, limit, top_k;
  float temperature, top_p;
  int64_t request;

  __device__ __forceinline__ RequestFields(const VerifyParams& p, int64_t base) {
    const SamplingArrays& s = p.sampling;
    const int64_t b = min(base + threadIdx.x % kWarpSize, p.num_requests - 1);
    first = p.row_start[b];
    end = p.row_start[b + 1];
    limit = p.limit[b];
    top_k = s.top_k[b];
    temperature = s.temperature[b];
    top_p = s.top_p[b];
    request = s.request[b];
  }
};

// The request that owns a row.
struct Owner {
  int64_t b = -1;  // -1 if no request owns the row; if a broken row_start gives two, the last
  int32_t limit = 0, top_k = 0;
  float temperature = 0.0f, top_p = 1.0f;
  int64_t request = 0;

  // `fields`: those of the first 32 requests. Called by whole warps.
  __device__ __forceinline__ Owner(const VerifyParams& p, int64_t row, RequestFields fields) {
#pragma unroll 1
    for (int64_t base = 0; base < p.num_requests; base += kWarpSize) {
      if (base > 0) fields = RequestFields(p, base);
      const bool mine = fields.first >= 0 && fields.first <= row && row < fields.end;
      const unsigned owners = __ballot_sync(kFullWarp, mine);
      if (owners == 0) continue;
      const int owner = 31 - __clz(owners);
      b = min(base + owner, p.num_requests - 1);
      limit = __shfl_sync(kFullWarp, fields.limit, owner);
      top_k = __shfl_sync(kFullWarp, fields.top_k, owner);
      temperature = __shfl_sync(kFullWarp, fields.temperature, owner);
      top_p = __shfl_sync(kFullWarp, fields.top_p, owner);
      request = __shfl_sync(kFullWarp, fields.request, owner);
    }
  }
};

// The rows of one request in shared memory.
struct TreeRows {
  int32_t tokens[kMaxTreeRows], parents[kMaxTreeRows], positions[kMaxTreeRows];
  int64_t first;
  int32_t num_rows;

  // Returns status bits; every thread of a block of kMaxTreeRows or more calls it. A request whose
  // row_start is invalid has no rows.
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
      const int32_t token = p.tree.tokens[begin + node], parent = p.tree.parents[begin + node];
      tokens[node] = token;
      parents[node] = parent;
      positions[node] = p.position[begin + node];
      bad_tree = node == 0 ? parent != -1 : parent < 0 || parent >= node;
      bad_token = node > 0 && (token < 0 || token >= p.vocab_size);
    }
    bad_tree = __syncthreads_or(bad_tree);
    bad_token = __syncthreads_or(bad_token);
    const bool nan_temperature = rows > 0 && isnan(p.sampling.temperature[b]);
    return (fits ? 0 : kStatusBadLength) | (bad_tree ? kStatusBadTree : 0) |
           (bad_token ? kStatusBadToken : 0) | (nan_temperature ? kStatusNanLogits : 0);
  }

  // The first child of a node whose token it is, -1 if there is none. Called by whole warps.
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

constexpr int kNoChild = kMaxTreeRows;

// The only child to which the path can lead from each node if there is no filter: of the drafted
// children the one that the target ranks first. So its row can be loaded before the token at the
// node is known.
struct BestChildren {
  unsigned long long rank[kMaxTreeRows];  // of the best child; 0 without one
  int32_t child[kMaxTreeRows];            // the first child of that rank, or kNoChild

  // Calls `meanwhile` while the logits are loaded. All threads of a block of kMaxTreeRows or more
  // call it.
  template <typename T, typename DataOf, typename DrawAt, typename F>
  __device__ __forceinline__ void find(const TreeRows& tree, float temperature, DataOf&& data_of,
                                       DrawAt&& draw_at, F&& meanwhile) {
    const int node = threadIdx.x;
    if (node < kMaxTreeRows) {
      rank[node] = 0;
      child[node] = kNoChild;
    }
    const int parent = node > 0 && node < tree.num_rows ? tree.parents[node] : -1;
    const int32_t token = parent >= 0 ? tree.tokens[node] : -1;
    const RowData<T> data = data_of(parent >= 0 ? min(parent, tree.num_rows - 1) : 0);
    const bool valid = parent < node && token >= 0 && token < data.vocab_size;
    T logit{};
    if (valid) logit = data.logits[token];
    meanwhile();
    __syncthreads();
    unsigned long long mine = 0;
    if (valid) {
      const Row<T> row(data, temperature);
      const float x = as_float32(logit);
      float score = row.scaled(x);
      if (!row.greedy) {
        const Draw draw = draw_at(parent);
        const auto id = static_cast<uint32_t>(token);
        score = add_rn(score, draw.noise(draw.group_word(id / kGroup), id));
      }
      if (!row.is_bad(x) && score > kNegInf) mine = rank_key(score, static_cast<uint32_t>(token));
      atomicMax(&rank[parent], mine);
    }
    __syncthreads();
    if (mine != 0 && mine == rank[parent]) atomicMin(&child[parent], node);
    __syncthreads();
  }
};

struct Step {
  DrawResult drawn;  // the target's token at this node
  int child;         // the child with that token, -1 if it was not drafted
};

// The stop ids of a request; each lane keeps one of the first 32.
class StopIds {
 public:
  __device__ StopIds(const VerifyParams& p, int64_t b) : p_(p), b_(b), first_(at(0)) {}

  // Called by whole warps.
  __device__ bool has(int32_t token) const {
    bool found = __any_sync(kFullWarp, first_ == token);
#pragma unroll 1
    for (int base = kWarpSize; base < p_.num_stop_ids && !found; base += kWarpSize) {
      found = __any_sync(kFullWarp, at(base) == token);
    }
    return found;
  }

 private:
  __device__ int32_t at(int base) const {
    const int i = base + threadIdx.x % kWarpSize;
    return i < p_.num_stop_ids ? p_.stop_ids[b_ * p_.stop_stride + i] : -1;  // no token
  }

  const VerifyParams& p_;
  const int64_t b_;
  const int32_t first_;
};

// Where a path stops. Loaded before the tree, so that it has arrived when it is needed.
struct StopRule {
  int32_t limit;
  StopIds stop_ids;

  __device__ StopRule(const VerifyParams& p, int64_t b) : limit(p.limit[b]), stop_ids(p, b) {}
};

// Token `i` of a request, drawn at `node`.
__device__ __forceinline__ void write_step(const VerifyParams& p, int64_t b, int64_t i, int node,
                                           const DrawResult& drawn) {
  p.out.emitted[b * p.out.emitted_stride + i] = drawn.token;
  p.out.logprobs[b * p.out.logprobs_stride + i] = drawn.logprob;
  if (p.out.filtered_logprobs != nullptr) {
    p.out.filtered_logprobs[b * p.out.filtered_stride + i] = drawn.filtered_logprob;
  }
  p.out.path[b * p.out.path_stride + i] = node;
}

// Writes how a path of `count` tokens ended.
__device__ __forceinline__ void write_end(const VerifyParams& p, int64_t b, const TreeRows& tree,
                                          int64_t limit, int64_t count, int32_t finish,
                                          int32_t status) {
  if (finish == kRunning && tree.num_rows > 0 && count == limit) finish = kLimit;
  p.out.finish[b] = finish;
  p.out.num_emitted[b] = static_cast<int32_t>(count);
  if (status != kStatusOk) p.status[b] |= status;
}

// Emits tokens along the path that next(node, &status) gives, up to a stop id, the limit or the
// width of the outputs. `reports`: this thread writes.
template <typename F>
__device__ void emit_path(const VerifyParams& p, int64_t b, const TreeRows& tree,
                          const StopRule& stop, bool reports, int32_t status, F&& next) {
  const int32_t limit = max(stop.limit, 0);
  const auto most = static_cast<int32_t>(min(int64_t{limit}, p.out.max_emitted));
  int32_t count = 0;
  int32_t finish = kRunning;
  for (int node = tree.num_rows > 0 ? 0 : -1; node >= 0 && count < most; ++count) {
    const Step step = next(node, &status);
    if (reports) write_step(p, b, count, node, step.drawn);
    if (stop.stop_ids.has(step.drawn.token)) {
      finish = kStopId;
      ++count;
      break;
    }
    node = step.child;
  }
  if (reports) write_end(p, b, tree, limit, count, finish, status);
}

}  // namespace tlt
