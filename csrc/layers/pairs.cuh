// The epilogue of a linear: `After` of its kernels. If it takes sums in *pairs*, a block owns both
// weight rows of each: gate and up, or row i of a head and row i + head_dim / 2, which RoPE rotates
// together. Sums of q, k and v are then stored where `append_kv` would store them.
#pragma once

#include <type_traits>

#include "kv/append.cuh"
#include "layers/params.h"

namespace tlt {

struct Nothing {};  // out = sums
struct SiluMul {};  // out = products of activated gates and ups

template <typename After>
constexpr bool kAppends = std::is_same_v<After, AppendKvParams>;
template <typename After>
constexpr bool kPairs = !std::is_same_v<After, Nothing>;

// Low row of pair `pair` of the weight, and the distance from it to the high row.
__device__ __forceinline__ int64_t low_row(const SiluMul&, int64_t pair) { return pair; }

__device__ __forceinline__ int64_t rows_apart(const LinearParams& p, const SiluMul&) {
  return p.out_dim / 2;
}

__device__ __forceinline__ int64_t rows_apart(const LinearParams&, const AppendKvParams& p) {
  return p.head_dim / 2;
}

__device__ __forceinline__ HeadPair head_pair(const AppendKvParams& p, int64_t pair) {
  const int half = static_cast<int>(p.head_dim / 2), head = static_cast<int>(pair) / half;
  return {head, static_cast<int>(pair) - head * half};
}

__device__ __forceinline__ int64_t low_row(const AppendKvParams& p, const HeadPair& at) {
  return at.head * p.head_dim + at.i;
}

__device__ __forceinline__ int64_t low_row(const AppendKvParams& p, int64_t pair) {
  return low_row(p, head_pair(p, pair));
}

template <int kRows>
struct RowPlaces {
  int32_t request[kRows];  // -1 = no request
  RowPlace at[kRows];
};

// Called by one warp: looks up the requests and cache pages of `rows` rows from `first_row` on.
// Reports errors of all rows if requested.
template <int kRows>
__device__ __forceinline__ void find_places(const AppendKvParams& p, int64_t first_row, int rows,
                                            bool reports, RowPlaces<kRows>* places) {
  const Sequences& s = p.sequences;
  const int lane = threadIdx.x % kWarpSize;
  if (lane < rows) places->request[lane] = -1;
  __syncwarp();
  constexpr int kAhead = 4;  // requests of a lane whose rows are loaded at once
  for (int64_t first = lane; first < s.num_requests; first += kAhead * kWarpSize) {
    int64_t begin[kAhead] = {}, end[kAhead] = {};
    bool valid[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t request = first + i * kWarpSize;
      valid[i] = request >= s.num_requests || rows_of(s, request, &begin[i], &end[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t request = first + i * kWarpSize;
      if (!valid[i]) {
        if (reports) report_on_device(s, request, kStatusBadLength);
        continue;
      }
      const int64_t last = min(end[i], first_row + rows);
#pragma unroll 1
      for (int64_t row = max(begin[i], first_row); row < last; ++row) {
        places->request[row - first_row] = static_cast<int32_t>(request);
      }
    }
  }
  __syncwarp();
  if (lane < rows && places->request[lane] >= 0) {
    const int64_t request = places->request[lane], row = first_row + lane;
    const int64_t slot = first_slot(s, request) + row - s.row_start[request];
    places->at[lane] = place_row(p, request, row, slot);
    if (reports) report_on_device(s, request, places->at[lane].status);
  }
  __syncwarp();
}

// Cosine and sine of a pair at a valid position.
__device__ __forceinline__ float2 angle_of(const AppendKvParams& p, int64_t position, int i) {
  const float* from = p.cos_sin + position * p.cos_sin_stride + i;
  return make_float2(from[0], from[p.head_dim / 2]);
}

// Writes the two sums of a pair; `angle` is used only for heads that RoPE rotates.
template <typename T>
__device__ __forceinline__ void store_pair(const PairOut<T>& out, int half, float low, float high,
                                           float2 angle) {
  if (out.low == nullptr) return;
  if (out.zero) {
    out.low[0] = out.low[half] = as_storage<T>(0.0f);
    return;
  }
  low = rounded_to<T>(low);
  high = rounded_to<T>(high);
  const float2 v = out.turns ? rotated(low, high, angle.x, angle.y) : make_float2(low, high);
  out.low[0] = as_storage<T>(v.x);
  out.low[half] = as_storage<T>(v.y);
}

}  // namespace tlt
