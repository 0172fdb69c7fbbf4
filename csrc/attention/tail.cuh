// The last keys of one row, for the query heads of one kv head: one warp, float32, SIMT.
//
// Lane j holds tail key j. A score is one chain of fma over the head; weights are summed by a
// butterfly over the lanes. Values are read 16 bytes a lane, so a few keys at once (2 or 4, by the
// head): each group of lanes adds every 2nd or 4th key in order, and a butterfly adds the groups.
// Reads up to 32 keys and values from wherever their slots are, and checks everything that the row
// depends on.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"

namespace tlt {

// What lane j reads: the slot of tail key j. Returns status bits, the same in every lane.
struct TailKey {
  int64_t begin;  // position of key 0
  int count;      // keys of the tail
  Place place;    // of this lane's key, where lane < count
};

__device__ __forceinline__ int32_t find_tail_key(const TreeAttentionParams& p, const Request& r,
                                                 int64_t row, int lane, TailKey* key) {
  const Sequences& s = p.sequences;
  const int64_t position = p.position[r.row + row], own_slot = r.slot + row;
  if (!well_placed(p, r, row, position)) return kStatusBadLength;
  key->begin = tail_begin(position);
  key->count = static_cast<int>(position - key->begin) + 1;
  int64_t slot = key->begin + lane;
  if (p.ancestors != nullptr) {
    const int64_t depth = position - r.context;
    const uint8_t* ancestors = p.ancestors + (r.row + row) * p.ancestor_stride;
    const int ancestor = lane < depth ? ancestors[lane] : 0;
    const int before = __shfl_up_sync(kFullWarp, ancestor, 1);
    // Rising and before the row itself: whatever the array holds, only older slots are read.
    const bool rising = lane == 0 || ancestor > before;
    const bool bad = lane < depth && (!rising || r.context + ancestor >= own_slot);
    if (__any_sync(kFullWarp, bad)) return kStatusBadTree;
    const int64_t in_flight = slot - r.context;  // -1 and less: a committed key
    const int index = in_flight >= 0 && in_flight < depth ? static_cast<int>(in_flight) : 0;
    const int ancestor_slot = __shfl_sync(kFullWarp, ancestor, index);
    if (in_flight >= 0) slot = in_flight < depth ? r.context + ancestor_slot : own_slot;
  }
  const int32_t bits = lane < key->count ? locate(s, r.index, slot, &key->place) : kStatusOk;
  return static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bits)));
}

// Eight storage values as float32.
template <typename T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = as_float32(reinterpret_cast<const T*>(&raw)[i]);
}

constexpr int kHeadsAtOnce = 4;
static_assert(kMaxGroup % kHeadsAtOnce == 0);

// Shared memory of one warp's tail.
template <int kDim>
struct TailScratch {
  uint4 keys[kTailKeys][kDim / 8 + 1];  // padded: a lane reads a key of its own
  float query[kHeadsAtOnce][kDim];
  float weight[kMaxGroup][kTailKeys];
};

// Copies the tail's keys or values, `stride` vectors apart; a few lanes a key.
template <typename T, int kDim>
__device__ __forceinline__ void stage_tail(const PagedCache& cache, const TailKey& key,
                                           int64_t kv_head, uint4* to, int stride) {
  constexpr int kLanesAKey = kDim / 8, kKeysAtOnce = kWarpSize / kLanesAKey;
  const int lane = threadIdx.x % kWarpSize, vector = lane % kLanesAKey;
  const T* from = static_cast<const T*>(cache.data) + kv_head * cache.head_stride + vector * 8;
  const int64_t offset = key.place.page * cache.page_stride + key.place.offset * cache.slot_stride;
#pragma unroll 4
  for (int first = 0; first < kTailKeys; first += kKeysAtOnce) {
    const int j = first + lane / kLanesAKey;
    const int64_t at = __shfl_sync(kFullWarp, offset, j);  // 0 where there is no key
    copy_async_16(shared_address(to + j * stride + vector), from + at, j < key.count);
  }
  commit_copies();
}

// Writes the partial of head h of the group: softmax to softmax[h], accumulator to
// acc[h * acc_stride]. `report_bits` has one warp of all that see the row report its status.
// `values` may be null: the values then take the place of the keys, and come after them.
template <typename T, int kDim>
__device__ __forceinline__ void attend_tail(const TreeAttentionParams& p, const Request& r,
                                            int64_t row, int64_t kv_head, int group,
                                            bool report_bits, TailScratch<kDim>* scratch,
                                            uint4* values, Softmax* softmax, float* acc,
                                            int64_t acc_stride) {
  constexpr int kLanesAKey = kDim / 8, kKeysAtOnce = kWarpSize / kLanesAKey;
  const int lane = threadIdx.x % kWarpSize;
  TailKey key{};
  if (const int32_t bits = find_tail_key(p, r, row, lane, &key)) {
    if (report_bits && lane == 0) report_on_device(p.sequences, r.index, bits);
    if (lane < group) softmax[lane] = {-INFINITY, -1.0f};
    return;
  }
  __syncwarp();  // the warp's last row is done with the scratch
  stage_tail<T, kDim>(p.k, key, kv_head, scratch->keys[0], kDim / 8 + 1);
  if (values != nullptr) stage_tail<T, kDim>(p.v, key, kv_head, values, kDim / 8);
  const T* q = static_cast<const T*>(p.q) + (r.row + row) * p.q_row_stride +
               kv_head * group * p.q_head_stride;
  const float log2_scale = mul_rn(p.scale, kInvLn2);
  for (int first = 0; first < group; first += kHeadsAtOnce) {  // heads past the group are zeros
    __syncwarp();
    for (int i = lane; i < kHeadsAtOnce * kLanesAKey; i += kWarpSize) {
      const int h = i / kLanesAKey, d = i % kLanesAKey * 8;
      float dims[8] = {};
      if (first + h < group) {
        unpack<T>(*reinterpret_cast<const uint4*>(q + (first + h) * p.q_head_stride + d), dims);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) scratch->query[h][d + n] = dims[n];
    }
    if (first == 0) wait_copies<0>();
    __syncwarp();
    float score[kHeadsAtOnce] = {};
#pragma unroll 2
    for (int d = 0; d < kDim / 8; ++d) {
      float dims[8];
      unpack<T>(scratch->keys[lane][d], dims);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const float4* query = reinterpret_cast<const float4*>(&scratch->query[h][d * 8]);
        const float4 low = query[0], high = query[1];
        score[h] = fma_rn(low.x, dims[0], score[h]);
        score[h] = fma_rn(low.y, dims[1], score[h]);
        score[h] = fma_rn(low.z, dims[2], score[h]);
        score[h] = fma_rn(low.w, dims[3], score[h]);
        score[h] = fma_rn(high.x, dims[4], score[h]);
        score[h] = fma_rn(high.y, dims[5], score[h]);
        score[h] = fma_rn(high.z, dims[6], score[h]);
        score[h] = fma_rn(high.w, dims[7], score[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      const float x = lane < key.count ? mul_rn(score[h], log2_scale) : -INFINITY;
      const float max = warp_max_all(x);
      const float weight = exp2_fast(add_rn(x, -finite_max(max)));
      const float sum = warp_sum_all(weight);
      scratch->weight[first + h][lane] = weight;
      if (lane == h && first + h < group) softmax[first + h] = {max, sum};
    }
  }
  if (values == nullptr) {
    values = scratch->keys[0];
    __syncwarp();  // all are done with the keys
    stage_tail<T, kDim>(p.v, key, kv_head, values, kDim / 8);
    wait_copies<0>();
  }
  __syncwarp();
  for (int first = 0; first < group; first += kHeadsAtOnce) {
    float out[kHeadsAtOnce][8] = {};
#pragma unroll 2
    for (int n = 0; n < kTailKeys; n += kKeysAtOnce) {  // keys past the tail: zero times zero
      const int j = n + lane / kLanesAKey;
      float value[8];
      unpack<T>(values[j * kLanesAKey + lane % kLanesAKey], value);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const float weight = scratch->weight[first + h][j];
#pragma unroll
        for (int i = 0; i < 8; ++i) out[h][i] = fma_rn(weight, value[i], out[h][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int lanes = kLanesAKey; lanes < kWarpSize; lanes *= 2) {
          out[h][i] = add_rn(out[h][i], __shfl_xor_sync(kFullWarp, out[h][i], lanes));
        }
      }
      if (lane >= kLanesAKey || first + h >= group) continue;
      float4* to = reinterpret_cast<float4*>(acc + (first + h) * acc_stride + lane * 8);
      to[0] = make_float4(out[h][0], out[h][1], out[h][2], out[h][3]);
      to[1] = make_float4(out[h][4], out[h][5], out[h][6], out[h][7]);
    }
  }
}

}  // namespace tlt
