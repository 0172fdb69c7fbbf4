// The last keys of one row, for the query heads of one kv head: one warp, float32, SIMT.
//
// Lane j holds tail key j. A score is one chain of fma over the head; weights are summed by a
// butterfly over the lanes; values are added one key after the other. Reads up to 32 keys and
// values from wherever their slots are, and checks everything that the row depends on.
#pragma once

#include "attention/canonical.cuh"

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
__device__ __forceinline__ void load8(const T* from, float (&to)[8]) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = as_float32(values[i]);
}

// Writes the partial of head h of the group: softmax to softmax[h], accumulator to
// acc[h * acc_stride]. `report_bits` has one warp of all that see the row report its status.
template <typename T, int kDim>
__device__ void attend_tail(const TreeAttentionParams& p, const Request& r, int64_t row,
                            int64_t kv_head, int group, bool report_bits, Softmax* softmax,
                            float* acc, int64_t acc_stride) {
  constexpr int kLaneDims = kDim / kWarpSize;  // each lane owns consecutive dimensions of values
  const int lane = threadIdx.x % kWarpSize;
  TailKey key{};
  if (const int32_t bits = find_tail_key(p, r, row, lane, &key)) {
    if (report_bits && lane == 0) report_on_device(p.sequences, r.index, bits);
    if (lane < group) softmax[lane] = {-INFINITY, -1.0f};
    return;
  }
  const auto offset_in = [&](const PagedCache& cache) {
    return key.place.page * cache.page_stride + key.place.offset * cache.slot_stride +
           kv_head * cache.head_stride;
  };
  const T* q = static_cast<const T*>(p.q) + (r.row + row) * p.q_row_stride +
               kv_head * group * p.q_head_stride;
  const T* k = static_cast<const T*>(p.k.data) + offset_in(p.k);
  const int64_t v_offset = offset_in(p.v);

  float score[kMaxGroup] = {};
  if (lane < key.count) {
#pragma unroll 4
    for (int d = 0; d < kDim; d += 8) {
      float key_dims[8];
      load8(k + d, key_dims);
#pragma unroll
      for (int h = 0; h < kMaxGroup; ++h) {
        if (h >= group) break;
        float query_dims[8];
        load8(q + h * p.q_head_stride + d, query_dims);
#pragma unroll
        for (int i = 0; i < 8; ++i) score[h] = fma_rn(query_dims[i], key_dims[i], score[h]);
      }
    }
  }
  const float log2_scale = mul_rn(p.scale, kInvLn2);
#pragma unroll
  for (int h = 0; h < kMaxGroup; ++h) {
    if (h >= group) break;
    const float x = lane < key.count ? mul_rn(score[h], log2_scale) : -INFINITY;
    const float max = warp_max_all(x);
    score[h] = exp2_fast(add_rn(x, -finite_max(max)));  // the weight from here on
    const float sum = warp_sum_all(score[h]);
    if (lane == h) softmax[h] = {max, sum};
  }

  float out[kMaxGroup][kLaneDims] = {};
  const T* values = static_cast<const T*>(p.v.data) + lane * kLaneDims;
#pragma unroll 8
  for (int j = 0; j < key.count; ++j) {
    const T* from = values + __shfl_sync(kFullWarp, v_offset, j);
    float value[kLaneDims];
    if constexpr (kLaneDims == 4) {
      const uint2 raw = *reinterpret_cast<const uint2*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = as_float32(reinterpret_cast<const T*>(&raw)[i]);
    } else {
      static_assert(kLaneDims == 2);
      const uint32_t raw = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int i = 0; i < 2; ++i) value[i] = as_float32(reinterpret_cast<const T*>(&raw)[i]);
    }
#pragma unroll
    for (int h = 0; h < kMaxGroup; ++h) {
      if (h >= group) break;
      const float weight = __shfl_sync(kFullWarp, score[h], j);
#pragma unroll
      for (int i = 0; i < kLaneDims; ++i) out[h][i] = fma_rn(weight, value[i], out[h][i]);
    }
  }
#pragma unroll
  for (int h = 0; h < kMaxGroup; ++h) {
    if (h >= group) break;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) acc[h * acc_stride + lane * kLaneDims + i] = out[h][i];
  }
}

}  // namespace tlt
