// expand_tree on the GPU: children = the top K of logit / T + noise of the target id.
//
// One cluster per request (up to 16 blocks on sm_90, else 1). Frontier rows are processed in
// waves of up to kWave, and the cluster's warps are distributed over them, so a row is spread over
// many multiprocessors. The noise of a warp's first ids does not depend on logits: it is computed
// before the kernel waits for the previous one, from values that rarely change meanwhile, and
// recomputed if they did. A warp passes over its ids once, and stores its best K and its sum of
// exponentials in the first block. After one barrier the warps of that block merge the lists, add
// the sums, and score, link and rank the children in shared memory. What a block needs from another
// is written into its shared memory before a barrier and never fetched after one, unless the lists
// are too long for that. Sums are integers (exp_sum.h), so scores have the CPU's bits.
//
// If the requests fill the card, so that no noise is hidden by the wait, only ids that may be among
// the best get their noise (lazy.cuh).
//
// A chain (one frontier row, one child) has a kernel of its own (chain.cuh).
//
// Reads B * F * draft_vocab logits once. Limits: K <= 128, 256 drafter slots, kMaxChildren.
#include "common/mma.cuh"
#include "tree/chain.cuh"
#include "tree/children.cuh"
#include "tree/frontier.cuh"
#include "tree/lazy.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

// Warps of a block, and ids per lane in a warp's tile. If few ids per lane suffice, small blocks
// are better: a warp finishes sooner, and a block fits beside those of another kernel.
struct LargeBlock {
  static constexpr int kWarps = 16, kIds = kGroup, kMemory = 0;  // words of a warp's tile
  static constexpr int kResident = 1;                            // blocks of a multiprocessor
  static constexpr bool kLazy = false;
};
struct SmallBlock {
  static constexpr int kWarps = 8, kIds = 4, kMemory = 0, kResident = 2;
  static constexpr bool kLazy = false;
};
// Draws the noise of few ids. Faster where little of it is hidden by the wait.
struct LazyBlock {
  static constexpr int kWarps = 16, kIds = kGroup, kMemory = kTileWords, kResident = 1;
  static constexpr bool kLazy = true;
};
static_assert(kWave <= SmallBlock::kWarps, "the first block has a warp of each row of a wave");

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
__global__ void __launch_bounds__(Size::kWarps* kWarpSize, Size::kResident)
    expand_kernel(const __grid_constant__ ExpandTreeParams p) {
  extern __shared__ Candidate memory[];
  __shared__ Shared shared;
  constexpr int kWarps = Size::kWarps, kIds = Size::kIds;
  Cluster<kWarps * kWarpSize> cluster;
  cluster.arrive();
  const int top_k = static_cast<int>(p.top_k), rows = static_cast<int>(p.frontier_rows);
  const Layout layout(cluster.size(), kWarps, Size::kMemory, rows, top_k);
  Candidate* const lists = memory + layout.candidates;
  Child* const children = reinterpret_cast<Child*>(lists + layout.lists);    // [rows, top_k]
  auto* const sums = reinterpret_cast<ExpSum*>(children + layout.children);  // of each warp
  [[maybe_unused]] auto* const tile_words = reinterpret_cast<uint32_t*>(sums + layout.sums);
  const bool in_first_block = fits_first_block(cluster.size() * kWarps, top_k);
  const int64_t b = cluster.item();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int cluster_warp = cluster.rank() * kWarps + warp;
  const int32_t columns = num_columns(p);
  const bool perturbed = !Size::kLazy && p.score_temperature > 0.0f;
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
    using Tile = TileOf<T, Size>;
    const int32_t step = assignment.slices * Tile::kTile, begin = slice * Tile::kTile + lane * kIds;
    const int32_t end = has_slice ? columns + lane * kIds : 0;  // the same for all lanes of a tile
    Tile tile(tile_words + warp * Size::kMemory);
    FrontierWords words(p, b, wave + mine);
    if (wave == 0) {  // all loads so far were speculative
      const volatile float* const temperature = p.temperature + b;
      if (begin < end && !is_greedy(*temperature)) {
        tile.precompute(p, expected_draw(p, b), begin);
      }
      wait_for_prior_grid();
      launch_dependents();
    }
    words.load(p, b);
    const FrontierAncestors frontier_ancestors(p, b, wave == 0 && cluster.rank() == 0);
    if (begin < end) tile.fetch(p, data, begin);
    const int32_t count = words.count();
    const FrontierRow row = frontier_row(p, b, wave + mine, words, count);
    const Row<T> logits(data, words.temperature());
    const Draw draw{p.round_keys, noise_key(p.seed, words.request(), NoiseDomain::kTarget),
                    words.root_position() + row.depth + 1};
    if (cluster_warp == mine && lane == 0) {  // in the first block
      shared.parent[wave + mine] = row.parent;
      shared.depth[wave + mine] = row.depth;
      shared.parent_score[wave + mine] = row.parent_score;
      shared.begin = has_room(p, count) ? count : 0;
    }
    if (wave == 0) frontier_ancestors.store(shared);
    if constexpr (Size::kLazy) {
      if (begin < end) tile.confirm(p, draw);
    }
    WarpList list(memory + warp * list_capacity(top_k), top_k);
    ExpSum sum;
    const bool exact = perturbed || logits.greedy, last_wave = wave + kWave >= rows;
    const int32_t stop = row.active ? end : 0;
    int32_t status = has_slice && slice == 0 ? row.status : kStatusOk;
#pragma unroll 1
    for (int32_t first = begin; first < stop; first += step) {
      const bool last = !(first + step < stop);
      status |= tile.prepare(p, logits, first);
      if constexpr (Size::kLazy) {
        tile.draw(p, draw, logits.greedy, first);
        tile.weigh(inverse, sum);
        if (!last) tile.fetch(p, data, first + step);
        tile.offer(draw, logits.greedy, last, list);
      } else {
        if (!logits.greedy) tile.draw(p, draw, perturbed, first);
        tile.weigh(inverse, sum);
        tile.offer(p, exact, first, list);
        if (!last) tile.fetch(p, data, first + step);
      }
    }
    cluster.wait();  // all blocks run, and the lists of the wave before were read
    list.keep_best(in_first_block ? cluster.remote(lists, 0) + cluster_warp * top_k
                                  : lists + warp * top_k);
    sum = warp_sum(sum);
    if (lane == 0) cluster.remote(sums, 0)[cluster_warp] = sum;
    cluster.arrive();
    status = __reduce_or_sync(kFullWarp, static_cast<unsigned>(status));
    if (lane == 0 && status != kStatusOk) atomicOr(&p.status[b], status);
    if (cluster.rank() != 0 && in_first_block && last_wave) return;  // no block reads its memory
    cluster.wait();
    for (int i = cluster.rank() == 0 ? warp : 2 * assignment.rows; i < 2 * assignment.rows;
         i += kWarps) {
      if (i < assignment.rows) {
        const int row = wave + i;
        merge_lists(assignment, i, top_k, list_of, children + row * top_k, &shared.count[row]);
        continue;
      }
      const int row = i - assignment.rows;
      ExpSum total;
#pragma unroll 1
      for (int k = lane; k < assignment.slices; k += kWarpSize)
        total.add(sums[assignment.warp(row, k)]);
      total = warp_sum(total);
      if (lane == 0) {
        shared.reference[wave + row] = total.reference;
        shared.log_sum[wave + row] = total.log();
      }
    }
    if (!in_first_block || !last_wave) cluster.arrive();  // the lists were read
  }
  if (!in_first_block) cluster.wait();
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

template <typename T, typename Size>
auto* kernel_of(const ExpandTreeParams& p) {
  return is_chain(p) ? chain_kernel<T, Size> : expand_kernel<T, Size>;
}

// As many blocks per request as have work and as run concurrently.
template <typename T, typename Size>
ClusterShape expand_shape(const char* op, const ExpandTreeParams& p) {
  const auto kernel = kernel_of<T, Size>(p);
  const auto shape_of = [&](unsigned cluster) -> ClusterShape {
    const Layout layout(static_cast<int>(cluster), Size::kWarps, Size::kMemory,
                        static_cast<int>(p.frontier_rows), static_cast<int>(p.top_k));
    const int tiles = Size::kWarps * Size::kMemory * static_cast<int>(sizeof(uint32_t));
    return {p.num_requests, Size::kWarps * kWarpSize, is_chain(p) ? tiles : layout.bytes(), cluster,
            true};
  };
  const int64_t slices =
      std::min<int64_t>(tiles_of<T, Size>(p), is_chain(p) ? kChainSlices : kMaxSlices);
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
    const auto launch = [&](auto size, const ClusterShape& shape) {
      launch_cluster_per_item(op, kernel_of<T, decltype(size)>(p), shape, as_stream(stream), p);
    };
    const auto one_tile_a_warp = [&](auto size, const ClusterShape& shape) {
      using Size = decltype(size);
      return std::min<int64_t>(p.frontier_rows, kWave) * tiles_of<T, Size>(p) <=
             shape.cluster * Size::kWarps;
    };
    const ClusterShape small = expand_shape<T, SmallBlock>(op, p);
    if (one_tile_a_warp(SmallBlock{}, small)) return launch(SmallBlock{}, small);
    const ClusterShape large = expand_shape<T, LargeBlock>(op, p);
    // The noise of a level is hidden if its blocks run beside those of the level before.
    const bool hidden = large.cluster > 1 && max_active_clusters(op, kernel_of<T, LargeBlock>(p),
                                                                 large) >= 2 * p.num_requests;
    const bool perturbed = p.score_temperature > 0.0f && !is_chain(p);  // needs all noise
    if (hidden || one_tile_a_warp(LargeBlock{}, large) || perturbed) {
      return launch(LargeBlock{}, large);
    }
    launch(LazyBlock{}, expand_shape<T, LazyBlock>(op, p));
  });
}

}  // namespace tlt
