// Folds tiles into at most eight (row, head) pairs by four warps together, for decoding, where all
// pairs would be in one warp of WarpTile. A warp scores 16 of a tile's 64 keys and accumulates a
// quarter of the dimensions, so a lane computes 4 softmax weights instead of 32. The weights go
// through shared memory, and each warp adds them in the order of WarpTile, so the results are
// bit-identical.
//
// Fragments are those of tiles.cuh; pairs are the low rows, and the high rows are zeros.
#pragma once

#include "attention/tiles.cuh"

namespace tlt {

constexpr int kFewPairs = 8, kFewWarps = 4;

// What the warps exchange for a tile. Two barriers a tile suffice: maxima are written before the
// first and read before the second, weights are written between both and read after the second.
struct FewExchange {
  float max[kFewWarps][kFewPairs];
  float2 weight[kFewPairs][kTile / 2 + 4];  // padded: the reads of a half-warp hit all banks

  // The largest score of a pair in the tile.
  __device__ __forceinline__ float largest(int pair) const {
    float largest = max[0][pair];
#pragma unroll
    for (int warp = 1; warp < kFewWarps; ++warp) largest = fmaxf(largest, max[warp][pair]);
    return largest;
  }

  // Packs the weights of a pair that a lane multiplies, two in each word. Returns their sum.
  template <typename T>
  __device__ __forceinline__ float pack_weights(int pair, int column,
                                                uint32_t (&packed)[kTile / 8]) const {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const float2 two = weight[pair][n * 4 + column];
      sum = add_rn(add_rn(sum, two.x), two.y);
      packed[n] = pack_pair<T>(two.x, two.y);
    }
    return sum;
  }
};

template <typename T, int kDim>
class FewTile {
 public:
  static constexpr int kColumns = kDim / kFewWarps / 8;  // tiles of 8 dimensions of a warp

  // `query`: a lane's part of the queries. `end`: where the tile keys of its pair end.
  __device__ __forceinline__ FewTile(const uint32_t (&query)[kDim / 16][2], int end, float factor,
                                     FewExchange* exchange)
      : query_(query),
        end_(end),
        factor_(factor),
        exchange_(*exchange),
        warp_(threadIdx.x / kWarpSize),
        lane_(threadIdx.x % kWarpSize) {
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float2& two : acc_) two = make_float2(0.0f, 0.0f);
    sum_ = 0.0f;
    max_ = -INFINITY;
  }

  __device__ __forceinline__ Softmax softmax() const { return {max_, quad_sum(sum_)}; }

  // The lanes have the accumulators of their pairs already.
  __device__ __forceinline__ void arrange() const {}

  // Of column tile n of the warp: dimensions 8 n + 2 (lane % 4) and the next one.
  __device__ __forceinline__ const float2& acc(int n) const { return acc_[n]; }

  // Scores the warp's 16 of the keys at `keys`, positions from `key` on.
  __device__ __forceinline__ void fold_keys(int key, uint32_t keys) {
    const int row = warp_ * kStep + lane_ % 8 + lane_ / 16 * 8, chunk = lane_ / 8 % 2;
    float score[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const uint32_t a[4] = {query_[step][0], 0, query_[step][1], 0};
      uint32_t b[4];
      load_matrices(b, keys + chunk_offset(row, step * 2 + chunk));
      mma_16816<T>(score[0], a, b[0], b[1]);
      mma_16816<T>(score[1], a, b[2], b[3]);
    }
    const bool inside = key + warp_ * kStep < end_;
#pragma unroll
    for (int i = 0; i < 4; ++i) weight_[i] = inside ? score[i / 2][i % 2] : -INFINITY;
  }

  // Turns the scores into weights. Calls `release` once all warps have scores, not right after the
  // loads of the keys were issued: they may wait in a queue, and the next tensor copy into this
  // memory would overtake them.
  template <typename F>
  __device__ __forceinline__ void weigh_keys(F&& release) {
    const int pair = lane_ / 4, column = lane_ % 4;
    const float largest =
        quad_max(fmaxf(fmaxf(weight_[0], weight_[1]), fmaxf(weight_[2], weight_[3])));
    if (column == 0) exchange_.max[warp_][pair] = largest;
    meet();
    release();
    const float max = fmaxf(max_, mul_rn(exchange_.largest(pair), factor_));
    const float base = finite_max(max), rescale = exp2_fast(add_rn(max_, -base));
    max_ = max;
#pragma unroll
    for (float& x : weight_) x = exp2_fast(fma_rn(x, factor_, -base));
    float2* to = &exchange_.weight[pair][warp_ * (kStep / 2) + column];
    to[0] = make_float2(weight_[0], weight_[1]);
    to[4] = make_float2(weight_[2], weight_[3]);
#pragma unroll
    for (float2& two : acc_) two = make_float2(mul_rn(two.x, rescale), mul_rn(two.y, rescale));
    meet();
    sum_ = fma_rn(sum_, rescale, exchange_.pack_weights<T>(pair, column, packed_));
  }

  // A pair whose keys have ended keeps its accumulators whatever the values are. The store to
  // `sink`, which is never read, depends on all products, so the caller releases the values after
  // their use.
  __device__ __forceinline__ void fold_values(int key, uint32_t values, float2* sink) {
    float full[kColumns][4];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      full[n][0] = acc_[n].x;
      full[n][1] = acc_[n].y;
      full[n][2] = full[n][3] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      const uint32_t a[4] = {packed_[2 * step], 0, packed_[2 * step + 1], 0};
      const bool inside = key + step * kStep < end_;
#pragma unroll
      for (int n = 0; n < kColumns; n += 2) {
        const int chunk = warp_ * kColumns + n + lane_ / 16;
        uint32_t b[4];
        load_matrices_transposed(b, values + chunk_offset(step * kStep + lane_ % 16, chunk));
        mma_16816<T>(full[n], a, b[0], b[1]);
        mma_16816<T>(full[n + 1], a, b[2], b[3]);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (inside) acc_[n] = make_float2(full[n][0], full[n][1]);
      }
    }
    float used[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kColumns; ++n) used[n % 2] += full[n][0];
    store_in_order(sink, used);
  }

 private:
  __device__ __forceinline__ void meet() const { sync_threads<2, kFewWarps * kWarpSize>(); }

  const uint32_t (&query_)[kDim / 16][2];
  const int end_;
  const float factor_;
  FewExchange& exchange_;
  const int warp_, lane_;
  float2 acc_[kColumns];
  float sum_, max_;             // sum: of this lane's columns
  float weight_[4];             // first the scores
  uint32_t packed_[kTile / 8];  // weights of all keys
};

}  // namespace tlt
