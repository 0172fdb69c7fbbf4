// Attention in float32 without tensor cores: for comparing with the CPU, not for speed.
//
// A warp owns one row and head. It takes the keys in position order in blocks of 32 that begin at
// multiples of 32, one key per lane, and folds the partial softmaxes of the blocks from the left.
// Any head_dim up to 256 and any page size.
#include "attention/op.h"
#include "attention/tail.cuh"

namespace tlt {
namespace {

constexpr int kWarps = 4;
constexpr int kLaneDims = 8;  // lane l owns dimensions l, l + 32, ...

// Slot of the row's key at `position`; the row was accepted by find_tail_key.
__device__ int64_t slot_of(const TreeAttentionParams& p, const Request& r, int64_t row,
                           int64_t position) {
  if (p.ancestors == nullptr || position < r.context) return position;
  if (position == p.position[r.row + row]) return r.slot + row;
  return r.context + p.ancestors[(r.row + row) * p.ancestor_stride + position - r.context];
}

__global__ void __launch_bounds__(kWarps* kWarpSize)
    attend_float_kernel(const __grid_constant__ TreeAttentionParams p) {
  const Request r = read_request(p, blockIdx.y);
  const int lane = threadIdx.x % kWarpSize;
  if (!r.good && blockIdx.x == 0 && threadIdx.x == 0) {
    report_on_device(p.sequences, r.index, kStatusBadLength);
  }
  const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (int64_t i = first; i < r.num_rows * p.num_heads; i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = i / p.num_heads, head = i % p.num_heads;
    const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
    const float* q =
        static_cast<const float*>(p.q) + (r.row + row) * p.q_row_stride + head * p.q_head_stride;
    TailKey tail{};
    const auto locate_slot = [&](int64_t slot, Place* place) {
      return locate(p.sequences, r.index, slot, place);
    };
    int32_t bits = find_tail_key(p, r, row, lane, locate_slot, &tail);
    const int64_t keys = bits ? 0 : p.position[r.row + row] + 1;
    Softmax total;
    float acc[kLaneDims] = {};
    for (int64_t begin = 0; begin < keys && !bits; begin += kWarpSize) {
      const int count = static_cast<int>(min(keys - begin, int64_t{kWarpSize}));
      Place place{};
      if (lane < count) {
        bits = locate(p.sequences, r.index, slot_of(p, r, row, begin + lane), &place);
      }
      bits = static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bits)));
      if (bits) break;
      const auto offset_in = [&](const PagedCache& cache) {
        return place.page * cache.page_stride + place.offset * cache.slot_stride +
               kv_head * cache.head_stride;
      };
      const float* k = static_cast<const float*>(p.k.data) + offset_in(p.k);
      const int64_t v_offset = offset_in(p.v);
      float score = 0.0f;
      if (lane < count) {
        for (int64_t d = 0; d < p.head_dim; ++d) score = fma_rn(q[d], k[d], score);
      }
      score = lane < count ? mul_rn(score, mul_rn(p.scale, kInvLn2)) : -INFINITY;
      Softmax part;
      part.max = warp_max_all(score);
      // Not the fast exponential: its error would be visible in float32.
      const float x = add_rn(score, -finite_max(part.max));
      const float weight = x == x ? exp_f32(mul_rn(x, kLn2)) : x;
      part.sum = warp_sum_all(weight);
      float value[kLaneDims] = {};
      for (int j = 0; j < count; ++j) {
        const float* v = static_cast<const float*>(p.v.data) + __shfl_sync(kFullWarp, v_offset, j);
        const float w = __shfl_sync(kFullWarp, weight, j);
#pragma unroll
        for (int n = 0; n < kLaneDims; ++n) {
          const int d = n * kWarpSize + lane;
          if (d < p.head_dim) value[n] = fma_rn(w, v[d], value[n]);
        }
      }
      float scale[2];
      if (!fold(&total, part, scale)) continue;
#pragma unroll
      for (int n = 0; n < kLaneDims; ++n) acc[n] = folded(acc[n], value[n], scale);
    }
    if (bits && lane == 0 && head == 0) report_on_device(p.sequences, r.index, bits);
    float* out =
        static_cast<float*>(p.out) + (r.row + row) * p.out_row_stride + head * p.out_head_stride;
#pragma unroll
    for (int n = 0; n < kLaneDims; ++n) {
      const int d = n * kWarpSize + lane;
      if (d < p.head_dim) out[d] = bits ? 0.0f : __fdiv_rn(acc[n], total.sum);
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[(r.row + row) * p.lse_stride + head] = bits ? -INFINITY : lse_of(total);
    }
  }
}

}  // namespace

void tree_attention_float_cuda(const TreeAttentionParams& p, uintptr_t stream) {
  const Sequences& s = p.sequences;
  const int64_t pairs = (s.num_rows + s.num_requests - 1) / s.num_requests * p.num_heads;
  const KernelShape shape{(pairs + kWarps - 1) / kWarps, kWarps * kWarpSize, 0, 1,
                          static_cast<unsigned>(s.num_requests)};
  launch_kernel("tree_attention", attend_float_kernel, shape, as_stream(stream), false, p);
}

}  // namespace tlt
