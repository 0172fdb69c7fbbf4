// The last keys of one row, for the query heads of one kv head: one warp, float32, SIMT.
//
// Lane j holds tail key j. A score is one chain of fma over the head; weights are summed by a
// butterfly over the lanes. Values are read 16 bytes a lane, so a few keys at once (2 or 4, by the
// head): each group of lanes adds every 2nd or 4th key in order, and a butterfly adds the groups.
// Reads up to 32 keys and values from wherever their slots are, and checks everything that the row
// depends on.
#pragma once

#include <type_traits>

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

// Keeps what is computed from a vector inside a loop: hoisted, the unpacked values would spill.
__device__ __forceinline__ void pin(uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void pin(uint2& v) {
  pin(v.x);
  pin(v.y);
}
__device__ __forceinline__ void pin(uint4& v) {
  pin(v.x);
  pin(v.y);
  pin(v.z);
  pin(v.w);
}

// Consecutive storage values of one vector load, as float32.
template <typename T, int kCount, typename Raw>
__device__ __forceinline__ void unpack(const Raw& raw, float (&to)[kCount]) {
  static_assert(sizeof(Raw) == kCount * sizeof(T));
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = as_float32(reinterpret_cast<const T*>(&raw)[i]);
}

constexpr int kHeadsAtOnce = 4;
static_assert(kMaxGroup % kHeadsAtOnce == 0);

template <int kDim>
constexpr int kTailScratch = kMaxGroup * kDim;  // floats of shared memory that a warp needs

// Writes the partial of head h of the group: softmax to softmax[h], accumulator to
// acc[h * acc_stride]. `report_bits` has one warp of all that see the row report its status.
template <typename T, int kDim>
__device__ __forceinline__ void attend_tail(const TreeAttentionParams& p, const Request& r,
                                            int64_t row, int64_t kv_head, int group,
                                            bool report_bits, float* scratch, Softmax* softmax,
                                            float* acc, int64_t acc_stride) {
  constexpr int kLaneDims = kDim / kWarpSize;  // of a query, per lane
  constexpr int kLanesAKey = kDim / 8, kKeysAtOnce = kWarpSize / kLanesAKey;
  using LaneVector = std::conditional_t<kLaneDims == 4, uint2, uint32_t>;
  const int lane = threadIdx.x % kWarpSize;
  const T* q = static_cast<const T*>(p.q) + (r.row + row) * p.q_row_stride +
               kv_head * group * p.q_head_stride + lane * kLaneDims;
  LaneVector query[kMaxGroup];
#pragma unroll
  for (int h = 0; h < kMaxGroup; ++h) {
    query[h] = {};
    if (h < group) query[h] = *reinterpret_cast<const LaneVector*>(q + h * p.q_head_stride);
  }
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
  __syncwarp();  // the warp's last row is done with the scratch
#pragma unroll
  for (int h = 0; h < kMaxGroup; ++h) {
    float dims[kLaneDims];
    unpack<T>(query[h], dims);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) scratch[h * kDim + lane * kLaneDims + i] = dims[i];
  }
  // All reads before the first use: they are far away, and a warp has few of them to overlap.
  const T* k = static_cast<const T*>(p.k.data) + offset_in(p.k);
  const T* v = static_cast<const T*>(p.v.data) + lane % kLanesAKey * 8;
  const int64_t v_offset = offset_in(p.v);
  uint4 keys[kDim / 8], values[kTailKeys / kKeysAtOnce];
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
    keys[d] = {};
    if (lane < key.count) keys[d] = reinterpret_cast<const uint4*>(k)[d];
  }
#pragma unroll
  for (int n = 0; n < kTailKeys / kKeysAtOnce; ++n) {
    const int j = n * kKeysAtOnce + lane / kLanesAKey;
    const T* from = v + __shfl_sync(kFullWarp, v_offset, j);
    values[n] = {};
    if (j < key.count) values[n] = *reinterpret_cast<const uint4*>(from);
  }
  __syncwarp();
  const float log2_scale = mul_rn(p.scale, kInvLn2);
  for (int first = 0; first < group; first += kHeadsAtOnce) {  // heads past the group are zeros
    float weight[kHeadsAtOnce] = {};
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      float key_dims[8];
      pin(keys[d]);
      unpack<T>(keys[d], key_dims);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const float4* q4 = reinterpret_cast<const float4*>(scratch + (first + h) * kDim + d * 8);
        const float4 low = q4[0], high = q4[1];
        weight[h] = fma_rn(low.x, key_dims[0], weight[h]);
        weight[h] = fma_rn(low.y, key_dims[1], weight[h]);
        weight[h] = fma_rn(low.z, key_dims[2], weight[h]);
        weight[h] = fma_rn(low.w, key_dims[3], weight[h]);
        weight[h] = fma_rn(high.x, key_dims[4], weight[h]);
        weight[h] = fma_rn(high.y, key_dims[5], weight[h]);
        weight[h] = fma_rn(high.z, key_dims[6], weight[h]);
        weight[h] = fma_rn(high.w, key_dims[7], weight[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      const float score = lane < key.count ? mul_rn(weight[h], log2_scale) : -INFINITY;
      const float max = warp_max_all(score);
      weight[h] = exp2_fast(add_rn(score, -finite_max(max)));
      const float sum = warp_sum_all(weight[h]);
      if (lane == h && first + h < group) softmax[first + h] = {max, sum};
    }
    float out[kHeadsAtOnce][8] = {};
#pragma unroll
    for (int n = 0; n < kTailKeys / kKeysAtOnce; ++n) {  // keys past the tail: zero times zero
      float value[8];
      pin(values[n]);
      unpack<T>(values[n], value);
#pragma unroll
      for (int h = 0; h < kHeadsAtOnce; ++h) {
        const float w = __shfl_sync(kFullWarp, weight[h], n * kKeysAtOnce + lane / kLanesAKey);
#pragma unroll
        for (int i = 0; i < 8; ++i) out[h][i] = fma_rn(w, value[i], out[h][i]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (first + h >= group) break;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int lanes = kLanesAKey; lanes < kWarpSize; lanes *= 2) {
          out[h][i] = add_rn(out[h][i], __shfl_xor_sync(kFullWarp, out[h][i], lanes));
        }
      }
      if (lane >= kLanesAKey) continue;
      float4* to = reinterpret_cast<float4*>(acc + (first + h) * acc_stride + lane * 8);
      to[0] = make_float4(out[h][0], out[h][1], out[h][2], out[h][3]);
      to[1] = make_float4(out[h][4], out[h][5], out[h][6], out[h][7]);
    }
  }
}

}  // namespace tlt
