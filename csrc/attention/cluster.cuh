// One launch for all of attention: a cluster has a row block, each of its blocks a split of the
// keys (the first one all before, too) or tails. They keep what they have in shared memory, meet,
// and finish some of the rows each, from what all have kept.
#pragma once

#include "attention/row_block.cuh"
#include "common/cluster.cuh"

namespace tlt {

template <typename T, int kDim, int kWarps>
class ClusterBlock : public RowBlock<T, kDim, kWarps, true> {
  using Base = RowBlock<T, kDim, kWarps, true>;

 public:
  using Base::Base;
  using typename Base::Memory;

  // What block `rank` of a cluster does: a split (the first block: all before, too) or tails, which
  // it keeps, then its part of the rows, from what all have kept.
  __device__ __forceinline__ void run(int rank) {
    const int end = tile_keys(p_, r_, row_ + num_rows_);
    const int blocks = min(splits_below(end), kClusterSplits);  // that have keys
    if (rank < blocks) {
      const KeyRange keys = cluster_keys(rank, end);
      this->consume(this->source_of(keys));
      sync_block<kWarps>();  // bad_from is set
      this->read_bad_from();
      this->report_bad_pages();
      keep_part(this->folds(keys));
    } else {
      keep_tails(rank - blocks, tail_blocks(blocks));
    }
    arrive_at_cluster();
    wait_for_cluster();  // all is kept
    merge_rows(rank, blocks);
    arrive_after_reads();
    wait_for_cluster();  // nothing goes away while it is read
  }

 private:
  // Where a block keeps dimensions 2 i and 2 i + 1 of pair m: rows of the totals' memory, 32 bytes
  // of four rows beside each other in different banks. A warp's rows are where its totals were.
  __device__ __forceinline__ float2* kept(int m, int i) const {
    return &shared_.total[0][0][0] + m * (kDim / 2) + (i ^ (m & 3) * 4);
  }

  // Keeps a split, or the total of several.
  __device__ __forceinline__ void keep_part(bool totals) {
    if (totals) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          const float2 value = total(half, n);
          part_.acc[n][2 * half] = value.x;
          part_.acc[n][2 * half + 1] = value.y;
        }
      }
      __syncwarp();  // all are read
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Softmax softmax = part_.softmax(half);
      if (totals) softmax = total_softmax_[half];
      if (bad(half)) softmax.sum = -1.0f;
      const int m = pair(half).m;
      if (lane_ % 4 == 0) shared_.softmax[m] = softmax;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *kept(m, n * 4 + lane_ % 4) =
            make_float2(part_.acc[n][2 * half], part_.acc[n][2 * half + 1]);
      }
    }
  }

  // How many blocks, of those without keys, compute tails: a power of two.
  __device__ __forceinline__ int tail_blocks(int blocks) const {
    return 1 << (31 - __clz(kClusterBlocks - blocks));
  }

  // Keeps the tails of rows turn, turn + turns, ..., a warp each.
  __device__ __forceinline__ void keep_tails(int turn, int turns) {
    if (warp_ >= Memory::kTails || turn >= turns) return;
    for (int i = turn + turns * warp_; i < num_rows_; i += turns * Memory::kTails) {
      Tail<kDim> tail;
      attend_tail<T, kDim, true>(p_, r_, row_ + i, kv_head_, l_.group, l_.page_shift,
                                 &shared_.tails[warp_], &tail);
      if (lane_ / 4 < l_.group) {
        const int m = i * l_.group + lane_ / 4;
        if (lane_ % 4 == 0) shared_.softmax[m] = tail.softmax;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) *kept(m, n * 4 + lane_ % 4) = tail.acc[n];
      }
    }
  }

  // What the blocks of the cluster keep of dimensions 2 i and 2 i + 1 of pair m.
  struct Kept {
    const Softmax* softmax_at;
    const float2* value_at;

    __device__ __forceinline__ Softmax softmax(int rank) const {
      const float2 pair = read_remote(softmax_at, rank);
      return {pair.x, pair.y};
    }
    __device__ __forceinline__ float2 value(int rank) const { return read_remote(value_at, rank); }
  };

  // Folds what `blocks` blocks keep of splits and the others of tails; a warp for 64 dimensions of
  // a row and head.
  __device__ __forceinline__ void merge_rows(int rank, int blocks) {
    constexpr int kPairWarps = kDim / 64;
    const int tasks = num_rows_ * l_.group * kPairWarps, last_tail = tail_blocks(blocks) - 1;
    for (int task = rank + kClusterBlocks * warp_; task < tasks; task += kClusterBlocks * kWarps) {
      const int m = task / kPairWarps, i = task % kPairWarps * kWarpSize + lane_;
      const int row = l_.rows_of(m), head = kv_head_ * l_.group + m - row * l_.group;
      const Kept kept_by{&shared_.softmax[m], kept(m, i)};
      const Softmax tail = kept_by.softmax(blocks + (row & last_tail));
      const float2 tail_value = kept_by.value(blocks + (row & last_tail));
      Softmax total;
      float2 acc{};
      fold_all<kFoldStep>(kept_by, blocks, shared_.steps[warp_], &total, &acc);
      fold_pair(tail, tail_value, &total, &acc);
      write_pair<T>(p_, r_.row + row_ + row, head, i, total, acc);
    }
  }

  using Base::bad;
  using Base::kv_head_;
  using Base::l_;
  using Base::lane_;
  using Base::num_rows_;
  using Base::p_;
  using Base::pair;
  using Base::part_;
  using Base::r_;
  using Base::row_;
  using Base::shared_;
  using Base::total;
  using Base::total_softmax_;
  using Base::warp_;
};

}  // namespace tlt
