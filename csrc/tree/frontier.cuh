// The fields of a request and of its frontier rows that a level of expand_tree reads.
#pragma once

#include "common/status.h"
#include "sampling/gumbel_max.cuh"
#include "tree/params.h"

namespace tlt {

// A frontier row and its parent.
struct FrontierRow {
  int64_t index;  // in draft_logits
  int32_t parent, depth;
  float parent_score;
  bool active;
  int32_t status;
};

__device__ inline bool has_room(const ExpandTreeParams& p, int64_t count) {
  return count >= 1 && count + p.frontier_rows * p.top_k <= p.nodes.capacity;
}

// The depth of the frontier that a level expects: it follows from its drafter slots.
__device__ __forceinline__ int32_t expected_depth(const ExpandTreeParams& p) {
  if (p.frontier_ancestors == nullptr) return 0;
  return 1 + static_cast<int32_t>(p.slot_base) / max(static_cast<int32_t>(p.frontier_rows), 1);
}

// The fields of a request and of one frontier row, loaded by one instruction of a warp: lane l
// holds word l. Before it knows the parent, a warp also reads 32 nodes, among which the parent
// probably is: the first nodes of the expected depth, if all levels above have all their nodes.
class FrontierWords {
 public:
  // Loads nothing, so it may precede the wait for the previous kernel.
  __device__ FrontierWords(const ExpandTreeParams& p, int64_t b, int64_t f) {
    const int lane = threadIdx.x % kWarpSize;
    from_ = reinterpret_cast<const uint32_t*>(p.request + b) + lane % 2;
    if (lane == 2) from_ = p.root_position + b;
    if (lane == 3) from_ = p.temperature + b;
    if (lane == 4) from_ = p.nodes.count + b;
    if (lane == 5) from_ = p.frontier + b * p.frontier_rows + f;
    asm volatile("" : "+l"(from_));  // or the compiler computes the address after the wait
    const int32_t depth = expected_depth(p), top_k = static_cast<int32_t>(p.top_k);
    first_node_ =
        depth < 2 ? depth : 1 + top_k + (depth - 2) * top_k * static_cast<int32_t>(p.frontier_rows);
  }
  __device__ void load(const ExpandTreeParams& p, int64_t b) {
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word_) : "l"(from_));
    const int32_t node = first_node_ + static_cast<int32_t>(threadIdx.x % kWarpSize);
    const int64_t at = b * p.nodes.capacity + min(int64_t{node}, p.nodes.capacity - 1);
    depth_ = p.nodes.depth[at];
    score_ = p.nodes.score[at];
  }
  __device__ int64_t request() const {
    return static_cast<int64_t>(static_cast<uint64_t>(at(1)) << 32 | at(0));
  }
  __device__ int32_t root_position() const { return static_cast<int32_t>(at(2)); }
  __device__ float temperature() const { return as_float(at(3)); }
  __device__ int32_t count() const { return static_cast<int32_t>(at(4)); }
  __device__ int32_t parent() const { return static_cast<int32_t>(at(5)); }

  // Gives depth and score of a node, whose index is 0 or more. Called by whole warps.
  __device__ void read_node(const ExpandTreeParams& p, int64_t b, int32_t node, int32_t* depth,
                            float* score) const {
    const int lane = node - first_node_;
    const bool read = lane >= 0 && lane < kWarpSize;
    *depth =
        read ? __shfl_sync(kFullWarp, depth_, lane) : p.nodes.depth[b * p.nodes.capacity + node];
    *score =
        read ? __shfl_sync(kFullWarp, score_, lane) : p.nodes.score[b * p.nodes.capacity + node];
  }

 private:
  __device__ uint32_t at(int lane) const { return __shfl_sync(kFullWarp, word_, lane); }
  const void* from_;
  int32_t first_node_, depth_;
  uint32_t word_;
  float score_;
};

__device__ inline FrontierRow frontier_row(const ExpandTreeParams& p, int64_t b, int64_t f,
                                           const FrontierWords& words, int32_t count) {
  FrontierRow row{b * p.frontier_rows + f, words.parent(), 0, 0.0f, false, kStatusOk};
  if (row.parent < 0) return row;
  row.status = kStatusBadLength;
  if (!has_room(p, count)) return row;
  row.status = kStatusBadTree;
  if (row.parent >= count) return row;
  words.read_node(p, b, row.parent, &row.depth, &row.parent_score);
  if (row.depth < 0 || row.depth >= kMaxDepth || isnan(row.parent_score)) return row;
  row.status = kStatusOk;
  row.active = true;
  return row;
}

// The draw that a level expects.
__device__ __forceinline__ Draw expected_draw(const ExpandTreeParams& p, int64_t b) {
  const volatile int64_t* const request = p.request + b;
  const volatile int32_t* const root_position = p.root_position + b;
  return {p.round_keys, noise_key(p.seed, *request, NoiseDomain::kTarget),
          *root_position + expected_depth(p) + 1};
}

}  // namespace tlt
