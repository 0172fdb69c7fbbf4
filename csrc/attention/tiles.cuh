// Folds tiles of keys and values in shared memory into the rows of a warp: by mma.sync, one warp
// alone, or on sm_90a by wgmma, four warps together.
//
// Fragments are those of mma.m16n8k16: lane 4 g + q holds rows g and g + 8 ("low" and "high") at
// columns 2 q and 2 q + 1 of each 8 columns. A row below means one (row, head) pair.
#pragma once

#include "attention/stream.cuh"
#include "common/wgmma.cuh"

namespace tlt {

constexpr int kMmaRows = 16;
static_assert(kStep == 16, "an MMA folds 16 keys");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kWarpGroups = true;
#else
constexpr bool kWarpGroups = false;
#endif

// The result of folding tiles: a partial softmax of the warp's 16 rows since the split began.
template <int kDim>
struct Fragment {
  float acc[kDim / 8][4];
  float sum[2];  // this lane's part of the weights of the low and the high row
  float max[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& column : acc) {
#pragma unroll
      for (float& x : column) x = 0.0f;
    }
    sum[0] = sum[1] = 0.0f;
    max[0] = max[1] = -INFINITY;
  }

  __device__ __forceinline__ Softmax softmax(int half) const {
    return {max[half], quad_sum(sum[half])};
  }
};

// The end of a row that does not exist or is not valid: it never forces masking, and its results
// are not used.
constexpr int kNoRow = INT32_MAX;

// The queries of a warp's rows and where their tile keys end.
template <int kDim>
struct Queries {
  uint32_t q[kDim / 16][4];
  int end[2];   // tail_begin of the low and the high row
  int largest;  // over the warp's rows; 0: nothing to fold
};

// A copy that the compiler does not recognise as one, so that the accumulators stay in their
// registers.
__device__ __forceinline__ float opaque_copy(float x) {
  float copy;
  asm volatile("mov.f32 %0, %1;" : "=f"(copy) : "f"(x));
  return copy;
}

// A store to shared memory by the warp's first lane that the compiler does not move.
__device__ __forceinline__ void store_in_order(float2* to, const float (&x)[2]) {
  asm volatile(
      "{\n.reg .pred first;\nsetp.eq.u32 first, %3, 0;\n"
      "@first st.shared.v2.f32 [%0], {%1, %2};\n}" ::"r"(shared_address(to)),
      "f"(x[0]), "f"(x[1]), "r"(threadIdx.x % kWarpSize)
      : "memory");
}

template <typename T, int kDim>
class WarpTile {
 public:
  // No row ends before `smallest_end`.
  __device__ __forceinline__ WarpTile(const Queries<kDim>& queries, int smallest_end, float factor,
                                      Fragment<kDim>* fragment, float2* sink)
      : queries_(queries),
        smallest_end_(smallest_end),
        factor_(factor),
        f_(*fragment),
        sink_(sink),
        lane_(threadIdx.x % kWarpSize) {}

  // Scores the keys at `keys`, positions from `key` on.
  __device__ __forceinline__ void fold_keys(int key, uint32_t keys) {
    if (!kWarpGroups && key >= queries_.largest) return;
    start_scores(keys);
    if constexpr (kWarpGroups) group_wait_behind<0>(score_);
  }

  // Turns scores into weights.
  __device__ __forceinline__ void weigh_keys(int key) {
    if (!kWarpGroups && key >= queries_.largest) return;
    if (key + kTile > smallest_end_) mask(key);
    float rescale[2];
    weigh(&rescale);
    scale(rescale);
    pack();
  }

  // Accumulates the values of the keys whose weights were computed.
  __device__ __forceinline__ void fold_values(int key, uint32_t values) {
    if (!kWarpGroups && key >= queries_.largest) return;
    if (key + kTile > smallest_end_) return add_some_values(key, values);
    start_values(values);
    if constexpr (kWarpGroups) group_wait_behind<0>(f_.acc);
  }

  // Whether all rows need the whole tile at `key`.
  __device__ __forceinline__ bool is_whole(int key) const { return key + kTile <= smallest_end_; }

  // The values of one tile and the keys of the next, if all rows need both whole: the tensor cores
  // accumulate values while the next scores become weights. Calls `release` when the keys are
  // scored.
  template <typename F>
  __device__ __forceinline__ void fold_both(uint32_t values, uint32_t next_keys, F&& release) {
    start_scores(next_keys);
    start_values(values);
    group_wait_behind<1>(score_);
    release();
    float rescale[2];
    weigh(&rescale);
    store_in_order(sink_, f_.sum);  // a store keeps the wait after the work before it
    group_wait_behind<0>(f_.acc);
    scale(rescale);
    pack();
  }

 private:
  static constexpr int kLines = kDim * 2 / kLine;
  using Values = std::conditional_t<kWarpGroups, SharedMatrix, uint32_t>;

  // With wgmma this only starts the computation.
  __device__ __forceinline__ void start_scores(uint32_t keys) {
    if constexpr (kWarpGroups) {
      const SharedMatrix matrix(keys);
      group_fence();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const uint64_t b = matrix.at(step / 4 * kLineBytes + step % 4 * 32);
        group_mma<T, false>(score_, queries_.q[step], b, step > 0);
      }
      group_commit();
      return;
    }
    const int row = lane_ % 8 + lane_ / 16 * 8, chunk = lane_ / 8 % 2;
#pragma unroll
    for (auto& column : score_) {
#pragma unroll
      for (float& x : column) x = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys + chunk_offset(n * 16 + row, step * 2 + chunk));
        mma_16816<T>(score_[2 * n], queries_.q[step], b[0], b[1]);
        mma_16816<T>(score_[2 * n + 1], queries_.q[step], b[2], b[3]);
      }
    }
  }

  // The ends of rows are multiples of kStep, so each pair of 8 columns is masked as a whole or not
  // at all.
  __device__ __forceinline__ void mask(int key) {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      const int at = key + n / 2 * kStep;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at >= queries_.end[i / 2]) score_[n][i] = -INFINITY;
      }
    }
  }

  // Turns scores into weights; `rescale` returns the factors that bring earlier sums to the new
  // maximum.
  __device__ __forceinline__ void weigh(float (*rescale_to)[2]) {
    auto& rescale = *rescale_to;
    float max[2], base[2], sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = quad_max(largest(half));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = fmaxf(f_.max[half], mul_rn(max[half], factor_));
      base[half] = finite_max(max[half]);
      rescale[half] = exp2_fast(add_rn(f_.max[half], -base[half]));
      f_.max[half] = max[half];
      sum[half] = 0.0f;
    }
    // Both rows are interleaved, because each addition of a row depends on the previous one.
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = score_[n][2 * half + i];
          x = exp2_fast(fma_rn(x, factor_, -base[half]));
          sum[half] = add_rn(sum[half], x);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      f_.sum[half] = fma_rn(f_.sum[half], rescale[half], sum[half]);
  }

  // The largest score of a row in this lane, as a tree: shorter than a chain, and equal.
  __device__ __forceinline__ float largest(int half) const {
    float max[kTile / 8];
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n)
      max[n] = fmaxf(score_[n][2 * half], score_[n][2 * half + 1]);
#pragma unroll
    for (int step = kTile / 16; step > 0; step /= 2) {
#pragma unroll
      for (int n = 0; n < step; ++n) max[n] = fmaxf(max[n], max[n + step]);
    }
    return max[0];
  }

  __device__ __forceinline__ void scale(const float (&rescale)[2]) {
    // A factor of one changes nothing, so all are skipped if no maximum changed.
    if (__all_sync(kFullWarp, rescale[0] == 1.0f && rescale[1] == 1.0f)) return;
#pragma unroll
    for (auto& column : f_.acc) {
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] = mul_rn(column[i], rescale[i / 2]);
    }
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weights_[n / 2][n % 2 * 2 + half] =
            pack_pair<T>(score_[n][2 * half], score_[n][2 * half + 1]);
      }
    }
  }

  __device__ __forceinline__ void start_values(uint32_t values) {
    const Values matrix(values);
    if constexpr (kWarpGroups) group_fence();
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
#pragma unroll
      for (int line = 0; line < kLines; ++line) add_line(weights_[step], matrix, step, line);
    }
    if constexpr (kWarpGroups) group_commit();
  }

  // Accumulates keys that lie past the end of some rows; those rows keep their accumulators
  // whatever the values are (with a weight of zero a NaN would still spread).
  __device__ __forceinline__ void add_some_values(int key, uint32_t values) {
    const Values matrix(values);
#pragma unroll
    for (int step = 0; step < kTileSteps; ++step) {
      const int at = key + step * kStep;
      if (at + kStep <= smallest_end_) {  // all rows need it
        if constexpr (kWarpGroups) group_fence();
#pragma unroll
        for (int line = 0; line < kLines; ++line) add_line(weights_[step], matrix, step, line);
        if constexpr (kWarpGroups) group_wait(f_.acc);
        continue;
      }
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        float (*acc)[4] = f_.acc + line * 8;
        float kept[8][4];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) kept[n][i] = opaque_copy(acc[n][i]);
        }
        if constexpr (kWarpGroups) group_fence();
        add_line(weights_[step], matrix, step, line);
        if constexpr (kWarpGroups) group_wait(f_.acc);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (at >= queries_.end[i / 2]) acc[n][i] = kept[n][i];
          }
        }
      }
    }
  }

  // Accumulates 64 dimensions of 16 keys; with wgmma this only starts the computation.
  __device__ __forceinline__ void add_line(const uint32_t (&weights)[4], const SharedMatrix& values,
                                           int step, int line) {
    const uint64_t b = values.at(line * kLineBytes + step * (kStep * kLine));
    group_mma<T, true>(f_.acc + line * 8, weights, b, true);
  }

  __device__ __forceinline__ void add_line(const uint32_t (&weights)[4], uint32_t values, int step,
                                           int line) {
    const int row = step * kStep + lane_ % 16;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float (*acc)[4] = f_.acc + line * 8 + 2 * n;
      uint32_t b[4];
      load_matrices_transposed(b, values + chunk_offset(row, line * 8 + n * 2 + lane_ / 16));
      mma_16816<T>(acc[0], weights, b[0], b[1]);
      mma_16816<T>(acc[1], weights, b[2], b[3]);
    }
  }

  const Queries<kDim>& queries_;
  const int smallest_end_;
  const float factor_;
  Fragment<kDim>& f_;
  float2* const sink_;  // of the warp; never read
  const int lane_;
  float score_[kTile / 8][4];        // later the weights
  uint32_t weights_[kTileSteps][4];  // packed, so that the next tile can be scored
};

}  // namespace tlt
