// sample and verify_tree on the GPU: token = argmax over ids of logit / T + noise of the id.
//
// A cluster (a single block before sm_90) owns a row: scan.cuh reads it once, filter.cuh applies
// top-k and top-p where a request sets them. `sample` is one launch of a cluster per row.
// verify_tree has two implementations with the same bits. For few rows, a cluster per node draws
// the tokens of all nodes at once, and a small kernel follows the path through them. For more rows,
// a cluster per request follows the path and reads only the rows on it; while it scores a row, it
// loads the row of the only child to which the path can lead.
//
// Moves rows * vocab_size logits once. Limits: 2^19 ids; 128 rows a request.
#include "sampling/filter.cuh"
#include "sampling/op.h"
#include "sampling/path.cuh"

// Before sm_90 the compiler would aim at two blocks a multiprocessor, with 64 registers and spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TLT_DRAW_BOUNDS __launch_bounds__(kThreads, 1)
#else
#define TLT_DRAW_BOUNDS __launch_bounds__(kThreads)
#endif

namespace tlt {
namespace {

constexpr int64_t kRowsAtOnce = 64;  // rows of verify_tree, if two blocks share a row
constexpr int kFollowThreads = kMaxTreeRows;

// What is drawn at a node, on the path or not.
struct NodeResult {
  DrawResult drawn;
  int32_t bad;
};
static_assert(sizeof(NodeResult) == kNodeBytes);

// The token of the only row that a cluster draws; its copies were started. With a filter the whole
// cluster must take part, and its blocks must not exit before each other; else one warp is enough.
template <typename T>
__device__ __forceinline__ NodeResult draw_row(Cluster<kThreads>& cluster, Scanner<T>& scanner,
                                               const Row<T>& row, const Setting& setting,
                                               const Draw& draw, bool want_filtered) {
  const Broadcast broadcast = setting.has_filter() ? Broadcast::kAll : Broadcast::kReporter;
  const RowResult result = scanner.score(row, !row.greedy, draw, broadcast);
  return {resolve(cluster, scanner, row, result, setting, draw, want_filtered), result.bad};
}

// A word that a whole warp loads. The load is waited for where the word is used: the compiler would
// move a plain load to a uniform register and wait for it at once.
class WarpWord {
 public:
  __device__ __forceinline__ explicit WarpWord(const void* from) {
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(word_) : "l"(from));
  }
  __device__ __forceinline__ uint32_t get() const { return __reduce_or_sync(kFullWarp, word_); }

 private:
  uint32_t word_;
};

__device__ __forceinline__ int64_t join(uint32_t low, uint32_t high) {
  return static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
}

__device__ __forceinline__ NoiseKey target_key(const SamplingArrays& s, int64_t request) {
  return noise_key(s.seed, request, NoiseDomain::kTarget);
}

// One cluster per row.
template <typename T>
__global__ void TLT_DRAW_BOUNDS sample_kernel(const __grid_constant__ SampleParams p) {
  extern __shared__ uint4 shared[];
  Cluster<kThreads> cluster;
  Scanner<T> scanner(cluster, shared, p.vocab_size);
  const int64_t i = cluster.item();
  const RowData<T> data(p.logits, p.logits_stride, i, p.vocab_size);
  wait_for_prior_grid();
  launch_dependents();
  // Small loads are issued before the copies, behind which they would queue, and used after.
  const SamplingArrays& s = p.sampling;
  const WarpWord temperature(s.temperature + i), top_k(s.top_k + i), top_p(s.top_p + i);
  const WarpWord position(p.position + i), request(s.request + i);
  const WarpWord request_high(reinterpret_cast<const int32_t*>(s.request + i) + 1);
  scanner.start(data);
  const float t = as_float(temperature.get());
  const Row<T> row(data, t);
  const Draw draw{s.round_keys, target_key(s, join(request.get(), request_high.get())),
                  static_cast<int32_t>(position.get())};
  const Setting setting(static_cast<int32_t>(top_k.get()), as_float(top_p.get()), p.vocab_size);
  const bool want_filtered = p.filtered_logprobs != nullptr, filters = setting.has_filter();
  const NodeResult result = draw_row(cluster, scanner, row, setting, draw, want_filtered);
  if (scanner.reports()) {
    p.tokens[i] = result.drawn.token;
    p.logprobs[i] = result.drawn.logprob;
    if (want_filtered) p.filtered_logprobs[i] = result.drawn.filtered_logprob;
    if (result.bad || isnan(t)) p.status[i] |= kStatusNanLogits;
  }
  if (filters) scanner.leave();
}

// One cluster per node.
template <typename T>
__global__ void TLT_DRAW_BOUNDS draw_nodes_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ uint4 shared[];
  Cluster<kThreads> cluster;
  Scanner<T> scanner(cluster, shared, p.vocab_size);
  const int64_t i = cluster.item();
  const RowData<T> data(p.logits, p.logits_stride, i, p.vocab_size);
  wait_for_prior_grid();
  launch_dependents();
  const WarpWord position(p.position + i);
  const RequestFields fields(p, 0);
  scanner.start(data);
  const Owner owner(p, i, fields);
  if (owner.b < 0 || owner.limit <= 0) return scanner.drain();
  const Row<T> row(data, owner.temperature);
  const Draw draw{p.sampling.round_keys, target_key(p.sampling, owner.request),
                  static_cast<int32_t>(position.get()) + 1};
  const Setting setting(owner.top_k, owner.top_p, p.vocab_size);
  const bool want_filtered = p.out.filtered_logprobs != nullptr, filters = setting.has_filter();
  const NodeResult result = draw_row(cluster, scanner, row, setting, draw, want_filtered);
  if (scanner.reports()) static_cast<NodeResult*>(p.workspace)[i] = result;
  if (filters) scanner.leave();
}

// Flags of a node: it drew a stop id; its row has bad logits.
constexpr int32_t kStops = 1, kBad = 2;

// One block per request follows the path through the tokens that were drawn at the nodes. All nodes
// find their child at once, so that a step of the path is one load of shared memory.
__global__ void __launch_bounds__(kFollowThreads)
    follow_kernel(const __grid_constant__ VerifyParams p) {
  __shared__ TreeRows tree;
  __shared__ NodeResult results[kMaxTreeRows];
  __shared__ int32_t flags[kMaxTreeRows], children[kMaxTreeRows], path[kMaxTreeRows];
  const int64_t b = blockIdx.x;
  const int t = threadIdx.x;
  const int32_t tree_status = tree.load(p, b);  // like the limit, older than the previous kernel
  const int64_t limit = max(p.limit[b], 0);
  const bool mine = t < tree.num_rows && limit > 0;
  wait_for_prior_grid();
  launch_dependents();
  NodeResult result{};
  bool stops = false;
  if (mine) {
    result = static_cast<const NodeResult*>(p.workspace)[tree.first + t];
    for (int64_t i = 0; i < p.num_stop_ids; ++i) {
      stops |= p.stop_ids[b * p.stop_stride + i] == result.drawn.token;
    }
  }
  results[t] = result;
  flags[t] = (stops ? kStops : 0) | (result.bad ? kBad : 0);
  children[t] = kNoChild;
  __syncthreads();
  const int32_t parent = mine ? tree.parents[t] : -1;
  if (parent >= 0 && parent < t && tree.tokens[t] == results[parent].drawn.token) {
    atomicMin(&children[parent], t);
  }
  __syncthreads();
  if (t >= kWarpSize) return;
  const int64_t most = limit < p.out.max_emitted ? limit : p.out.max_emitted;
  int count = 0;
  int32_t finish = kRunning, status = tree_status;
  for (int node = 0; node < tree.num_rows && count < most; ++count) {
    if (t == 0) path[count] = node;
    if (flags[node] & kBad) status |= kStatusNanLogits;
    if (flags[node] & kStops) finish = kStopId;
    node = finish == kStopId ? kNoChild : children[node];
  }
  __syncwarp();
#pragma unroll 1
  for (int i = t; i < count; i += kWarpSize) write_step(p, b, i, path[i], results[path[i]].drawn);
  if (t == 0) write_end(p, b, tree, limit, count, finish, status);
}

// One cluster per request draws only at the nodes of the path.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    draw_path_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ uint4 shared[];
  __shared__ TreeRows tree;
  __shared__ BestChildren best_children;
  Cluster<kThreads> cluster;
  Scanner<T> scanner(cluster, shared, p.vocab_size);
  const int64_t b = cluster.item();
  wait_for_prior_grid();
  launch_dependents();
  const Setting setting(p.sampling, b, p.vocab_size);
  const float temperature = p.sampling.temperature[b];
  const NoiseKey key = target_key(p.sampling, p.sampling.request[b]);
  const StopRule stop(p, b);
  const int32_t tree_status = tree.load(p, b);
  const bool want_filtered = p.out.filtered_logprobs != nullptr;
  const auto data_of = [&](int node) {
    return RowData<T>(p.logits, p.logits_stride, tree.first + node, p.vocab_size);
  };
  const auto draw_at = [&](int node) {
    return Draw{p.sampling.round_keys, key, tree.positions[node] + 1};
  };
  int prefetched = kNoChild;  // the node whose row is being copied
  const bool prefetches = !setting.has_filter() && scanner.keeps_row();
  if (prefetches && tree.num_rows > 0 && stop.limit > 0) {
    prefetched = 0;
    best_children.find<T>(tree, temperature, data_of, draw_at, [&] { scanner.start(data_of(0)); });
  }
  emit_path(p, b, tree, stop, scanner.reports(), tree_status, [&](int node, int32_t* status) {
    const RowData<T> data = data_of(node);
    const Row<T> row(data, temperature);
    if (node != prefetched) scanner.start(data);
    prefetched = prefetches ? best_children.child[node] : kNoChild;
    const bool has_next = prefetched != kNoChild;
    const RowResult result = scanner.score(row, !row.greedy, draw_at(node),
                                           prefetches ? Broadcast::kWinner : Broadcast::kAll,
                                           has_next ? data_of(prefetched) : data, has_next);
    if (result.bad) *status |= kStatusNanLogits;
    const DrawResult drawn =
        resolve(cluster, scanner, row, result, setting, draw_at(node), want_filtered);
    return Step{drawn, tree.find_child(node, drawn.token)};
  });
  scanner.drain();
  scanner.leave();
}

}  // namespace

// How many rows of verify_tree run in one wave of clusters.
template <typename T, typename Params>
int64_t rows_at_once(const char* op, void (*kernel)(Params), int device, int64_t vocab_size) {
  if (ceil_div(vocab_size, kStep) > kWarps * depth_of<T>(has_hopper_code(op, kernel))) {
    return kRowsAtOnce;
  }
  int blocks = 0;  // a block fills a multiprocessor
  check_cuda(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device), op);
  return blocks;
}

void sample_cuda(const SampleParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "sample";
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto kernel = sample_kernel<T>;
    launch_cluster_per_item(op, kernel, row_launch<T>(op, kernel, p.rows, p.vocab_size),
                            as_stream(stream), p);
  });
}

void verify_tree_cuda(const VerifyParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "verify_tree";
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto nodes_kernel = draw_nodes_kernel<T>;
    if (p.workspace == nullptr || p.num_rows == 0 ||
        p.num_rows > rows_at_once<T>(op, nodes_kernel, device, p.vocab_size)) {
      const auto path_kernel = draw_path_kernel<T>;
      const ClusterShape shape = row_launch<T>(op, path_kernel, p.num_requests, p.vocab_size);
      return launch_cluster_per_item(op, path_kernel, shape, as_stream(stream), p);
    }
    launch_cluster_per_item(op, nodes_kernel,
                            row_launch<T>(op, nodes_kernel, p.num_rows, p.vocab_size),
                            as_stream(stream), p);
    launch_cluster_per_item(op, follow_kernel, {p.num_requests, kFollowThreads, 0, 1, true},
                            as_stream(stream), p);
  });
}

}  // namespace tlt
