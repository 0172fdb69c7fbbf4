// expand_tree on the GPU: children = the top K of logit / T + gumbel(noise word of the target id).
//
// One team of blocks a request (a cluster of 8 on Hopper). Frontier rows are taken up to kWave at a
// time and the team's warps are dealt to them, so a row is spread over many multiprocessors. A warp
// keeps a sorted list of the best K of its ids in shared memory; one warp a row merges the sorted
// lists and writes the children, and the team's first block links them and ranks the next frontier.
// The log-softmax sums integer weights floor(2^40 exp(value - max)), so scores have the CPU's bits.
//
// Moves B * F * draft_vocab logits, once from memory and once more from cache (the largest value
// must be known before the weights). Limits: K <= 128, 256 drafter slots.
#include "common/status.h"
#include "sampling/row.cuh"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kTreeThreads = 512;
constexpr int kTreeWarps = kTreeThreads / kWarpSize;
constexpr int kWave = 8;
constexpr int kMaxFrontier = 256;
constexpr int kHeads = kMaxTeam * kTreeWarps / kWarpSize;  // lists that one lane merges at most
static_assert(kWave <= kTreeWarps);

using TreeTeam = Team<kTreeThreads>;

struct Candidate {
  uint64_t key;  // rank_key(score, target id)
  float value;   // that the log-softmax takes: scaled logit or score
  int32_t token;
};
static_assert(sizeof(Candidate) == 16);

// A frontier row and its parent.
struct FrontierRow {
  int64_t index;  // in draft_logits
  int32_t parent;
  int32_t position;  // of the children
  float parent_score;
  bool active;
  int32_t status;
};

__device__ bool has_room(const ExpandTreeParams& p, int64_t b) {
  const int64_t count = p.nodes.count[b];
  return count >= 1 && count + p.frontier_rows * p.top_k <= p.nodes.capacity;
}

__device__ FrontierRow frontier_row(const ExpandTreeParams& p, int64_t b, int64_t f, bool room) {
  FrontierRow row{b * p.frontier_rows + f, 0, 0, 0.0f, false, kStatusOk};
  row.parent = p.frontier[row.index];
  if (row.parent < 0) return row;
  row.status = kStatusBadLength;
  if (!room) return row;
  row.status = kStatusBadTree;
  if (row.parent >= p.nodes.count[b]) return row;
  const int64_t at = b * p.nodes.capacity + row.parent;
  const int32_t depth = p.nodes.depth[at];
  row.parent_score = p.nodes.score[at];
  if (depth < 0 || depth >= kMaxDepth || isnan(row.parent_score)) return row;
  row.position = p.root_position[b] + depth + 1;
  row.status = kStatusOk;
  row.active = true;
  return row;
}

// What ids first .. first + kGroup - 1 are worth: scaled logits, target ids, noise.
template <typename T>
struct DraftGroup {
  float scaled[kGroup];
  int32_t token[kGroup];
  float largest;
  int32_t status = kStatusOk;

  __device__ DraftGroup(const ExpandTreeParams& p, const Row<T>& row, int32_t first) {
    float x[kGroup];
    if (row.clean(row.load(first), x, scaled, &largest)) status |= kStatusNanDraft;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) token[i] = first + i;
    if (p.d2t == nullptr) return;
    largest = kNegInf;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int32_t id = first + i < row.vocab_size ? __ldg(p.d2t + first + i) : 0;
      const bool known = id >= 0 && id < p.vocab_size;
      token[i] = known ? id : 0;
      if (!known) {
        scaled[i] = kNegInf;
        status |= kStatusBadToken;
      }
      largest = fmaxf(largest, scaled[i]);
    }
  }

  // A draft id's noise is its target id's, which shares its quad with no neighbour.
  __device__ void words(const ExpandTreeParams& p, const Draw& draw,
                        uint32_t (&word)[kGroup]) const {
    if (p.d2t == nullptr) {
#pragma unroll
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const Philox4 r =
            noise_words(draw.key, draw.position, static_cast<uint32_t>(token[0]) / 4 + quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) word[4 * quad + i] = r.word[i];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t id = token[i];
      const Philox4 r = noise_words(draw.key, draw.position, id >> 2);
      const uint32_t low = id & 1 ? r.word[1] : r.word[0], high = id & 1 ? r.word[3] : r.word[2];
      word[i] = id & 2 ? high : low;
    }
  }

  // score[i] is exact where it reaches `threshold`, else -inf; exact everywhere if `all`.
  __device__ void scores(const ExpandTreeParams& p, const Draw& draw, bool greedy, bool all,
                         float threshold, float (&score)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) score[i] = greedy ? scaled[i] : kNegInf;
    constexpr float kMaxGumbelScore = 22.9f;  // above gumbel(0), the largest there is
    if (greedy || (!all && add_rn(largest, kMaxGumbelScore) < threshold)) return;
    uint32_t word[kGroup];
    words(p, draw, word);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (all || add_rn(scaled[i], gumbel_bound(word[i])) >= threshold) {
        score[i] = add_rn(scaled[i], gumbel(word[i]));
      }
    }
  }
};

// The best candidates that one warp has seen, best first, in shared memory.
struct WarpList {
  Candidate* entry;
  int top_k, count = 0;

  __device__ WarpList(Candidate* entry, int top_k) : entry(entry), top_k(top_k) {}

  __device__ float threshold() const {
    return count < top_k ? kNegInf
                         : from_ascending(static_cast<uint32_t>(entry[top_k - 1].key >> 32));
  }

  // False if the candidate comes too late: the same for the whole warp.
  __device__ bool insert(const Candidate& candidate) {
    const int lane = threadIdx.x % kWarpSize;
    __syncwarp();
    const uint64_t last = count > 0 ? entry[count - 1].key : ~uint64_t{0};
    if (candidate.key <= last) {
      if (count == top_k) return false;
      if (lane == 0) entry[count] = candidate;
      ++count;
      __syncwarp();
      return true;
    }
    int place = 0;
    for (int base = 0; base < count; base += kWarpSize) {
      const bool before = base + lane < count && entry[base + lane].key >= candidate.key;
      place += __popc(__ballot_sync(kFullWarp, before));
    }
    if (count < top_k) ++count;
    for (int base = (count - 1) / kWarpSize * kWarpSize; base >= 0; base -= kWarpSize) {
      const int i = base + lane;
      const bool moves = i > place && i < count;
      const Candidate moved = entry[moves ? i - 1 : 0];
      __syncwarp();
      if (moves) entry[i] = moved;
      __syncwarp();
    }
    if (lane == 0) entry[place] = candidate;
    __syncwarp();
    return true;
  }

  // Takes this tile's scores best first until the list wants no more. Called by whole warps.
  template <typename T>
  __device__ void take(const DraftGroup<T>& group, float (&score)[kGroup], bool perturbed) {
    while (true) {
      int at = 0;
      float best = score[0];
      int32_t token = group.token[0];
      float value = perturbed ? score[0] : group.scaled[0];
#pragma unroll
      for (int i = 1; i < kGroup; ++i) {
        if (score[i] > best || (score[i] == best && group.token[i] < token)) {
          at = i;
          best = score[i];
          token = group.token[i];
          value = perturbed ? score[i] : group.scaled[i];
        }
      }
      const uint32_t order = ascending(best);
      const uint32_t highest = __reduce_max_sync(kFullWarp, order);
      if (highest == ascending(kNegInf)) return;
      const uint32_t id = order == highest ? static_cast<uint32_t>(token) : 0xffffffffu;
      const uint32_t lowest = __reduce_min_sync(kFullWarp, id);
      const int owner = __ffs(__ballot_sync(kFullWarp, id == lowest && order == highest)) - 1;
      const Candidate candidate{static_cast<uint64_t>(highest) << 32 | ~lowest,
                                __shfl_sync(kFullWarp, value, owner), static_cast<int32_t>(lowest)};
      if (!insert(candidate)) return;
      const bool mine = static_cast<int>(threadIdx.x % kWarpSize) == owner;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (mine && i == at) score[i] = kNegInf;
      }
    }
  }
};

// How the team's warps are dealt to the rows of a wave: warp w works on row w % rows.
struct Deal {
  int rows, slices;

  __device__ Deal(const TreeTeam& team, int rows)
      : rows(rows), slices(team.size() * kTreeWarps / rows) {}
  // The warp that has a slice of a row.
  __device__ int warp(int row, int slice) const { return slice * rows + row; }
};

template <typename V>
__device__ V* of_warp(const TreeTeam& team, V* shared, int stride, int warp) {
  return team.remote(shared, warp / kTreeWarps) + warp % kTreeWarps * stride;
}

// Merges a row's lists by one warp and writes its children; returns how many.
__device__ int merge_lists(const ExpandTreeParams& p, const TreeTeam& team, const Deal& deal,
                           int row, Candidate* lists, const int32_t* list_count, float parent_score,
                           float max, float inverse, float log_sum, int64_t place) {
  const int lane = threadIdx.x % kWarpSize, top_k = static_cast<int>(p.top_k);
  const Candidate* head[kHeads];
  int left[kHeads];
  uint64_t key[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int slice = h * kWarpSize + lane;
    left[h] = 0;
    key[h] = 0;
    if (slice < deal.slices) {
      const int warp = deal.warp(row, slice);
      head[h] = of_warp(team, lists, top_k, warp);
      left[h] = *of_warp(team, list_count, 1, warp);
      if (left[h] > 0) key[h] = head[h]->key;
    }
  }
  for (int k = 0; k < top_k; ++k) {
    uint64_t mine = 0;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) mine = key[h] > mine ? key[h] : mine;
    const uint64_t best = warp_reduce(mine, Max());
    if (best == 0) return k;
    const int owner = __ffs(__ballot_sync(kFullWarp, mine == best)) - 1;
    if (lane != owner) continue;
    bool taken = false;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (taken || key[h] != best) continue;
      taken = true;
      const float log_prob = add_rn(mul_rn(add_rn(head[h]->value, -max), inverse), -log_sum);
      p.nodes.token[place + k] = head[h]->token;
      p.nodes.score[place + k] = add_rn(parent_score, fminf(log_prob, 0.0f));
      ++head[h];
      key[h] = --left[h] > 0 ? head[h]->key : 0;
    }
  }
  return top_k;
}

// The first block's last act: closes gaps between the rows' children, links them, and ranks the
// next frontier. `counts` are the children of each frontier row.
__device__ void append_children(const ExpandTreeParams& p, int64_t b, bool room,
                                const int32_t* counts, int32_t* offsets) {
  __shared__ float tile[kTreeThreads];
  const int t = threadIdx.x;
  const int rows = static_cast<int>(p.frontier_rows), top_k = static_cast<int>(p.top_k);
  const int64_t first = b * p.nodes.capacity;
  const int32_t begin = room ? p.nodes.count[b] : 0;
  int32_t* token = p.nodes.token + first + begin;
  float* score = p.nodes.score + first + begin;
  for (int f = t; f <= rows; f += kTreeThreads) {
    int32_t sum = 0;
    for (int g = 0; g < f; ++g) sum += counts[g];
    offsets[f] = sum;
  }
  __syncthreads();
  for (int f = 0; f < rows; ++f) {
    if (offsets[f] == f * top_k) continue;
    const bool moves = t < counts[f];
    const int32_t moved_token = moves ? __ldcg(token + f * top_k + t) : 0;
    const float moved_score = moves ? __ldcg(score + f * top_k + t) : 0.0f;
    __syncthreads();
    if (moves) {
      token[offsets[f] + t] = moved_token;
      score[offsets[f] + t] = moved_score;
    }
    __syncthreads();
  }
  for (int i = t; i < rows * top_k; i += kTreeThreads) {
    const int f = i / top_k, k = i % top_k;
    if (k >= counts[f]) continue;
    const int32_t parent = p.frontier[b * rows + f];
    const int64_t at = first + begin + offsets[f] + k;
    p.nodes.parent[at] = parent;
    p.nodes.depth[at] = p.nodes.depth[first + parent] + 1;
  }
  const int total = offsets[rows];
  for (int base = 0; base < total; base += kTreeThreads) {
    const int i = base + t;
    const float mine = i < total ? __ldcg(score + i) : kNegInf;
    int rank = 0;
    for (int other = 0; other < total; other += kTreeThreads) {
      __syncthreads();
      if (other + t < total) tile[t] = __ldcg(score + other + t);
      __syncthreads();
      const int size = min(kTreeThreads, total - other);
      for (int j = 0; j < size; ++j) {
        rank += tile[j] > mine || (tile[j] == mine && other + j < i);
      }
    }
    if (i >= total || rank >= top_k) continue;
    int f = 0;
    while (i >= offsets[f + 1]) ++f;
    const int64_t out = b * top_k + rank, row = b * rows + f;
    p.next_frontier[out] = begin + i;
    p.next_row[out] = static_cast<int32_t>(row);
    uint8_t* ancestors = p.next_ancestors + out * kMaxDepth;
    const int in_flight =
        p.frontier_ancestors == nullptr ? 0 : p.nodes.depth[first + p.frontier[row]];
    for (int d = 0; d < kMaxDepth; ++d) {
      uint8_t slot = 0;
      if (d < in_flight - 1) slot = p.frontier_ancestors[row * kMaxDepth + d];
      if (d == in_flight - 1) slot = static_cast<uint8_t>(p.slot_base + f);
      ancestors[d] = slot;
    }
  }
  for (int k = total + t; k < top_k; k += kTreeThreads) {
    const int64_t out = b * top_k + k;
    p.next_frontier[out] = -1;
    p.next_row[out] = 0;
    for (int d = 0; d < kMaxDepth; ++d) p.next_ancestors[out * kMaxDepth + d] = 0;
  }
  __syncthreads();
  if (t == 0 && room) p.nodes.count[b] = begin + total;
}

template <typename T>
__global__ void __launch_bounds__(kTreeThreads) expand_kernel(const ExpandTreeParams p) {
  extern __shared__ Candidate lists[];  // [kTreeWarps, top_k]
  __shared__ int32_t list_count[kTreeWarps];
  __shared__ float largest[kTreeWarps];
  __shared__ int64_t mass[kTreeWarps];
  __shared__ int32_t counts[kMaxFrontier], offsets[kMaxFrontier + 1];
  TreeTeam team;
  const int64_t b = team.item();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int team_warp = team.rank() * kTreeWarps + warp;
  const int top_k = static_cast<int>(p.top_k);
  const bool room = has_room(p, b);
  const float temperature = p.temperature[b];
  const bool perturbed = p.score_temperature > 0.0f;
  const float inverse = perturbed ? __fdiv_rn(1.0f, p.score_temperature) : 1.0f;
  const int64_t columns =
      p.d2t != nullptr || p.draft_vocab < p.vocab_size ? p.draft_vocab : p.vocab_size;
  const NoiseKey key = noise_key(p.seed, p.request[b], NoiseDomain::kTarget);

  for (int wave = 0; wave < p.frontier_rows; wave += kWave) {
    const Deal deal(team, min(kWave, static_cast<int>(p.frontier_rows) - wave));
    const int mine = team_warp % deal.rows, slice = team_warp / deal.rows;
    const FrontierRow row = frontier_row(p, b, wave + mine, room);
    const Row<T> logits(p.draft_logits, p.logits_stride, row.index, columns, temperature);
    const Draw draw{key, row.position};
    const bool works = row.active && slice < deal.slices;
    const int32_t step = deal.slices * kWarpSize * kGroup;
    const int32_t begin = (slice * kWarpSize + lane) * kGroup;
    const int32_t end = works ? logits.vocab_size + lane * kGroup : 0;  // the same trips a warp

    WarpList list(lists + warp * top_k, top_k);
    float most = kNegInf;
    int32_t status = slice == 0 ? row.status : kStatusOk;
    for (int32_t first = begin; first < end; first += step) {
      const DraftGroup<T> group(p, logits, first);
      float score[kGroup];
      group.scores(p, draw, logits.greedy, perturbed, list.threshold(), score);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) most = fmaxf(most, perturbed ? score[i] : group.scaled[i]);
      status |= group.status;
      list.take(group, score, perturbed);
    }
    most = warp_max(most);
    status = __reduce_or_sync(kFullWarp, static_cast<unsigned>(status));
    if (lane == 0) {
      largest[warp] = most;
      list_count[warp] = list.count;
      if (status != kStatusOk) atomicOr(&p.status[b], status);
    }
    team.sync();

    const auto largest_of = [&](int of_row) {
      float value = kNegInf;
      for (int i = lane; i < deal.slices; i += kWarpSize) {
        value = fmaxf(value, *of_warp(team, largest, 1, deal.warp(of_row, i)));
      }
      return warp_max(value);
    };
    const float max = largest_of(mine);
    int64_t sum = 0;
    for (int32_t first = begin; first < end; first += step) {
      const DraftGroup<T> group(p, logits, first);
      float value[kGroup];
      if (perturbed) {
        group.scores(p, draw, logits.greedy, true, kNegInf, value);
      } else {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) value[i] = group.scaled[i];
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float scaled = exp_f32(mul_rn(add_rn(value[i], -max), inverse));
        sum += __float2ll_rz(mul_rn(scaled, 0x1p40f));
      }
    }
    sum = warp_reduce(sum, Sum());
    if (lane == 0) mass[warp] = sum;
    team.sync();

    const int turn = warp * team.size() + team.rank();  // rows go round the blocks
    if (turn < deal.rows) {
      const int64_t f = wave + turn;
      const FrontierRow merged = frontier_row(p, b, f, room);
      int children = 0;
      if (merged.active) {
        int64_t total = 0;
        for (int i = lane; i < deal.slices; i += kWarpSize) {
          total += *of_warp(team, mass, 1, deal.warp(turn, i));
        }
        total = warp_reduce(total, Sum());
        const float log_sum = log_f32(mul_rn(static_cast<float>(total), 0x1p-40f));
        children = merge_lists(p, team, deal, turn, lists, list_count, merged.parent_score,
                               largest_of(turn), inverse, log_sum,
                               b * p.nodes.capacity + p.nodes.count[b] + f * top_k);
      }
      if (lane == 0) team.remote(counts, 0)[f] = children;
      __threadfence();
    }
    team.sync();  // children are written, and nobody reads the lists any more
  }
  if (team.rank() == 0) append_children(p, b, room, counts, offsets);
}

}  // namespace

void expand_tree_cuda(const ExpandTreeParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  dispatch_storage("expand_tree", p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch_teams("expand_tree", expand_kernel<T>, p.num_requests, kTreeThreads,
                 kTreeWarps * p.top_k * sizeof(Candidate), false, as_stream(stream), p);
  });
}

}  // namespace tlt
