// One launch for all of attention: a cluster has a row block, each of its blocks some splits of the
// keys (the first one folds its own) or tails. They keep what they have in shared memory, meet, and
// finish some of the rows each, from what all have kept.
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

  // What block `rank` of a cluster does: splits and tails, which it keeps, then its part of the
  // rows, from what all have kept.
  __device__ __forceinline__ void run(int rank) {
    const ClusterCuts<kDim> cuts(tile_keys(p_, r_, row_ + num_rows_));
    if (Memory::kKeeps > 1 && warp_ == kWarps - 1) place_partials(rank, cuts);
    if (rank < cuts.blocks) {
      const KeyRange keys = cluster_keys(rank, cuts);
      this->consume(this->source_of(keys));
      sync_block<kWarps>();  // bad_from is set
      this->read_bad_from();
      this->report_bad_pages();
      if (this->folds(keys)) keep_total();
      refuse_kept();
    }
    if (rank >= cuts.first_tail()) keep_tails(rank, cuts);
    arrive_at_cluster();
    wait_for_cluster();  // all is kept
    merge_rows(rank, cuts);
    arrive_after_reads();
    wait_for_cluster();  // nothing goes away while it is read
  }

 private:
  // Keeps the total of several splits.
  __device__ __forceinline__ void keep_total() {
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
    this->keep_part(0, total_softmax_);
  }

  // Says that rows that need a bad page of this block have no result.
  __device__ __forceinline__ void refuse_kept() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (bad(half) && lane_ % 4 == 0) shared_.parts[0].softmax[pair(half).m].sum = -1.0f;
    }
  }

  // How many blocks compute tails: a power of two.
  __device__ __forceinline__ int tail_blocks(const ClusterCuts<kDim>& cuts) const {
    return 1 << (31 - __clz(kClusterBlocks - cuts.first_tail()));
  }

  // Keeps the tails of rows turn, turn + turns, ..., a warp each.
  __device__ __forceinline__ void keep_tails(int rank, const ClusterCuts<kDim>& cuts) {
    const int turn = rank - cuts.first_tail(), turns = tail_blocks(cuts);
    if (warp_ >= Memory::kTails || turn >= turns) return;
    for (int i = turn + turns * warp_; i < num_rows_; i += turns * Memory::kTails) {
      Tail<kDim> tail;
      attend_tail<T, kDim, true>(p_, r_, row_ + i, kv_head_, l_.group, l_.page_shift,
                                 &shared_.tails[warp_], &tail);
      if (lane_ / 4 < l_.group) {
        const int m = i * l_.group + lane_ / 4;
        const int as = cuts.tail_kept();
        if (lane_ % 4 == 0) shared_.parts[as].softmax[m] = tail.softmax;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) *this->kept(as, m, n * 4 + lane_ % 4) = tail.acc[n];
      }
    }
  }

  // What the blocks of the cluster keep of a pair, and of two of its dimensions.
  struct Kept {
    const Memory& shared;
    uint32_t softmax_at, value_at;  // in a part

    // Where the part of a partial is; past the last one, where anything is.
    __device__ __forceinline__ uint32_t part(int i) const {
      if constexpr (Memory::kKeeps > 1) return shared.place[i];
      return remote_address(shared.parts, i);
    }
    __device__ __forceinline__ Softmax softmax_of(uint32_t part) const {
      const float2 two = read_remote(part + softmax_at);
      return {two.x, two.y};
    }
    __device__ __forceinline__ float2 value_of(uint32_t part) const {
      return read_remote(part + value_at);
    }
    __device__ __forceinline__ Softmax softmax(int i) const { return softmax_of(part(i)); }
    __device__ __forceinline__ float2 value(int i, int) const { return value_of(part(i)); }
  };

  // Writes down where the partials are, and how many, before anybody waits for them. Past the last
  // one a block reads its own: were it the last one's again, all blocks would queue for one.
  __device__ __forceinline__ void place_partials(int rank, const ClusterCuts<kDim>& cuts) {
    const int partials = cuts.partials();
    const int at = lane_ < partials ? cuts.place_of(lane_) : rank * Memory::kKeeps;
    shared_.place[lane_] = remote_address(&shared_.parts[at % Memory::kKeeps], at / Memory::kKeeps);
    if (lane_ == 0) shared_.partials = partials;
  }

  // Folds what the blocks keep of splits and of tails; a warp for 64 dimensions of a row and head.
  __device__ __forceinline__ void merge_rows(int rank, const ClusterCuts<kDim>& cuts) {
    constexpr int kPairWarps = kDim / 64;
    const int tasks = num_rows_ * l_.group * kPairWarps, last_tail = tail_blocks(cuts) - 1;
    const int partials = Memory::kKeeps > 1 ? shared_.partials : cuts.blocks;
    const uint32_t parts = shared_address(shared_.parts);
    for (int task = rank + kClusterBlocks * warp_; task < tasks; task += kClusterBlocks * kWarps) {
      const int m = task / kPairWarps, i = task % kPairWarps * kWarpSize + lane_;
      const int row = l_.rows_of(m), head = kv_head_ * l_.group + m - row * l_.group;
      const Kept kept_by{shared_, shared_address(&shared_.parts[0].softmax[m]) - parts,
                         shared_address(this->kept(0, m, i)) - parts};
      const uint32_t tail_part =
          remote_address(&shared_.parts[cuts.tail_kept()], cuts.first_tail() + (row & last_tail));
      const Softmax tail = kept_by.softmax_of(tail_part);
      const float2 tail_value = kept_by.value_of(tail_part);
      Softmax total;
      float2 acc{};
      fold_all<2 * kFoldStep>(kept_by, partials, shared_.steps[warp_], &total, &acc);
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
