// The second launch of attention with shared keys: it computes the tails of rows while the first
// launch streams keys, then folds all partials of a row from the left, as one block would.
#pragma once

#include "attention/fold.cuh"
#include "attention/row_block.cuh"

namespace tlt {

constexpr int kPrefetch = 24;  // partials read together

// The partials of one (row, head); a lane has two dimensions. Their addresses are computed before
// the first launch ends. Few blocks share keys, so the distance between two partials fits in an
// int.
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

  __device__ __forceinline__ float2 value(int i,
                                          int last) const {  // reads nothing past the last partial
    return i <= last ? __ldcg(acc_ + i * step_ * (kDim / 2)) : float2{};
  }

 private:
  const int step_;
  const Softmax* softmax_;
  const float2* acc_;
};

// What the merge computes for a row and kv head before the partials are ready.
template <int kDim>
struct alignas(16) MergeRow {
  float2 acc[kMaxGroup][kDim / 2];  // of the tail
  Softmax softmax[kMaxGroup];
  int count;         // of partials
  int row, kv_head;  // row among all rows
};

// Prepares one row, by one warp.
template <typename T, int kDim>
__device__ __forceinline__ void prepare_row(const Launch& l, const Request& r, int row, int kv_head,
                                            TailScratch<kDim>* scratch, MergeRow<kDim>* to) {
  const int lane = threadIdx.x % kWarpSize, head = lane / 4;
  Tail<kDim> tail;
  attend_tail<T, kDim>(l.p, r, row, kv_head, l.group, l.page_shift, scratch, &tail);
  if (lane % 4 == 0) to->softmax[head] = tail.softmax;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) to->acc[head][n * 4 + lane % 4] = tail.acc[n];
  const int64_t position = l.p.position[r.row + row];
  int count = 0;
  if (is_valid_row(l.p, r, row, position)) {
    using C = Cuts<kDim>;
    const auto splits = static_cast<int>(C::splits_below(tail_begin(position)));
    const auto first = static_cast<int>(C::splits_below(item_begin<kDim>(l, r, 1)));
    count = splits == 0 ? 0 : splits <= first ? 1 : splits - first + 1;
  }
  if (lane == 0) {
    to->count = count;
    to->row = static_cast<int>(r.row) + row;
    to->kv_head = kv_head;
  }
}

// Folds the partials and tails of rows and writes the results; a warp takes 64 dimensions of a
// head.
template <typename T, int kDim>
class WarpMerge {
 public:
  __device__ __forceinline__ WarpMerge(const Launch& l, const MergeRow<kDim>* rows, FoldStep* steps)
      : l_(l), rows_(rows), steps_(steps) {
    constexpr int kHeadWarps = kDim / 64;
    const int warp = threadIdx.x / kWarpSize;
    group_head_ = warp / kHeadWarps;
    pair_ = warp % kHeadWarps * kWarpSize + threadIdx.x % kWarpSize;
  }

  __device__ __forceinline__ void merge(int count) const {
    int most = 0;
    for (int i = 0; i < count; ++i) most = max(most, rows_[i].count);
    if (count > 2 && most <= kFoldStep) return merge_few(count);
    for (int i = 0; i < count; ++i) {
      Softmax total;
      float2 acc{};
      fold_all<kPrefetch>(partials_of(i), rows_[i].count, steps_, &total, &acc);
      finish(i, &total, &acc);
    }
  }

 private:
  // If there are few partials, those of several rows are read before the first fold. Past the last
  // row, that row is read again.
  __device__ __forceinline__ void merge_few(int count) const {
    constexpr int kRows = 4;
#pragma unroll 1
    for (int first = 0; first < count; first += kRows) {
      PrefetchedPartials<kFoldStep> ahead[kRows];
      Softmax total[kRows];
      float2 acc[kRows]{};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = min(first + i, count - 1);
        ahead[i].read(partials_of(row), 0, rows_[row].count);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = min(first + i, count - 1);
        ahead[i].fold(0, rows_[row].count, steps_, &total[i], &acc[i]);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + i < count) finish(first + i, &total[i], &acc[i]);
      }
    }
  }

  __device__ __forceinline__ int head_of(int i) const {
    return rows_[i].kv_head * l_.group + group_head_;
  }
  __device__ __forceinline__ SharedPartials<kDim> partials_of(int i) const {
    return {l_, rows_[i].row, head_of(i), pair_};
  }
  __device__ __forceinline__ void finish(int i, Softmax* total, float2* acc) const {
    fold_pair(rows_[i].softmax[group_head_], rows_[i].acc[group_head_][pair_], total, acc);
    write_pair<T>(l_.p, rows_[i].row, head_of(i), pair_, *total, *acc);
  }

  const Launch& l_;
  const MergeRow<kDim>* const rows_;
  FoldStep* const steps_;  // of the warp
  int group_head_, pair_;
};

// Finishes rows, `merge_rows` (row, kv head) pairs a turn: first their tails, a warp each, while
// the first launch still streams, then their partials. Grid: (turns, requests).
template <typename T, int kDim>
__global__ void __launch_bounds__(kMaxGroup* kDim / 64 * kWarpSize, 128 / kDim)
    merge_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(1024) char memory[];
  auto* rows = reinterpret_cast<MergeRow<kDim>*>(memory);
  auto* scratches = reinterpret_cast<TailScratch<kDim>*>(rows + l.merge_rows);
  __shared__ FoldStep steps[kMaxGroup * kDim / 64][kWarpSize];
  launch_dependents();
  const Request r = read_request(l.p, blockIdx.y);
  const int warp = threadIdx.x / kWarpSize;
  const auto kv_heads = static_cast<int>(l.p.num_kv_heads);
  const int all = static_cast<int>(r.num_rows) * kv_heads, turn = l.merge_rows;
  const WarpMerge<T, kDim> warp_merge(l, rows, steps[warp]);
  for (int first = blockIdx.x * turn; first < all; first += gridDim.x * turn) {
    const int count = min(turn, all - first);
    for (int i = warp; i < count && warp < l.tail_warps; i += l.tail_warps) {
      prepare_row<T, kDim>(l, r, (first + i) / kv_heads, (first + i) % kv_heads, &scratches[warp],
                           &rows[i]);
    }
    __syncthreads();        // the tails are stored
    wait_for_prior_grid();  // everything read so far was written before that grid
    warp_merge.merge(count);
    __syncthreads();  // the next turn overwrites the tails
  }
  wait_for_prior_grid();  // a block without rows must not exit earlier either
}

}  // namespace tlt
