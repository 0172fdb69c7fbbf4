// Picks the device's version of an op.
#pragma once

#include "common/range.h"
#include "common/tensor.h"

namespace tlt {

// Runs `cpu()`, or `cuda()` for arrays on a GPU; throws if this build has no CUDA kernels.
template <typename Cpu, typename Cuda>
void dispatch_device(const char* op, const Tensor& tensor, Cpu&& cpu,
                     [[maybe_unused]] Cuda&& cuda) {
  if (tensor.device.device_type == kDLCPU) return cpu();
  require(tensor.is_cuda(), op, "arrays must be on the CPU or on a CUDA device");
#if defined(TLT_WITH_CUDA)
  const Range range("op", op);
  return cuda();
#else
  require(false, op, "this build has no CUDA kernels: reinstall with nvcc on PATH (TLT_CUDA=1)");
#endif
}

}  // namespace tlt
