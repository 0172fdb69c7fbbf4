// Hopper's tensor-core instructions of four warps (wgmma, sm_90a), one function each.
//
// A (64 rows, 16 to a warp) and the accumulators are in registers, laid out as those of m16n8k16; B
// is in shared memory in rows of 128 bytes, swizzled by a tensor copy. All warps of a warpgroup
// execute them together.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tlt {

// Sets the number of registers of each thread of a warpgroup; all its warps call it, at the start
// of the code that only they run. A warpgroup can take the registers that others of the block have
// released; a request for more never returns, even if the multiprocessor has free registers.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Descriptor of a matrix in shared memory, with consecutive blocks of 8 rows; `address` must be the
// same in all lanes. Only the low word is kept: an offset is one addition in uniform registers.
struct SharedMatrix {
  uint32_t low;

  SharedMatrix() = default;
  __device__ __forceinline__ explicit SharedMatrix(uint32_t address)
      : low(__shfl_sync(0xffffffffu, address, 0) >> 4) {}

  __device__ __forceinline__ SharedMatrix after(uint32_t bytes) const {
    SharedMatrix other;
    other.low = low + (bytes >> 4);
    return other;
  }

  __device__ __forceinline__ uint64_t at(uint32_t offset) const {
    constexpr uint32_t kSwizzle128 = 1u << 30, kStride = 8 * 128 >> 4;
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"(low + (offset >> 4)), "r"(kSwizzle128 | kStride));
    return descriptor;
  }
};

// Orders earlier accesses to registers before the next group_mma.
__device__ __forceinline__ void group_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits all started products as a group.
__device__ __forceinline__ void group_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are in flight.
template <int kPending>
__device__ __forceinline__ void group_wait_for_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending groups are in flight; `d` must not be read before.
template <int kPending, int kColumns>
__device__ __forceinline__ void group_wait_behind(float (&d)[kColumns][4]) {
  group_wait_for_all_but<kPending>();
#pragma unroll
  for (auto& column : d) {
#pragma unroll
    for (float& x : column) asm volatile("" : "+f"(x)::"memory");
  }
}

// Waits for all started products; `d` must not be read before.
template <int kColumns>
__device__ __forceinline__ void group_wait(float (&d)[kColumns][4]) {
  group_commit();
  group_wait_behind<0>(d);
}

// Starts d = a b^T, or d += a b^T if `add`: 64x64x16. B is 64 rows of 16, or 16 rows of 64 if
// kTransposed.
template <typename T, bool kTransposed>
__device__ __forceinline__ void group_mma(float (*d)[4], const uint32_t (&a)[4], uint64_t b,
                                          bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
          "n"(kTransposed ? 1 : 0));
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, "
        "%9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, "
        "%27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),
          "n"(kTransposed ? 1 : 0));
  }
}

}  // namespace tlt
