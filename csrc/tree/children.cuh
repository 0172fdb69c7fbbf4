// The end of a level of expand_tree: the first block of a cluster merges the lists of the warps,
// and scores, links and ranks the children in its shared memory.
#pragma once

#include "common/rows.cuh"
#include "tree/ancestors.cuh"
#include "tree/draft.cuh"

namespace tlt {

constexpr int kMostBlocks = 2 * kPortableCluster;  // of a cluster: the non-portable limit
constexpr int kWave = 8;                           // frontier rows that are processed together
constexpr int kMaxFrontier = 256;
constexpr int kMaxSlices = 64;                  // of a row
constexpr int kMaxChildren = 8192;              // of a request in a level
constexpr int kMaxCollected = 4096;             // list entries that fit into the first block
constexpr int kHeads = kMaxSlices / kWarpSize;  // lists that one lane merges
constexpr int kHeld = 2;                        // entries of each that it holds

struct Child {
  float value;  // later its score
  int32_t token;
};

// Whether all lists of a cluster are in its first block, or each list in its own block.
TLT_HD bool fits_first_block(int cluster_warps, int top_k) {
  return cluster_warps * top_k <= kMaxCollected;
}

// Dynamic shared memory: the warps' candidates, the lists that are merged, the children, the sums
// of the cluster's warps, the words of the warps' tiles.
struct Layout {
  int candidates, lists;  // entries
  int children, sums, words;

  TLT_HD Layout(int cluster, int warps, int tile_words, int frontier_rows, int top_k)
      : candidates(warps * list_capacity(top_k)),
        lists((fits_first_block(cluster * warps, top_k) ? cluster : 1) * warps * top_k),
        children(frontier_rows * top_k),
        sums(cluster * warps),
        words(warps * tile_words) {}
  TLT_HD int bytes() const {
    return static_cast<int>((candidates + lists) * sizeof(Candidate) + children * sizeof(Child) +
                            sums * sizeof(ExpSum) + words * sizeof(uint32_t));
  }
};

struct Shared {                 // of the first block
  int32_t count[kMaxFrontier];  // children of a row
  int32_t parent[kMaxFrontier], depth[kMaxFrontier];
  float parent_score[kMaxFrontier], reference[kMaxFrontier], log_sum[kMaxFrontier];
  alignas(16) uint8_t ancestors[kMaxFrontier * kMaxDepth];
  int32_t begin;  // nodes before this level; 0 if the store has no room
};

// The distribution of the cluster's warps over the rows of a wave: warp w works on row w % rows.
struct WarpAssignment {
  int rows, slices;

  __device__ WarpAssignment(int cluster_warps, int rows)
      : rows(rows), slices(min(kMaxSlices, cluster_warps / rows)) {}
  // The warp of a slice of a row.
  __device__ int warp(int row, int slice) const { return slice * rows + row; }
};

// The sum of the lanes' integers of 0 or more.
__device__ inline int64_t warp_sum(int64_t x) {
  int64_t sum = 0;
#pragma unroll
  for (int bit = 0; bit < 64; bit += 22) {
    const uint32_t part = static_cast<uint32_t>(x >> bit) & ((1u << 22) - 1);
    sum += static_cast<int64_t>(__reduce_add_sync(kFullWarp, part)) << bit;
  }
  return sum;
}

// The sum of all lanes.
__device__ inline ExpSum warp_sum(ExpSum sum) {
  sum.raise(warp_max(sum.reference));
#pragma unroll
  for (int k = 0; k < ExpSum::kParts; ++k) sum.part[k] = warp_sum(sum.part[k]);
  return sum;
}

// Merges a row's lists by one warp of the first block. `list_of(warp)` is the list of a warp of the
// cluster.
template <typename ListOf>
__device__ void merge_lists(const WarpAssignment& assignment, int row, int top_k, ListOf&& list_of,
                            Child* children, int32_t* count) {
  const int lane = threadIdx.x % kWarpSize;
  const Candidate* list[kHeads];
  Candidate queue[kHeads][kHeld];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int slice = h * kWarpSize + lane;
    list[h] = list_of(assignment.warp(row, min(slice, assignment.slices - 1)));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      queue[h][i] = Candidate{};
      if (slice < assignment.slices && i < top_k) queue[h][i] = list[h][i];
    }
  }
  int next[kHeads] = {};
  int k = 0;
#pragma unroll 1
  for (; k < top_k; ++k) {
    uint64_t mine = queue[0][0].key;
#pragma unroll
    for (int h = 1; h < kHeads; ++h) mine = max(mine, queue[h][0].key);
    const uint64_t best = warp_max(mine);
    if (best == 0) break;
    if (lane != __ffs(__ballot_sync(kFullWarp, mine == best)) - 1) continue;
    bool taken = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (taken || queue[h][0].key != best) continue;
      taken = true;
      children[k] = {queue[h][0].value, queue[h][0].token()};
#pragma unroll
      for (int i = 1; i < kHeld; ++i) queue[h][i - 1] = queue[h][i];
      const int after = kHeld + next[h]++;
      queue[h][kHeld - 1] = after < top_k ? list[h][after] : Candidate{};
    }
  }
  if (lane == 0) *count = k;
}

// Last step, in the first block: scores and links the children, and ranks the next frontier. A
// row's children have room for top_k entries, of which the first `count` are used.
__device__ inline void append_children(const ExpandTreeParams& p, int64_t b, int32_t begin,
                                       const Shared& shared, Child* children) {
  const int rows = static_cast<int>(p.frontier_rows), top_k = static_cast<int>(p.top_k);
  const int64_t first = b * p.nodes.capacity + begin;
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const auto before = [&](int row) {  // children of the rows before; called by whole warps
    int32_t sum = 0;
#pragma unroll 1
    for (int f = lane; f < row; f += kWarpSize) sum += shared.count[f];
    return __reduce_add_sync(kFullWarp, sum);
  };
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  // Calls `of` with a row, a child and its place among those of all rows. A warp takes a row.
  const auto for_each = [&](int num_rows, auto&& of) {
#pragma unroll 1
    for (int f = warp; f < num_rows; f += warps) {
      const int32_t offset = before(f);
#pragma unroll 1
      for (int k = lane; k < top_k; k += kWarpSize) of(f, k, offset + k);
    }
  };
  for_each(rows, [&](int f, int k, int32_t place) {
    const Child child = children[f * top_k + k];
    float score = NAN;  // of an unused entry: not above, below or equal to any score
    if (k < shared.count[f]) {
      const float log_prob =
          add_rn(add_rn(mul_rn(child.value, inverse), -shared.reference[f]), -shared.log_sum[f]);
      score = add_rn(shared.parent_score[f], fminf(log_prob, 0.0f));
      const int64_t to = first + place;
      p.nodes.token[to] = child.token;
      p.nodes.score[to] = score;
      p.nodes.parent[to] = shared.parent[f];
      p.nodes.depth[to] = shared.depth[f] + 1;
    }
    children[f * top_k + k].value = score;
  });
  __syncthreads();
  const auto advance = [&](int rank, int32_t node, int f) {  // f: the row that it came from, or -1
    const int64_t out = b * top_k + rank;
    p.next_frontier[out] = node;
    p.next_row[out] = f < 0 ? 0 : static_cast<int32_t>(b * rows + f);
    const int in_flight = f < 0 || p.frontier_ancestors == nullptr ? 0 : shared.depth[f];
    uint64_t low = 0, high = 0;
    if (in_flight > 0) {  // its parent's, then the slot of its parent
      const int own = in_flight - 1, bits = 8 * (own % 8);
      const uint64_t below = (uint64_t{1} << bits) - 1;
      const uint64_t slot = static_cast<uint64_t>(static_cast<uint8_t>(p.slot_base + f)) << bits;
      const auto* const parents = reinterpret_cast<const uint64_t*>(shared.ancestors) + 2 * f;
      low = own < 8 ? (parents[0] & below) | slot : parents[0];
      high = own < 8 ? 0 : (parents[1] & below) | slot;
    }
    write_ancestors(p.next_ancestors + out * kMaxDepth, low, high);
  };
  const int total = before(rows);
  for_each(rows + 1, [&](int f, int k, int32_t place) {
    if (f == rows) {
      if (k >= total) advance(k, -1, -1);
      return;
    }
    if (k >= shared.count[f]) return;
    const int i = f * top_k + k;
    const float mine = children[i].value;
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < rows * top_k; ++j) {
      const float other = children[j].value;
      rank += (other > mine) | ((other == mine) & (j < i));
    }
    if (rank < top_k) advance(rank, begin + place, f);
  });
  if (threadIdx.x == 0 && begin > 0) p.nodes.count[b] = begin + total;
}

}  // namespace tlt
