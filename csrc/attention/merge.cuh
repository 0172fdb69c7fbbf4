// The second launch of attention whose keys are shared: tails of rows beside the first one's
// stream, then all partials of a row, folded from the left as one block would.
#pragma once

#include "attention/row_block.cuh"

namespace tlt {

// Folds a partial of one (row, head) into what is left of it; a lane has two dimensions.
__device__ __forceinline__ void fold_pair(const Softmax& part, const float2& value, Softmax* total,
                                          float2* acc) {
  float scale[2];
  if (part.sum < 0.0f) total->sum = -1.0f;
  if (total->sum < 0.0f || !fold(total, part, scale)) return;
  *acc = make_float2(folded(acc->x, value.x, scale), folded(acc->y, value.y, scale));
}

constexpr int kAhead = 24;    // partials read at once
constexpr int kFoldStep = 8;  // of them between looks at how many there are

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

// The partials of one (row, head); a lane has two dimensions. Where they are is known before they
// are there. Fewer than kFew blocks share keys, so that steps from one to the next fit in an int.
template <int kDim>
class PartialFold {
 public:
  __device__ __forceinline__ PartialFold(const Launch& l, int64_t row, int64_t head, int pair,
                                         int count, FoldStep* steps)
      : step_(static_cast<int>(l.p.sequences.num_rows * l.p.num_heads)),
        count_(count),
        softmax_(l.partials.softmax + partial_index(l, 0, row, head)),
        acc_(reinterpret_cast<const float2*>(l.partials.acc) +
             partial_index(l, 0, row, head) * (kDim / 2) + pair),
        steps_(steps) {}

  // Folds all of them from the left; a negative sum says that one has no result.
  __device__ __forceinline__ void fold_all(Softmax* total, float2* acc) const {
    for (int first = 0; first < count_ && !(total->sum < 0.0f); first += kAhead) {
      fold_some(first, total, acc);
    }
  }

 private:
  __device__ __forceinline__ Softmax read_partial(int i) const {
    const float2 pair = __ldcg(reinterpret_cast<const float2*>(softmax_) + i * step_);
    return {pair.x, pair.y};
  }

  __device__ __forceinline__ void fold_some(int first, Softmax* total, float2* acc) const {
    const int lane = threadIdx.x % kWarpSize, last = count_ - 1;
    Softmax mine;
    if (lane < kAhead && first + lane <= last) mine = read_partial(first + lane);
    float2 value[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // all reads before the first fold
      if (i % kFoldStep == 0 && first + i > last) break;
      value[i] = __ldcg(acc_ + min(first + i, last) * step_ * (kDim / 2));
    }
    steps_[lane] = find_fold(mine, &total->max);
    const bool refused = __any_sync(kFullWarp, mine.sum < 0.0f);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kFoldStep == 0 && first + i > last) break;
      const FoldStep step = steps_[i];
      const float sum = folded(total->sum, step.sum, step.scale);
      const float x = folded(acc->x, value[i].x, step.scale);
      const float y = folded(acc->y, value[i].y, step.scale);
      total->sum = step.folds != 0.0f ? sum : total->sum;
      *acc = step.folds != 0.0f ? make_float2(x, y) : *acc;
    }
    __syncwarp();  // before the next ones come there
    if (refused) total->sum = -1.0f;
  }

  const int step_, count_;
  const Softmax* softmax_;
  const float2* acc_;
  FoldStep* steps_;
};

// What the merge knows of a row and kv head before there are partials, and where it finds it out.
template <int kDim>
struct MergeRow {
  TailScratch<kDim> scratch;
  float2 acc[kMaxGroup][kDim / 2];
  Softmax softmax[kMaxGroup];
  int count;  // of partials
};

// One warp's part of that: the row's tail.
template <typename T, int kDim>
__device__ __forceinline__ void prepare_row(const Launch& l, const Request& r, int64_t row,
                                            int kv_head, MergeRow<kDim>* to) {
  const int lane = threadIdx.x % kWarpSize, head = lane / 4;
  Tail<kDim> tail;
  attend_tail<T, kDim>(l.p, r, row, kv_head, l.group, &to->scratch, &tail);
  if (lane % 4 == 0) to->softmax[head] = tail.softmax;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) to->acc[head][n * 4 + lane % 4] = tail.acc[n];
  const int64_t position = l.p.position[r.row + row];
  int count = 0;
  if (well_placed(l.p, r, row, position)) {
    const auto splits = static_cast<int>(splits_below(tail_begin(position)));
    const auto first = static_cast<int>(splits_below(next_split(item_size(l, r))));
    count = splits == 0 ? 0 : splits <= first ? 1 : splits - first + 1;
  }
  if (lane == 0) to->count = count;
}

// Folds the partials of a row and its tail, and writes it; a warp for 64 dimensions of a head.
template <typename T, int kDim>
__device__ __forceinline__ void merge_row(const Launch& l, int64_t row, int kv_head,
                                          const MergeRow<kDim>& from, FoldStep* steps) {
  constexpr int kHeadWarps = kDim / 64;
  const TreeAttentionParams& p = l.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group_head = warp / kHeadWarps, pair = warp % kHeadWarps * kWarpSize + lane;
  const int head = kv_head * l.group + group_head;
  Softmax total;
  float2 acc{};
  PartialFold<kDim>(l, row, head, pair, from.count, steps).fold_all(&total, &acc);
  fold_pair(from.softmax[group_head], from.acc[group_head][pair], &total, &acc);
  const bool refused = total.sum < 0.0f;
  const float inverse = __frcp_rn(total.sum);
  T* out = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
  const uint32_t two = pack_pair<T>(mul_rn(acc.x, inverse), mul_rn(acc.y, inverse));
  reinterpret_cast<uint32_t*>(out)[pair] = refused ? 0 : two;
  if (p.lse != nullptr && pair == 0) {
    p.lse[row * p.lse_stride + head] = refused ? -INFINITY : lse_of(total);
  }
}

// Finishes rows, `merge_rows` pairs of a row and a kv head a turn: their tails, a warp each, while
// the launch before still streams, then their partials. Grid: (turns, requests).
template <typename T, int kDim>
__global__ void __launch_bounds__(kMaxGroup* kDim / 64 * kWarpSize, 1)
    merge_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(1024) char memory[];
  auto* rows = reinterpret_cast<MergeRow<kDim>*>(memory);
  __shared__ FoldStep steps[kMaxGroup * kDim / 64][kWarpSize];
  launch_dependents();
  const Request r = read_request(l.p, blockIdx.y);
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const auto kv_heads = static_cast<int>(l.p.num_kv_heads);
  const int all = static_cast<int>(r.num_rows) * kv_heads, turn = l.merge_rows;
  for (int first = blockIdx.x * turn; first < all; first += gridDim.x * turn) {
    const int count = min(turn, all - first);
    for (int i = warp; i < count; i += warps) {
      prepare_row<T, kDim>(l, r, (first + i) / kv_heads, (first + i) % kv_heads, &rows[i]);
    }
    __syncthreads();        // the tails are there
    wait_for_prior_grid();  // what was read so far is older than that grid
    for (int i = 0; i < count; ++i) {
      const int64_t row = r.row + (first + i) / kv_heads;
      merge_row<T, kDim>(l, row, (first + i) % kv_heads, rows[i], steps[warp]);
    }
    __syncthreads();  // the next turn's tails come where these were
  }
  wait_for_prior_grid();  // nor may a block without rows end before it
}

}  // namespace tlt
