// Tiles of keys and values in shared memory, folded by a warp into its 16 rows.
//
// Fragments are those of mma.m16n8k16: lane 4 g + q holds rows g and g + 8 ("low" and "high") at
// columns 2 q and 2 q + 1 of each 8 columns. A row below means one (row, head) pair.
#pragma once

#include "attention/stream.cuh"

namespace tlt {

constexpr int kMmaRows = 16;
static_assert(kStep == 16, "an MMA folds 16 keys");

// What a warp folds tiles into: a partial softmax of its 16 rows since the split began.
template <int kDim>
struct Fragment {
  float acc[kDim / 8][4];
  float sum[4];  // one more column of values, all ones: sums the weights as the MMA does
  float max[2];  // of the low and the high row

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& column : acc) {
#pragma unroll
      for (float& x : column) x = 0.0f;
    }
#pragma unroll
    for (float& x : sum) x = 0.0f;
    max[0] = max[1] = -INFINITY;
  }
};

// The end of a row that is not there or not well placed: it never makes a step mixed, and its
// results are not used.
constexpr int kNoRow = INT32_MAX;

// The queries of a warp's rows and how far their tile keys go.
template <int kDim>
struct Queries {
  uint32_t q[kDim / 16][4];
  int end[2];             // tail_begin of the low and the high row
  int smallest, largest;  // over the warp's rows; largest 0: nothing to fold
};

template <typename T, int kDim>
class WarpTile {
 public:
  __device__ __forceinline__ WarpTile(const Queries<kDim>& queries, float log2_scale,
                                      Fragment<kDim>* fragment)
      : queries_(queries), log2_scale_(log2_scale), f_(*fragment), lane_(threadIdx.x % kWarpSize) {}

  // Turns the keys at `keys`, positions from `key` on, into weights.
  __device__ __forceinline__ void fold_keys(int key, uint32_t keys) {
    scores(keys, weight_);
    if (key + kTile > queries_.smallest) mask(key, weight_);
    weigh(weight_);
  }

  // Adds the values of those keys.
  __device__ __forceinline__ void fold_values(int key, uint32_t values) {
    if (key + kTile <= queries_.smallest) {
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) add_values<false>(key, step, values);
    } else {
#pragma unroll
      for (int step = 0; step < kTileSteps; ++step) add_values<true>(key, step, values);
    }
  }

 private:
  __device__ __forceinline__ void scores(uint32_t keys, float (&score)[kTile / 8][4]) {
    const int row = lane_ % 8 + lane_ / 16 * 8, chunk = lane_ / 8 % 2;
#pragma unroll
    for (auto& column : score) {
#pragma unroll
      for (float& x : column) x = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys + chunk_offset<kDim>(n * 16 + row, step * 2 + chunk));
        mma_16816<T>(score[2 * n], queries_.q[step], b[0], b[1]);
        mma_16816<T>(score[2 * n + 1], queries_.q[step], b[2], b[3]);
      }
    }
  }

  // A row's ends are multiples of kStep, so each pair of 8 columns is in or out as a whole.
  __device__ __forceinline__ void mask(int key, float (&score)[kTile / 8][4]) {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const int at = key + n / 2 * kStep;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at >= queries_.end[i / 2]) score[n][i] = -INFINITY;
      }
    }
  }

  // Scores become weights; what was folded before is scaled to the new maximum.
  __device__ __forceinline__ void weigh(float (&score)[kTile / 8][4]) {
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = f_.max[half];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        score[n][2 * half] = mul_rn(score[n][2 * half], log2_scale_);
        score[n][2 * half + 1] = mul_rn(score[n][2 * half + 1], log2_scale_);
        max = fmaxf(max, fmaxf(score[n][2 * half], score[n][2 * half + 1]));
      }
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
      const float base = finite_max(max);
      shrink[half] = exp2_fast(add_rn(f_.max[half], -base));
      f_.max[half] = max;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        score[n][2 * half] = exp2_fast(add_rn(score[n][2 * half], -base));
        score[n][2 * half + 1] = exp2_fast(add_rn(score[n][2 * half + 1], -base));
      }
    }
    // Times one changes nothing, so all of them are skipped where no maximum moved.
    if (__all_sync(kFullWarp, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (auto& column : f_.acc) column[i] = mul_rn(column[i], shrink[i / 2]);
      f_.sum[i] = mul_rn(f_.sum[i], shrink[i / 2]);
    }
  }

  // Adds 16 keys. kMixed: some rows may end before them, and keep what they have whatever the
  // values are (a weight of zero would still spread a NaN).
  template <bool kMixed>
  __device__ __forceinline__ void add_values(int key, int step, uint32_t values) {
    const int at = key + step * kStep;
    const uint32_t a[4] = {pack_pair<T>(weight_[2 * step][0], weight_[2 * step][1]),
                           pack_pair<T>(weight_[2 * step][2], weight_[2 * step][3]),
                           pack_pair<T>(weight_[2 * step + 1][0], weight_[2 * step + 1][1]),
                           pack_pair<T>(weight_[2 * step + 1][2], weight_[2 * step + 1][3])};
    const auto add = [&](float (&acc)[4], uint32_t b0, uint32_t b1) {
      if constexpr (kMixed) {
        float sum[4] = {acc[0], acc[1], acc[2], acc[3]};
        mma_16816<T>(sum, a, b0, b1);
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = at < queries_.end[i / 2] ? sum[i] : acc[i];
      } else {
        mma_16816<T>(acc, a, b0, b1);
      }
    };
    const uint32_t ones = pack_pair<T>(1.0f, 1.0f);
    add(f_.sum, ones, ones);
    const int row = step * kStep + lane_ % 16;
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values + chunk_offset<kDim>(row, n * 2 + lane_ / 16));
      add(f_.acc[2 * n], b[0], b[1]);
      add(f_.acc[2 * n + 1], b[2], b[3]);
    }
  }

  const Queries<kDim>& queries_;
  const float log2_scale_;
  Fragment<kDim>& f_;
  const int lane_;
  float weight_[kTile / 8][4];
};

}  // namespace tlt
