// The blocks of the small and the mid linear: eight warps multiply, one part of K each. The
// appending forms have two more warps, the finishers, which meanwhile look up the destinations of
// the sums.
#pragma once

#include "layers/linear.cuh"
#include "layers/pairs.cuh"

namespace tlt {

constexpr int kMultipliers = kParts * kWarpSize;
constexpr int kFinishers = 2 * kWarpSize;

template <typename After>
constexpr int kBlockThreads = kMultipliers + kAppends<After> * kFinishers;

// Barriers of the multipliers, of the finishers, and of both; 0 is that of __syncthreads.
constexpr int kMultipliersBarrier = 1, kFinishersBarrier = 2, kSumsBarrier = 3;

// Waits until the sums and their destinations are in shared memory. Finishers and multipliers
// execute different calls of it, which __syncthreads does not allow.
template <typename After>
__device__ __forceinline__ void sync_sums() {
  if constexpr (kAppends<After>) {
    meet_threads<kSumsBarrier, kBlockThreads<After>>();
  } else {
    __syncthreads();
  }
}

// The row of a finisher lane in one of its turns, out of S::kRows.
template <typename S>
__device__ __forceinline__ int finished_row(int turn) {
  return (static_cast<int>(threadIdx.x) - kMultipliers + turn * kFinishers) / S::kUnit;
}

// Positions of a finisher's rows, counted from `first_row`, out of `rows`; -1 = no row.
template <typename S, typename Position, int kTurns>
__device__ __forceinline__ void find_positions(const AppendKvParams& after, int first_row, int rows,
                                               Position (&position)[kTurns]) {
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = finished_row<S>(i);
    position[i] = row < rows ? after.position[first_row + row] : -1;
  }
}

// Angles of pair `pair` of a head at these positions. A row without a valid position is not stored.
template <typename Position, int kTurns>
__device__ __forceinline__ void find_angles(const AppendKvParams& after,
                                            const Position (&position)[kTurns], int pair,
                                            float2 (&angle)[kTurns]) {
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (position[i] < 0 || position[i] >= after.max_position) continue;
    angle[i] = angle_of(after, position[i], pair);
  }
}

// The destinations of the two sums of a pair of a row, and their rotation.
struct PairDestination {
  void* low;  // null: not stored
  float2 angle, bias;
  int zero, turns;  // see PairOut
};

// Called by the finishers of a block with `rows` of at most S::kRows rows from `first_row` on and
// `count` pairs from `begin` on: fills `destinations` [S::kRows, S::kUnit] while others multiply.
template <typename T, typename S>
__device__ __forceinline__ void find_destinations(const LinearParams& p,
                                                  const AppendKvParams& after, int first_row,
                                                  int rows, int begin, int count,
                                                  PairDestination* destinations) {
  __shared__ RowPlaces<S::kRows> places;
  const int thread = threadIdx.x - kMultipliers, half = static_cast<int>(after.head_dim / 2);
  const int pair = thread % S::kUnit;
  const HeadPair at = head_pair(after, begin + min(pair, count - 1));
  float2 bias = {};
  if (p.bias) {
    const T* from = static_cast<const T*>(p.bias) + low_row(after, at);
    bias = make_float2(as_float32(from[0]), as_float32(from[half]));
  }
  if (!p.pdl_tables) wait_for_prior_grid();
  // Positions are loaded together with the destinations, and angles before the barrier.
  constexpr int kTurns = S::kRows * S::kUnit / kFinishers;
  int32_t position[kTurns];
  find_positions<S>(after, first_row, rows, position);
  if (thread < kWarpSize) find_places(after, first_row, rows, blockIdx.x == 0, &places);
  float2 angle[kTurns] = {};
  find_angles(after, position, at.i, angle);
  sync_threads<kFinishersBarrier, kFinishers>();
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = finished_row<S>(i);
    if (row >= rows) continue;
    PairDestination to = {nullptr, angle[i], bias, 0, 0};
    if (pair < count && places.request[row] >= 0) {
      const PairOut<T> out = pair_out<T>(after, first_row + row, at, places.at[row]);
      to.low = out.low;
      to.zero = out.zero;
      to.turns = out.turns;
    }
    destinations[row * S::kUnit + pair] = to;
  }
}

}  // namespace tlt
