// Attention of ragged rows over a paged cache, 16-bit, tensor cores (mma.sync; tensor copies on
// sm_90, cp.async before):
//
//   out[row, head] = sum_j softmax_j(scale * q . k_j) v_j    over the row's keys j = 0 .. position
//
// The query heads of a kv head and the rows of a request are packed into M, 16 (row, head) pairs a
// warp. A block owns one request, kv head and block of rows, and a range of splits of the keys
// (splits.h): it streams tiles of 64 keys and of 64 values through a ring in shared memory, once,
// and each warp folds them into its pairs alone, so a pair's bits do not depend on the block. With
// few blocks one more grid dimension shares out the splits and the rows' tails: partials go to the
// caller's workspace and a second launch folds them. Otherwise a block folds its own.
//
// Moves each key and value once per row block. head_dim 64 and 128, pages of 16 to 128 slots,
// groups to 8. Every address comes from a checked page; the grid depends on shapes alone.
#include <string>
#include <type_traits>

#include "attention/op.h"
#include "attention/plan.h"
#include "attention/row_block.cuh"

namespace tlt {
namespace {

constexpr int kMergeWarps = 4;

// Makes the barriers of a ring; the same code for sm_80, which has none.
template <int kRing>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kRing]) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : full) init_barrier(&barrier, 1);
    fence_copies();
  }
  __syncthreads();
#endif
}

// Lets copies overwrite what this thread wrote to the ring's memory.
__device__ __forceinline__ void release_ring() {
#if __CUDA_ARCH__ >= 900
  fence_copies();
#endif
}

// Grid: (kv heads * row blocks, requests, items and tails).
template <typename T, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWarps == 4 ? 2 : 1)
    attend_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(1024) char memory[];
  auto* shared = reinterpret_cast<Shared<kDim, kWarps>*>(memory);
  launch_dependents();
  RingPlace<kRingTiles<kWarps>> place;
  init_ring(shared->full);
  const Request r = read_request(l.p, blockIdx.y);
  if (!r.good && blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    report_on_device(l.p.sequences, r.index, kStatusBadLength);
  }
  const int64_t kv_head = blockIdx.x / l.row_blocks;
  const int block_rows = kWarps * kMmaRows / l.group;
  for (int64_t row = int64_t{blockIdx.x % l.row_blocks} * block_rows; row < r.num_rows;
       row += int64_t{l.row_blocks} * block_rows) {
    RowBlock<T, kDim, kWarps> block(l, r, kv_head, row, shared, &place);
    const int item = blockIdx.z, tail_item = item - l.partials.max_items;
    const bool alone = l.partials.acc == nullptr;
    if (tail_item < 0) block.run(item);
    if (alone || tail_item >= 0) {
      const int first = alone ? 0 : tail_item * kWarps;
      block.run_tails(first + threadIdx.x / kWarpSize,
                      alone ? kWarps : (gridDim.z - l.partials.max_items) * kWarps);
    }
    if (alone) {
      __syncthreads();  // all tails are there
      block.finish();
    }
    release_ring();
    __syncthreads();  // the next turn reuses shared memory
  }
}

// Folds the partials of each (row, head): a warp each. Grid: (blocks by turns, requests).
template <typename T, int kDim>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    merge_kernel(const __grid_constant__ Launch l) {
  constexpr int kLaneDims = kDim / kWarpSize, kAhead = 12;
  const TreeAttentionParams& p = l.p;
  const Request r = read_request(p, blockIdx.y);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / kWarpSize;
  bool waited = false;
  for (int64_t i = first; i < r.num_rows * p.num_heads; i += int64_t{gridDim.x} * kMergeWarps) {
    const int64_t row = r.row + i / p.num_heads, head = i % p.num_heads;
    const int64_t tail = partial_index(l, l.partials.max_items, row, head);
    Softmax total;
    float acc[kLaneDims] = {};
    bool refused = !well_placed(p, r, row - r.row, p.position[row]);
    const int64_t splits = refused ? 0 : splits_below(tail_begin(p.position[row]));
    const int64_t first_item = first_splits(l, r);
    const int64_t items = splits == 0 ? 0 : splits <= first_item ? 1 : splits - first_item + 1;
    if (!waited) wait_for_prior_grid();  // what was read so far is older than that grid
    waited = true;
    for (int64_t item = 0; item <= items; item += kAhead) {
      Softmax part[kAhead];
      float value[kAhead][kLaneDims];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {  // all reads before the first fold
        if (item + a > items) break;
        const int64_t at = item + a == items ? tail : partial_index(l, item + a, row, head);
        part[a] = l.partials.softmax[at];
        const float* from = l.partials.acc + at * kDim + lane * kLaneDims;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) value[a][d] = from[d];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (item + a > items) break;
        float scale[2];
        refused |= part[a].sum < 0.0f;
        if (!fold(&total, part[a], scale)) continue;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) acc[d] = folded(acc[d], value[a][d], scale);
      }
    }
    const float inverse = __frcp_rn(total.sum);
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
#pragma unroll
    for (int d = 0; d < kLaneDims; d += 2) {
      const uint32_t two = pack_pair<T>(mul_rn(acc[d], inverse), mul_rn(acc[d + 1], inverse));
      reinterpret_cast<uint32_t*>(out + lane * kLaneDims)[d / 2] = refused ? 0 : two;
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[row * p.lse_stride + head] = refused ? -INFINITY : lse_of(total);
    }
  }
}

CUtensorMap map_of(const TreeAttentionParams& p, const PagedCache& cache) {
  const Sequences& s = p.sequences;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int64_t lines = p.head_dim * 2 / kLine;
  return make_tensor_map(
      cache.data,
      {kLine / 2, size(p.num_kv_heads), size(s.page_size), size(lines), size(s.num_pages)},
      {size(2 * cache.head_stride), size(2 * cache.slot_stride), kLine,
       size(2 * cache.page_stride)},
      {kLine / 2, 1, kStep, static_cast<cuuint32_t>(lines), 1});
}

template <typename T, int kDim, int kWarps>
void launch_attend(const Launch& l, const AttentionPlan& plan, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<kDim, kWarps>);
  const auto kernel = attend_kernel<T, kDim, kWarps>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "tree_attention: shared memory");
  const int64_t block_rows = kWarps * kMmaRows / l.group;
  const int64_t tails = l.partials.acc == nullptr ? 0 : (block_rows + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(l.p.num_kv_heads * plan.row_blocks),
                  static_cast<unsigned>(l.p.sequences.num_requests),
                  static_cast<unsigned>(l.partials.max_items + tails));
  kernel<<<grid, kWarps * kWarpSize, bytes, stream>>>(l);
  check_cuda(cudaGetLastError(), "tree_attention");
}

template <typename T, int kDim>
void launch_merge(const Launch& l, cudaStream_t stream) {
  const Sequences& s = l.p.sequences;
  const int64_t pairs = (s.num_rows + s.num_requests - 1) / s.num_requests * l.p.num_heads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((pairs + kMergeWarps - 1) / kMergeWarps),
                        static_cast<unsigned>(s.num_requests));
  config.blockDim = dim3(kMergeWarps * kWarpSize);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = is_hopper() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, merge_kernel<T, kDim>, l), "tree_attention: merge");
}

template <typename T, int kDim>
void launch(const Launch& l, const AttentionPlan& plan, cudaStream_t stream) {
  if (plan.warps == 4) {
    launch_attend<T, kDim, 4>(l, plan, stream);
  } else {
    launch_attend<T, kDim, 8>(l, plan, stream);
  }
  if (l.partials.acc != nullptr) launch_merge<T, kDim>(l, stream);
}

}  // namespace

void tree_attention_cuda(const TreeAttentionParams& p, void* workspace, int device,
                         uintptr_t stream) {
  const DeviceGuard guard(device);
  if (p.dtype == DType::kFloat32) return tree_attention_float_cuda(p, stream);
  const Sequences& s = p.sequences;
  AttentionPlan plan = plan_attention({s.num_requests, s.num_rows, p.num_heads, p.num_kv_heads,
                                       p.head_dim, s.max_pages * s.page_size});
  const auto group = static_cast<int>(p.num_heads / p.num_kv_heads);
  int page_shift = 0;
  while (int64_t{1} << page_shift < s.page_size) ++page_shift;
  Launch l{p, {}, group, static_cast<int>(plan.row_blocks), page_shift, {}};
  if (is_hopper()) l.maps = {map_of(p, p.k), map_of(p, p.v)};
  l.partials = {nullptr, nullptr, 1, 1};
  if (workspace != nullptr && plan.max_items > 1) {
    const int64_t partials = (plan.max_items + 1) * s.num_rows * p.num_heads;
    auto* acc = static_cast<float*>(workspace);
    l.partials = {acc, reinterpret_cast<Softmax*>(acc + partials * p.head_dim),
                  static_cast<int>(plan.max_items), static_cast<int>(plan.share)};
  }
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if constexpr (!std::is_same_v<T, float>) {
      if (p.head_dim == 64) return launch<T, 64>(l, plan, as_stream(stream));
      if (p.head_dim == 128) return launch<T, 128>(l, plan, as_stream(stream));
      throw std::invalid_argument("tree_attention: on a GPU a 16-bit head_dim is 64 or 128, got " +
                                  std::to_string(p.head_dim));
    }
  });
}

}  // namespace tlt
