// gather_new_rows on the GPU: one block per row, so that a pass of one request also copies its rows
// in parallel.
//
// Rows are packed, so a block first counts the rows of all requests before its own; the counts are
// a few words that every block reads. Block (i, b) has row i of request b if there is one. The
// other blocks write the ids of the padding rows at the end, in the same order. Reads and writes
// the features once.
#include <type_traits>

#include "common/device.cuh"
#include "kv/op.h"
#include "kv/words.cuh"

namespace tlt {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

// Sums of two counts over the block, in all threads.
__device__ int2 block_sum(int2 v) {
  __shared__ int2 of_warp[kWarps];
  v.x = static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(v.x)));
  v.y = static_cast<int>(__reduce_add_sync(kFullWarp, static_cast<unsigned>(v.y)));
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = v;
  __syncthreads();
  int2 sum = make_int2(0, 0);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    sum.x += of_warp[warp].x;
    sum.y += of_warp[warp].y;
  }
  return sum;
}

// Grid: (largest number of rows of a request, requests).
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherNewRowsParams p) {
  const Sequences& s = p.sequences;
  const int request = static_cast<int>(blockIdx.y), i = static_cast<int>(blockIdx.x);
  int32_t bits;
  int2 rows = make_int2(0, 0);  // before this request; of all
  for (int other = threadIdx.x; other < s.num_requests; other += kThreads) {
    const int count = static_cast<int>(new_rows_of(p, other, &bits));
    rows.y += count;
    if (other < request) rows.x += count;
  }
  rows = block_sum(rows);
  const int count = static_cast<int>(new_rows_of(p, request, &bits));
  const int t = s.context_len[request] - count + i;
  if (i == 0 && threadIdx.x == 0) {
    report_on_device(s, request, bits);
    p.row_start[request] = rows.x;
    p.first[request] = t;
    p.last[request] = count == 0 ? 0 : rows.x + count - 1;
    if (request == s.num_requests - 1) p.row_start[request + 1] = rows.y;
  }
  if (i >= count) {
    if (threadIdx.x != 0) return;
    const int inert_before = request * static_cast<int>(p.most) - rows.x + i - count;
    p.ids[rows.y + inert_before] = 0;
    p.position[rows.y + inert_before] = 0;
    return;
  }
  const int row = rows.x + i;
  Place place{};
  bits = locate(s, request, t, &place);
  if (threadIdx.x == 0) {
    report_on_device(s, request, bits);
    p.ids[row] = p.tokens[p.slot[request] * p.tokens_stride + t + 1];
    p.position[row] = t;
  }
  const Word* from = reinterpret_cast<const Word*>(p.features + place.page * p.page_bytes +
                                                   place.offset * p.slot_bytes);
  Word* to = reinterpret_cast<Word*>(p.rows + row * p.row_bytes);
  const int words = static_cast<int>(p.feature_bytes / sizeof(Word));
  for (int w = threadIdx.x; w < words; w += kThreads) to[w] = bits ? Word{} : from[w];
}

}  // namespace

void gather_new_rows_cuda(const GatherNewRowsParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "gather_new_rows";
  const DeviceGuard guard(device);
  const unsigned requests = grid_axis(op, "requests", p.sequences.num_requests);
  if (requests == 0) {
    check_cuda(cudaMemsetAsync(p.row_start, 0, sizeof(int32_t), as_stream(stream)), op);
    return;
  }
  dispatch_word({address(p.features), p.page_bytes, p.slot_bytes, address(p.rows), p.row_bytes,
                 p.feature_bytes},
                [&](auto* tag) {
                  using Word = std::remove_pointer_t<decltype(tag)>;
                  const KernelShape shape{p.most, kThreads, 0, 1, requests};
                  launch_kernel(op, gather_kernel<Word>, shape, as_stream(stream), false, p);
                });
}

}  // namespace tlt
