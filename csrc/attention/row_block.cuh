// The work of one thread block in an attention launch: the keys that it folds for its rows, and how
// it stores, shares and finishes the results. kernel.cu describes the whole.
#pragma once

#include "attention/fold.cuh"
#include "attention/launch.cuh"
#include "attention/shared.cuh"
#include "attention/tiles.cuh"

namespace tlt {

// The rows of one block: m = row * group + head.
template <typename T, int kDim, int kWarps, Residency kResidency>
class RowBlock {
 public:
  using Memory = Shared<kDim, kWarps, kHopper, kResidency>;
  using C = Cuts<kDim>;
  using Cursor = RingCursor<Memory::kRing>;

  __device__ __forceinline__ RowBlock(const Launch& l, const Request& r, int64_t kv_head,
                                      int64_t row, Memory* shared, Cursor* cursor)
      : l_(l), p_(l.p), r_(r), kv_head_(kv_head), row_(row), shared_(*shared), cursor_(*cursor) {
    num_rows_ = static_cast<int>(min(r.num_rows - row, int64_t{l.rows_of(kWarps * kMmaRows)}));
    warp_ = threadIdx.x / kWarpSize;
    lane_ = threadIdx.x % kWarpSize;
  }

  // Prefetches the first keys of an item into L2.
  __device__ __forceinline__ void prefetch(int item) const {
    prefetch_keys<kDim>(source_of(keys_of(item)), 0, kPrefetchKeys);
  }

  // The work of a producer warp in an item. With pdl it copies committed keys at once and waits for
  // the previous kernel before it copies others.
  __device__ __forceinline__ void produce(int item) {
    const KeyRange keys = keys_of(item);
    if (nothing_to_do(keys)) return;
    const int committed = p_.pdl ? static_cast<int>(clamp_position(r_.context)) : INT32_MAX;
    produce_tiles(source_of(keys), l_.loader_shift, committed,
                  p_.pdl && shares() ? kPrefetchKeys : 0, &shared_.ring, &shared_.barriers,
                  &cursor_, shared_.bad_from);
    sync_block<kWarps>();
  }

  // Folds the tile keys of one item; stores its partials, or writes the rows.
  __device__ __forceinline__ void run(int item) {
    const KeyRange keys = keys_of(item);
    if (nothing_to_do(keys)) return;
    consume(source_of(keys));
    sync_block<kWarps>();  // the ring is free, and bad_from is set
    read_bad_from();
    report_bad_pages();
    if (keys.begin > 0) return invalidate_partial(first_partial<kDim>(l_, r_, keys.begin));
    if (shares()) return store_total();
    store_softmax();
    sync_threads<2, kWarps * kWarpSize>();  // all warps stored their totals
    finish();
  }

 protected:
  static constexpr int kRing = Memory::kRing;
  static constexpr bool kCluster = kResidency == Residency::kCluster;

  __device__ __forceinline__ bool nothing_to_do(const KeyRange& keys) const {
    return keys.begin >= keys.end && shares();
  }

  // Whether other blocks have keys of these rows. A constant in kernels for such blocks only.
  __device__ __forceinline__ bool shares() const {
    return kCluster || kResidency == Residency::kFewPairs || l_.partials.acc != nullptr;
  }

  // Keys to prefetch, 64 KB with their values: more would delay the previous launch, which still
  // streams its last keys or merges. With one producer warp, no more than the ring holds.
  static constexpr int kPrefetchKeys = (1 << 14) / kDim;

  // Whether a block of a cluster has several splits to fold.
  __device__ __forceinline__ bool folds(const KeyRange& keys) const {
    return keys.begin == 0 && keys.end > kSmall;
  }

  __device__ __forceinline__ KeyRange keys_of(int item) const {
    const int end = tile_keys(p_, r_, row_ + num_rows_);
    if constexpr (kCluster) return cluster_keys(item, ClusterCuts<kDim>(end));
    return item_keys<kDim>(l_, r_, item, end);
  }

  __device__ __forceinline__ KeySource source_of(const KeyRange& keys) const {
    return {p_, l_.maps, r_.index, kv_head_, l_.page_shift, keys};
  }

  // Computes the tails of this block's rows, a warp each, folds them into the totals and writes the
  // rows.
  __device__ __forceinline__ void finish() {
    if (warp_ >= Memory::kTails) return;
    for (int i = warp_; i < num_rows_; i += Memory::kTails) {
      Tail<kDim> tail;
      attend_tail<T, kDim>(p_, r_, row_ + i, kv_head_, l_.group, l_.page_shift,
                           &shared_.tails[warp_], &tail);
      if (lane_ / 4 < l_.group) store_out(i, tail);
    }
  }

  // Folds the first item's splits into the totals; stores each split of the other items separately.
  __device__ __forceinline__ void consume(const KeySource& source) {
    KeyStream<T, kDim, kWarps, kRing> stream(source, &shared_.ring, &shared_.barriers, &cursor_);
    const ScoreScale scale(p_.scale);
    const bool totals = kCluster ? folds(source.keys) : source.keys.begin == 0;
    read_queries(scale.flip, totals);
    int partial = kCluster ? 0 : first_partial<kDim>(l_, r_, source.keys.begin);
    WarpTile<T, kDim> tile(queries_, smallest_end(), scale.factor, &part_, &shared_.sink[warp_]);
    part_.clear();
    const auto ends = [&](int key) { return C::starts_split(key) || key >= source.keys.end; };
    // Only two tiles are fastest one after the other, because their code is then fetched once.
    const bool many = source.keys.end - source.keys.begin > kSmall;
    for (int key = source.keys.begin; key < source.keys.end; key += kTile) {
      tile.fold_keys(key, stream.acquire_keys());
      stream.release_keys();
      tile.weigh_keys(key);
      for (; kWarpGroups && many && tile.is_whole(key + kTile) && !ends(key + kTile);
           key += kTile) {
        const uint32_t next_keys = stream.acquire_keys(), values = stream.acquire_values();
        tile.fold_both(values, next_keys, [&] { stream.release_keys(); });
        stream.release_values();
      }
      tile.fold_values(key, stream.acquire_values());
      stream.release_values();
      if (!ends(key + kTile)) continue;
      if (kCluster && !totals) {
        keep_part(partial++, {part_.softmax(0), part_.softmax(1)});
      } else if (kCluster || partial == 0) {
        fold_part();
      } else {
        store_part(partial++);
      }
      part_.clear();
    }
    stream.finish(shared_.bad_from);
  }

  // The (row, head) pair of this lane's low or high row.
  struct Pair {
    bool inside;
    int m, head;
    int64_t row;  // among all rows
  };

  __device__ __forceinline__ Pair pair(int half) const {
    const int m = warp_ * kMmaRows + lane_ / 4 + half * 8;
    const int row = l_.rows_of(m);
    return {row < num_rows_, m, m - row * l_.group, r_.row + row_ + row};
  }

  // No row's tile keys end before this position.
  __device__ __forceinline__ int smallest_end() const {
    const int64_t first = p_.ancestors == nullptr ? r_.slot + row_ : r_.context;
    return static_cast<int>(tail_begin(clamp_position(first)));
  }

  // Loads all queries and positions before it uses any; with pdl it first computes what does not
  // depend on the queries. Clears the totals meanwhile.
  __device__ __forceinline__ void read_queries(uint32_t flip, bool totals) {
    int position[2];
    const uint32_t* pairs[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      position[half] = at.inside ? p_.position[at.row] : 0;
      const T* q = static_cast<const T*>(p_.q);
      if (at.inside) {
        q += at.row * p_.q_row_stride + (kv_head_ * l_.group + at.head) * p_.q_head_stride;
      }
      pairs[half] = reinterpret_cast<const uint32_t*>(q) + lane_ % 4;
    }
    const auto meanwhile = [&] {
      if (totals) clear_total();
      find_ends(position);
    };
    if (p_.pdl) meanwhile();
    wait_for_prior_grid();
    launch_dependents();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool inside = pair(half).inside;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        queries_.q[step][half] = inside ? pairs[half][step * 8] : 0;
        queries_.q[step][half + 2] = inside ? pairs[half][step * 8 + 4] : 0;
      }
    }
    if (!p_.pdl) meanwhile();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool good = queries_.end[half] != kNoRow;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        uint32_t& low = queries_.q[step][half];
        uint32_t& high = queries_.q[step][half + 2];
        low = good ? low ^ flip : 0;
        high = good ? high ^ flip : 0;
      }
    }
  }

  __device__ __forceinline__ void find_ends(const int (&position)[2]) {
    int largest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      const bool good = at.inside && is_valid_row(p_, r_, at.row - r_.row, position[half]);
      queries_.end[half] = good ? static_cast<int>(tail_begin(position[half])) : kNoRow;
      if (good) largest = max(largest, queries_.end[half]);
    }
    queries_.largest = __reduce_max_sync(kFullWarp, largest);
  }

  // The lane's accumulators of finished splits: columns 8 n + 2 (lane % 4) and the next one of a
  // half.
  __device__ __forceinline__ float2& total(int half, int n) {
    return shared_.parts[0].total[warp_][2 * n + half][lane_];
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total_softmax_[half] = Softmax{};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) total(half, n) = make_float2(0.0f, 0.0f);
    }
  }

  __device__ __forceinline__ void fold_part() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scale[2];
      if (!fold(&total_softmax_[half], part_.softmax(half), scale)) continue;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 before = total(half, n);
        total(half, n) = make_float2(folded(before.x, part_.acc[n][2 * half], scale),
                                     folded(before.y, part_.acc[n][2 * half + 1], scale));
      }
    }
  }

  // The address of dimensions 2 i and 2 i + 1 of pair m of a partial of a cluster block, in the
  // memory of the totals: four rows of 32 bytes each fall into different banks. The rows of a warp
  // in the first partial lie where its totals were.
  __device__ __forceinline__ float2* kept(int partial, int m, int i) const {
    return &shared_.parts[partial].total[0][0][0] + m * (kDim / 2) + (i ^ (m & 3) * 4);
  }

  __device__ __forceinline__ void keep_part(int partial, const Softmax (&softmax)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = pair(half).m;
      if (lane_ % 4 == 0) shared_.parts[partial].softmax[m] = softmax[half];
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *kept(partial, m, n * 4 + lane_ % 4) =
            make_float2(part_.acc[n][2 * half], part_.acc[n][2 * half + 1]);
      }
    }
  }

  // Whether a page that the pair's tile keys need is bad.
  __device__ __forceinline__ bool bad(int half) const {
    return queries_.end[half] != kNoRow && bad_from_ < queries_.end[half];
  }

  __device__ __forceinline__ void read_bad_from() {
    bad_from_ = INT32_MAX;
#pragma unroll
    for (int from : shared_.bad_from) bad_from_ = min(bad_from_, from);
  }

  __device__ __forceinline__ void report_bad_pages() {
    const bool any = (pair(0).inside && bad(0)) || (pair(1).inside && bad(1));
    if (any && kv_head_ == 0) report_on_device(p_.sequences, r_.index, kStatusBadPage);
  }

  // The softmax of a half's splits; invalid if one of their pages is bad.
  __device__ __forceinline__ Softmax result(int half) const {
    Softmax softmax = total_softmax_[half];
    if (bad(half)) softmax.sum = -1.0f;
    return softmax;
  }

  __device__ __forceinline__ int64_t index_of(const Pair& at, int64_t partial) const {
    return partial_index(l_, partial, at.row, kv_head_ * l_.group + at.head);
  }

  __device__ __forceinline__ float2* partial_acc(int64_t index) const {
    return reinterpret_cast<float2*>(l_.partials.acc + index * kDim) + lane_ % 4;
  }

  // Stores the first item's splits, folded.
  __device__ __forceinline__ void store_total() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const int64_t index = index_of(at, 0);
      if (lane_ % 4 == 0) l_.partials.softmax[index] = result(half);
      float2* acc = partial_acc(index);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) acc[n * 4] = total(half, n);
    }
  }

  // Stores one split from registers.
  __device__ __forceinline__ void store_part(int partial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Softmax softmax = part_.softmax(half);
      const Pair at = pair(half);
      if (!at.inside) continue;
      const int64_t index = index_of(at, partial);
      if (lane_ % 4 == 0) l_.partials.softmax[index] = softmax;
      float2* acc = partial_acc(index);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        acc[n * 4] = make_float2(part_.acc[n][2 * half], part_.acc[n][2 * half + 1]);
      }
    }
  }

  // Marks rows that need a bad page of the item as having no result, in its first partial.
  __device__ __forceinline__ void invalidate_partial(int partial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside || !bad(half) || lane_ % 4 != 0) continue;
      l_.partials.softmax[index_of(at, partial)].sum = -1.0f;
    }
  }

  __device__ __forceinline__ void store_softmax() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane_ % 4 == 0) shared_.parts[0].softmax[pair(half).m] = result(half);
    }
  }

  // Folds the tail of row i of the block, of head lane / 4, into the totals and writes the row.
  __device__ __forceinline__ void store_out(int i, const Tail<kDim>& tail) {
    const int m = i * l_.group + lane_ / 4;
    const auto& totals = shared_.parts[0].total[m / kMmaRows];
    Softmax softmax = shared_.parts[0].softmax[m];
    const bool invalid = softmax.sum < 0.0f || tail.softmax.sum < 0.0f;
    float scale[2] = {1.0f, 0.0f};
    if (!invalid) fold(&softmax, tail.softmax, scale);
    const float inverse = invalid ? 0.0f : __frcp_rn(softmax.sum);
    const int64_t row = r_.row + row_ + i, head = kv_head_ * l_.group + lane_ / 4;
    T* out = static_cast<T*>(p_.out) + row * p_.out_row_stride + head * p_.out_head_stride;
    uint32_t* pairs = reinterpret_cast<uint32_t*>(out) + lane_ % 4;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 before = totals[2 * n + m / 8 % 2][m % 8 * 4 + lane_ % 4];
      const float x = mul_rn(folded(before.x, tail.acc[n].x, scale), inverse);
      const float y = mul_rn(folded(before.y, tail.acc[n].y, scale), inverse);
      pairs[n * 4] = invalid ? 0 : pack_pair<T>(x, y);
    }
    if (p_.lse != nullptr && lane_ % 4 == 0) {
      p_.lse[row * p_.lse_stride + head] = invalid ? -INFINITY : lse_of(softmax);
    }
  }

  const Launch& l_;
  const TreeAttentionParams& p_;
  const Request& r_;
  const int64_t kv_head_, row_;
  Memory& shared_;
  Cursor& cursor_;
  int num_rows_, warp_, lane_;
  int bad_from_;
  Queries<kDim> queries_;
  Fragment<kDim> part_;
  Softmax total_softmax_[2];
};

}  // namespace tlt
