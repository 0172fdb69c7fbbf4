// Like FewTile, for 128 dimensions: keys and values are the first operands of mma.sync and the
// pairs are its 8 columns, so no registers hold empty rows. A lane has the scores and accumulators
// of pairs 2 (lane % 4) and the next ("its columns"), but the queries, packed weights and sums of
// pair lane / 4. The products of an output are added in the order of FewTile, so the results are
// bit-identical.
#pragma once

#include "attention/few.cuh"

namespace tlt {

// Transposes a matrix of 8 x 8 floats: a lane holds columns 2 (lane % 4) and the next of row
// lane / 4, before and after. Called by whole warps.
__device__ __forceinline__ void transpose_matrix(float* even, float* odd) {
  const auto transposed = [](uint32_t halves) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(halves));
    return halves;
  };
  const uint32_t low = transposed(__byte_perm(as_bits(*even), as_bits(*odd), 0x5410));
  const uint32_t high = transposed(__byte_perm(as_bits(*even), as_bits(*odd), 0x7632));
  *even = as_float(__byte_perm(low, high, 0x5410));
  *odd = as_float(__byte_perm(low, high, 0x7632));
}

template <typename T, int kDim>
class FewKeysTile {
 public:
  static constexpr int kColumns = kDim / kFewWarps / 8;  // tiles of 8 dimensions of a warp

  // `query`: a lane's part of the queries. `end`: where the tile keys of its pair end.
  __device__ __forceinline__ FewKeysTile(const uint32_t (&query)[kDim / 16][2], int end,
                                         float factor, FewExchange* exchange)
      : query_(query),
        end_{of_column(end, 0), of_column(end, 1)},
        factor_(factor),
        exchange_(*exchange),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize) {
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& block : acc_) {
#pragma unroll
      for (float& x : block) x = 0.0f;
    }
    sum_ = 0.0f;
    max_[0] = max_[1] = own_max_ = -INFINITY;
  }

  // Of pair lane / 4.
  __device__ __forceinline__ Softmax softmax() const { return {own_max_, quad_sum(sum_)}; }

  // Gives each lane the accumulators of pair lane / 4; the next call is `clear`.
  __device__ __forceinline__ void arrange() {
#pragma unroll
    for (auto& block : acc_) {
      transpose_matrix(&block[0], &block[1]);
      transpose_matrix(&block[2], &block[3]);
    }
  }

  // After `arrange`, of column tile n of the warp: dimensions 8 n + 2 (lane % 4) and the next one.
  __device__ __forceinline__ float2 acc(int n) const {
    return make_float2(acc_[n / 2][n % 2 * 2], acc_[n / 2][n % 2 * 2 + 1]);
  }

  // Scores the warp's 16 of the keys at `keys`, positions from `key` on.
  __device__ __forceinline__ void fold_keys(int key, uint32_t keys) {
    const int row = warp_ * kStep + lane_ % 16, chunk = lane_ / 16;
#pragma unroll
    for (float& x : weight_) x = 0.0f;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, keys + chunk_offset(row, step * 2 + chunk));
      mma_16816<T>(weight_, a, query_[step][0], query_[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key + warp_ * kStep >= end_[i % 2]) weight_[i] = -INFINITY;
    }
  }

  // As in FewTile.
  template <typename F>
  __device__ __forceinline__ void weigh_keys(F&& release) {
    const int own = lane_ / 4, column = lane_ % 4;
    float max[2], rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = fmaxf(weight_[i], weight_[i + 2]);
#pragma unroll
      for (int lanes = 4; lanes < kWarpSize; lanes *= 2) {
        max[i] = fmaxf(max[i], __shfl_xor_sync(kFullWarp, max[i], lanes));
      }
      if (lane_ < 4) exchange_.max[warp_][2 * column + i] = max[i];
    }
    meet();
    release();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = 2 * column + i;
      max[i] = fmaxf(max_[i], mul_rn(exchange_.largest(pair), factor_));
      const float base = finite_max(max[i]);
      rescale[i] = exp2_fast(add_rn(max_[i], -base));
      max_[i] = max[i];
      auto* const to = reinterpret_cast<float*>(exchange_.weight[pair]) + warp_ * kStep + own;
      to[0] = exp2_fast(fma_rn(weight_[i], factor_, -base));
      to[8] = exp2_fast(fma_rn(weight_[i + 2], factor_, -base));
    }
    own_max_ = of_own_pair(max);
    const float own_rescale = of_own_pair(rescale);
#pragma unroll
    for (auto& block : acc_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) block[i] = mul_rn(block[i], rescale[i % 2]);
    }
    meet();
    sum_ = fma_rn(sum_, own_rescale, exchange_.pack_weights<T>(own, column, packed_));
  }

  // As in FewTile.
  __device__ __forceinline__ void fold_values(int key, uint32_t values, float2* sink) {
    const int row = lane_ % 8 + lane_ / 16 * 8, chunk = warp_ * kColumns + lane_ / 8 % 2;
    float full[kColumns / 2][4];
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) full[n][i] = acc_[n][i];
    }
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) {
        uint32_t a[4];
        load_matrices_transposed(a, values + chunk_offset(step * kStep + row, chunk + n * 2));
        mma_16816<T>(full[n], a, packed_[2 * step], packed_[2 * step + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + step * kStep < end_[i % 2]) acc_[n][i] = full[n][i];
        }
      }
    }
    float used[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) used[n % 2] += full[n][0];
    store_in_order(sink, used);
  }

 private:
  __device__ __forceinline__ void meet() const { sync_threads<2, kFewWarps * kWarpSize>(); }

  // Of column i of a lane, from the lanes of that pair.
  __device__ __forceinline__ static int of_column(int x, int i) {
    return __shfl_sync(kFullWarp, x, (threadIdx.x % 4 * 2 + i) * 4);
  }
  // Of the columns of a lane, the value of pair lane / 4.
  __device__ __forceinline__ float of_own_pair(const float (&x)[2]) const {
    const float even = __shfl_sync(kFullWarp, x[0], lane_ / 8);
    const float odd = __shfl_sync(kFullWarp, x[1], lane_ / 8);
    return lane_ / 4 % 2 ? odd : even;
  }

  const uint32_t (&query_)[kDim / 16][2];
  const int end_[2];  // of its columns
  const float factor_;
  FewExchange& exchange_;
  const int warp_, lane_;
  float acc_[kColumns / 2][4];  // dimensions lane / 4 (i < 2) or 8 more of 16, of column i % 2
  float sum_;                   // of pair lane / 4, this lane's part of the keys
  float max_[2], own_max_;      // of its columns, of pair lane / 4
  float weight_[4];             // first the scores: keys lane / 4 (i < 2) or 8 more, column i % 2
  uint32_t packed_[kTile / 8];  // weights of all keys
};

}  // namespace tlt
