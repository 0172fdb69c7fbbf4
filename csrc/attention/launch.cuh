// Arguments of the attention kernels, and which keys each block takes.
#pragma once

#include "attention/stream.cuh"

namespace tlt {

// Partials of every (row, head): one of the splits of the first item together, then one of each
// later split.
struct Partials {
  float* acc;        // [partials, rows, heads, head_dim]; null: each block folds its own splits
  Softmax* softmax;  // [partials, rows, heads]
  int items;         // blocks that share the keys of a row block
  uint32_t share;    // of the keys, for one item (splits.h)
};

struct Launch {
  TreeAttentionParams p;
  Partials partials;
  int group, row_blocks, page_shift;
  int group_inverse;  // 2^16 / group, rounded up
  int merge_rows;     // (row, kv head) pairs that a block of the merge finishes together
  int tail_warps;     // warps of it that compute tails
  int loader_shift;   // log2 of the producer warps of a block
  TileMaps maps;

  // pairs / group, if both are small.
  __device__ __forceinline__ int rows_of(int pairs) const { return pairs * group_inverse >> 16; }
};

__device__ __forceinline__ int64_t partial_index(const Launch& l, int64_t partial, int64_t row,
                                                 int64_t head) {
  return (partial * l.p.sequences.num_rows + row) * l.p.num_heads + head;
}

// Keys of each item of a request; an item takes the splits that begin in its part of the keys.
template <int kDim>
__device__ __forceinline__ uint32_t item_size(const Launch& l, const Request& r) {
  return Cuts<kDim>::keys_of_item(clamp_position(last_position(l.p, r)), l.partials.share);
}

// Keys of item `item` of a row block whose tile keys end at `end`.
template <int kDim>
__device__ __forceinline__ KeyRange item_keys(const Launch& l, const Request& r, int item,
                                              int end) {
  using C = Cuts<kDim>;
  if (l.partials.acc == nullptr) return {0, end};
  const uint32_t size = item_size<kDim>(l, r), last = static_cast<uint32_t>(end);
  const uint32_t begin = C::next_split(item * size), next = C::next_split((item + 1) * size);
  return {static_cast<int>(min(begin, last)),
          item + 1 < l.partials.items ? static_cast<int>(min(next, last)) : end};
}

// Keys of a block of a cluster.
template <int kDim>
__device__ __forceinline__ KeyRange cluster_keys(int rank, const ClusterCuts<kDim>& cuts) {
  return {cuts.begin(rank), cuts.begin(rank + 1)};
}

// Index of the first partial of an item whose keys begin at `begin`.
template <int kDim>
__device__ __forceinline__ int first_partial(const Launch& l, const Request& r, int begin) {
  if (begin == 0) return 0;
  using C = Cuts<kDim>;
  const uint32_t second = C::next_split(item_size<kDim>(l, r));
  return C::splits_below(begin) - static_cast<int>(C::splits_below(second)) + 1;
}

}  // namespace tlt
