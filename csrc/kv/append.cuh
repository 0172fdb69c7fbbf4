// What append_kv and the linear that appends its own output share: a row's slot, and RoPE.
#pragma once

#include "common/device.cuh"
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

// Where a row belongs, or why it cannot be written.
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

}  // namespace tlt
