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
  int small_items;   // the first of them, which take one of the smallest splits each
  uint32_t share;    // of the other keys, for one other item (splits.h)
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

// The first key of an item of a request, whatever its number of keys is.
template <int kDim>
__device__ __forceinline__ uint32_t item_begin(const Launch& l, const Request& r, uint32_t item) {
  const uint32_t end = clamp_position(last_position(l.p, r));
  return Cuts<kDim>::item_begin(end, l.partials.small_items, l.partials.share, item);
}

// Keys of the item of block `block` of a row block whose tile keys end at `end`. Small items have
// the last blocks, so that they are the second ones of multiprocessors.
template <int kDim>
__device__ __forceinline__ KeyRange item_keys(const Launch& l, const Request& r, int block,
                                              int end) {
  if (l.partials.acc == nullptr) return {0, end};
  const int items = l.partials.items, turned = block + l.partials.small_items;
  const int item = turned < items ? turned : turned - items;
  const uint32_t last = static_cast<uint32_t>(end);
  const uint32_t begin = item_begin<kDim>(l, r, item), next = item_begin<kDim>(l, r, item + 1);
  return {static_cast<int>(min(begin, last)),
          item + 1 < items ? static_cast<int>(min(next, last)) : end};
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
  const uint32_t second = item_begin<kDim>(l, r, 1);
  return C::splits_below(begin) - static_cast<int>(C::splits_below(second)) + 1;
}

}  // namespace tlt
