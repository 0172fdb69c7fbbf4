// Hopper's tensor copies and their barriers, one function each, and the tensor map, which the host
// makes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/cuda.h"

namespace tlt {

// A tensor map of 16-bit elements: extents and box from the innermost axis on, byte strides of all
// other axes. Copies are swizzled in rows of 128 bytes; elements outside read as zeros.
template <int kRank>
CUtensorMap make_tensor_map(const void* data, const cuuint64_t (&extents)[kRank],
                            const cuuint64_t (&strides)[kRank - 1],
                            const cuuint32_t (&box)[kRank]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(entry);
  }();
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, kRank, const_cast<void*>(data), extents, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("no tensor map for this layout: CUDA error " + std::to_string(result));
  }
  return map;
}

// A tensor map of the rows of a matrix: a box is 64 columns of `box_rows` rows.
inline CUtensorMap make_row_map(const void* data, int64_t rows, int64_t columns, int64_t stride,
                                int64_t box_rows) {
  return make_tensor_map<2>(data, {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)},
                            {static_cast<cuuint64_t>(2 * stride)},
                            {64, static_cast<cuuint32_t>(box_rows)});
}

// The same for two matrices, `apart` rows apart: a box is 8 rows of the first, the same 8 of the
// second, the next 8 of the first, and so on, `box_rows` in all. Together they have `rows` rows,
// each a multiple of 8.
inline CUtensorMap make_pair_map(const void* data, int64_t rows, int64_t apart, int64_t columns,
                                 int64_t stride, int64_t box_rows) {
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  return make_tensor_map<4>(data, {size(columns), 8, 2, size(rows / 16)},
                            {size(2 * stride), size(2 * stride * apart), size(2 * 8 * stride)},
                            {64, 8, 2, static_cast<cuuint32_t>(box_rows / 16)});
}

#if defined(__CUDACC__)

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(arrivals)
               : "memory");
}

// Makes this thread's barrier initialisation visible to the cluster; a cluster barrier follows.
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Orders this thread's earlier shared-memory accesses before later tensor copies.
__device__ __forceinline__ void fence_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Barriers can also be named by their addresses, which loops compute once.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  arrive_expecting(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), bytes);
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  arrive(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)));
}

// Arrives once all copy_async_16 copies that this thread started are complete (sm_80 and later).
__device__ __forceinline__ void arrive_copied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}

// Increments a counter, which wraps to 0 after `most`, and returns its old value. Ordered after the
// accesses that happened before it (acquire and release).
__device__ __forceinline__ uint32_t count_up(uint32_t* counter, uint32_t most) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(counter))), "r"(most)
               : "memory");
  return before;
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "retry:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@!done bra retry;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  wait_barrier(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)), parity);
}

// The cache policy "evict first" of L2, as createpolicy.fractional.L2::evict_first encodes it.
constexpr uint64_t kEvictFirst = 0x12f0000000000000;

// Copies a box of data that is streamed. L2 evicts it before instructions, spilled values and
// partial results.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x0, int x1,
                                         int x2, int x3, int x4, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
      "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "l"(kEvictFirst)
      : "memory");
}

// Copies 64 columns of a matrix from `column` on, of the rows from `row` on.
__device__ __forceinline__ void copy_rows(uint32_t to, const CUtensorMap* map, int column, int row,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same for a map of pairs: rows from `row` on, a multiple of 16, in the map's order.
__device__ __forceinline__ void copy_pairs(uint32_t to, const CUtensorMap* map, int column, int row,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(row / 16), "r"(barrier)
      : "memory");
}

// The same for consecutive bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
}

// Prefetches a tensor map; otherwise its first copy is slow.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Prefetches a box into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int x0, int x1, int x2, int x3,
                                             int x4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

#endif

}  // namespace tlt
