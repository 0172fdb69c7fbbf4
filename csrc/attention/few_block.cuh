// A block whose rows have at most eight (row, head) pairs folds its keys with FewTile or, in the
// kernel for few pairs of 128 dimensions, FewKeysTile, four warps together; other blocks are
// RowBlocks. Lane 4 m + q of every warp has pair m = row * group + head; of the results its warp
// has a quarter of the dimensions. The results lie where a RowBlock has those of its first warp's
// low rows, so that the same code finishes and merges them.
#pragma once

#include "attention/few_keys.cuh"
#include "attention/row_block.cuh"

namespace tlt {

template <typename T, int kDim, int kWarps, Residency kResidency>
class FewBlock : public RowBlock<T, kDim, kWarps, kResidency> {
  using Base = RowBlock<T, kDim, kWarps, kResidency>;

 public:
  using Base::Base;

  __device__ __forceinline__ void run(int item) {
    if constexpr (kCanBeFew) {
      if (has_few()) return run_few(item);
    }
    Base::run(item);
  }

 protected:
  using Base::kv_head_;
  using Base::l_;
  using Base::lane_;
  using Base::num_rows_;
  using Base::p_;
  using Base::r_;
  using Base::row_;
  using Base::shared_;
  using Base::warp_;

  using Tile = std::conditional_t<(kDim > 64), FewKeysTile<T, kDim>, FewTile<T, kDim>>;
  static constexpr int kColumns = Tile::kColumns;
  // With 128 dimensions only in a kernel of its own: more code makes the others slower.
  static constexpr bool kCanBeFew =
      kWarps == kFewWarps && (kDim <= 64 || kResidency == Residency::kFewPairs);

  __device__ __forceinline__ bool has_few() const { return num_rows_ * l_.group <= kFewPairs; }

  // Folds keys. keep(partial, softmax, acc) gets each split, from `partial` on, or if `folds` all
  // together as partial 0; acc(n) has the dimensions of column tile n of the warp. Returns whether
  // the lane's pair needs a bad page, and reports it.
  template <typename Keep>
  __device__ __forceinline__ bool fold_few(const KeySource& source, bool folds, int partial,
                                           Keep&& keep) {
    KeyStream<T, kDim, kWarps, Base::kRing> stream(source, &shared_.ring, &shared_.barriers,
                                                   &this->cursor_);
    const ScoreScale scale(p_.scale);
    const int m = lane_ / 4, row = l_.rows_of(m);
    const bool inside = row < num_rows_;
    const int64_t at = r_.row + row_ + (inside ? row : 0);
    const int position = p_.position[at];
    const bool good = inside && is_valid_row(p_, r_, at - r_.row, position);
    const int end = good ? static_cast<int>(tail_begin(position)) : kNoRow;
    const T* q = static_cast<const T*>(p_.q) + at * p_.q_row_stride + head() * p_.q_head_stride;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(q) + lane_ % 4;
    wait_for_prior_grid();
    launch_dependents();
    uint32_t query[kDim / 16][2];
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) query[step][i] = good ? words[step * 8 + i * 4] ^ scale.flip : 0;
    }
    Tile tile(query, end, scale.factor, &shared_.parts[0].few.exchange);
    Softmax total;
    float2 sum[kColumns]{};
#pragma unroll 1
    for (int key = source.keys.begin; key < source.keys.end; key += kTile) {
      tile.fold_keys(key, stream.acquire_keys());
      tile.weigh_keys([&] { stream.release_keys(); });
      tile.fold_values(key, stream.acquire_values(), &shared_.sink[warp_]);
      stream.release_values();
      if (!Base::C::starts_split(key + kTile) && key + kTile < source.keys.end) continue;
      const Softmax part = tile.softmax();
      tile.arrange();
      float factor[2];
      if (!folds) {
        keep(partial++, part, [&](int n) { return tile.acc(n); });
      } else if (fold(&total, part, factor)) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          sum[n] = make_float2(folded(sum[n].x, tile.acc(n).x, factor),
                               folded(sum[n].y, tile.acc(n).y, factor));
        }
      }
      tile.clear();
    }
    stream.finish(shared_.bad_from);
    if (folds) keep(0, total, [&](int n) { return sum[n]; });
    sync_block<kWarps>();  // the ring is free, and bad_from is set
    this->read_bad_from();
    if (end == kNoRow || this->bad_from_ >= end) return false;
    if (kv_head_ == 0) report_on_device(p_.sequences, r_.index, kStatusBadPage);
    return true;
  }

  // The head of the lane's pair; any head if there is none.
  __device__ __forceinline__ int64_t head() const {
    const int m = lane_ / 4, row = l_.rows_of(m);
    return kv_head_ * l_.group + (row < num_rows_ ? m - row * l_.group : 0);
  }

  // Whether the lane stores the softmax of its pair.
  __device__ __forceinline__ bool stores_softmax() const { return warp_ == 0 && lane_ % 4 == 0; }

 private:
  // `run` for few pairs.
  __device__ __forceinline__ void run_few(int item) {
    const KeyRange keys = this->keys_of(item);
    if (this->nothing_to_do(keys)) return;
    const int m = lane_ / 4, row = l_.rows_of(m), first = first_partial<kDim>(l_, r_, keys.begin);
    const bool inside = row < num_rows_, shares = this->shares();
    const auto index_of = [&](int partial) {
      return partial_index(l_, partial, r_.row + row_ + row, head());
    };
    const auto keep = [&](int partial, const Softmax& softmax, const auto& acc) {
      if (!shares) {
        if (stores_softmax()) shared_.parts[0].softmax[m] = softmax;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          shared_.parts[0].total[0][2 * (warp_ * kColumns + n)][lane_] = acc(n);
        }
      } else if (inside) {
        const int64_t index = index_of(partial);
        if (stores_softmax()) l_.partials.softmax[index] = softmax;
        float2* to = this->partial_acc(index) + warp_ * kColumns * 4;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) to[n * 4] = acc(n);
      }
    };
    if (fold_few(this->source_of(keys), keys.begin == 0, first, keep) && stores_softmax()) {
      (shares ? l_.partials.softmax[index_of(first)] : shared_.parts[0].softmax[m]).sum = -1.0f;
    }
    if (shares) return;
    sync_threads<2, kWarps * kWarpSize>();  // all warps stored their totals
    this->finish();
  }
};

}  // namespace tlt
