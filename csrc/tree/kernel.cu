// expand_tree on the GPU: children = the top K of logit / T + gumbel(noise word of the target id).
//
// One team of blocks a request (a cluster of up to 16 on Hopper). Frontier rows are taken up to
// kWave at a time and the team's warps are dealt to them, so a row is spread over many
// multiprocessors. A warp keeps a sorted list of the best K of its ids. One warp a row, with no ids
// of its own, merges the lists while the others sum the weights; then the team's first block
// scores, links and ranks all children in its shared memory. What one block must know of another is
// written into its shared memory before a barrier, never fetched after one, except the lists. The
// log-softmax sums integer weights floor(2^40 exp(value - max)), so scores have the CPU's bits.
//
// Moves B * F * draft_vocab logits, once from memory, and once more from cache where a warp has
// more than a tile (the largest value must be known before the weights). Limits: K <= 128, 256
// drafter slots, kMaxChildren.
#include "common/mma.cuh"
#include "tree/draft.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kMostBlocks = 2 * kMaxTeam;  // of a team: Hopper's own limit, not a portable one
constexpr int kWave = 8;
constexpr int kMaxFrontier = 256;
constexpr int kMaxSlices = 64;  // of a row
constexpr int kMaxChildren = 8192;
constexpr int kHeads = kMaxSlices / kWarpSize;  // lists that one lane merges
constexpr int kQueue = 4;                       // entries of each that it holds
static_assert(kWave <= kTreeWarps);

using TreeTeam = Team<kTreeThreads>;

struct Child {
  float value;    // then its score
  int32_t token;  // then its frontier row
};

struct Shared {
  float largest[kMostBlocks * kTreeWarps];                // of every warp of the team
  int64_t mass[kMostBlocks * kTreeWarps];                 // from here on only in the first block
  int32_t count[kMaxFrontier], offset[kMaxFrontier + 1];  // children of a row, and before it
  int32_t parent[kMaxFrontier], depth[kMaxFrontier];
  float parent_score[kMaxFrontier], max[kMaxFrontier], log_sum[kMaxFrontier];
  uint8_t ancestors[kMaxFrontier * kMaxDepth];
  int32_t begin;  // nodes before this level's; 0 if there is no room for them
};

// A frontier row and its parent.
struct FrontierRow {
  int64_t index;  // in draft_logits
  int32_t parent, depth;
  float parent_score;
  bool active;
  int32_t status;
};

__device__ bool has_room(const ExpandTreeParams& p, int64_t count) {
  return count >= 1 && count + p.frontier_rows * p.top_k <= p.nodes.capacity;
}

__device__ FrontierRow frontier_row(const ExpandTreeParams& p, int64_t b, int64_t f, int32_t parent,
                                    int32_t count) {
  FrontierRow row{b * p.frontier_rows + f, parent, 0, 0.0f, false, kStatusOk};
  if (parent < 0) return row;
  row.status = kStatusBadLength;
  if (!has_room(p, count)) return row;
  row.status = kStatusBadTree;
  if (parent >= count) return row;
  const int64_t at = b * p.nodes.capacity + parent;
  row.depth = p.nodes.depth[at];
  row.parent_score = p.nodes.score[at];
  if (row.depth < 0 || row.depth >= kMaxDepth || isnan(row.parent_score)) return row;
  row.status = kStatusOk;
  row.active = true;
  return row;
}

// How the team's warps are dealt to the rows of a wave: warp w works on row w % rows.
struct Deal {
  int rows, slices;

  __device__ Deal(const TreeTeam& team, int rows)
      : rows(rows), slices(min(kMaxSlices, team.size() * kTreeWarps / rows)) {}
  // The warp that has a slice of a row.
  __device__ int warp(int row, int slice) const { return slice * rows + row; }
};

// Merges a row's lists by one warp, and leaves the best children with the first block.
__device__ void merge_lists(const TreeTeam& team, const Deal& deal, int row, int top_k,
                            const Candidate* lists, Child* children, int32_t* count) {
  const int lane = threadIdx.x % kWarpSize;
  const Candidate* list[kHeads];
  Candidate queue[kHeads][kQueue];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int slice = h * kWarpSize + lane, warp = deal.warp(row, min(slice, deal.slices - 1));
    list[h] = team.remote(lists, warp / kTreeWarps) + warp % kTreeWarps * top_k;
#pragma unroll
    for (int i = 0; i < kQueue; ++i) {
      queue[h][i] = Candidate{};
      if (slice < deal.slices && i < top_k) queue[h][i] = list[h][i];
    }
  }
  int next[kHeads] = {};
  int k = 0;
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
      *team.remote(children + k, 0) = {queue[h][0].value, queue[h][0].token()};
#pragma unroll
      for (int i = 1; i < kQueue; ++i) queue[h][i - 1] = queue[h][i];
      const int after = kQueue + next[h]++;
      queue[h][kQueue - 1] = after < top_k ? list[h][after] : Candidate{};
    }
  }
  if (lane == 0) *team.remote(count, 0) = k;
}

// The first block's last act: closes gaps between the rows' children, scores and links them, and
// ranks the next frontier.
__device__ void append_children(const ExpandTreeParams& p, int64_t b, int32_t begin,
                                const Shared& shared, Child* children) {
  const int t = threadIdx.x;
  const int rows = static_cast<int>(p.frontier_rows), top_k = static_cast<int>(p.top_k);
  const int64_t first = b * p.nodes.capacity + begin;
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  const int total = shared.offset[rows];
  for (int base = 0; base < rows * top_k; base += kTreeThreads) {
    const int i = base + t, f = min(i / top_k, rows - 1);
    const bool valid = i < rows * top_k && i - f * top_k < shared.count[f];
    const Child child = children[valid ? i : 0];
    __syncthreads();  // a child moves down, past those that were read before
    if (valid) {
      const int to = shared.offset[f] + i - f * top_k;
      const float log_prob =
          add_rn(mul_rn(add_rn(child.value, -shared.max[f]), inverse), -shared.log_sum[f]);
      const float score = add_rn(shared.parent_score[f], fminf(log_prob, 0.0f));
      children[to] = {score, f};
      p.nodes.token[first + to] = child.token;
      p.nodes.score[first + to] = score;
      p.nodes.parent[first + to] = shared.parent[f];
      p.nodes.depth[first + to] = shared.depth[f] + 1;
    }
    __syncthreads();
  }
  for (int i = t; i < max(total, top_k); i += kTreeThreads) {
    int rank = i;  // past the children: an empty place
    const Child child = i < total ? children[i] : Child{};
    if (i < total) {
      rank = 0;
      for (int j = 0; j < total; ++j) {
        const float other = children[j].value;
        rank += other > child.value || (other == child.value && j < i);
      }
    }
    if (rank >= top_k) continue;
    const int64_t out = b * top_k + rank;
    const int f = child.token;
    p.next_frontier[out] = i < total ? begin + i : -1;
    p.next_row[out] = i < total ? static_cast<int32_t>(b * rows + f) : 0;
    const int in_flight = i < total && p.frontier_ancestors != nullptr ? shared.depth[f] : 0;
#pragma unroll
    for (int d = 0; d < kMaxDepth; ++d) {
      uint8_t slot = d < in_flight - 1 ? shared.ancestors[f * kMaxDepth + d] : 0;
      if (d == in_flight - 1) slot = static_cast<uint8_t>(p.slot_base + f);
      p.next_ancestors[out * kMaxDepth + d] = slot;
    }
  }
  if (t == 0 && begin > 0) p.nodes.count[b] = begin + total;
}

// What the first block knows of the frontier before the rows are read, by its warp without ids.
__device__ void load_frontier(const ExpandTreeParams& p, int64_t b, Shared& shared) {
  const int rows = static_cast<int>(p.frontier_rows), lane = threadIdx.x % kWarpSize;
  const int32_t count = p.nodes.count[b];
  if (lane == 0) shared.begin = has_room(p, count) ? count : 0;
  for (int f = lane; f < rows; f += kWarpSize) {
    const FrontierRow row = frontier_row(p, b, f, p.frontier[b * rows + f], count);
    shared.parent[f] = row.parent;
    shared.depth[f] = row.depth;
    shared.parent_score[f] = row.parent_score;
  }
  if (p.frontier_ancestors == nullptr) return;
  for (int i = lane; i < rows * kMaxDepth; i += kWarpSize) {
    shared.ancestors[i] = p.frontier_ancestors[b * rows * kMaxDepth + i];
  }
}

// What a request and one of its frontier rows say, by one load of a warp: lane l has word l.
class FrontierWords {
 public:
  __device__ FrontierWords(const ExpandTreeParams& p, int64_t b, int64_t f) {
    const int lane = threadIdx.x % kWarpSize;
    const void* from = reinterpret_cast<const uint32_t*>(p.request + b) + lane % 2;
    if (lane == 2) from = p.root_position + b;
    if (lane == 3) from = p.temperature + b;
    if (lane == 4) from = p.nodes.count + b;
    if (lane == 5) from = p.frontier + b * p.frontier_rows + f;
    word_ = *static_cast<const volatile uint32_t*>(from);
  }
  __device__ int64_t request() const {
    return static_cast<int64_t>(static_cast<uint64_t>(at(1)) << 32 | at(0));
  }
  __device__ int32_t root_position() const { return static_cast<int32_t>(at(2)); }
  __device__ float temperature() const { return as_float(at(3)); }
  __device__ int32_t count() const { return static_cast<int32_t>(at(4)); }
  __device__ int32_t parent() const { return static_cast<int32_t>(at(5)); }

 private:
  __device__ uint32_t at(int lane) const { return __shfl_sync(kFullWarp, word_, lane); }
  uint32_t word_;
};

template <typename T>
__global__ void __launch_bounds__(kTreeThreads, 1)
    expand_kernel(const __grid_constant__ ExpandTreeParams p) {
  extern __shared__ Candidate lists[];  // [kTreeWarps, top_k]
  __shared__ Shared shared;
  TreeTeam team;
  team.arrive();
  const int top_k = static_cast<int>(p.top_k);
  DraftTile<T> tile(reinterpret_cast<float*>(lists + kTreeWarps * top_k));
  Child* children = reinterpret_cast<Child*>(reinterpret_cast<char*>(lists + kTreeWarps * top_k) +
                                             DraftTile<T>::kBytes);  // [frontier_rows, top_k]
  const int64_t b = team.item();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int team_warp = team.rank() * kTreeWarps + warp;
  const bool merges = warp == kTreeWarps;
  const int32_t columns = static_cast<int32_t>(
      p.d2t != nullptr || p.draft_vocab < p.vocab_size ? p.draft_vocab : p.vocab_size);
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  wait_for_prior_grid();
  launch_dependents();

  for (int wave = 0; wave < p.frontier_rows; wave += kWave) {
    const Deal deal(team, min(kWave, static_cast<int>(p.frontier_rows) - wave));
    const int mine = team_warp % deal.rows, slice = team_warp / deal.rows;
    const RowData<T> data(p.draft_logits, p.logits_stride, b * p.frontier_rows + wave + mine,
                          columns);
    const int32_t step = deal.slices * kTile, begin = slice * kTile + lane * kGroup;
    const int32_t end = !merges && slice < deal.slices ? columns + lane * kGroup : 0;
    const FrontierWords words(p, b, wave + mine);
    if (begin < end) tile.fetch(p, data, begin);
    const FrontierRow row = frontier_row(p, b, wave + mine, words.parent(), words.count());
    const Row<T> logits(data, words.temperature());
    const Draw draw{p.round_keys, noise_key(p.seed, words.request(), NoiseDomain::kTarget),
                    words.root_position() + row.depth + 1};
    if (wave == 0) {
      if (merges && team.rank() == 0) load_frontier(p, b, shared);
      team.wait();  // all blocks run
    }
    WarpList list(top_k);
    float most = kNegInf;
    int64_t sum = 0;
    int32_t status = slice == 0 && !merges ? row.status : kStatusOk;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // the children, then the weights
      for (int32_t first = begin; first < end && row.active; first += step) {
        if (pass == 0 || begin + step < end) {  // else the tile is still there
          if (pass != 0 || first != begin) tile.fetch(p, data, first);
          status |= tile.prepare(p, logits, draw, perturbed);
        }
        if (pass == 0) {
          most = fmaxf(most, tile.largest());
          tile.offer(draw, perturbed || logits.greedy, list);
        } else {
          sum += tile.weigh(most, inverse);
        }
      }
      if (pass == 0) {
        most = warp_max(most);
        if (!merges) {
          list.write(lists + warp * top_k);
          if (lane < team.size()) *team.remote(&shared.largest[team_warp], lane) = most;
        }
        team.sync();
        most = kNegInf;
        for (int i = lane; i < deal.slices; i += kWarpSize) {
          most = fmaxf(most, shared.largest[deal.warp(mine, i)]);
        }
        most = warp_max(most);
        if (team_warp == mine) shared.max[wave + mine] = most;  // in the first block
      }
    }
    if (merges) {
      for (int r = team.rank(); r < deal.rows; r += team.size()) {
        merge_lists(team, deal, r, top_k, lists, children + (wave + r) * top_k,
                    &shared.count[wave + r]);
      }
    } else {
      sum = warp_reduce(sum, Sum());
      if (lane == 0) *team.remote(&shared.mass[team_warp], 0) = sum;
      status = __reduce_or_sync(kFullWarp, static_cast<unsigned>(status));
      if (lane == 0 && status != kStatusOk) atomicOr(&p.status[b], status);
    }
    team.sync();
    if (team.rank() == 0 && warp < deal.rows) {
      int64_t total = 0;
      for (int i = lane; i < deal.slices; i += kWarpSize) total += shared.mass[deal.warp(warp, i)];
      total = warp_reduce(total, Sum());
      if (lane == 0) {
        shared.log_sum[wave + warp] = log_f32(mul_rn(static_cast<float>(total), 0x1p-40f));
      }
    }
  }
  if (team.rank() != 0) return;
  for (int f = threadIdx.x; f <= p.frontier_rows; f += kTreeThreads) {
    int32_t before = 0;
    for (int g = 0; g < f; ++g) before += shared.count[g];
    shared.offset[f] = before;
  }
  __syncthreads();
  append_children(p, b, shared.begin, shared, children);
}

}  // namespace

void expand_tree_cuda(const ExpandTreeParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "expand_tree";
  const int64_t children = p.frontier_rows * p.top_k;
  require(children <= kMaxChildren, op,
          "frontier: the GPU takes at most " + std::to_string(kMaxChildren) +
              " children a request and level (rows times top_k), got " + std::to_string(children));
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto kernel = expand_kernel<T>;
    const auto shared = static_cast<int>(kTreeWarps * p.top_k * sizeof(Candidate) +
                                         DraftTile<T>::kBytes + children * sizeof(Child));
    TeamShape shape{p.num_requests, kTreeThreads, shared, kMostBlocks, true};
    while (has_hopper_code(op, kernel) && shape.team > 1 &&
           max_active_teams(op, kernel, shape) < p.num_requests) {
      shape.team /= 2;
    }
    launch_teams(op, kernel, shape, as_stream(stream), p);
  });
}

}  // namespace tlt
