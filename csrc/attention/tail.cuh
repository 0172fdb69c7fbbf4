// The last keys of one row, for the query heads of one kv head: one warp, mma.sync.
//
// Keys and values are gathered from their slots in position order, so that tail key j is column j
// of the scores whatever its slot is. Of the 16 rows of an MMA the first ones are the query heads,
// the others up to the eighth repeat the last head, and the rest are zeros. Checks everything that
// the row depends on.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"

namespace tlt {

// Finds the slots of a row's tail. Lane j calls locate_slot(slot of key j), which returns a status
// bit. Returns all status bits, the same in all lanes; `count` is set if the row is valid.
template <typename Locate>
__device__ __forceinline__ int32_t find_tail_keys(const TreeAttentionParams& p, const Request& r,
                                                  int row, int lane, Locate&& locate_slot,
                                                  int* count) {
  const uint8_t* ancestors = p.ancestors + (r.row + row) * p.ancestor_stride;
  const bool has_ancestor = p.ancestors != nullptr && lane < kMaxDepth;
  int ancestor = has_ancestor ? ancestors[lane] : 0;  // loaded together with the position
  const int position = p.position[r.row + row], own_slot = r.slot + row;
  if (!is_valid_row(p, r, row, position)) return kStatusBadLength;
  const int begin = tail_begin(position);
  *count = position - begin + 1;
  int slot = begin + lane;
  if (p.ancestors != nullptr) {
    const int depth = position - r.context;
    if (lane >= depth) ancestor = 0;
    const int before = __shfl_up_sync(kFullWarp, ancestor, 1);
    // Slots must rise and precede the row: whatever the array holds, only older slots are read.
    const bool rising = lane == 0 || ancestor > before;
    const bool bad = lane < depth && (!rising || r.context + ancestor >= own_slot);
    if (__any_sync(kFullWarp, bad)) return kStatusBadTree;
    const int in_flight = slot - r.context;  // negative: a committed key
    const int index = in_flight >= 0 && in_flight < depth ? in_flight : 0;
    const int ancestor_slot = __shfl_sync(kFullWarp, ancestor, index);
    if (in_flight >= 0) slot = in_flight < depth ? r.context + ancestor_slot : own_slot;
  }
  const int32_t bits = lane < *count ? locate_slot(slot) : kStatusOk;
  return static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bits)));
}

// Where the key and the value of a slot begin, for a kv head.
struct alignas(16) TailAddress {
  const void *key, *value;
};
static_assert(sizeof(TailAddress) == sizeof(uint4));
static_assert(kTailKeys == kWarpSize, "a lane finds one key");

// Keys or values in shared memory; padded, so that ldmatrix has no bank conflicts.
template <int kDim>
using TailRows = uint4[kTailKeys][kDim / 8 + 1];

// Shared memory of one warp's tail. The padding of a key holds its addresses.
template <int kDim>
struct TailScratch {
  TailRows<kDim> keys, values;

  __device__ __forceinline__ TailAddress& address(int key) {
    return *reinterpret_cast<TailAddress*>(&keys[key][kDim / 8]);
  }
};

// A lane's part of a tail: of head lane / 4, dimensions 8 n + 2 (lane % 4) and the next.
template <int kDim>
struct Tail {
  Softmax softmax;
  float2 acc[kDim / 8];
};

// Copies the keys or the values, whose addresses are in the scratch; a few lanes per key.
template <int kDim>
__device__ __forceinline__ void stage_tail(int count, TailScratch<kDim>* scratch,
                                           const void* TailAddress::* from, TailRows<kDim>* to) {
  constexpr int kLanesAKey = kDim / 8, kKeysAtOnce = kWarpSize / kLanesAKey, kBatch = 8;
  static_assert(kTailKeys % (kBatch * kKeysAtOnce) == 0);
  const int lane = threadIdx.x % kWarpSize, vector = lane % kLanesAKey;
#pragma unroll
  for (int first = lane / kLanesAKey; first < kTailKeys; first += kBatch * kKeysAtOnce) {
    const void* at[kBatch];  // all are read first: each copy would wait for its own
#pragma unroll
    for (int i = 0; i < kBatch; ++i) at[i] = scratch->address(first + i * kKeysAtOnce).*from;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int j = first + i * kKeysAtOnce;
      copy_async_16(shared_address(&(*to)[j][vector]), static_cast<const uint4*>(at[i]) + vector,
                    j < count);
    }
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
  const int left = count - threadIdx.x % 4 * 2;  // keys from the lane's first one on
  float max = -INFINITY;
#pragma unroll
  for (int n = 0; n < kTailKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (left <= 8 * n + i) score[n][i] = -INFINITY;
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
__device__ __forceinline__ void attend_tail(const TreeAttentionParams& p, const Request& r, int row,
                                            int kv_head, int group, int page_shift,
                                            TailScratch<kDim>* scratch, Tail<kDim>* tail) {
  const int lane = threadIdx.x % kWarpSize;
  const ScoreScale scale(p.scale);
  uint32_t query[kDim / 16][2];
  const auto read_query = [&] {
    const int head = min(lane / 4, group - 1);  // what is computed past the group is not used
    const T* q = static_cast<const T*>(p.q) + (r.row + row) * p.q_row_stride +
                 (kv_head * group + head) * p.q_head_stride;
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q) + lane % 4;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) query[step][i] = pairs[step * 8 + i * 4] ^ scale.flip;
    }
  };
  if constexpr (!kWaits) read_query();
  __syncwarp();  // the scratch of the warp's previous row is no longer used
  scratch->address(lane) = {p.k.data, p.v.data};       // past the tail nothing is read there
  const auto locate_slot = [&](int slot) -> int32_t {  // `locate` without divisions
    const Sequences& s = p.sequences;
    if (static_cast<unsigned>(slot) >= static_cast<unsigned>(p.num_slots)) return kStatusBadLength;
    const int page = s.block_table[r.index * s.table_stride + (slot >> page_shift)];
    if (page < 0 || page >= s.num_pages) return kStatusBadPage;
    const unsigned offset = slot & ((1 << page_shift) - 1);
    const auto address = [&](const PagedCache& cache) {
      return static_cast<const T*>(cache.data) + static_cast<unsigned>(page) * cache.page_stride +
             offset * cache.slot_stride + kv_head * cache.head_stride;
    };
    scratch->address(lane) = {address(p.k), address(p.v)};
    return kStatusOk;
  };
  int count = 0;
  const int32_t bits = find_tail_keys(p, r, row, lane, locate_slot, &count);
  if constexpr (kWaits) {
    wait_for_prior_grid();
    read_query();
  }
  if (bits != kStatusOk) {
    if (kv_head == 0 && lane == 0) report_on_device(p.sequences, r.index, bits);
    tail->softmax.sum = -1.0f;
    return;
  }
  __syncwarp();
  stage_tail(count, scratch, &TailAddress::key, &scratch->keys);
  stage_tail(count, scratch, &TailAddress::value, &scratch->values);
  float score[kTailKeys / 8][4] = {};
  wait_copies<1>();
  __syncwarp();
  score_tail<T, kDim>(query, *scratch, score);
  tail->softmax = weigh_tail(score, scale.factor, count);
  wait_copies<0>();
  __syncwarp();
  add_tail_values<T, kDim>(score, *scratch, tail->acc);
}

}  // namespace tlt
