// All of attention in one launch: a cluster owns a row block. Each of its blocks computes some
// splits of the keys (the first block folds its own) or tails and stores the results in its shared
// memory. After a cluster barrier each block finishes some of the rows from the results of all
// blocks.
#pragma once

#include "attention/few_block.cuh"
#include "common/cluster.cuh"

namespace tlt {

template <typename T, int kDim, int kWarps>
class ClusterBlock : public FewBlock<T, kDim, kWarps, Residency::kCluster> {
  using Base = FewBlock<T, kDim, kWarps, Residency::kCluster>;

 public:
  using Base::Base;
  using typename Base::Memory;

  // The work of block `rank` of a cluster: it computes splits and tails, then finishes its rows
  // from the results of all blocks.
  __device__ __forceinline__ void run(int rank) {
    const ClusterCuts<kDim> cuts(tile_keys(p_, r_, row_ + num_rows_));
    if (Memory::kNumPartials > 1 && warp_ == kWarps - 1) locate_partials(rank, cuts);
    if (rank < cuts.blocks) keep_splits(cluster_keys(rank, cuts));
    if (rank >= cuts.first_tail()) keep_tails(rank, cuts);
    arrive_at_cluster();
    wait_for_cluster();  // all results are stored
    merge_rows(rank, cuts);
    arrive_after_reads();
    wait_for_cluster();  // no block exits while others read its memory
  }

 private:
  // Folds the block's keys and stores the results.
  __device__ __forceinline__ void keep_splits(const KeyRange& keys) {
    if constexpr (Base::kCanBeFew) {
      if (this->has_few()) return keep_few(keys);
    }
    this->consume(this->source_of(keys));
    sync_block<kWarps>();  // bad_from is set
    this->read_bad_from();
    this->report_bad_pages();
    if (this->folds(keys)) keep_total();
    invalidate_kept();
  }

  // The same for few pairs.
  __device__ __forceinline__ void keep_few(const KeyRange& keys) {
    const int m = lane_ / 4;
    const auto keep = [&](int partial, const Softmax& softmax, const auto& acc) {
      if (this->stores_softmax()) shared_.parts[partial].softmax[m] = softmax;
#pragma unroll
      for (int n = 0; n < Base::kColumns; ++n) {
        *this->kept(partial, m, (warp_ * Base::kColumns + n) * 4 + lane_ % 4) = acc(n);
      }
    };
    const bool bad = this->fold_few(this->source_of(keys), this->folds(keys), 0, keep);
    if (bad && this->stores_softmax()) shared_.parts[0].softmax[m].sum = -1.0f;
  }

  // Stores the total of several splits.
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
    __syncwarp();  // all values are read
    this->keep_part(0, total_softmax_);
  }

  // Marks rows that need a bad page of this block as having no result.
  __device__ __forceinline__ void invalidate_kept() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (bad(half) && lane_ % 4 == 0) shared_.parts[0].softmax[pair(half).m].sum = -1.0f;
    }
  }

  // How many blocks compute tails: a power of two.
  __device__ __forceinline__ int tail_blocks(const ClusterCuts<kDim>& cuts) const {
    return 1 << (31 - __clz(kClusterBlocks - cuts.first_tail()));
  }

  // Stores the tails of rows turn, turn + turns, ..., one warp per row.
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

  // The partials of a (row, head) pair in the blocks of the cluster, for two dimensions.
  struct ClusterPartials {
    const Memory& shared;
    uint32_t softmax_at, value_at;  // offsets in a part

    // The address of the part of a partial; past the last one, an address that may be read.
    __device__ __forceinline__ uint32_t part(int i) const {
      if constexpr (Memory::kNumPartials > 1) return shared.partial_address[i];
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

  // Stores the addresses of the partials and their number before they are waited for. Past the last
  // partial a block uses its own part: if all blocks used the last one, they would queue for one
  // block's memory.
  __device__ __forceinline__ void locate_partials(int rank, const ClusterCuts<kDim>& cuts) {
    const int partials = cuts.partials();
    const int at = lane_ < partials ? cuts.location_of(lane_) : rank * Memory::kNumPartials;
    shared_.partial_address[lane_] =
        remote_address(&shared_.parts[at % Memory::kNumPartials], at / Memory::kNumPartials);
    if (lane_ == 0) shared_.partials = partials;
  }

  // Folds the splits and tails of all blocks; a warp takes 64 dimensions of a row and head.
  __device__ __forceinline__ void merge_rows(int rank, const ClusterCuts<kDim>& cuts) {
    constexpr int kPairWarps = kDim / 64;
    const int tasks = num_rows_ * l_.group * kPairWarps, last_tail = tail_blocks(cuts) - 1;
    const int partials = Memory::kNumPartials > 1 ? shared_.partials : cuts.blocks;
    const uint32_t parts = shared_address(shared_.parts);
    for (int task = rank + kClusterBlocks * warp_; task < tasks; task += kClusterBlocks * kWarps) {
      const int m = task / kPairWarps, i = task % kPairWarps * kWarpSize + lane_;
      const int row = l_.rows_of(m), head = kv_head_ * l_.group + m - row * l_.group;
      const ClusterPartials partials_of{shared_,
                                        shared_address(&shared_.parts[0].softmax[m]) - parts,
                                        shared_address(this->kept(0, m, i)) - parts};
      const uint32_t tail_part =
          remote_address(&shared_.parts[cuts.tail_kept()], cuts.first_tail() + (row & last_tail));
      const Softmax tail = partials_of.softmax_of(tail_part);
      const float2 tail_value = partials_of.value_of(tail_part);
      Softmax total;
      float2 acc{};
      fold_all<2 * kFoldStep>(partials_of, partials, shared_.steps[warp_], &total, &acc);
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
