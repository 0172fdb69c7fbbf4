// The partial softmaxes of one (row, head), folded from the left; a lane has two dimensions.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"

namespace tlt {

// Folds a partial into what is left of it.
__device__ __forceinline__ void fold_pair(const Softmax& part, const float2& value, Softmax* total,
                                          float2* acc) {
  float scale[2];
  if (part.sum < 0.0f) total->sum = -1.0f;
  if (total->sum < 0.0f || !fold(total, part, scale)) return;
  *acc = make_float2(folded(acc->x, value.x, scale), folded(acc->y, value.y, scale));
}

constexpr int kFoldStep = 8;  // partials read between looks at how many there are

// One fold from the left: total = fma(part, scale[1], total * scale[0]), where `folds` is not 0.
struct alignas(16) FoldStep {
  float scale[2], sum, folds;
};

// Finds the factors of a warp's folds all at once, a lane each: those of fold() one by one.
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

// As many as kAhead partials of the `count` of a (row, head), from partial `first` on, read at once
// and folded later. `from` reads one by softmax(i) or, anything where it is past the last one,
// value(i, last). A negative sum says that one has no result.
template <int kAhead>
class PartialsAhead {
 public:
  template <typename From>
  __device__ __forceinline__ void read(const From& from, int first, int count) {
    const int lane = threadIdx.x % kWarpSize, last = count - 1;
    mine_ = Softmax{};
    if (lane < kAhead && first + lane <= last) mine_ = from.softmax(first + lane);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i > 0 && i % kFoldStep == 0 && first + i > last) break;
      value_[i] = from.value(first + i, last);
    }
  }

  // Into a total; `steps` are the warp's.
  __device__ __forceinline__ void fold(int first, int count, FoldStep* steps, Softmax* total,
                                       float2* acc) const {
    steps[threadIdx.x % kWarpSize] = find_fold(mine_, &total->max);
    const bool refused = __any_sync(kFullWarp, mine_.sum < 0.0f);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i > 0 && i % kFoldStep == 0 && first + i >= count) break;
      const FoldStep step = steps[i];
      const float sum = folded(total->sum, step.sum, step.scale);
      const float x = folded(acc->x, value_[i].x, step.scale);
      const float y = folded(acc->y, value_[i].y, step.scale);
      total->sum = step.folds != 0.0f ? sum : total->sum;
      *acc = step.folds != 0.0f ? make_float2(x, y) : *acc;
    }
    __syncwarp();  // before the next ones come there
    if (refused) total->sum = -1.0f;
  }

 private:
  Softmax mine_;  // a lane has one of them
  float2 value_[kAhead];
};

// Folds all of them.
template <int kAhead, typename From>
__device__ __forceinline__ void fold_all(const From& from, int count, FoldStep* steps,
                                         Softmax* total, float2* acc) {
  for (int first = 0; first < count && !(total->sum < 0.0f); first += kAhead) {
    PartialsAhead<kAhead> ahead;
    ahead.read(from, first, count);
    ahead.fold(first, count, steps, total, acc);
  }
}

// Writes dimensions 2 pair and 2 pair + 1 of a row and head.
template <typename T>
__device__ __forceinline__ void write_pair(const TreeAttentionParams& p, int64_t row, int64_t head,
                                           int pair, const Softmax& total, const float2& acc) {
  const bool refused = total.sum < 0.0f;
  const float inverse = __frcp_rn(total.sum);
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
  const uint32_t two = pack_pair<T>(mul_rn(acc.x, inverse), mul_rn(acc.y, inverse));
  reinterpret_cast<uint32_t*>(out)[pair] = refused ? 0 : two;
  if (p.lse != nullptr && pair == 0) {
    p.lse[row * p.lse_stride + head] = refused ? -INFINITY : lse_of(total);
  }
}

}  // namespace tlt
