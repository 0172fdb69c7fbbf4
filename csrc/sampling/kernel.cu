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
#include "sampling/filter.cuh"
#include "sampling/op.h"
#include "sampling/walk.cuh"

namespace tlt {
namespace {

constexpr int kWarps = kThreads / kWarpSize;
constexpr int kScoreBlocks = 4;  // blocks a multiprocessor, so that loads hide behind arithmetic

__device__ __forceinline__ int64_t global_warp() {
  return int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
}

template <typename T>
__device__ __forceinline__ void score_chunk(const Row<T>& row, const SamplingArrays& s, int64_t i,
                                            int32_t position, int64_t chunk, Partial* out) {
  const Draw draw{noise_key(s.seed, s.request[i], NoiseDomain::kTarget), position};
  const Partial partial = scan_chunk(row, static_cast<int32_t>(chunk), !row.greedy, draw);
  if (threadIdx.x % kWarpSize == 0) *out = partial;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kScoreBlocks) score_rows_kernel(const SampleParams p) {
  allow_next_kernel();
  const int64_t num_chunks = chunks_of(p.vocab_size), warp = global_warp();
  const int64_t i = warp / num_chunks, chunk = warp % num_chunks;
  if (i >= p.rows) return;
  const Row<T> row(p.logits, p.logits_stride, i, p.vocab_size, p.sampling.temperature[i]);
  score_chunk(row, p.sampling, i, p.position[i], chunk, static_cast<Partial*>(p.workspace) + warp);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kScoreBlocks) score_nodes_kernel(const VerifyParams p) {
  allow_next_kernel();
  const int64_t num_chunks = chunks_of(p.vocab_size), warp = global_warp();
  const int64_t i = warp / num_chunks, chunk = warp % num_chunks;
  if (i >= p.num_rows) return;
  const int64_t b = find_request(p, i);
  if (b < 0 || p.limit[b] <= 0) return;
  const Row<T> row(p.logits, p.logits_stride, i, p.vocab_size, p.sampling.temperature[b]);
  score_chunk(row, p.sampling, b, p.position[i] + 1, chunk,
              static_cast<Partial*>(p.workspace) + warp);
}

// One team a row.
template <typename T, bool kScored>
__global__ void __launch_bounds__(kThreads) finish_rows_kernel(const SampleParams p) {
  extern __shared__ Partial shared_partials[];
  Team<kThreads> team;
  const int64_t i = team.item();
  wait_for_previous_kernel();
  const Setting setting(p.sampling, i, p.vocab_size);
  if (!setting.has_filter() && team.rank() != 0) return;
  const bool one_warp = kScored && !setting.has_filter();
  if (one_warp && threadIdx.x >= kWarpSize) return;
  const Row<T> row(p.logits, p.logits_stride, i, p.vocab_size, p.sampling.temperature[i]);
  const Draw draw{noise_key(p.sampling.seed, p.sampling.request[i], NoiseDomain::kTarget),
                  p.position[i]};
  const int64_t num_chunks = chunks_of(p.vocab_size);
  RowResult result;
  if constexpr (kScored) {
    result = merge_row(static_cast<const Partial*>(p.workspace) + i * num_chunks, num_chunks);
  } else {
    result = scan_row(row, !row.greedy, draw, shared_partials);
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
__global__ void __launch_bounds__(kThreads) walk_kernel(const VerifyParams p) {
  extern __shared__ Partial shared_partials[];
  __shared__ TreeRows tree;
  __shared__ RowResult results[kMaxTreeRows];
  Team<kThreads> team;
  const int64_t b = team.item();
  wait_for_previous_kernel();
  const Setting setting(p.sampling, b, p.vocab_size);
  if (!setting.has_filter() && team.rank() != 0) return;
  const bool reports = team.rank() == 0 && threadIdx.x == 0;
  int32_t status = tree.load(p, b);
  const int64_t num_chunks = chunks_of(p.vocab_size);
  const Partial* partials = static_cast<const Partial*>(p.workspace) + tree.first * num_chunks;
  if (kScored && p.limit[b] > 0) {
    for (int node = threadIdx.x / kWarpSize; node < tree.num_rows; node += kWarps) {
      RowResult result = merge_row(partials + node * num_chunks, num_chunks);
      if (result.token >= p.vocab_size) result.token = -1;  // rows that two requests claim
      if (threadIdx.x % kWarpSize == 0) results[node] = result;
    }
    __syncthreads();
  }
  const bool want_filtered = p.filtered_logprobs != nullptr;
  walk(p, b, tree, reports, status, [&](int node, int32_t* row_status) {
    const Row<T> row(p.logits, p.logits_stride, tree.first + node, p.vocab_size,
                     p.sampling.temperature[b]);
    const Draw draw{noise_key(p.sampling.seed, p.sampling.request[b], NoiseDomain::kTarget),
                    p.position[tree.first + node] + 1};
    const RowResult result =
        kScored ? results[node] : scan_row(row, !row.greedy, draw, shared_partials);
    if (result.bad) *row_status |= kStatusNanLogits;
    const Drawn drawn = resolve(team, row, result, setting, draw, want_filtered);
    return Step{drawn, tree.find_child(node, drawn.token)};
  });
  if (setting.has_filter()) team.sync();
}

unsigned score_blocks(const char* op, int64_t rows, int64_t vocab_size) {
  const int64_t blocks = (rows * chunks_of(vocab_size) + kWarps - 1) / kWarps;
  require(blocks < int64_t{1} << 31, op, "logits: too many rows for one launch");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void sample_cuda(const SampleParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "sample";
  const DeviceGuard guard(device);
  dispatch_storage(op, p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (p.workspace == nullptr) {
      const size_t shared = sampling_workspace_bytes(1, p.vocab_size);
      return launch_teams(op, finish_rows_kernel<T, false>, p.rows, kThreads, shared, false,
                          as_stream(stream), p);
    }
    score_rows_kernel<T>
        <<<score_blocks(op, p.rows, p.vocab_size), kThreads, 0, as_stream(stream)>>>(p);
    check_cuda(cudaGetLastError(), op);
    launch_teams(op, finish_rows_kernel<T, true>, p.rows, kThreads, 0, true, as_stream(stream), p);
  });
}

void verify_tree_cuda(const VerifyParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "verify_tree";
  const DeviceGuard guard(device);
  dispatch_storage(op, p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (p.workspace == nullptr || p.num_rows == 0) {
      const size_t shared = sampling_workspace_bytes(1, p.vocab_size);
      return launch_teams(op, walk_kernel<T, false>, p.num_requests, kThreads, shared, false,
                          as_stream(stream), p);
    }
    score_nodes_kernel<T>
        <<<score_blocks(op, p.num_rows, p.vocab_size), kThreads, 0, as_stream(stream)>>>(p);
    check_cuda(cudaGetLastError(), op);
    launch_teams(op, walk_kernel<T, true>, p.num_requests, kThreads, 0, true, as_stream(stream), p);
  });
}

}  // namespace tlt
