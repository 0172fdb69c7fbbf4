// The end of a pass on the GPU: one block; one thread for each request, then one for each token,
// then one for each request again if some finished. Neighbouring threads have neighbouring
// requests, so the ring is written in whole lines.
//
// Moves 8 bytes per token into the ring and 4 into the token store, and a dozen words per request.
// The cost is the launch and the latency of the ring's host memory. The ring's state is written
// last: the block's writes happen before the barrier, and the first thread's system-wide fence
// orders them before the state.
#include "common/device.cuh"
#include "common/mma.cuh"
#include "graphs/advance.h"
#include "graphs/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 512;
constexpr int kFew = 4;  // requests up to which four warps run: a barrier of few warps is faster

__global__ void __launch_bounds__(kThreads)
    advance_kernel(const __grid_constant__ AdvanceBatchParams p) {
  __shared__ int32_t reason_s, most_s, ended_s;
  // Loaded before the prior kernels end, because it comes from host memory.
  bool stop = false;
  if (threadIdx.x == 0) {
    stop = *static_cast<volatile int32_t*>(p.ring.stop) != 0;
    reason_s = most_s = ended_s = 0;
  }
  wait_for_prior_grid();
  const int64_t record = record_of(p);
  __syncthreads();
  for (int64_t b = threadIdx.x; b < p.batch; b += blockDim.x) {
    const RowAdvance row = plan_row(p, b);
    take_row(p, row, record, b);
    if (row.reason != 0) atomicOr(&reason_s, row.reason);
    atomicMax(&most_s, row.count);
    if (row.ended) atomicAdd(&ended_s, 1);
  }
  __syncthreads();
  for (int64_t at = threadIdx.x; at < most_s * p.batch; at += blockDim.x) {
    const int64_t i = at / p.batch, b = at % p.batch;
    const RowAdvance row = plan_row(p, b);
    if (i < row.count) take_token(p, row, record, b, i);
  }
  __syncthreads();
  if (ended_s != 0) {
    for (int64_t b = threadIdx.x; b < p.batch; b += blockDim.x) {
      if (plan_row(p, b).ended) retire_row(p, b);
    }
  }
  if (threadIdx.x != 0) return;
  p.ring.time_ns[record] = device_ns();
  const uint64_t state = take_pass(p, reason_s, ended_s, stop);
  __threadfence_system();
  *static_cast<volatile uint64_t*>(p.ring.state) = state;
}

__global__ void arm_kernel(const __grid_constant__ ArmPassesParams p) {
  arm(p);
  *p.ring.begin_ns = device_ns();
}

}  // namespace

void advance_batch_cuda(const AdvanceBatchParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const KernelShape shape{1, p.batch <= kFew ? kFew * kWarpSize : kThreads};
  launch_kernel("advance_batch", advance_kernel, shape, as_stream(stream), true, p);
}

void arm_passes_cuda(const ArmPassesParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  launch_kernel("arm_passes", arm_kernel, {1, 1}, as_stream(stream), false, p);
}

}  // namespace tlt
