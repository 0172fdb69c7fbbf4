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
  int index, row, num_rows, context;
  int slot;  // of the first row; -1 if the lengths are bad or pass the table
  bool good;
};

// Bypasses L1, which may hold values from before the kernel waited for the previous one.
__device__ __forceinline__ Request read_request(const TreeAttentionParams& p, int index) {
  const Sequences& s = p.sequences;
  Request r;
  r.index = index;
  r.row = __ldcg(s.row_start + index);
  const int end = __ldcg(s.row_start + index + 1);
  r.good = 0 <= r.row && r.row <= end && end <= s.num_rows;
  r.num_rows = r.good ? end - r.row : 0;
  r.context = __ldcg(s.context_len + index);
  const int base = s.slot_base == nullptr ? 0 : __ldcg(s.slot_base + index);
  const bool fits = r.context >= 0 && base >= 0 && r.context <= p.num_slots - base;
  r.slot = fits ? r.context + base : -1;
  return r;
}

// Whether a row's position and slot match and lie inside the table. Since no slot reaches
// kMaxTileKeys, a negative position does not pass for a large one.
__device__ __forceinline__ bool is_valid_row(const TreeAttentionParams& p, const Request& r,
                                             int row, int position) {
  const unsigned slot = static_cast<unsigned>(r.slot) + row;
  if (r.slot < 0 || slot >= static_cast<unsigned>(p.num_slots)) return false;
  const unsigned at = position;
  return p.ancestors == nullptr ? at == slot : at - r.context <= unsigned{kMaxDepth};
}

// An upper bound of the positions of a request's rows up to `row`, at most kMaxTileKeys. Arbitrary
// for a request without a valid slot.
__device__ __forceinline__ uint32_t last_position(const TreeAttentionParams& p, const Request& r,
                                                  uint32_t row) {
  const uint32_t last = p.ancestors == nullptr ? r.slot + row : r.context + uint32_t{kMaxDepth};
  return min(last, uint32_t{kMaxTileKeys});
}

// An upper bound of the tile keys of a block of rows that ends before `row_end`. Each of these keys
// is committed or, in a chain, the slot of an earlier row; none is past the table.
__device__ __forceinline__ int tile_keys(const TreeAttentionParams& p, const Request& r,
                                         int row_end) {
  if (r.slot < 0) return 0;
  const uint32_t keys = tail_begin(last_position(p, r, row_end - 1));
  return static_cast<int>(min(keys, p.num_slots & ~(kStep - 1u)));
}

}  // namespace tlt
