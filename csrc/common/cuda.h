// Host-side helpers of the CUDA launchers: every runtime call and every launch is checked.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

namespace tlt {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

inline cudaStream_t as_stream(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// Makes a device current while the guard lives.
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

constexpr int kPortableCluster = 8;

struct KernelShape {
  int64_t blocks;
  int threads;
  int shared_bytes = 0;
  unsigned cluster = 1;  // blocks of a cluster; above 1 only on sm_90
  unsigned rows = 1;     // the grid's second axis
  unsigned layers = 1;   // the grid's third axis
};

constexpr int64_t kGridAxis = 65535;  // maximum of the second and third axes of a grid

// Rejects a count that exceeds such an axis.
inline unsigned grid_axis(const char* op, const char* what, int64_t count) {
  if (count > kGridAxis) {
    throw std::invalid_argument(std::string(op) + ": expected at most " +
                                std::to_string(kGridAxis) + " " + what + " on a CUDA device, got " +
                                std::to_string(count));
  }
  return static_cast<unsigned>(count);
}

// A cached property of a kernel, by (kernel, device, cluster, bytes of shared memory), one cache
// for each call site. The value is -1 at first; `f` maps the old value to the new one.
template <typename F>
int recall(const char* op, const void* kernel, unsigned cluster, int shared_bytes, F&& f) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, unsigned, int>, int> cache;
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const std::lock_guard<std::mutex> lock(mutex);
  int& value = cache.try_emplace({kernel, device, cluster, shared_bytes}, -1).first->second;
  return value = f(value);
}

// Whether the code that runs on the current card is of sm_90 or later: clusters, tensor copies,
// programmatic dependent launch. It depends on the code and not on the card, because a card also
// runs code compiled for older ones. So a Hopper card can test the code for sm_80:
//   TLT_CUDA_ARCHS=80-virtual pip install -e . && pytest -m gpu tests/csrc
template <typename... Params>
bool has_hopper_code(const char* op, void (*kernel)(Params...)) {
  return recall(op, reinterpret_cast<const void*>(kernel), 0, 0, [&](int cached) {
    if (cached >= 0) return cached;
    cudaFuncAttributes code;
    check_cuda(cudaFuncGetAttributes(&code, kernel), op);
    return code.binaryVersion >= 90 && code.ptxVersion >= 90 ? 1 : 0;
  });
}

// Raises a kernel's limit of dynamic shared memory. It never lowers it, because captured graphs may
// hold launches that need more.
template <typename... Params>
void allow_shared(const char* op, void (*kernel)(Params...), int bytes) {
  recall(op, reinterpret_cast<const void*>(kernel), 0, 0, [&](int most) {
    if (bytes <= std::max(most, 0)) return most;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               op);
    return bytes;
  });
}

// Gives a kernel the largest share of shared memory, like all kernels of a layer: one with another
// split of L1 and shared memory waits until a multiprocessor is empty.
template <typename... Params>
void prefer_shared(const char* op, void (*kernel)(Params...)) {
  recall(op, reinterpret_cast<const void*>(kernel), 0, 0, [&](int cached) {
    if (cached < 0) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared),
                 op);
    }
    return 1;
  });
}

// A launch and its attributes.
struct LaunchConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute list[2]{};

  template <typename... Params>
  LaunchConfig(const char* op, void (*kernel)(Params...), const KernelShape& shape,
               cudaStream_t stream, bool pdl) {
    allow_shared(op, kernel, shape.shared_bytes);
    if (shape.cluster > kPortableCluster) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                 op);
    }
    config.gridDim = dim3(static_cast<unsigned>(shape.blocks), shape.rows, shape.layers);
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.stream = stream;
    config.attrs = list;
    if (shape.cluster > 1) {
      cudaLaunchAttribute& attribute = list[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {shape.cluster, 1, 1};
    }
    if (pdl && has_hopper_code(op, kernel)) {  // code for an older card does not wait
      cudaLaunchAttribute& attribute = list[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

// Launches a kernel. `pdl` (programmatic dependent launch, sm_90): the kernel may start before the
// previous kernel on the stream ends, and calls wait_for_prior_grid before it uses that kernel's
// results. Every block of it must wait, so that its end implies the end of all earlier kernels.
template <typename... Params, typename... Args>
void launch_kernel(const char* op, void (*kernel)(Params...), const KernelShape& shape,
                   cudaStream_t stream, bool pdl, const Args&... args) {
  if (shape.blocks == 0 || shape.rows == 0 || shape.layers == 0) return;  // nothing to do
  const LaunchConfig launch(op, kernel, shape, stream, pdl);
  check_cuda(cudaLaunchKernelEx(&launch.config, kernel, args...), op);
}

#endif

}  // namespace tlt
