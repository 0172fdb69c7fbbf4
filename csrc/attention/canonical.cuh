// The arithmetic that all kernels of attention share; it is the reason why their results agree bit
// for bit, however the work is distributed. A row at position p has
//
//   * tile keys, positions 0 .. tail_begin(p) - 1: folded in splits that begin at fixed positions
//     (`split_begin`), by an online softmax over tiles of kTile keys that restarts in each split;
//   * tail keys, the last 17 to 32 positions up to p (all of them if p is below 32): gathered in
//     position order, so that key j is always column j of the same MMA (tail.cuh).
//
// Partial softmaxes are folded from the left: split 0, split 1, ..., tail. The order does not
// depend on a length, a slot or another row. Scores are in units of log2, partials are not
// normalised.
#pragma once

#include "attention/params.h"
#include "attention/splits.h"
#include "common/device.cuh"

namespace tlt {

constexpr int kMaxGroup = 8;  // query heads of a kv head
constexpr float kLn2 = 0x1.62e43p-1f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float finite_max(float max) { return max == -INFINITY ? 0.0f : max; }

// Reductions over the four lanes that hold a row of an MMA fragment; all four get the same bits.
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(kFullWarp, v, 1));
  return fmaxf(v, __shfl_xor_sync(kFullWarp, v, 2));
}

__device__ __forceinline__ float quad_sum(float v) {
  v = add_rn(v, __shfl_xor_sync(kFullWarp, v, 1));
  return add_rn(v, __shfl_xor_sync(kFullWarp, v, 2));
}

// A score is q . k times `factor`, in units of log2. The sign of the scale is moved into q, so that
// the largest product is the largest score. A scale of zero becomes the smallest factor, so that
// minus infinity stays minus infinity.
struct ScoreScale {
  float factor;
  uint32_t flip;  // sign bits of two values of q

  __device__ __forceinline__ explicit ScoreScale(float scale)
      : factor(fmaxf(fabsf(mul_rn(scale, kInvLn2)), 0x1p-126f)),
        flip(scale < 0.0f ? 0x80008000u : 0u) {}
};

// A softmax over some keys. sum = 0: no keys. sum < 0: the row could not be computed.
struct Softmax {
  float max = -INFINITY, sum = 0.0f;
};

// Folds `part` into `total` from the right. `scale` returns the factors of the accumulators, for
// fma(part, scale[1], total * scale[0]). False if `part` has no keys.
__device__ __forceinline__ bool fold(Softmax* total, const Softmax& part, float (&scale)[2]) {
  if (part.sum == 0.0f) return false;
  const float max = fmaxf(total->max, part.max);
  scale[0] = exp2_fast(add_rn(total->max, -finite_max(max)));
  scale[1] = exp2_fast(add_rn(part.max, -finite_max(max)));
  total->max = max;
  total->sum = fma_rn(part.sum, scale[1], mul_rn(total->sum, scale[0]));
  return true;
}

__device__ __forceinline__ float folded(float total, float part, const float (&scale)[2]) {
  return fma_rn(part, scale[1], mul_rn(total, scale[0]));
}

__device__ __forceinline__ float lse_of(const Softmax& s) {
  return fma_rn(s.max, kLn2, s.sum == s.sum ? log_f32(s.sum) : s.sum);
}

// One request of the launch, as a block reads it. A bad row_start leaves it no rows; with bad
// lengths each row is reported (is_valid_row).
struct Request {
  int64_t index, row, num_rows, context, slot;  // first row, its slot
  bool good;
};

// Bypasses L1, which may hold values from before the kernel waited for the previous one.
__device__ __forceinline__ Request read_request(const TreeAttentionParams& p, int64_t index) {
  const Sequences& s = p.sequences;
  Request r;
  r.index = index;
  r.row = __ldcg(s.row_start + index);
  const int64_t end = __ldcg(s.row_start + index + 1);
  r.good = 0 <= r.row && r.row <= end && end <= s.num_rows;
  r.num_rows = r.good ? end - r.row : 0;
  r.context = __ldcg(s.context_len + index);
  const int64_t base = s.slot_base == nullptr ? 0 : __ldcg(s.slot_base + index);
  r.slot = r.context < 0 || base < 0 ? INT64_MIN / 2 : r.context + base;  // as `first_slot`
  return r;
}

// Whether a row's position and slot match and lie inside the table.
__device__ __forceinline__ bool is_valid_row(const TreeAttentionParams& p, const Request& r,
                                             int64_t row, int64_t position) {
  const int64_t slot = r.slot + row, depth = position - r.context;
  if (slot < 0 || slot >= p.sequences.max_pages * p.sequences.page_size) return false;
  return p.ancestors == nullptr ? position == slot : 0 <= depth && depth <= kMaxDepth;
}

// An upper bound of the positions of a request's rows.
__device__ __forceinline__ int64_t last_position(const TreeAttentionParams& p, const Request& r) {
  return p.ancestors == nullptr ? r.slot + r.num_rows : r.context + kMaxDepth;
}

// A position in 32 bits, in which all keys are counted: 64-bit instructions are expensive at the
// start of a block. The result is arbitrary for a request without a valid slot.
__device__ __forceinline__ uint32_t clamp_position(int64_t position) {
  return static_cast<uint32_t>(min(static_cast<uint64_t>(position), uint64_t{kMaxTileKeys}));
}

// An upper bound of the tile keys of a block of rows that ends before `row_end`. Each of these keys
// is committed or, in a chain, the slot of an earlier row; none is past the table.
__device__ __forceinline__ int tile_keys(const TreeAttentionParams& p, const Request& r,
                                         int64_t row_end) {
  const Sequences& s = p.sequences;
  if (r.slot < 0) return 0;
  const int64_t last = p.ancestors == nullptr ? r.slot + row_end - 1 : r.context + kMaxDepth;
  const uint32_t keys = tail_begin(clamp_position(last));
  return static_cast<int>(min(keys, clamp_position(s.max_pages * s.page_size) & ~(kStep - 1u)));
}

}  // namespace tlt
