// Attention of ragged rows over a paged cache, 16-bit, on tensor cores:
//
//   out[row, head] = sum_j softmax_j(scale * q . k_j) v_j    over the row's keys j = 0 .. position
//
// The query heads of a kv head and the rows of a request are packed into the MMA's M, 64 (row,
// head) pairs per four warps: on sm_90a one wgmma of four warps, padded if there are fewer pairs;
// on older cards mma.sync of 16 pairs per warp. In some kernels four warps share at most eight
// pairs (few_block.cuh). A block owns one request, kv head and block of rows, and a range of splits
// of the keys (splits.h). One producer warp (four, if blocks share keys of 64 dimensions) streams
// tiles of 64 keys and of 64 values once through a ring in shared memory, by tensor copies (on
// sm_80 all warps do, by cp.async).
//
// With few blocks one more grid dimension distributes the splits: partials go to the caller's
// workspace, and a second launch (merge.cuh) computes the rows' tails meanwhile and folds all
// partials in index order. With very few blocks, and short tables, a cluster does all of that in
// one launch, through its blocks' shared memory. Otherwise a block folds its own splits. All
// launches use programmatic dependent launch: they prefetch keys into L2 (with pdl, they copy the
// committed keys), wait for the previous kernel, and read.
//
// Reads each key and value once per row block. head_dim 64 and 128, pages of 16 to 128 slots,
// groups up to 8. Every address is derived from a checked page; the grid depends on shapes alone.
#include <algorithm>
#include <string>
#include <type_traits>

#include "attention/cluster.cuh"
#include "attention/few_block.cuh"
#include "attention/merge.cuh"
#include "attention/op.h"
#include "attention/plan.h"
#include "common/rows.cuh"

namespace tlt {
namespace {

constexpr const char* kOp = "tree_attention";
constexpr int kClusterWarps = 4;  // warps that compute
constexpr int kFewRequests = 8;   // with more, blocks of few pairs wait for memory anyway

// Initialises the barriers of a ring; does nothing for sm_80, which has none.
template <int kRing>
__device__ __forceinline__ void init_ring(RingBarriers<kRing>* barriers, int warps,
                                          int loader_shift) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : barriers->full) init_barrier(&barrier, 1 << loader_shift);
    for (uint64_t& barrier : barriers->empty) init_barrier(&barrier, warps);
    fence_copies();
  }
  __syncthreads();
#endif
}

// Allows copies to overwrite what this thread wrote to the ring's memory.
__device__ __forceinline__ void release_ring() {
#if __CUDA_ARCH__ >= 900
  fence_copies();
#endif
}

// The kv head and the row block of a block. One row block, the usual case, saves a division of a
// hundred cycles.
struct BlockRows {
  int kv_head, first;
};

__device__ __forceinline__ BlockRows find_rows(const Launch& l, unsigned block) {
  const unsigned row_blocks = l.row_blocks;
  if (row_blocks == 1) return {static_cast<int>(block), 0};
  return {static_cast<int>(block / row_blocks), static_cast<int>(block % row_blocks)};
}

// Calls f(block) for each row block of a thread block: from row block `first` of the kv head on,
// every row_blocks-th.
template <typename Block, int kRows, typename F>
__device__ __forceinline__ void for_row_blocks(const Launch& l, int kv_head, int first,
                                               typename Block::Memory* shared, F&& f) {
  typename Block::Cursor cursor;
  const Request r = read_request(l.p, blockIdx.y);
  if (!r.good && blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    wait_for_prior_grid();
    report_on_device(l.p.sequences, r.index, kStatusBadLength);
  }
  const int block_rows = l.rows_of(kRows);
  for (int64_t row = first * block_rows; row < r.num_rows; row += l.row_blocks * block_rows) {
    Block block(l, r, kv_head, row, shared, &cursor);
    f(block);
  }
}

// Grid: (kv heads * row blocks, requests, items).
template <typename T, int kDim, int kWarps, Residency kResidency>
__global__ void __launch_bounds__((kWarps + (kHopper ? kProducerWarps : 0)) * kWarpSize,
                                  kWarps == 4 ? 2 : 1)
    attend_kernel(const __grid_constant__ Launch l) {
  using Block = FewBlock<T, kDim, kWarps, kResidency>;
  constexpr int kRows = kWarps * kMmaRows;
  extern __shared__ __align__(1024) char memory[];
  auto* shared = reinterpret_cast<typename Block::Memory*>(memory);
  init_ring(&shared->barriers, kWarps, l.loader_shift);
  const auto [kv_head, first] = find_rows(l, blockIdx.x);
  if (kHopper && threadIdx.x >= kWarps * kWarpSize) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    give_registers<56>();
#endif
    if (!l.p.pdl) {
      for_row_blocks<Block, kRows>(l, kv_head, first, shared,
                                   [](const Block& block) { block.prefetch(blockIdx.z); });
      wait_for_prior_grid();
    }
    for_row_blocks<Block, kRows>(l, kv_head, first, shared, [](Block& block) {
      block.produce(blockIdx.z);
      sync_block<kWarps>();
    });
  } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    take_registers<kWarps == 4 ? 200 : 224>();
#endif
    if (!l.p.pdl) {
      wait_for_prior_grid();
      launch_dependents();  // not earlier: the merge reads keys before it waits for this grid
    }
    for_row_blocks<Block, kRows>(l, kv_head, first, shared, [](Block& block) {
      block.run(blockIdx.z);
      release_ring();
      sync_block<kWarps>();  // the next row block reuses shared memory
    });
    wait_for_prior_grid();  // a block without rows must not exit earlier either
  }
}

// The same and the merge in one launch (cluster.cuh). Grid: (blocks of a cluster, requests, kv
// heads * row blocks).
template <typename T, int kDim>
__global__ void __launch_bounds__((kClusterWarps + kProducerWarps) * kWarpSize, 2)
    cluster_kernel(const __grid_constant__ Launch l) {
#if __CUDA_ARCH__ >= 900
  constexpr int kWarps = kClusterWarps, kRows = kWarps * kMmaRows;
  using Block = ClusterBlock<T, kDim, kWarps>;
  extern __shared__ __align__(1024) char memory[];
  auto* shared = reinterpret_cast<typename Block::Memory*>(memory);
  launch_dependents();
  init_ring(&shared->barriers, kWarps, l.loader_shift);
  const auto [kv_head, first] = find_rows(l, blockIdx.z);
  if (threadIdx.x >= kWarps * kWarpSize) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    give_registers<56>();
#endif
    if (!l.p.pdl) {
      for_row_blocks<Block, kRows>(l, kv_head, first, shared,
                                   [](const Block& block) { block.prefetch(blockIdx.x); });
      wait_for_prior_grid();
    }
    for_row_blocks<Block, kRows>(l, kv_head, first, shared, [](Block& block) {
      block.produce(blockIdx.x);
      for (int barrier = 0; barrier < 2; ++barrier) {  // the cluster barriers of run()
        arrive_after_reads();
        wait_for_cluster();
      }
      sync_block<kWarps>();
    });
  } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    take_registers<200>();
#endif
    if (!l.p.pdl) wait_for_prior_grid();
    for_row_blocks<Block, kRows>(l, kv_head, first, shared, [](Block& block) {
      block.run(blockIdx.x);
      release_ring();
      sync_block<kWarps>();  // the next row block reuses shared memory
    });
    wait_for_prior_grid();  // a block without rows must not exit earlier either
  }
#endif
}

CUtensorMap map_of(const TreeAttentionParams& p, const PagedCache& cache) {
  const Sequences& s = p.sequences;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int64_t lines = p.head_dim * 2 / kLine;
  // A tensor map needs an address and a page. That of a cache without pages is one line of q; what
  // is read of it is not used, as every page is bad.
  const bool empty = s.num_pages == 0;
  const auto extent = [&](int64_t n) { return size(empty ? 1 : n); };
  return make_tensor_map(
      empty ? p.q : cache.data,
      {kLine / 2, extent(p.num_kv_heads), extent(s.page_size), extent(lines), extent(s.num_pages)},
      {size(2 * cache.head_stride), size(2 * cache.slot_stride), kLine,
       size(2 * cache.page_stride)},
      {kLine / 2, 1, kStep, 1, 1});
}

template <typename T, int kDim, int kWarps, Residency kResidency>
void launch_attend(const Launch& l, const AttentionPlan& plan, bool hopper, cudaStream_t stream) {
  const int bytes = hopper ? sizeof(Shared<kDim, kWarps, true, kResidency>)
                           : sizeof(Shared<kDim, kWarps, false, kResidency>);
  const KernelShape shape{l.p.num_kv_heads * plan.row_blocks,
                          (kWarps + (hopper ? kProducerWarps : 0)) * kWarpSize,
                          bytes,
                          1,
                          static_cast<unsigned>(l.p.sequences.num_requests),
                          static_cast<unsigned>(l.partials.items)};
  // Dependent launches, like the merge: both wait before they read what previous kernels wrote.
  // Otherwise the split of L1 and shared memory is the smallest for one block, and the merge waits.
  if (kResidency == Residency::kAlone) {
    prefer_shared(kOp, attend_kernel<T, kDim, kWarps, kResidency>);
  }
  launch_kernel(kOp, attend_kernel<T, kDim, kWarps, kResidency>, shape, stream, true, l);
}

template <typename T, int kDim>
void launch_merge(const Launch& l, cudaStream_t stream) {
  const Sequences& s = l.p.sequences;
  const int64_t rows = (s.num_rows + s.num_requests - 1) / s.num_requests;
  const int warps = l.group * kDim / 64;
  const int bytes = static_cast<int>(sizeof(MergeRow<kDim>)) * l.merge_rows +
                    static_cast<int>(sizeof(TailScratch<kDim>)) * l.tail_warps;
  const int64_t turns = (rows * l.p.num_kv_heads + l.merge_rows - 1) / l.merge_rows;
  const KernelShape shape{turns, warps * kWarpSize, bytes, 1,
                          static_cast<unsigned>(s.num_requests)};
  launch_kernel(kOp, merge_kernel<T, kDim>, shape, stream, true, l);
}

// False if the card cannot run such clusters.
template <typename T, int kDim>
bool launch_clusters(const Launch& l, const AttentionPlan& plan, cudaStream_t stream) {
  const auto kernel = cluster_kernel<T, kDim>;
  const int bytes = sizeof(Shared<kDim, kClusterWarps, true, Residency::kCluster>);
  const int threads = (kClusterWarps + kProducerWarps) * kWarpSize;
  if (max_active_clusters(kOp, kernel, {1, threads, bytes, kClusterBlocks, true}) < 1) return false;
  const KernelShape shape{kClusterBlocks,
                          threads,
                          bytes,
                          kClusterBlocks,
                          static_cast<unsigned>(l.p.sequences.num_requests),
                          static_cast<unsigned>(l.p.num_kv_heads * plan.row_blocks)};
  launch_kernel(kOp, kernel, shape, stream, true, l);
  return true;
}

template <typename T, int kDim>
void launch(Launch l, const AttentionPlan& plan, cudaStream_t stream) {
  // A build contains the same architectures for all kernels.
  const bool hopper = has_hopper_code(kOp, cluster_kernel<T, kDim>);
  if (hopper) l.maps = {map_of(l.p, l.p.k), map_of(l.p, l.p.v)};
  const bool shares = l.partials.acc != nullptr;
  if (hopper && shares && plan.cluster && launch_clusters<T, kDim>(l, plan, stream)) return;
  // Instances of blocks that share keys; 64 dimensions have one for all.
  constexpr Residency kAlone = kDim > 64 ? Residency::kAlone : Residency::kPacked;
  constexpr Residency kFew = kDim > 64 ? Residency::kFewPairs : Residency::kPacked;
  const Sequences& s = l.p.sequences;
  const bool few = hopper && s.num_requests <= kFewRequests &&
                   s.num_rows * l.group <= kFewPairs * s.num_requests;  // on average
  if (plan.warps == 8) {
    launch_attend<T, kDim, 8, Residency::kPacked>(l, plan, hopper, stream);
  } else if (shares && plan.alone) {
    launch_attend<T, kDim, 4, kAlone>(l, plan, hopper, stream);
  } else if (shares && few) {
    launch_attend<T, kDim, 4, kFew>(l, plan, hopper, stream);
  } else {
    launch_attend<T, kDim, 4, Residency::kPacked>(l, plan, hopper, stream);
  }
  if (shares) launch_merge<T, kDim>(l, stream);
}

}  // namespace

void tree_attention_cuda(const TreeAttentionParams& p, void* workspace, int device,
                         uintptr_t stream) {
  const DeviceGuard guard(device);
  grid_axis(kOp, "requests", p.sequences.num_requests);
  if (p.dtype == DType::kFloat32) return tree_attention_float_cuda(p, stream);
  const Sequences& s = p.sequences;
  AttentionPlan plan = plan_attention({s.num_requests, s.num_rows, p.num_heads, p.num_kv_heads,
                                       p.head_dim, s.max_pages * s.page_size});
  const auto group = static_cast<int>(p.num_heads / p.num_kv_heads);
  int page_shift = 0;
  while (int64_t{1} << page_shift < s.page_size) ++page_shift;
  Launch l{p,
           {},
           group,
           static_cast<int>(plan.row_blocks),
           page_shift,
           (1 << 16) / group + 1,
           static_cast<int>(plan.merge_rows),
           static_cast<int>(plan.tail_warps),
           plan.items > 1 && p.head_dim <= 64 ? 2 : 0,  // four producer warps or one
           {}};
  l.partials = {nullptr, nullptr, 1, 0, 0};
  if (workspace != nullptr && plan.items > 1) {
    const int64_t partials = plan.partials * s.num_rows * p.num_heads;
    auto* acc = static_cast<float*>(workspace);
    l.partials = {acc, reinterpret_cast<Softmax*>(acc + partials * p.head_dim),
                  static_cast<int>(plan.items), static_cast<int>(plan.small_items),
                  share_of(plan.items - plan.small_items)};
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
