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

// The fields of a node that is probably the parent, read before the parent is known.
struct ExpectedParent {
  int32_t node = -1, depth = 0;
  float score = 0.0f;
};

__device__ inline FrontierRow frontier_row(const ExpandTreeParams& p, int64_t b, int64_t f,
                                           int32_t parent, int32_t count,
                                           const ExpectedParent& expected = {}) {
  FrontierRow row{b * p.frontier_rows + f, parent, 0, 0.0f, false, kStatusOk};
  if (parent < 0) return row;
  row.status = kStatusBadLength;
  if (!has_room(p, count)) return row;
  row.status = kStatusBadTree;
  if (parent >= count) return row;
  const int64_t at = b * p.nodes.capacity + parent;
  row.depth = parent == expected.node ? expected.depth : p.nodes.depth[at];
  row.parent_score = parent == expected.node ? expected.score : p.nodes.score[at];
  if (row.depth < 0 || row.depth >= kMaxDepth || isnan(row.parent_score)) return row;
  row.status = kStatusOk;
  row.active = true;
  return row;
}

// The fields of a request and of one frontier row, loaded by one instruction of a warp: lane l
// holds word l.
class FrontierWords {
 public:
  __device__ FrontierWords(const ExpandTreeParams& p, int64_t b, int64_t f) {
    const int lane = threadIdx.x % kWarpSize;
    const void* from = reinterpret_cast<const uint32_t*>(p.request + b) + lane % 2;
    if (lane == 2) from = p.root_position + b;
    if (lane == 3) from = p.temperature + b;
    if (lane == 4) from = p.nodes.count + b;
    if (lane == 5) from = p.frontier + b * p.frontier_rows + f;
    word_ = *static_cast<const volatile uint32_t*>(from);
  }
  __device__ int64_t request() const {
    return static_cast<int64_t>(static_cast<uint64_t>(at(1)) << 32 | at(0));
  }
  __device__ int32_t root_position() const { return static_cast<int32_t>(at(2)); }
  __device__ float temperature() const { return as_float(at(3)); }
  __device__ int32_t count() const { return static_cast<int32_t>(at(4)); }
  __device__ int32_t parent() const { return static_cast<int32_t>(at(5)); }

 private:
  __device__ uint32_t at(int lane) const { return __shfl_sync(kFullWarp, word_, lane); }
  uint32_t word_;
};

// The depth of the frontier that a level expects: it follows from its drafter slots.
__device__ __forceinline__ int32_t expected_depth(const ExpandTreeParams& p) {
  if (p.frontier_ancestors == nullptr) return 0;
  return 1 + static_cast<int32_t>(p.slot_base) / max(static_cast<int32_t>(p.frontier_rows), 1);
}

// The noise key that a level expects.
__device__ __forceinline__ Draw expected_draw(const ExpandTreeParams& p, int64_t b) {
  const volatile int64_t* const request = p.request + b;
  const volatile int32_t* const root_position = p.root_position + b;
  return {p.round_keys, noise_key(p.seed, *request, NoiseDomain::kTarget),
          *root_position + expected_depth(p) + 1};
}

}  // namespace tlt
