// Folds the partial softmaxes of one (row, head) from the left; a lane has two dimensions.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"

namespace tlt {

// Folds a partial into the total of those to its left.
__device__ __forceinline__ void fold_pair(const Softmax& part, const float2& value, Softmax* total,
                                          float2* acc) {
  float scale[2];
  if (part.sum < 0.0f) total->sum = -1.0f;
  if (total->sum < 0.0f || !fold(total, part, scale)) return;
  *acc = make_float2(folded(acc->x, value.x, scale), folded(acc->y, value.y, scale));
}

constexpr int kFoldStep = 8;  // partials read before the number of partials is checked again

// One fold from the left: total = fma(part, scale[1], total * scale[0]); skipped if `folds` is 0.
struct alignas(16) FoldStep {
  float scale[2], sum, folds;
};

// Computes the factors of all folds of a warp at once, one per lane, with the results of fold() one
// by one.
__device__ __forceinline__ FoldStep find_fold(const Softmax& part, float* total_max) {
  const int lane = threadIdx.x % kWarpSize;
  const bool folds = part.sum != 0.0f;
  float max = folds ? part.max : -INFINITY;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const float before = __shfl_up_sync(kFullWarp, max, step);
    if (lane >= step) max = fmaxf(before, max);
  }
  max = fmaxf(*total_max, max);
  const float before = __shfl_up_sync(kFullWarp, max, 1);
  const float scale = exp2_fast(add_rn(lane == 0 ? *total_max : before, -finite_max(max)));
  *total_max = __shfl_sync(kFullWarp, max, kWarpSize - 1);
  const float part_scale = exp2_fast(add_rn(part.max, -finite_max(max)));
  return {{scale, part_scale}, part.sum, folds ? 1.0f : 0.0f};
}

// Up to kPrefetch of the `count` partials of a (row, head), from partial `first` on, read together
// and folded later. `from` reads one partial: softmax(i) and value(i, last), which is arbitrary
// past the last one. A negative sum marks a partial without a result.
template <int kPrefetch>
class PrefetchedPartials {
 public:
  template <typename From>
  __device__ __forceinline__ void read(const From& from, int first, int count) {
    const int lane = threadIdx.x % kWarpSize, last = count - 1;
    mine_ = Softmax{};
    if (lane < kPrefetch && first + lane <= last) mine_ = from.softmax(first + lane);
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      if (i > 0 && i % kFoldStep == 0 && first + i > last) break;
      value_[i] = from.value(first + i, last);
    }
  }

  // Folds them into a total; `steps` is scratch of the warp.
  __device__ __forceinline__ void fold(int first, int count, FoldStep* steps, Softmax* total,
                                       float2* acc) const {
    steps[threadIdx.x % kWarpSize] = find_fold(mine_, &total->max);
    const bool invalid = __any_sync(kFullWarp, mine_.sum < 0.0f);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPrefetch; ++i) {
      if (i > 0 && i % kFoldStep == 0 && first + i >= count) break;
      const FoldStep step = steps[i];
      const float sum = folded(total->sum, step.sum, step.scale);
      const float x = folded(acc->x, value_[i].x, step.scale);
      const float y = folded(acc->y, value_[i].y, step.scale);
      total->sum = step.folds != 0.0f ? sum : total->sum;
      *acc = step.folds != 0.0f ? make_float2(x, y) : *acc;
    }
    __syncwarp();  // before the next steps are written there
    if (invalid) total->sum = -1.0f;
  }

 private:
  Softmax mine_;  // of the lane's partial
  float2 value_[kPrefetch];
};

// Folds all partials.
template <int kPrefetch, typename From>
__device__ __forceinline__ void fold_all(const From& from, int count, FoldStep* steps,
                                         Softmax* total, float2* acc) {
  for (int first = 0; first < count && !(total->sum < 0.0f); first += kPrefetch) {
    PrefetchedPartials<kPrefetch> ahead;
    ahead.read(from, first, count);
    ahead.fold(first, count, steps, total, acc);
  }
}

// Writes dimensions 2 pair and 2 pair + 1 of a row and head.
template <typename T>
__device__ __forceinline__ void write_pair(const TreeAttentionParams& p, int64_t row, int64_t head,
                                           int pair, const Softmax& total, const float2& acc) {
  const bool invalid = total.sum < 0.0f;
  const float inverse = __frcp_rn(total.sum);
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
  const uint32_t two = pack_pair<T>(mul_rn(acc.x, inverse), mul_rn(acc.y, inverse));
  reinterpret_cast<uint32_t*>(out)[pair] = invalid ? 0 : two;
  if (p.lse != nullptr && pair == 0) {
    p.lse[row * p.lse_stride + head] = invalid ? -INFINITY : lse_of(total);
  }
}

}  // namespace tlt
