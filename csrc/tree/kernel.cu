// expand_tree on the GPU: children = the top K of logit / T + noise of the target id.
//
// One cluster per request (up to 16 blocks on sm_90, else 1). Frontier rows are processed in
// waves of up to kWave, and the cluster's warps are distributed over them, so a row is spread over
// many multiprocessors. The noise of a warp's first ids does not depend on logits: it is computed
// before the kernel waits for the previous one, from values that rarely change meanwhile, and
// recomputed if they did. A warp sends the largest value of its ids to all blocks and draws the
// noise of further ids while it waits for theirs. Then it sums its weights and stores its best K
// and its sum in the first block, whose warps merge the lists, and score, link and rank the
// children in shared memory. What a block needs from another is written into its shared memory
// before a barrier and never fetched after one, unless the lists are too long for that. The
// log-softmax sums integer weights floor(2^40 exp(value - max)), so scores have the CPU's bits.
//
// Reads B * F * draft_vocab logits once from memory, and once more from cache if a warp has more
// than one tile (the largest value must be known before the weights). Limits: K <= 128, 256 drafter
// slots, kMaxChildren.
#include "common/mma.cuh"
#include "tree/ancestors.cuh"
#include "tree/draft.cuh"
#include "tree/frontier.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kMostBlocks = 2 * kPortableCluster;  // of a cluster: the non-portable limit
constexpr int kWave = 8;
constexpr int kMaxFrontier = 256;
constexpr int kMaxSlices = 64;  // of a row
constexpr int kMaxChildren = 8192;
constexpr int kMaxCollected = 4096;             // list entries that fit into the first block
constexpr int kHeads = kMaxSlices / kWarpSize;  // lists that one lane merges
constexpr int kQueue = 4;                       // entries of each that it holds

// Warps of a block, and ids per lane in a warp's tile. If few ids per lane suffice, small blocks
// are better: a warp finishes sooner, and a block fits beside those of another kernel.
struct LargeBlock {
  static constexpr int kWarps = 16, kIds = kGroup;
};
struct SmallBlock {
  static constexpr int kWarps = 8, kIds = 4;
};
constexpr int kMostWarps = kMostBlocks * LargeBlock::kWarps;  // of a cluster
static_assert(kWave <= SmallBlock::kWarps, "the first block has a warp of each row of a wave");

struct Child {
  float value;  // later its score
  int32_t token;
};

// Whether all lists of a cluster are in its first block, or each list in its own block.
TLT_HD bool fits_first_block(int cluster_warps, int top_k) {
  return cluster_warps * top_k <= kMaxCollected;
}

// Dynamic shared memory: the warps' candidates, the lists that are merged, the children.
struct Layout {
  int candidates, lists;  // entries
  int children;

  TLT_HD Layout(int cluster, int warps, int frontier_rows, int top_k)
      : candidates(warps * list_capacity(top_k)),
        lists((fits_first_block(cluster * warps, top_k) ? cluster : 1) * warps * top_k),
        children(frontier_rows * top_k) {}
  TLT_HD int bytes() const {
    return static_cast<int>((candidates + lists) * sizeof(Candidate) + children * sizeof(Child));
  }
};

struct Shared {
  float largest[kMostWarps];    // of every warp of the cluster
  int64_t mass[kMostWarps];     // from here on only in the first block
  int32_t count[kMaxFrontier];  // children of a row
  int32_t parent[kMaxFrontier], depth[kMaxFrontier];
  float parent_score[kMaxFrontier], max[kMaxFrontier], log_sum[kMaxFrontier];
  alignas(16) uint8_t ancestors[kMaxFrontier * kMaxDepth];
  int32_t begin;  // nodes before this level; 0 if the store has no room
};

// The distribution of the cluster's warps over the rows of a wave: warp w works on row w % rows.
struct WarpAssignment {
  int rows, slices;

  __device__ WarpAssignment(int cluster_warps, int rows)
      : rows(rows), slices(min(kMaxSlices, cluster_warps / rows)) {}
  // The warp of a slice of a row.
  __device__ int warp(int row, int slice) const { return slice * rows + row; }
};

// Merges a row's lists by one warp of the first block. `list_of(warp)` is the list of a warp of the
// cluster.
template <typename ListOf>
__device__ void merge_lists(const WarpAssignment& assignment, int row, int top_k, ListOf&& list_of,
                            Child* children, int32_t* count) {
  const int lane = threadIdx.x % kWarpSize;
  const Candidate* list[kHeads];
  Candidate queue[kHeads][kQueue];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int slice = h * kWarpSize + lane;
    list[h] = list_of(assignment.warp(row, min(slice, assignment.slices - 1)));
#pragma unroll
    for (int i = 0; i < kQueue; ++i) {
      queue[h][i] = Candidate{};
      if (slice < assignment.slices && i < top_k) queue[h][i] = list[h][i];
    }
  }
  int next[kHeads] = {};
  int k = 0;
#pragma unroll 1
  for (; k < top_k; ++k) {
    uint64_t mine = queue[0][0].key;
#pragma unroll
    for (int h = 1; h < kHeads; ++h) mine = max(mine, queue[h][0].key);
    const uint64_t best = warp_max(mine);
    if (best == 0) break;
    if (lane != __ffs(__ballot_sync(kFullWarp, mine == best)) - 1) continue;
    bool taken = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (taken || queue[h][0].key != best) continue;
      taken = true;
      children[k] = {queue[h][0].value, queue[h][0].token()};
#pragma unroll
      for (int i = 1; i < kQueue; ++i) queue[h][i - 1] = queue[h][i];
      const int after = kQueue + next[h]++;
      queue[h][kQueue - 1] = after < top_k ? list[h][after] : Candidate{};
    }
  }
  if (lane == 0) *count = k;
}

// Last step, in the first block: scores and links the children, and ranks the next frontier. A
// row's children have room for top_k entries, of which the first `count` are used.
__device__ void append_children(const ExpandTreeParams& p, int64_t b, int32_t begin,
                                const Shared& shared, Child* children) {
  const int rows = static_cast<int>(p.frontier_rows), top_k = static_cast<int>(p.top_k);
  const int64_t first = b * p.nodes.capacity + begin;
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  const auto before = [&](int row) {  // children of the rows before
    int32_t sum = 0;
    for (int f = 0; f < row; ++f) sum += shared.count[f];
    return sum;
  };
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * top_k; i += static_cast<int>(blockDim.x)) {
    const int f = i / top_k, k = i - f * top_k;
    const Child child = children[i];
    float score = NAN;  // of an unused entry: not above, below or equal to any score
    if (k < shared.count[f]) {
      const float log_prob =
          add_rn(mul_rn(add_rn(child.value, -shared.max[f]), inverse), -shared.log_sum[f]);
      score = add_rn(shared.parent_score[f], fminf(log_prob, 0.0f));
      const int64_t to = first + before(f) + k;
      p.nodes.token[to] = child.token;
      p.nodes.score[to] = score;
      p.nodes.parent[to] = shared.parent[f];
      p.nodes.depth[to] = shared.depth[f] + 1;
    }
    children[i].value = score;
  }
  __syncthreads();
  const auto advance = [&](int rank, int32_t node, int f) {  // f: the row that it came from, or -1
    const int64_t out = b * top_k + rank;
    p.next_frontier[out] = node;
    p.next_row[out] = f < 0 ? 0 : static_cast<int32_t>(b * rows + f);
    const int in_flight = f < 0 || p.frontier_ancestors == nullptr ? 0 : shared.depth[f];
    uint64_t low = 0, high = 0;
    if (in_flight > 0) {  // its parent's, then the slot of its parent
      const int own = in_flight - 1, bits = 8 * (own % 8);
      const uint64_t below = (uint64_t{1} << bits) - 1;
      const uint64_t slot = static_cast<uint64_t>(static_cast<uint8_t>(p.slot_base + f)) << bits;
      const auto* const parents = reinterpret_cast<const uint64_t*>(shared.ancestors) + 2 * f;
      low = own < 8 ? (parents[0] & below) | slot : parents[0];
      high = own < 8 ? 0 : (parents[1] & below) | slot;
    }
    write_ancestors(p.next_ancestors + out * kMaxDepth, low, high);
  };
  const int total = before(rows);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * top_k + top_k; i += static_cast<int>(blockDim.x)) {
    const int f = i / top_k, k = i - f * top_k;
    if (f == rows) {
      if (k >= total) advance(k, -1, -1);
      continue;
    }
    if (k >= shared.count[f]) continue;
    const float mine = children[i].value;
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < rows * top_k; ++j) {
      const float other = children[j].value;
      rank += other > mine || (other == mine && j < i);
    }
    if (rank < top_k) advance(rank, begin + before(f) + k, f);
  }
  if (threadIdx.x == 0 && begin > 0) p.nodes.count[b] = begin + total;
}

// The ancestors of the frontier: loaded to registers early, stored to shared memory when they have
// arrived.
class FrontierAncestors {
 public:
  __device__ FrontierAncestors(const ExpandTreeParams& p, int64_t b, bool wanted)
      : size_(wanted && p.frontier_ancestors != nullptr
                  ? static_cast<int>(p.frontier_rows) * kMaxDepth
                  : 0),
        from_(p.frontier_ancestors + b * p.frontier_rows * kMaxDepth) {
    const int i = threadIdx.x;
    if (i < size_) first_ = from_[i];
  }
  __device__ void store(Shared& shared) const {
    int i = threadIdx.x;
    if (i < size_) shared.ancestors[i] = first_;
#pragma unroll 1
    for (i += static_cast<int>(blockDim.x); i < size_; i += static_cast<int>(blockDim.x))
      shared.ancestors[i] = from_[i];
  }

 private:
  int size_;
  const uint8_t* from_;
  uint8_t first_ = 0;
};

template <typename T, typename Size>
__global__ void __launch_bounds__(Size::kWarps* kWarpSize, LargeBlock::kWarps / Size::kWarps)
    expand_kernel(const __grid_constant__ ExpandTreeParams p) {
  extern __shared__ Candidate memory[];
  __shared__ Shared shared;
  constexpr int kWarps = Size::kWarps, kIds = Size::kIds;
  Cluster<kWarps * kWarpSize> cluster;
  cluster.arrive();
  const int top_k = static_cast<int>(p.top_k), rows = static_cast<int>(p.frontier_rows);
  const Layout layout(cluster.size(), kWarps, rows, top_k);
  Candidate* const lists = memory + layout.candidates;
  Child* const children = reinterpret_cast<Child*>(lists + layout.lists);  // [rows, top_k]
  const bool in_first_block = fits_first_block(cluster.size() * kWarps, top_k);
  const int64_t b = cluster.item();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int cluster_warp = cluster.rank() * kWarps + warp;
  const int32_t columns = static_cast<int32_t>(
      p.d2t != nullptr || p.draft_vocab < p.vocab_size ? p.draft_vocab : p.vocab_size);
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  // The list of a warp of the cluster.
  const auto list_of = [&](int of) {
    return in_first_block ? lists + of * top_k
                          : cluster.remote(lists, of / kWarps) + of % kWarps * top_k;
  };

#pragma unroll 1
  for (int wave = 0; wave < rows; wave += kWave) {
    const WarpAssignment assignment(cluster.size() * kWarps, min(kWave, rows - wave));
    const int mine = cluster_warp % assignment.rows, slice = cluster_warp / assignment.rows;
    const bool has_slice = slice < assignment.slices;
    const RowData<T> data(p.draft_logits, p.logits_stride, b * rows + wave + mine, columns);
    using Tile = DraftTile<T, kIds>;
    const int32_t step = assignment.slices * Tile::kTile, begin = slice * Tile::kTile + lane * kIds;
    const int32_t end = has_slice ? columns + lane * kIds : 0;  // the same for all lanes of a tile
    Tile tile;
    if (wave == 0) {  // all loads so far were speculative
      const volatile float* const temperature = p.temperature + b;
      if (begin < end && !is_greedy(*temperature)) {
        tile.precompute(p, expected_draw(p, b), begin);
      }
      wait_for_prior_grid();
      launch_dependents();
    }
    const FrontierWords words(p, b, wave + mine);
    const FrontierAncestors frontier_ancestors(p, b, wave == 0 && cluster.rank() == 0);
    if (begin < end) tile.fetch(p, data, begin);
    const int32_t count = words.count();
    const FrontierRow row = frontier_row(p, b, wave + mine, words.parent(), count);
    const Row<T> logits(data, words.temperature());
    const Draw draw{p.round_keys, noise_key(p.seed, words.request(), NoiseDomain::kTarget),
                    words.root_position() + row.depth + 1};
    if (cluster_warp == mine && lane == 0) {  // in the first block
      shared.parent[wave + mine] = row.parent;
      shared.depth[wave + mine] = row.depth;
      shared.parent_score[wave + mine] = row.parent_score;
      shared.begin = has_room(p, count) ? count : 0;
    }
    if (wave == 0) {
      frontier_ancestors.store(shared);
      cluster.wait();  // all blocks run
    }
    WarpList list(memory + warp * list_capacity(top_k), top_k);
    const bool exact = perturbed || logits.greedy;
    const int32_t stop = row.active ? end : 0;
    float most = kNegInf;
    int64_t sum = 0;
    int32_t status = has_slice && slice == 0 ? row.status : kStatusOk;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // the children, then the weights
      int32_t first = begin;
      bool last;
      do {
        last = !(first + step < stop);
        const bool some = first < stop, fresh = some && (pass == 0 || begin + step < stop);
        const auto send = [&] {  // the other blocks wait for it
          if (pass != 0) return;
          if (some) most = fmaxf(most, tile.largest());
          if (!last) return;
          most = warp_max(most);
          if (lane < cluster.size()) *cluster.remote(&shared.largest[cluster_warp], lane) = most;
        };
        if (fresh) {
          if (pass != 0 || first != begin) tile.fetch(p, data, first);
          status |= tile.prepare(p, logits);
        }
        if (!perturbed) send();
        if (fresh && !logits.greedy && (pass == 0 || perturbed)) tile.draw(p, draw, perturbed);
        if (perturbed) send();
        if (pass == 0 && last) cluster.arrive();  // also waits for the values that were sent
        if (some && pass == 0) tile.offer(p, exact, list);
        if (some && pass != 0) sum += tile.weigh(most, inverse);
        first += step;
      } while (!last);
      if (pass != 0) break;
      cluster.wait();
      most = kNegInf;
      for (int i = lane; i < assignment.slices; i += kWarpSize) {
        most = fmaxf(most, shared.largest[assignment.warp(mine, i)]);
      }
      most = warp_max(most);
      if (cluster_warp == mine) shared.max[wave + mine] = most;
    }
    list.keep_best(in_first_block ? cluster.remote(lists, 0) + cluster_warp * top_k
                                  : lists + warp * top_k);
    sum = warp_reduce(sum, Sum());
    if (lane == 0) *cluster.remote(&shared.mass[cluster_warp], 0) = sum;
    status = __reduce_or_sync(kFullWarp, static_cast<unsigned>(status));
    if (lane == 0 && status != kStatusOk) atomicOr(&p.status[b], status);
    cluster.arrive();
    if (cluster.rank() != 0 && in_first_block && wave + kWave >= rows)
      return;  // no block reads its memory
    cluster.wait();
    for (int i = cluster.rank() == 0 ? warp : 2 * assignment.rows; i < 2 * assignment.rows;
         i += kWarps) {
      if (i < assignment.rows) {
        const int row = wave + i;
        merge_lists(assignment, i, top_k, list_of, children + row * top_k, &shared.count[row]);
        continue;
      }
      const int row = i - assignment.rows;
      int64_t total = 0;
      for (int k = lane; k < assignment.slices; k += kWarpSize)
        total += shared.mass[assignment.warp(row, k)];
      total = warp_reduce(total, Sum());
      if (lane == 0) {
        shared.log_sum[wave + row] = log_f32(mul_rn(static_cast<float>(total), 0x1p-40f));
      }
    }
    if (!in_first_block) cluster.sync();  // the lists were read
  }
  if (cluster.rank() != 0) return;
  __syncthreads();
  append_children(p, b, shared.begin, shared, children);
}

// Tiles of a row.
template <typename T, typename Size>
int64_t tiles_of(const ExpandTreeParams& p) {
  constexpr int64_t kTile = DraftTile<T, Size::kIds>::kTile;
  return ceil_div(p.draft_vocab, kTile);
}

// As many blocks per request as have work and as run concurrently.
template <typename T, typename Size>
ClusterShape expand_shape(const char* op, const ExpandTreeParams& p) {
  const auto kernel = expand_kernel<T, Size>;
  const auto shape_of = [&](unsigned cluster) -> ClusterShape {
    const Layout layout(static_cast<int>(cluster), Size::kWarps, static_cast<int>(p.frontier_rows),
                        static_cast<int>(p.top_k));
    return {p.num_requests, Size::kWarps * kWarpSize, layout.bytes(), cluster, true};
  };
  const int64_t slices = std::min<int64_t>(tiles_of<T, Size>(p), kMaxSlices);
  const int64_t warps = std::min<int64_t>(p.frontier_rows, kWave) * slices;
  unsigned cluster = 1;
  if (has_hopper_code(op, kernel)) {
    while (cluster < kMostBlocks && cluster * Size::kWarps < warps) cluster *= 2;
  }
  while (cluster > 1 && max_active_clusters(op, kernel, shape_of(cluster)) < p.num_requests)
    cluster /= 2;
  return shape_of(cluster);
}

}  // namespace

void expand_tree_cuda(const ExpandTreeParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "expand_tree";
  const int64_t children = p.frontier_rows * p.top_k;
  require(children <= kMaxChildren, op,
          "frontier: expected at most " + std::to_string(kMaxChildren) +
              " children a request and level (rows times top_k) on a GPU, got " +
              std::to_string(children));
  require(p.frontier_rows > 0, op, "frontier: expected 1 row a request or more on a GPU, got none");
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const ClusterShape small = expand_shape<T, SmallBlock>(op, p);
    const int64_t warps = std::min<int64_t>(p.frontier_rows, kWave) * tiles_of<T, SmallBlock>(p);
    if (warps <= small.cluster * SmallBlock::kWarps) {  // at most one tile per warp
      return launch_cluster_per_item(op, expand_kernel<T, SmallBlock>, small, as_stream(stream), p);
    }
    launch_cluster_per_item(op, expand_kernel<T, LargeBlock>, expand_shape<T, LargeBlock>(op, p),
                            as_stream(stream), p);
  });
}

}  // namespace tlt
