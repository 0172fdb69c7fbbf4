// How the tree kernels write a list of ancestors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/limits.h"

namespace tlt {

static_assert(kMaxDepth == 16);

// Writes kMaxDepth bytes, the first the lowest of `low`.
__device__ __forceinline__ void write_ancestors(uint8_t* out, uint64_t low, uint64_t high) {
  if (reinterpret_cast<uintptr_t>(out) % sizeof(ulonglong2) == 0) {
    *reinterpret_cast<ulonglong2*>(out) = make_ulonglong2(low, high);
    return;
  }
#pragma unroll 1
  for (int d = 0; d < kMaxDepth; ++d) {
    out[d] = static_cast<uint8_t>((d < 8 ? low : high) >> 8 * (d % 8));
  }
}

}  // namespace tlt
