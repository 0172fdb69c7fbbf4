// Shared by append_kv and linear_append: the slot of a row, and RoPE.
#pragma once

#include "common/device.cuh"
#include "common/mma.cuh"
#include "kv/params.h"

namespace tlt {

template <typename T>
__device__ __forceinline__ float rounded_to(float v) {
  return as_float32(as_storage<T>(v));
}

// RoPE of dimensions i and i + head_dim / 2. No contraction: the same bits as the CPU's.
__device__ __forceinline__ float2 rotated(float low, float high, float cosine, float sine) {
  return make_float2(add_rn(mul_rn(low, cosine), -mul_rn(high, sine)),
                     add_rn(mul_rn(high, cosine), mul_rn(low, sine)));
}

// Where a row is written, or why it cannot be written.
struct RowPlace {
  Place place;
  int64_t position;
  int32_t status;
};

__device__ __forceinline__ RowPlace place_row(const AppendKvParams& p, int64_t request, int64_t row,
                                              int64_t slot) {
  RowPlace at{};
  at.position = p.position[row];
  at.status = locate(p.sequences, request, slot, &at.place);
  if (at.position < 0 || at.position >= p.max_position) at.status |= kStatusBadLength;
  return at;
}

template <typename T>
__device__ __forceinline__ T* slot_of(const PagedCache& cache, const Place& place,
                                      int64_t kv_head) {
  return static_cast<T*>(cache.data) + place.page * cache.page_stride +
         place.offset * cache.slot_stride + kv_head * cache.head_stride;
}

// One head of (q | k | v): RoPE pairs the elements i and i + head_dim / 2 of a head.
struct HeadPair {
  int head, i;
};

// Where the two values of a pair are written: low[0] and low[head_dim / 2].
template <typename T>
struct PairOut {
  T* low = nullptr;   // null: not written
  bool zero = false;  // zeros are written
  bool turns = false;
};

template <typename T>
__device__ __forceinline__ PairOut<T> pair_out(const AppendKvParams& p, int64_t row,
                                               const HeadPair& pair, const RowPlace& at) {
  const int head = pair.head, i = pair.i;
  if (head < p.num_heads) {
    T* q = static_cast<T*>(p.q_out) + row * p.q_row_stride + head * p.q_head_stride;
    return {q + i, at.status != 0, true};
  }
  if (at.status) return {};
  if (head < p.num_heads + p.num_kv_heads) {
    return {slot_of<T>(p.k, at.place, head - p.num_heads) + i, false, true};
  }
  return {slot_of<T>(p.v, at.place, head - p.num_heads - p.num_kv_heads) + i, false, false};
}

// Four consecutive pairs of `rotated`, in words of two values.
template <typename T>
__device__ __forceinline__ void turn_4(uint32_t& low0, uint32_t& low1, uint32_t& high0,
                                       uint32_t& high1, const float4& cosine, const float4& sine) {
  const auto turn = [](uint32_t& low, uint32_t& high, float2 c, float2 s) {
    const float2 a = unpack<T>(low), b = unpack<T>(high);
    const float2 first = rotated(a.x, b.x, c.x, s.x), second = rotated(a.y, b.y, c.y, s.y);
    low = pack_pair<T>(first.x, second.x);
    high = pack_pair<T>(first.y, second.y);
  };
  turn(low0, high0, make_float2(cosine.x, cosine.y), make_float2(sine.x, sine.y));
  turn(low1, high1, make_float2(cosine.z, cosine.w), make_float2(sine.z, sine.w));
}

// Writes eight consecutive pairs of a head, 16 bits each; `cosines`: those of the first pair, if
// the head is rotated. See has_whole_chunks.
template <typename T>
__device__ __forceinline__ void store_pairs(const PairOut<T>& out, int half, uint4 low, uint4 high,
                                            const float* cosines) {
  if (out.low == nullptr) return;
  if (out.zero) {
    low = high = make_uint4(0, 0, 0, 0);
  } else if (out.turns) {
    const float4* cosine = reinterpret_cast<const float4*>(cosines);
    const float4* sine = reinterpret_cast<const float4*>(cosines + half);
    turn_4<T>(low.x, low.y, high.x, high.y, cosine[0], sine[0]);
    turn_4<T>(low.z, low.w, high.z, high.w, cosine[1], sine[1]);
  }
  *reinterpret_cast<uint4*>(out.low) = low;
  *reinterpret_cast<uint4*>(out.low + half) = high;
}

// Whether eight consecutive elements of a half head are one aligned chunk in all arrays.
inline bool has_whole_chunks(const AppendKvParams& p) {
  const auto address = [](const void* data) { return reinterpret_cast<uintptr_t>(data) / 2; };
  const auto of = [&](const PagedCache& c) {
    return address(c.data) | c.page_stride | c.slot_stride | c.head_stride;
  };
  const auto elements = address(p.q_out) | p.q_row_stride | p.q_head_stride | of(p.k) | of(p.v);
  return bytes_of(p.dtype) == 2 && (elements | p.head_dim / 2) % 8 == 0 &&
         (address(p.cos_sin) | 2 * p.cos_sin_stride) % 8 == 0;
}

}  // namespace tlt
