// A level of a chain: one frontier row and its best child. Children are not ranked by their score,
// so no log-softmax is computed, and the child's score is its parent's. A warp keeps the best of
// its ids as one word and writes it to the first block of the cluster. After a barrier the first
// warp of that block takes the best of all words and links the child. Distribution and noise are
// those of expand_kernel (kernel.cu).
#pragma once

#include "common/rows.cuh"
#include "tree/frontier.cuh"
#include "tree/lazy.cuh"

namespace tlt {

// Warps of a row. More than kMaxSlices, the limit of trees, since a warp's result is one word and
// not a list. One request then uses up to 16 small blocks, which start beside blocks of the
// previous kernel.
constexpr int kChainSlices = 256;

// The best candidate of a warp, with the interface of WarpList.
class WarpBest {
 public:
  __device__ void take(bool has, uint64_t key, float) {
    if (has) key_ = max(key_, key);
  }
  __device__ float threshold(float lower_bound) {
    floor_ = fmaxf(floor_, warp_max(lower_bound));
    return floor_;
  }
  __device__ uint64_t key() const { return warp_max(key_); }

 private:
  uint64_t key_ = 0;  // of the lane's best
  float floor_ = kNegInf;
};

// Appends the child of a key, which becomes the next frontier; key 0: there is none. `inherited` is
// ancestor `lane` of the parent. Called by one warp.
__device__ inline void append_child(const ExpandTreeParams& p, int64_t b, const FrontierRow& row,
                                    int32_t count, uint64_t key, uint8_t inherited) {
  const int lane = threadIdx.x % kWarpSize;
  const int in_flight = key == 0 || p.frontier_ancestors == nullptr ? 0 : row.depth;
  if (lane < kMaxDepth) {
    const auto slot = static_cast<uint8_t>(p.slot_base);
    p.next_ancestors[b * kMaxDepth + lane] = lane < in_flight - 1    ? inherited
                                             : lane == in_flight - 1 ? slot
                                                                     : 0;
  }
  if (lane != 0) return;
  p.next_frontier[b] = key == 0 ? -1 : count;
  p.next_row[b] = key == 0 ? 0 : static_cast<int32_t>(b);
  if (key == 0) return;
  const int64_t to = b * p.nodes.capacity + count;
  p.nodes.token[to] = Candidate{key, 0.0f, 0}.token();
  p.nodes.score[to] = row.parent_score;
  p.nodes.parent[to] = row.parent;
  p.nodes.depth[to] = row.depth + 1;
  p.nodes.count[b] = count + 1;
}

template <typename T, typename Size>
__global__ void __launch_bounds__(Size::kWarps* kWarpSize, Size::kResident)
    chain_kernel(const __grid_constant__ ExpandTreeParams p) {
  extern __shared__ uint32_t tile_words[];
  __shared__ uint64_t best[kChainSlices];  // of each warp; in the first block
  constexpr int kWarps = Size::kWarps, kIds = Size::kIds;
  using Tile = TileOf<T, Size>;
  Cluster<kWarps * kWarpSize> cluster;
  launch_dependents();
  cluster.arrive();
  const int64_t b = cluster.item();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int slice = cluster.rank() * kWarps + warp;
  const int slices = min(kChainSlices, cluster.size() * kWarps);
  const int32_t columns = num_columns(p);
  const RowData<T> data(p.draft_logits, p.logits_stride, b, columns);
  const int32_t step = slices * Tile::kTile, begin = slice * Tile::kTile + lane * kIds;
  // `begin < end` is the same for all lanes.
  const int32_t end = slice < slices ? columns + lane * kIds : 0;
  Tile tile(tile_words + warp * Size::kMemory);
  const volatile float* const temperature = p.temperature + b;
  if (begin < end && !is_greedy(*temperature)) tile.precompute(p, expected_draw(p, b), begin);
  FrontierWords words(p, b, 0);
  wait_for_prior_grid();  // all loads so far were speculative
  words.load(p, b);
  const bool inherits = p.frontier_ancestors != nullptr && slice == 0 && lane < kMaxDepth;
  const uint8_t inherited = inherits ? p.frontier_ancestors[b * kMaxDepth + lane] : 0;
  if (begin < end) tile.fetch(p, data, begin);
  const int32_t count = words.count();
  const FrontierRow row = frontier_row(p, b, 0, words, count);
  const Row<T> logits(data, words.temperature());
  const Draw draw{p.round_keys, noise_key(p.seed, words.request(), NoiseDomain::kTarget),
                  words.root_position() + row.depth + 1};
  if constexpr (Size::kLazy) {
    if (begin < end) tile.confirm(p, draw);
  }
  const int32_t stop = row.active ? end : 0;
  int32_t status = slice == 0 ? row.status : kStatusOk;
  WarpBest list;
#pragma unroll 1
  for (int32_t first = begin; first < stop; first += step) {
    const bool last = !(first + step < stop);
    status |= tile.prepare(p, logits, first);
    if constexpr (Size::kLazy) {
      tile.draw(p, draw, logits.greedy, first);
      if (!last) tile.fetch(p, data, first + step);
      tile.offer(draw, logits.greedy, last, list);
    } else {
      if (!logits.greedy) tile.draw(p, draw, false, first);
      tile.offer(p, logits.greedy, first, list);
      if (!last) tile.fetch(p, data, first + step);
    }
  }
  const uint64_t mine = list.key();
  cluster.wait();  // all blocks run
  if (lane == 0 && slice < slices) *cluster.remote(best + slice, 0) = mine;
  cluster.arrive();
  status = __reduce_or_sync(kFullWarp, static_cast<unsigned>(status));
  if (lane == 0 && status != kStatusOk) atomicOr(&p.status[b], status);
  if (cluster.rank() != 0) return;  // no block reads its memory
  cluster.wait();
  if (warp != 0) return;
  uint64_t key = 0;
  for (int i = lane; i < slices; i += kWarpSize) key = max(key, best[i]);
  append_child(p, b, row, count, warp_max(key), inherited);
}

}  // namespace tlt
