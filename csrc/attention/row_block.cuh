// One block's part of an attention launch: which keys it folds for which rows, and how it keeps,
// shares and finishes what it has. See kernel.cu for the whole.
#pragma once

#include "attention/tail.cuh"
#include "attention/tiles.cuh"

namespace tlt {

// Partials of the items of every (row, head): item 0 .. max_items - 1, then the tail.
struct Partials {
  float* acc;        // [max_items + 1, rows, heads, head_dim]; null: each block folds its own
  Softmax* softmax;  // [max_items + 1, rows, heads]
  int max_items, share;
};

struct Launch {
  TreeAttentionParams p;
  Partials partials;
  int group, row_blocks, page_shift;
  TileMaps maps;
};

__device__ __forceinline__ int64_t partial_index(const Launch& l, int64_t item, int64_t row,
                                                 int64_t head) {
  return (item * l.p.sequences.num_rows + row) * l.p.num_heads + head;
}

// Splits that item 0 takes, from the first on; it folds them in registers.
__device__ __forceinline__ int64_t first_splits(const Launch& l, const Request& r) {
  const int64_t splits = splits_below(r.context * 3 / (2 * l.partials.share));
  return splits < 1 ? 1 : splits;
}

struct KeyRange {
  int begin, end;  // positions
};

// Keys of item `item` of a row block whose tile keys end at `end`. The items after the first take
// a split each, the last split first, since late splits are the large ones.
__device__ __forceinline__ KeyRange item_keys(const Launch& l, const Request& r, int64_t item,
                                              int end, int64_t* index) {
  *index = 0;
  if (l.partials.acc == nullptr) return {0, end};
  const int64_t first = first_splits(l, r);
  if (item == 0) return {0, min(end, static_cast<int>(split_begin(first)))};
  const int64_t split = splits_below(end) - item;
  if (split < first) return {0, 0};
  *index = split - first + 1;
  return {static_cast<int>(split_begin(split)), min(end, static_cast<int>(split_begin(split + 1)))};
}

template <int kDim>
constexpr int kTailStride = kDim + 8;  // floats between tails in shared memory: no bank conflicts

template <int kWarps>
constexpr int kRingTiles = kWarps == 4 ? 5 : 8;  // two blocks a multiprocessor, or one

// Shared memory of a block: the ring of tiles, which the tails use after it, and the totals of
// splits done, kept out of the registers that the tiles need.
template <int kDim, int kWarps>
struct Shared {
  static constexpr int kPairs = kWarps * kMmaRows;
  static constexpr int kRing = kRingTiles<kWarps>;
  struct Tails {
    float acc[kPairs][kTailStride<kDim>];
    TailScratch<kDim> scratch[kWarps];
    Softmax softmax[kPairs];
  };
  union {
    Ring<kDim, kRing> ring;
    Tails tails;
  };
  float2 total[kWarps][kDim / 4][kWarpSize];  // accumulators of a lane, a column of its own
  uint64_t full[kRing];                       // barriers of the ring (sm_90)
  int bad_from;                               // first position whose page is bad
};

// The rows of one block: m = row * group + head.
template <typename T, int kDim, int kWarps>
class RowBlock {
 public:
  __device__ __forceinline__ RowBlock(const Launch& l, const Request& r, int64_t kv_head,
                                      int64_t row, Shared<kDim, kWarps>* shared,
                                      RingPlace<kRingTiles<kWarps>>* place)
      : l_(l), p_(l.p), r_(r), kv_head_(kv_head), row_(row), shared_(*shared), place_(*place) {
    num_rows_ = static_cast<int>(min(r.num_rows - row, int64_t{kWarps * kMmaRows / l.group}));
    warp_ = threadIdx.x / kWarpSize;
    lane_ = threadIdx.x % kWarpSize;
  }

  // Folds the tile keys of one item; returns what the warp's rows have.
  __device__ __forceinline__ void run(int64_t item) {
    int64_t index;
    const int end = tile_keys(p_, r_, row_ + num_rows_);
    const KeyRange keys = item_keys(l_, r_, item, end, &index);
    if (keys.begin >= keys.end && l_.partials.acc != nullptr) return;
    TileLoader<T, kDim, kWarps * kWarpSize> loader(p_, l_.maps, r_, static_cast<int>(kv_head_),
                                                   keys.begin, keys.end, l_.page_shift);
    const auto load_to = [&](int slot) {
      loader.load_next(shared_address(shared_.ring.tile[slot]), &shared_.full[slot]);
    };
    for (int i = 0; i < kRing - 1; ++i) load_to((place_.slot + i) % kRing);
    if (threadIdx.x == 0) shared_.bad_from = INT32_MAX;  // read after many barriers
    read_queries();
    WarpTile<T, kDim> tile(queries_, mul_rn(p_.scale, kInvLn2), &part_);
    clear_total();
    part_.clear();
    // Waits for the next tile, and loads another to where the last one was.
    const auto take_tile = [&] {
      const int slot = place_.slot;
      loader.template wait<kRing>(&shared_.full[slot], place_.parity);
      __syncthreads();  // the tile is there for all, and all have left the last one
      load_to(place_.before());
      place_.advance();
      return shared_address(shared_.ring.tile[slot]);
    };
    for (int key = keys.begin; key < keys.end; key += kTile) {
      const bool active = key < queries_.largest;
      const uint32_t tile_keys = take_tile();
      if (active) tile.fold_keys(key, tile_keys);
      const uint32_t tile_values = take_tile();
      if (active) tile.fold_values(key, tile_values);
      if (starts_split(key + kTile) || key + kTile >= keys.end) fold_part();
    }
    loader.publish_bad(&shared_.bad_from);
    wait_copies<0>();
    __syncthreads();  // the ring is free
    bad_from_ = shared_.bad_from;
    report_bad_pages();
    if (l_.partials.acc != nullptr) store_partial(index);
  }

  // Folds the tails, which are in shared memory, and writes the rows.
  __device__ __forceinline__ void finish() {
    fold_tails();
    store_out();
  }

  // Tails of this block's rows, a warp each: into the workspace, or for the block itself.
  __device__ __forceinline__ void run_tails(int first, int step) {
    for (int i = first; i < num_rows_; i += step) {
      Softmax* softmax = shared_.tails.softmax + i * l_.group;
      float* acc = shared_.tails.acc[i * l_.group];
      int64_t stride = kTailStride<kDim>;
      uint4* values = nullptr;
      if (l_.partials.acc != nullptr) {
        const int64_t at =
            partial_index(l_, l_.partials.max_items, r_.row + row_ + i, kv_head_ * l_.group);
        softmax = l_.partials.softmax + at;
        acc = l_.partials.acc + at * kDim;
        stride = kDim;
        values = reinterpret_cast<uint4*>(shared_.total[warp_]);  // no splits, no totals
        static_assert(sizeof(shared_.total[0]) == kTailKeys * kDim * sizeof(T));
      }
      attend_tail<T, kDim>(p_, r_, row_ + i, kv_head_, l_.group, kv_head_ == 0,
                           &shared_.tails.scratch[warp_], values, softmax, acc, stride);
    }
  }

 private:
  static constexpr int kRing = kRingTiles<kWarps>;

  // The (row, head) pair of this lane's low or high row.
  struct Pair {
    bool inside;
    int m, head;
    int64_t row;  // among all rows
  };

  __device__ __forceinline__ Pair pair(int half) const {
    const int m = warp_ * kMmaRows + lane_ / 4 + half * 8;
    const int row = m / l_.group;
    return {row < num_rows_, m, m - row * l_.group, r_.row + row_ + row};
  }

  __device__ __forceinline__ void read_queries() {
    int smallest = INT32_MAX, largest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      int end = kNoRow;
      const T* q = static_cast<const T*>(p_.q);
      const int position = at.inside ? p_.position[at.row] : 0;
      const bool good = at.inside && well_placed(p_, r_, at.row - r_.row, position);
      if (good) {
        end = static_cast<int>(tail_begin(position));
        q += at.row * p_.q_row_stride + (kv_head_ * l_.group + at.head) * p_.q_head_stride;
        smallest = min(smallest, end);
        largest = max(largest, end);
      }
      queries_.end[half] = end;
      const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q) + lane_ % 4;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        queries_.q[step][half] = good ? pairs[step * 8] : 0;
        queries_.q[step][half + 2] = good ? pairs[step * 8 + 4] : 0;
      }
    }
    queries_.smallest = __reduce_min_sync(kFullWarp, smallest);
    queries_.largest = __reduce_max_sync(kFullWarp, largest);
  }

  // A lane's accumulators of the splits done: columns 8 n + 2 (lane % 4) and the next of a half.
  __device__ __forceinline__ float2& total(int half, int n) {
    return shared_.total[warp_][2 * n + half][lane_];
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total_softmax_[half] = Softmax{};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) total(half, n) = make_float2(0.0f, 0.0f);
    }
  }

  // Folds the lane's accumulators of a half, given by column, into the total.
  template <typename Part>
  __device__ __forceinline__ void fold_into_total(int half, const Softmax& softmax, Part&& part) {
    float scale[2];
    if (!fold(&total_softmax_[half], softmax, scale)) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 before = total(half, n), more = part(n);
      total(half, n) =
          make_float2(folded(before.x, more.x, scale), folded(before.y, more.y, scale));
    }
  }

  __device__ __forceinline__ void fold_part() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fold_into_total(half, {part_.max[half], part_.sum[2 * half]}, [&](int n) {
        return make_float2(part_.acc[n][2 * half], part_.acc[n][2 * half + 1]);
      });
    }
    part_.clear();
  }

  // Whether a page that the pair's tile keys need was bad.
  __device__ __forceinline__ bool bad(int half) const {
    return queries_.end[half] != kNoRow && bad_from_ < queries_.end[half];
  }

  __device__ __forceinline__ void report_bad_pages() {
    const bool any = (pair(0).inside && bad(0)) || (pair(1).inside && bad(1));
    if (any && kv_head_ == 0) report_on_device(p_.sequences, r_.index, kStatusBadPage);
  }

  __device__ __forceinline__ void store_partial(int64_t item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const int64_t index = partial_index(l_, item, at.row, kv_head_ * l_.group + at.head);
      Softmax softmax = total_softmax_[half];
      if (bad(half)) softmax.sum = -1.0f;
      if (lane_ % 4 == 0) l_.partials.softmax[index] = softmax;
      float2* acc = reinterpret_cast<float2*>(l_.partials.acc + index * kDim) + lane_ % 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) acc[n * 4] = total(half, n);
    }
  }

  __device__ __forceinline__ void fold_tails() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const Softmax tail = shared_.tails.softmax[at.m];
      if (tail.sum < 0.0f || bad(half)) {
        total_softmax_[half].sum = -1.0f;
        continue;
      }
      const float2* acc = reinterpret_cast<const float2*>(shared_.tails.acc[at.m]) + lane_ % 4;
      fold_into_total(half, tail, [&](int n) { return acc[n * 4]; });
    }
  }

  __device__ __forceinline__ void store_out() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const Softmax& softmax = total_softmax_[half];
      const bool refused = softmax.sum < 0.0f;
      const int64_t head = kv_head_ * l_.group + at.head;
      const float inverse = refused ? 0.0f : __frcp_rn(softmax.sum);
      T* out = static_cast<T*>(p_.out) + at.row * p_.out_row_stride + head * p_.out_head_stride;
      uint32_t* pairs = reinterpret_cast<uint32_t*>(out) + lane_ % 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 acc = total(half, n);
        pairs[n * 4] = refused ? 0 : pack_pair<T>(mul_rn(acc.x, inverse), mul_rn(acc.y, inverse));
      }
      if (p_.lse != nullptr && lane_ % 4 == 0) {
        p_.lse[at.row * p_.lse_stride + head] = refused ? -INFINITY : lse_of(softmax);
      }
    }
  }

  const Launch& l_;
  const TreeAttentionParams& p_;
  const Request& r_;
  const int64_t kv_head_, row_;
  Shared<kDim, kWarps>& shared_;
  RingPlace<kRing>& place_;
  int num_rows_, warp_, lane_;
  int bad_from_;
  Queries<kDim> queries_;
  Fragment<kDim> part_;
  Softmax total_softmax_[2];
};

}  // namespace tlt
