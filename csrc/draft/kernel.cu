// The drafter's input rows: out[r] = rms_norm(embedding[id]) | rms_norm(hidden[row]).
//
// One launch replaces a gather of ids, two gathers of rows, two norms and the positions of a level.
// A block owns one half of a row; the norm is bit-identical to csrc/layers/kernel.cu. Reads and
// writes each row once, and writes the hidden states of a level once more. Any dim; float32,
// float16, bfloat16.
#include "common/mma.cuh"
#include "draft/op.h"
#include "layers/device.cuh"

namespace tlt {
namespace {

constexpr int kThreads = 128;

// Normalises one row of `dim` from `from` (null: zeros) to `to`, and copies it unchanged to `copy`
// (may be null).
template <typename T>
__device__ void norm_row(const DraftInputsParams& p, const T* from, const T* weight, T* to, T* copy,
                         bool aligned) {
  const int dim = static_cast<int>(p.dim);
  constexpr int kSize = Chunk<T>::kSize;
  __shared__ float shared_scale;
  if (threadIdx.x < kWarpSize && from != nullptr) {
    const float squares = warp_squares(from, dim, aligned);
    if (threadIdx.x == 0) shared_scale = norm_scale<T>(squares, dim, p.eps);
  }
  __syncthreads();
  for (int k = threadIdx.x * kSize; k < dim; k += kThreads * kSize) {
    Chunk<T> chunk;
    if (from != nullptr) chunk = load_chunk(from, k, dim, aligned);
    if (copy != nullptr) store_chunk(copy, k, dim, aligned, chunk);
    if (from != nullptr) norm_chunk(chunk, shared_scale, load_chunk(weight, k, dim, aligned));
    store_chunk(to, k, dim, aligned, chunk);
  }
}

// Two blocks for each row: embedding, hidden state.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    inputs_kernel(const __grid_constant__ DraftInputsParams p, const bool aligned) {
  const int64_t r = blockIdx.x / 2;
  launch_dependents();
  wait_for_prior_grid();
  T* out = static_cast<T*>(p.out) + r * p.out_stride;
  if (blockIdx.x % 2 == 0) {
    const int64_t token = embedding_row(p, r);
    const T* from = static_cast<const T*>(p.embedding) + token * p.embedding_stride;
    norm_row<T>(p, token < 0 ? nullptr : from, static_cast<const T*>(p.input_norm), out, nullptr,
                aligned);
    if (p.ids == nullptr && threadIdx.x == 0) {
      p.position[r] = p.root_position[r / p.width] + p.depth;
    }
  } else {
    const int64_t row = hidden_row(p, r);
    const T* from = static_cast<const T*>(p.hidden) + row * p.hidden_stride;
    T* copy = static_cast<T*>(p.hidden_out);
    if (copy != nullptr) copy += r * p.hidden_out_stride;
    norm_row<T>(p, row < 0 ? nullptr : from, static_cast<const T*>(p.hidden_norm), out + p.dim,
                copy, aligned);
  }
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
    const KernelShape shape{2 * p.rows, kThreads};
    launch_kernel("draft_inputs", inputs_kernel<T>, shape, as_stream(stream), true, p, aligned);
  });
}

}  // namespace tlt
