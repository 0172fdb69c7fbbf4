// The second launch of attention whose keys are shared: tails of rows beside the first one's
// stream, then all partials of a row, folded from the left as one block would.
#pragma once

#include "attention/fold.cuh"
#include "attention/row_block.cuh"

namespace tlt {

constexpr int kAhead = 24;  // partials read at once

// The partials of one (row, head); a lane has two dimensions. Where they are is known before they
// are there. Few blocks share keys, so that steps from one to the next fit in an int.
template <int kDim>
class SharedPartials {
 public:
  __device__ __forceinline__ SharedPartials(const Launch& l, int64_t row, int64_t head, int pair)
      : step_(static_cast<int>(l.p.sequences.num_rows * l.p.num_heads)),
        softmax_(l.partials.softmax + partial_index(l, 0, row, head)),
        acc_(reinterpret_cast<const float2*>(l.partials.acc) +
             partial_index(l, 0, row, head) * (kDim / 2) + pair) {}

  __device__ __forceinline__ Softmax softmax(int i) const {
    const float2 pair = __ldcg(reinterpret_cast<const float2*>(softmax_) + i * step_);
    return {pair.x, pair.y};
  }

  __device__ __forceinline__ float2 value(int i, int last) const {  // no more bytes than needed
    return i <= last ? __ldcg(acc_ + i * step_ * (kDim / 2)) : float2{};
  }

 private:
  const int step_;
  const Softmax* softmax_;
  const float2* acc_;
};

// What the merge knows of a row and kv head before there are partials, and where it finds it out.
template <int kDim>
struct MergeRow {
  TailScratch<kDim> scratch;
  float2 acc[kMaxGroup][kDim / 2];
  Softmax softmax[kMaxGroup];
  int count;  // of partials
};

// One warp's part of that: the row's tail.
template <typename T, int kDim>
__device__ __forceinline__ void prepare_row(const Launch& l, const Request& r, int64_t row,
                                            int kv_head, MergeRow<kDim>* to) {
  const int lane = threadIdx.x % kWarpSize, head = lane / 4;
  Tail<kDim> tail;
  attend_tail<T, kDim>(l.p, r, row, kv_head, l.group, l.page_shift, &to->scratch, &tail);
  if (lane % 4 == 0) to->softmax[head] = tail.softmax;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) to->acc[head][n * 4 + lane % 4] = tail.acc[n];
  const int64_t position = l.p.position[r.row + row];
  int count = 0;
  if (well_placed(l.p, r, row, position)) {
    using C = Cuts<kDim>;
    const auto splits = static_cast<int>(C::splits_below(tail_begin(position)));
    const auto first = static_cast<int>(C::splits_below(C::next_split(item_size<kDim>(l, r))));
    count = splits == 0 ? 0 : splits <= first ? 1 : splits - first + 1;
  }
  if (lane == 0) to->count = count;
}

// Folds the partials of a row and its tail, and writes it; a warp for 64 dimensions of a head.
template <typename T, int kDim>
__device__ __forceinline__ void merge_row(const Launch& l, int64_t row, int kv_head,
                                          const MergeRow<kDim>& from, FoldStep* steps) {
  constexpr int kHeadWarps = kDim / 64;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group_head = warp / kHeadWarps, pair = warp % kHeadWarps * kWarpSize + lane;
  const int head = kv_head * l.group + group_head;
  Softmax total;
  float2 acc{};
  const SharedPartials<kDim> partials(l, row, head, pair);
  fold_all<kAhead>(partials, from.count, steps, &total, &acc);
  fold_pair(from.softmax[group_head], from.acc[group_head][pair], &total, &acc);
  write_pair<T>(l.p, row, head, pair, total, acc);
}

// Finishes rows, `merge_rows` pairs of a row and a kv head a turn: their tails, a warp each, while
// the launch before still streams, then their partials. Grid: (turns, requests).
template <typename T, int kDim>
__global__ void __launch_bounds__(kMaxGroup* kDim / 64 * kWarpSize, 1)
    merge_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(1024) char memory[];
  auto* rows = reinterpret_cast<MergeRow<kDim>*>(memory);
  __shared__ FoldStep steps[kMaxGroup * kDim / 64][kWarpSize];
  launch_dependents();
  const Request r = read_request(l.p, blockIdx.y);
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const auto kv_heads = static_cast<int>(l.p.num_kv_heads);
  const int all = static_cast<int>(r.num_rows) * kv_heads, turn = l.merge_rows;
  for (int first = blockIdx.x * turn; first < all; first += gridDim.x * turn) {
    const int count = min(turn, all - first);
    for (int i = warp; i < count; i += warps) {
      prepare_row<T, kDim>(l, r, (first + i) / kv_heads, (first + i) % kv_heads, &rows[i]);
    }
    __syncthreads();        // the tails are there
    wait_for_prior_grid();  // what was read so far is older than that grid
    for (int i = 0; i < count; ++i) {
      const int64_t row = r.row + (first + i) / kv_heads;
      merge_row<T, kDim>(l, row, (first + i) % kv_heads, rows[i], steps[warp]);
    }
    __syncthreads();  // the next turn's tails come where these were
  }
  wait_for_prior_grid();  // nor may a block without rows end before it
}

}  // namespace tlt
