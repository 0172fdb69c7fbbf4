// The last keys of one row, for the query heads of one kv head: one warp, mma.sync.
//
// Keys and values are gathered from their slots in position order, so that tail key j is column j
// of the scores whatever its slot is. Of the 16 rows of an MMA the first ones are the query heads
// and the others are zeros. Checks everything that the row depends on.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"

namespace tlt {

// What lane j reads: the slot of tail key j.
struct TailKey {
  int64_t begin;  // position of key 0
  int count;      // keys of the tail
  Place place;    // of this lane's key, where lane < count
};

// Returns status bits, the same in all lanes. `locate_slot(slot, &place)` finds a slot's page and
// returns a status bit.
template <typename Locate>
__device__ __forceinline__ int32_t find_tail_key(const TreeAttentionParams& p, const Request& r,
                                                 int64_t row, int lane, Locate&& locate_slot,
                                                 TailKey* key) {
  const uint8_t* ancestors = p.ancestors + (r.row + row) * p.ancestor_stride;
  const bool has_ancestor = p.ancestors != nullptr && lane < kMaxDepth;
  int ancestor = has_ancestor ? ancestors[lane] : 0;  // loaded together with the position
  const int64_t position = p.position[r.row + row], own_slot = r.slot + row;
  if (!is_valid_row(p, r, row, position)) return kStatusBadLength;
  key->begin = tail_begin(position);
  key->count = static_cast<int>(position - key->begin) + 1;
  int64_t slot = key->begin + lane;
  if (p.ancestors != nullptr) {
    const int64_t depth = position - r.context;
    if (lane >= depth) ancestor = 0;
    const int before = __shfl_up_sync(kFullWarp, ancestor, 1);
    // Slots must rise and precede the row: whatever the array holds, only older slots are read.
    const bool rising = lane == 0 || ancestor > before;
    const bool bad = lane < depth && (!rising || r.context + ancestor >= own_slot);
    if (__any_sync(kFullWarp, bad)) return kStatusBadTree;
    const int64_t in_flight = slot - r.context;  // negative: a committed key
    const int index = in_flight >= 0 && in_flight < depth ? static_cast<int>(in_flight) : 0;
    const int ancestor_slot = __shfl_sync(kFullWarp, ancestor, index);
    if (in_flight >= 0) slot = in_flight < depth ? r.context + ancestor_slot : own_slot;
  }
  const int32_t bits = lane < key->count ? locate_slot(slot, &key->place) : kStatusOk;
  return static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bits)));
}

// Shared memory of one warp's tail; padded, so that ldmatrix has no bank conflicts.
template <int kDim>
struct TailScratch {
  static constexpr int kStride = kDim / 8 + 1;
  uint4 keys[kTailKeys][kStride], values[kTailKeys][kStride];
};

// A lane's part of a tail: of head lane / 4, dimensions 8 n + 2 (lane % 4) and the next.
template <int kDim>
struct Tail {
  Softmax softmax;
  float2 acc[kDim / 8];
};

// Copies the tail's keys or values; a few lanes per key.
template <typename T, int kDim>
__device__ __forceinline__ void stage_tail(const PagedCache& cache, const TailKey& key,
                                           int64_t kv_head, uint4 (*to)[kDim / 8 + 1]) {
  constexpr int kLanesAKey = kDim / 8, kKeysAtOnce = kWarpSize / kLanesAKey;
  const int lane = threadIdx.x % kWarpSize, vector = lane % kLanesAKey;
  const T* from = static_cast<const T*>(cache.data) + kv_head * cache.head_stride + vector * 8;
  const int64_t offset = key.place.page * cache.page_stride + key.place.offset * cache.slot_stride;
#pragma unroll 4
  for (int first = 0; first < kTailKeys; first += kKeysAtOnce) {
    const int j = first + lane / kLanesAKey;
    const int64_t at = __shfl_sync(kFullWarp, offset, j);  // 0 without a key
    copy_async_16(shared_address(&to[j][vector]), from + at, j < key.count);
  }
  commit_copies();
}

// Scores of a staged tail: keys 8 n + 2 (lane % 4) and the next in score[n][0] and [1].
template <typename T, int kDim>
__device__ __forceinline__ void score_tail(const uint32_t (&query)[kDim / 16][2],
                                           const TailScratch<kDim>& scratch,
                                           float (&score)[kTailKeys / 8][4]) {
  const int lane = threadIdx.x % kWarpSize, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t a[4] = {query[step][0], 0, query[step][1], 0};
#pragma unroll
    for (int n = 0; n < kTailKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, shared_address(&scratch.keys[n * 16 + row][step * 2 + chunk]));
      mma_16816<T>(score[2 * n], a, b[0], b[1]);
      mma_16816<T>(score[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Turns scores into weights.
__device__ __forceinline__ Softmax weigh_tail(float (&score)[kTailKeys / 8][4], float factor,
                                              int count) {
  const int first = threadIdx.x % 4 * 2;
  float max = -INFINITY;
#pragma unroll
  for (int n = 0; n < kTailKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * n + first + i >= count) score[n][i] = -INFINITY;
      max = fmaxf(max, score[n][i]);
    }
  }
  Softmax softmax;
  softmax.max = mul_rn(quad_max(max), factor);
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTailKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[n][i] = exp2_fast(fma_rn(score[n][i], factor, -finite_max(softmax.max)));
      sum = add_rn(sum, score[n][i]);
    }
  }
  softmax.sum = quad_sum(sum);
  return softmax;
}

// Accumulates the staged values. Keys past the tail contribute zero times zero.
template <typename T, int kDim>
__device__ __forceinline__ void add_tail_values(const float (&weight)[kTailKeys / 8][4],
                                                const TailScratch<kDim>& scratch,
                                                float2 (&acc)[kDim / 8]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kDim / 16; ++n) {
    float out[2][4] = {};
#pragma unroll
    for (int step = 0; step < kTailKeys / 16; ++step) {
      const uint32_t a[4] = {pack_pair<T>(weight[2 * step][0], weight[2 * step][1]), 0,
                             pack_pair<T>(weight[2 * step + 1][0], weight[2 * step + 1][1]), 0};
      uint32_t b[4];
      const uint4* from = &scratch.values[step * 16 + lane % 16][n * 2 + lane / 16];
      load_matrices_transposed(b, shared_address(from));
      mma_16816<T>(out[0], a, b[0], b[1]);
      mma_16816<T>(out[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) acc[2 * n + i] = make_float2(out[i][0], out[i][1]);
  }
}

// The tail of one row; if it cannot be computed, its sum is negative and the status is set. kWaits:
// finds the keys first, waits for the previous kernel, and then reads what it wrote.
template <typename T, int kDim, bool kWaits = false>
__device__ __forceinline__ void attend_tail(const TreeAttentionParams& p, const Request& r,
                                            int64_t row, int64_t kv_head, int group, int page_shift,
                                            TailScratch<kDim>* scratch, Tail<kDim>* tail) {
  const int lane = threadIdx.x % kWarpSize, head = lane / 4;
  const ScoreScale scale(p.scale);
  uint32_t query[kDim / 16][2];
  const auto read_query = [&] {
    const T* q = static_cast<const T*>(p.q) + (r.row + row) * p.q_row_stride +
                 (kv_head * group + head) * p.q_head_stride;
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q) + lane % 4;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        query[step][i] = head < group ? pairs[step * 8 + i * 4] ^ scale.flip : 0;
      }
    }
  };
  if constexpr (!kWaits) read_query();
  TailKey key{};
  const auto locate_slot = [&](int64_t slot,
                               Place* place) -> int32_t {  // `locate` without divisions
    const Sequences& s = p.sequences;
    if (slot < 0 || slot >= s.max_pages << page_shift) return kStatusBadLength;
    const int64_t page = s.block_table[r.index * s.table_stride + (slot >> page_shift)];
    if (page < 0 || page >= s.num_pages) return kStatusBadPage;
    *place = {page, slot & ((1 << page_shift) - 1)};
    return kStatusOk;
  };
  const int32_t bits = find_tail_key(p, r, row, lane, locate_slot, &key);
  if constexpr (kWaits) {
    wait_for_prior_grid();
    read_query();
  }
  if (bits != kStatusOk) {
    if (kv_head == 0 && lane == 0) report_on_device(p.sequences, r.index, bits);
    tail->softmax.sum = -1.0f;
    return;
  }
  __syncwarp();  // the scratch of the warp's previous row is no longer used
  stage_tail<T, kDim>(p.k, key, kv_head, scratch->keys);
  stage_tail<T, kDim>(p.v, key, kv_head, scratch->values);
  float score[kTailKeys / 8][4] = {};
  wait_copies<1>();
  __syncwarp();
  score_tail<T, kDim>(query, *scratch, score);
  tail->softmax = weigh_tail(score, scale.factor, key.count);
  wait_copies<0>();
  __syncwarp();
  add_tail_values<T, kDim>(score, *scratch, tail->acc);
}

}  // namespace tlt
