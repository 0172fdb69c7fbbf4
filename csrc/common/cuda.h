// Host-side helpers of the CUDA launchers: every runtime call and every launch is checked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tlt {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Whether the current device is of sm_90 or later: tensor copies, launches that start early.
inline bool is_hopper() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  return major >= 9;
}

// Makes the tensor's device current for the length of a launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device != previous_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != previous_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

#if defined(__CUDACC__)

struct KernelShape {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;
  unsigned cluster = 1;  // more on sm_90 alone
  unsigned rows = 1;     // of blocks: the grid's second axis
};

// Launches a kernel. `early` (sm_90): it may begin while the kernels before it on the stream still
// run, and waits for them itself (wait_for_prior_grid) before it uses what they read or write.
// Every block of such a kernel must wait, so that its own end means the end of all before it.
template <typename... Params, typename... Args>
void launch_kernel(const char* what, void (*kernel)(Params...), const KernelShape& shape,
                   cudaStream_t stream, bool early, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), shape.rows);
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute list[2]{};
  config.attrs = list;
  if (shape.cluster > 1) {
    list[0].id = cudaLaunchAttributeClusterDimension;
    list[0].val.clusterDim = {shape.cluster, 1, 1};
    config.numAttrs = 1;
  }
  if (early) {
    cudaFuncAttributes code;  // code for an older card does not wait
    check_cuda(cudaFuncGetAttributes(&code, kernel), what);
    if (code.ptxVersion >= 90) {
      cudaLaunchAttribute& attribute = list[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

#endif

}  // namespace tlt
