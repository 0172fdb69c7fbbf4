// The drafter's input rows: out[r] = rms_norm(embedding[id]) | rms_norm(hidden[row]).
//
// One launch replaces a gather of ids, two gathers of rows, two norms and the positions of a level.
// A block or a warp owns one half of a row, as in csrc/layers/kernel.cu, to which the norm is
// bit-identical. Reads and writes each row once, and writes the hidden states of a level once more.
// Any dim; float32, float16, bfloat16.
#include "common/mma.cuh"
#include "draft/op.h"
#include "layers/device.cuh"

namespace tlt {
namespace {

// Like norm_row; `from` may be null: zeros.
template <int kRowThreads, typename T>
__device__ __forceinline__ void norm_or_clear(const DraftInputsParams& p, const T* from,
                                              const T* weight, T* to, T* copy, bool aligned) {
  const int dim = static_cast<int>(p.dim);
  if (from != nullptr) {
    return norm_row<kRowThreads>(from, weight, to, dim, p.eps, aligned, copy);
  }
#pragma unroll 1
  for (int k = threadIdx.x % kRowThreads; k < dim; k += kRowThreads) {
    to[k] = T{};
    if (copy != nullptr) copy[k] = T{};
  }
}

// The norm's rows are halves of rows: embedding, hidden state.
template <typename T, int kRowThreads>
__global__ void __launch_bounds__(kNormBlock<kRowThreads>)
    inputs_kernel(const __grid_constant__ DraftInputsParams p, const bool aligned) {
  launch_dependents();
  const T* input_norm = static_cast<const T*>(p.input_norm);
  const T* hidden_norm = static_cast<const T*>(p.hidden_norm);
  prefetch_weight<kRowThreads>(input_norm, static_cast<int>(p.dim));
  prefetch_weight<kRowThreads>(hidden_norm, static_cast<int>(p.dim));
  wait_for_prior_grid();
  const int64_t half = norm_row_index<kRowThreads>(), r = half / 2;
  if (r >= p.rows) return;
  T* out = static_cast<T*>(p.out) + r * p.out_stride;
  const T* from;
  T* copy = nullptr;
  if (half % 2 == 0) {
    const int64_t token = embedding_row(p, r);
    from = token < 0 ? nullptr : static_cast<const T*>(p.embedding) + token * p.embedding_stride;
    if (p.ids == nullptr && threadIdx.x % kRowThreads == 0) {
      p.position[r] = p.root_position[r / p.width] + p.depth;
    }
  } else {
    const int64_t row = hidden_row(p, r);
    from = row < 0 ? nullptr : static_cast<const T*>(p.hidden) + row * p.hidden_stride;
    if (p.hidden_out != nullptr) {
      copy = static_cast<T*>(p.hidden_out) + r * p.hidden_out_stride;
    }
  }
  norm_or_clear<kRowThreads>(p, from, half % 2 == 0 ? input_norm : hidden_norm,
                             out + half % 2 * p.dim, copy, aligned);
}

}  // namespace

void draft_inputs_cuda(const DraftInputsParams& p, int device, uintptr_t stream) {
  check_columns("draft_inputs", 2 * p.dim);
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int64_t kBytes = sizeof(T);
    const int64_t row = p.dim * kBytes;
    const bool aligned = is_aligned(p.embedding, p.embedding_stride * kBytes, row) &&
                         is_aligned(p.hidden, p.hidden_stride * kBytes, row) &&
                         is_aligned(p.out, p.out_stride * kBytes, row) &&
                         is_aligned(p.hidden_out, p.hidden_out_stride * kBytes, row) &&
                         is_aligned(p.input_norm, 0, 0) && is_aligned(p.hidden_norm, 0, 0);
    const bool warps = warps_own_rows<T>(2 * p.rows, p.dim, aligned);
    launch_kernel("draft_inputs",
                  warps ? inputs_kernel<T, kWarpSize> : inputs_kernel<T, kNormThreads>,
                  norm_shape(2 * p.rows, warps), as_stream(stream), true, p, aligned);
  });
}

}  // namespace tlt
