// Parts of the decode kernel: its tiles, a block's share of the weights, and the epilogue.
#pragma once

#include <algorithm>

#include "layers/linear.cuh"

namespace tlt {

// Each warp owns one part of K.
template <int kRowTiles_, int kStages_>
struct Decode {
  static constexpr int kTiles = 2;              // tiles of 16 weight rows
  static constexpr int kRowTiles = kRowTiles_;  // tiles of 8 rows of x
  static constexpr int kCols = 16 * kTiles, kRows = 8 * kRowTiles;
  static constexpr int kStages = kStages_;
  static constexpr int kChunks = 4 * kTiles;                   // a lane's share of one step
  static constexpr int kStage = kParts * kChunks * kWarpSize;  // chunks
  static constexpr int kSums = kParts * kRows * kCols;
  static constexpr int kSharedBytes = kSums * 4 + kStages * kStage * 16;
};
using Few = Decode<1, 3>;
using Many = Decode<2, 3>;
using ManyAppending = Decode<2, 2>;  // a smaller ring leaves room for RowPlaces
static_assert(Many::kRows == kPieceRows);

constexpr int kBlocksPerSm = 2;
static_assert(kBlocksPerSm * (Many::kSharedBytes + 1024 + 512) <= 228 * 1024,
              "shared memory of an SM");
static_assert(kBlocksPerSm *
                      (std::max(Few::kSharedBytes, ManyAppending::kSharedBytes) + 1024 + 4096) <=
                  228 * 1024,
              "shared memory of an SM");

// A block owns `base` weight rows (or pairs of them: pairs.cuh), and the first `extra` blocks own
// one more. Shares are equal because each SM gets an equal share of the card's bandwidth. A block
// divides its rows into equal tiles.
struct Shares {
  int base, extra;
};

struct Share {
  int64_t begin;
  int count, tiles, tile_count;
  __device__ Share(const Shares& shares, int max_tile) {
    const int c = blockIdx.x;
    begin = static_cast<int64_t>(c) * shares.base + min(c, shares.extra);
    count = shares.base + (c < shares.extra);
    tiles = (count + max_tile - 1) / max_tile;
    tile_count = tiles == 1 ? count : (count + tiles - 1) / tiles;
  }
  __device__ int first(int tile) const { return min(tile * tile_count, count); }
};

// A step of x for one lane: rows g and g + 8 of x, 8 of 32 elements each, twice.
template <typename T, int kRowTiles>
struct Rows {
  Chunk<T> x[kRowTiles][2];
  Chunk<T> norm_weight[2];  // used if x is normed
};

// Index in shared memory of a sum (x row, column) of a tile: the lanes of a warp hit 32 banks.
template <int kCols>
__device__ __forceinline__ int sum_index(int row, int col) {
  return (row * kCols + col) ^ (row / 2 % 4 * 8);
}

template <typename D>
__device__ __forceinline__ float tile_sum(const float* sums, int row, int col) {
  float part[kParts];
#pragma unroll
  for (int w = 0; w < kParts; ++w) {
    part[w] = sums[w * D::kRows * D::kCols + sum_index<D::kCols>(row, col)];
  }
  return sum_of_parts(part);
}

__device__ __forceinline__ uint4 shuffle(const uint4& v, int lane) {
  return make_uint4(__shfl_sync(kFullWarp, v.x, lane), __shfl_sync(kFullWarp, v.y, lane),
                    __shfl_sync(kFullWarp, v.z, lane), __shfl_sync(kFullWarp, v.w, lane));
}

// ---- epilogue -----------------------------------------------------------------------------------

// The values added to a sum, in their storage type, because a conversion would wait for the load.
// A thread loads its first ones early: nothing else hides their latency.
struct Added {
  uint32_t bias, residual;
};

__device__ __forceinline__ const void* residual_of(const LinearParams& p, int64_t at) {
  return static_cast<const char*>(p.residual) + (at << (p.out_dtype == DType::kFloat32 ? 2 : 1));
}

__device__ __forceinline__ uint32_t load_residual(const LinearParams& p, int64_t at) {
  return p.out_dtype == DType::kFloat32 ? static_cast<const uint32_t*>(p.residual)[at]
                                        : static_cast<const uint16_t*>(p.residual)[at];
}

__device__ __forceinline__ Added load_added(const LinearParams& p, int row, int64_t col) {
  Added added = {};
  if (p.bias) added.bias = static_cast<const uint16_t*>(p.bias)[col];
  if (p.residual) added.residual = load_residual(p, row * p.residual_stride + col);
  return added;
}

// The address of an output.
__device__ __forceinline__ char* out_of(const LinearParams& p, int64_t at) {
  return static_cast<char*>(p.out) + (at << (p.out_dtype == DType::kFloat32 ? 2 : 1));
}

template <typename T>
__device__ __forceinline__ void store_added(const LinearParams& p, char* to, float sum,
                                            const Added& added) {
  if (p.bias) sum += unpack<T>(added.bias).x;
  if (p.residual) {
    sum += p.out_dtype == DType::kFloat32 ? __uint_as_float(added.residual)
                                          : unpack<T>(added.residual).x;
  }
  if (p.out_dtype == DType::kFloat32) {
    *reinterpret_cast<float*>(to) = sum;
  } else {
    *reinterpret_cast<T*>(to) = as_storage<T>(sum);
  }
}

// Four neighbours, from a multiple of four on, of an array of 16-bit or, if `wide`, float32
// elements, unconverted.
template <typename T>
__device__ __forceinline__ uint4 load_four(const void* from, int64_t at, bool wide) {
  if (wide) return *reinterpret_cast<const uint4*>(static_cast<const float*>(from) + at);
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const T*>(from) + at);
  return make_uint4(words.x, words.y, 0, 0);
}

template <typename T>
__device__ __forceinline__ void add_four(float (&sum)[4], const uint4& v, bool wide) {
  const float2 low = unpack<T>(v.x), high = unpack<T>(v.y);
  sum[0] += wide ? __uint_as_float(v.x) : low.x;
  sum[1] += wide ? __uint_as_float(v.y) : low.y;
  sum[2] += wide ? __uint_as_float(v.z) : high.x;
  sum[3] += wide ? __uint_as_float(v.w) : high.y;
}

}  // namespace tlt
