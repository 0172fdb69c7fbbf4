// sample and verify_tree on the GPU: token = argmax over ids of logit / T + gumbel(noise word of
// id).
//
// With a workspace two launches: `score` gives every warp one chunk of one row (row.cuh) and reads
// each logit once; then a team of blocks a row (sample) or a request (verify_tree) folds the
// chunks' partials, applies top-k and top-p where a request sets them (filter.cuh), and follows the
// tree. verify_tree so scores all rows at once, and reports only on those that its walk visits, as
// the CPU does. Without a workspace the second kernel scans the rows itself, one block a row, with
// the same bits.
//
// Moves rows * vocab_size logits, once. Limits: 2^22 ids; 128 rows a request.
#include "common/mma.cuh"
#include "sampling/filter.cuh"
#include "sampling/op.h"
#include "sampling/walk.cuh"

namespace tlt {
namespace {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kScoreWarps = 8;
constexpr int kScoreThreads = kScoreWarps * kWarpSize;
constexpr int kScoreBlocks = 4;  // a multiprocessor, so that latencies overlap

// Blocks are dealt to rows (x), kScoreWarps chunks each (y).
unsigned blocks_a_row(int64_t vocab_size) {
  return static_cast<unsigned>((chunks_of(vocab_size) + kScoreWarps - 1) / kScoreWarps);
}

// Scores this block's part of a row for the sampling parameters of item b.
template <typename T>
__device__ __forceinline__ void score_part(const RowData<T>& data, const SamplingArrays& s,
                                           int64_t b, const int32_t* position, int32_t ahead,
                                           void* workspace) {
  extern __shared__ uint4 stages[];
  __shared__ uint32_t reached;
  const int32_t warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int32_t chunk = blockIdx.y * kScoreWarps + warp;
  uint4* stage = stages + warp * kStageSlots<T>;
  stage_chunk(data, chunk, stage);
  const Row<T> row(data, s.temperature[b]);
  const Draw draw{noise_key(s.seed, s.request[b], NoiseDomain::kTarget), *position + ahead};
  if (threadIdx.x == 0) reached = ascending(kNegInf);
  __syncthreads();
  const auto share = [&](float score) {
    if (lane == 0) atomicMax(&reached, ascending(score));
    __syncthreads();
    return from_ascending(reached);
  };
  // A warp past the row's end scans nothing, but meets the others at the barrier.
  const Partial partial = scan_chunk(row, chunk, stage, !row.greedy, draw, share);
  const int32_t num_chunks = static_cast<int32_t>(chunks_of(data.vocab_size));
  if (lane == 0 && chunk < num_chunks) {
    static_cast<Partial*>(workspace)[int64_t{blockIdx.x} * num_chunks + chunk] = partial;
  }
}

template <typename T>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_rows_kernel(const SampleParams p) {
  wait_for_prior_grid();
  launch_dependents();
  const int64_t i = blockIdx.x;
  const RowData<T> data(p.logits, p.logits_stride, i, p.vocab_size);
  score_part(data, p.sampling, i, p.position + i, 0, p.workspace);
}

template <typename T>
__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_nodes_kernel(const VerifyParams p) {
  wait_for_prior_grid();
  launch_dependents();
  const int64_t i = blockIdx.x;
  const int64_t b = find_request(p, i);
  if (b < 0 || p.limit[b] <= 0) return;
  const RowData<T> data(p.logits, p.logits_stride, i, p.vocab_size);
  score_part(data, p.sampling, b, p.position + i, 1, p.workspace);
}

// One team a row.
template <typename T, bool kScored>
__global__ void __launch_bounds__(kThreads, 2) finish_rows_kernel(const SampleParams p) {
  extern __shared__ uint4 shared[];
  Team<kThreads> team;
  const int64_t i = team.item();
  const Setting setting(p.sampling, i, p.vocab_size);  // older than the kernel before
  const Row<T> row({p.logits, p.logits_stride, i, p.vocab_size}, p.sampling.temperature[i]);
  const Draw draw{noise_key(p.sampling.seed, p.sampling.request[i], NoiseDomain::kTarget),
                  p.position[i]};
  wait_for_prior_grid();
  launch_dependents();
  if (!setting.has_filter() && team.rank() != 0) return;
  const bool one_warp = kScored && !setting.has_filter();
  if (one_warp && threadIdx.x >= kWarpSize) return;
  RowResult result;
  if constexpr (kScored) {
    result = merge_row(row, static_cast<const Partial*>(p.workspace) + i * chunks_of(p.vocab_size));
  } else {
    result = scan_row(row, !row.greedy, draw, shared);
  }
  const bool want_filtered = p.filtered_logprobs != nullptr;
  const Drawn drawn = resolve(team, row, result, setting, draw, want_filtered);
  if (team.rank() == 0 && threadIdx.x == 0) {
    p.tokens[i] = drawn.token;
    p.logprobs[i] = drawn.logprob;
    if (want_filtered) p.filtered_logprobs[i] = drawn.filtered_logprob;
    if (result.bad) p.status[i] |= kStatusNanLogits;
  }
  if (setting.has_filter()) team.sync();  // a block's shared memory stays until all have read it
}

// One team a request.
template <typename T, bool kScored>
__global__ void __launch_bounds__(kThreads, 2) walk_kernel(const VerifyParams p) {
  extern __shared__ uint4 shared[];
  __shared__ TreeRows tree;
  __shared__ RowResult results[kMaxTreeRows];
  Team<kThreads> team;
  const int64_t b = team.item();
  const Setting setting(p.sampling, b, p.vocab_size);  // older than the kernel before
  const bool reports = team.rank() == 0 && threadIdx.x == 0;
  const bool idle = !setting.has_filter() && team.rank() != 0;
  const int32_t status = idle ? kStatusOk : tree.load(p, b);
  const float temperature = p.sampling.temperature[b];
  const NoiseKey key = noise_key(p.sampling.seed, p.sampling.request[b], NoiseDomain::kTarget);
  const auto row_of = [&](int node) {
    return Row<T>({p.logits, p.logits_stride, tree.first + node, p.vocab_size}, temperature);
  };
  wait_for_prior_grid();
  launch_dependents();
  if (idle) return;
  const int64_t num_chunks = chunks_of(p.vocab_size);
  const Partial* partials = static_cast<const Partial*>(p.workspace) + tree.first * num_chunks;
  if (kScored && p.limit[b] > 0) {
    for (int node = threadIdx.x / kWarpSize; node < tree.num_rows; node += kWarps) {
      const RowResult result = merge_row(row_of(node), partials + node * num_chunks);
      if (threadIdx.x % kWarpSize == 0) results[node] = result;
    }
    __syncthreads();
  }
  const bool want_filtered = p.filtered_logprobs != nullptr;
  walk(p, b, tree, reports, status, [&](int node, int32_t* row_status) {
    const Row<T> row = row_of(node);
    const Draw draw{key, p.position[tree.first + node] + 1};
    const RowResult result = kScored ? results[node] : scan_row(row, !row.greedy, draw, shared);
    if (result.bad) *row_status |= kStatusNanLogits;
    const Drawn drawn = resolve(team, row, result, setting, draw, want_filtered);
    return Step{drawn, tree.find_child(node, drawn.token)};
  });
  if (setting.has_filter()) team.sync();
}

// Launches a score kernel for `rows` rows, and then the kernel that takes its results.
template <typename T, typename Params>
void launch_both(const char* op, void (*score)(Params), void (*finish)(Params), const Params& p,
                 int64_t rows, int64_t items, cudaStream_t stream) {
  LaunchShape shape{rows, kScoreThreads, kScoreWarps * kStageSlots<T> * sizeof(uint4), 1, true};
  shape.parts = blocks_a_row(p.vocab_size);
  launch(op, score, shape, stream, p);
  launch(op, finish, {items, kThreads, 0, kMaxTeam, true}, stream, p);
}

}  // namespace

void sample_cuda(const SampleParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "sample";
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (p.workspace != nullptr) {
      return launch_both<T>(op, score_rows_kernel<T>, finish_rows_kernel<T, true>, p, p.rows,
                            p.rows, as_stream(stream));
    }
    const size_t shared = scan_bytes<T>(p.vocab_size);
    launch(op, finish_rows_kernel<T, false>, {p.rows, kThreads, shared, kMaxTeam, false},
           as_stream(stream), p);
  });
}

void verify_tree_cuda(const VerifyParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "verify_tree";
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (p.workspace != nullptr && p.num_rows > 0) {
      return launch_both<T>(op, score_nodes_kernel<T>, walk_kernel<T, true>, p, p.num_rows,
                            p.num_requests, as_stream(stream));
    }
    const size_t shared = scan_bytes<T>(p.vocab_size);
    launch(op, walk_kernel<T, false>, {p.num_requests, kThreads, shared, kMaxTeam, false},
           as_stream(stream), p);
  });
}

}  // namespace tlt
