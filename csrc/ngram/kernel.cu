// ngram_propose on the GPU: the same trees as cpu.cpp, bit for bit.
//
// One team of blocks a request (a cluster of 8 on Hopper), four steps:
//   scan   The team's warps share out the group's tokens in chunks of 128, latest first. A lane
//          looks at four tokens; where one equals the root it counts how far back the texts agree.
//          A warp holds the best kMaxMatches of its matches as sorted keys, one a lane; newcomers
//          that beat the least wait in a queue until there are 32, are sorted and merged in.
//   merge  The warps' lists meet in log2 rounds, then the blocks' in the first block. Keys are
//          totally ordered, so neither the split of the work nor the order of arrival shows.
//   look   The trie before any node is left out, all levels at once, one warp a level and one match
//          a lane: lanes with the same tokens so far are one node, and its count is a weighted
//          population count of their mask. Noise, ranks among siblings and log shares come here.
//   grow   One warp goes down the levels: adds up scores, keeps top_k nodes, writes them.
// Moves 4 bytes a token of the group, once, normally out of the L2.
#include "common/noise.h"
#include "common/status.h"
#include "common/team.cuh"
#include "ngram/op.h"

namespace tlt {
namespace {

constexpr int kTeamThreads = 256;    // of a block in a team of several
constexpr int kAloneThreads = 1024;  // of one that is alone
constexpr int kLoad = 4;             // tokens a lane reads at once
constexpr int kChunk = kWarpSize * kLoad;
constexpr int kUnroll = 4;  // chunks that a warp has on their way
static_assert(kMaxMatches == kWarpSize);

// What a block knows of the request and its group.
template <int kThreads>
struct Shared {
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kMaxGroup < kThreads && kMaxTeam <= kWarps);

  int32_t suffix[kMaxNgram];  // the request's last tokens, newest first; -1 before its start
  int32_t root;               // its position; below 0: nothing to do
  int32_t slot[kMaxGroup];
  int32_t length[kMaxGroup];
  int32_t chunks[kMaxGroup];
  int32_t first_chunk[kMaxGroup + 1];     // chunks of the sequences before
  uint32_t list[kWarps][kMaxMatches];     // keys, largest first
  uint32_t queue[kWarps][2 * kWarpSize];  // keys that wait to be merged
  // Of each level of the trie and each match:
  int32_t token[kMaxDepth][kMaxMatches];   // what follows; -1 = nothing
  unsigned equal[kMaxDepth][kMaxMatches];  // the lanes with the same token
  unsigned node[kMaxDepth][kMaxMatches];   // the lanes at the same node; 0 = at none
  float gain[kMaxDepth][kMaxMatches];      // log share of that node
  uint8_t place[kMaxDepth][kMaxMatches];   // of that node among its siblings
};

// ---- sorted lists of a warp, one key a lane -----------------------------------------------------

// Sorts a bitonic sequence of keys, largest first.
__device__ __forceinline__ uint32_t sort_bitonic(uint32_t key, int lane) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, key, step);
    key = lane & step ? min(key, other) : max(key, other);
  }
  return key;
}

__device__ __forceinline__ uint32_t sort_keys(uint32_t key, int lane) {
#pragma unroll
  for (int size = 2; size < kWarpSize; size *= 2) {
#pragma unroll
    for (int step = size / 2; step > 0; step /= 2) {
      const uint32_t other = __shfl_xor_sync(kFullWarp, key, step);
      key = ((lane & step) == 0) == ((lane & size) == 0) ? max(key, other) : min(key, other);
    }
  }
  return sort_bitonic(key, lane);
}

// The 32 largest keys of two sorted lists, sorted.
__device__ __forceinline__ uint32_t merge_keys(uint32_t a, uint32_t b, int lane) {
  return sort_bitonic(max(a, __shfl_sync(kFullWarp, b, kWarpSize - 1 - lane)), lane);
}

// The best keys that one warp has met.
class Best {
 public:
  __device__ Best(uint32_t* queue, int lane) : queue_(queue), lane_(lane) {}

  // Called by the whole warp; a key of 0 is none.
  __device__ __forceinline__ void offer(uint32_t key) {
    const unsigned better = __ballot_sync(kFullWarp, key > least_);
    if (better == 0) return;
    if (key > least_) queue_[waiting_ + __popc(better & ((1u << lane_) - 1))] = key;
    waiting_ += __popc(better);
    if (waiting_ >= kWarpSize) merge(kWarpSize);
  }

  __device__ __forceinline__ uint32_t finish() {
    if (waiting_ > 0) merge(waiting_);
    return key_;
  }

 private:
  // Merges the first `count` (at most 32) of the queue; the rest moves up.
  __device__ __forceinline__ void merge(int count) {
    __syncwarp();
    const uint32_t fresh = lane_ < count ? queue_[lane_] : 0;
    const uint32_t later = kWarpSize + lane_ < waiting_ ? queue_[kWarpSize + lane_] : 0;
    __syncwarp();
    queue_[lane_] = later;
    __syncwarp();
    waiting_ -= count;
    key_ = merge_keys(key_, sort_keys(fresh, lane_), lane_);
    least_ = __shfl_sync(kFullWarp, key_, kWarpSize - 1);
  }

  uint32_t* queue_;  // [64]
  int lane_, waiting_ = 0;
  uint32_t key_ = 0, least_ = 0;
};

// ---- scan ---------------------------------------------------------------------------------------

// Four tokens from `position` on; 16 bytes at once where rows are aligned.
__device__ __forceinline__ int4 load_tokens(const int32_t* text, int32_t position, int32_t length,
                                            bool aligned) {
  int4 v{-1, -1, -1, -1};
  if (position >= length) return v;
  if (aligned) return __ldg(reinterpret_cast<const int4*>(text + position));
  v.x = __ldg(text + position);
  if (position + 1 < length) v.y = __ldg(text + position + 1);
  if (position + 2 < length) v.z = __ldg(text + position + 2);
  if (position + 3 < length) v.w = __ldg(text + position + 3);
  return v;
}

// A chunk of a sequence that a warp is about to look at.
struct Chunk {
  int32_t sequence = -1;  // none
  int32_t position = 0;   // of the lane's first token
  int4 tokens{};
};

template <int kThreads>
class Scanner {
 public:
  __device__ Scanner(const NgramProposeParams& p, Shared<kThreads>& s)
      : p_(p),
        s_(s),
        lane_(threadIdx.x % kWarpSize),
        aligned_(p.max_len % kLoad == 0 && reinterpret_cast<uintptr_t>(p.tokens) % 16 == 0) {}

  // The best keys of the chunks that fall to this warp.
  __device__ uint32_t run(const Team<kThreads>& team) {
    Best best(s_.queue[threadIdx.x / kWarpSize], lane_);
    const int32_t chunks = s_.first_chunk[p_.group_size];
    const int32_t warps = team.threads() / kWarpSize;
    for (int32_t first = team.thread() / kWarpSize; first < chunks; first += warps * kUnroll) {
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * warps < chunks) chunk[u] = load(first + u * warps);
      }
      // All from the first place: the instruction cache is cold, so one copy of this code.
#pragma unroll 1
      for (int u = 0; u < kUnroll && chunk[0].sequence >= 0; ++u) {
        match(chunk[0], best);
#pragma unroll
        for (int v = 1; v < kUnroll; ++v) chunk[v - 1] = chunk[v];
        chunk[kUnroll - 1].sequence = -1;
      }
    }
    return best.finish();
  }

 private:
  __device__ __forceinline__ const int32_t* text(int32_t sequence) const {
    return p_.tokens + s_.slot[sequence] * p_.max_len;
  }

  // Places from here on have nothing after them.
  __device__ __forceinline__ int32_t end(int32_t sequence) const { return s_.length[sequence] - 1; }

  __device__ __forceinline__ Chunk load(int32_t index) {
    while (index >= s_.first_chunk[sequence_ + 1]) ++sequence_;  // a warp's indices only grow
    const int32_t from_start = s_.first_chunk[sequence_ + 1] - 1 - index;
    Chunk chunk{sequence_, from_start * kChunk + lane_ * kLoad};
    chunk.tokens = load_tokens(text(sequence_), chunk.position, end(sequence_), aligned_);
    return chunk;
  }

  __device__ __forceinline__ void match(const Chunk& chunk, Best& best) {
    const int32_t root = s_.suffix[0], places = end(chunk.sequence) - chunk.position;
    unsigned hits = 0;  // a bit for each of the lane's tokens
    if (places > 0) {
      hits = (chunk.tokens.x == root) | (chunk.tokens.y == root) << 1 |
             (chunk.tokens.z == root) << 2 | (chunk.tokens.w == root) << 3;
      hits &= (1u << min(kLoad, places)) - 1;
    }
    while (__any_sync(kFullWarp, hits)) {
      uint32_t key = 0;
      if (hits != 0) {
        const int place = 31 - __clz(hits);
        hits ^= 1u << place;
        const int32_t position = chunk.position + place;
        const int32_t matched = count_matched(text(chunk.sequence), position);
        if (matched >= p_.min_ngram) {
          key = match_key(matched, chunk.sequence, position, static_cast<int32_t>(p_.max_len));
        }
      }
      best.offer(key);
    }
  }

  // The token at `position` matches already.
  __device__ __forceinline__ int32_t count_matched(const int32_t* text, int32_t position) const {
    const int32_t most = min(static_cast<int32_t>(p_.max_ngram), min(position, s_.root) + 1);
    int32_t n = 1;
    while (n < most && __ldg(text + position - n) == s_.suffix[n]) ++n;
    return n;
  }

  const NgramProposeParams& p_;
  Shared<kThreads>& s_;
  int lane_, sequence_ = 0;
  bool aligned_;
};

// ---- merge --------------------------------------------------------------------------------------

// The best keys of `count` warps, in the first of them: a power of 2. Called by the whole block.
template <int kThreads>
__device__ uint32_t merge_warps(uint32_t key, int count, Shared<kThreads>& s) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (int half = count / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) s.list[warp][lane] = key;
    __syncthreads();
    if (warp < half) key = merge_keys(key, s.list[warp + half][lane], lane);
  }
  return key;
}

// The same for a team; every warp of the first block gets them.
template <int kThreads>
__device__ uint32_t merge_team(const Team<kThreads>& team, uint32_t key, Shared<kThreads>& s) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  key = merge_warps(key, Shared<kThreads>::kWarps, s);
  if (warp == 0) s.list[0][lane] = key;
  if (team.size() > 1) {
    team.sync();
    if (team.rank() == 0 && warp < team.size()) key = team.remote(&s.list[0][0], warp)[lane];
    team.sync();  // read; the other blocks may end
    if (team.rank() > 0) return 0;
    key = merge_warps(key, team.size(), s);
    if (warp == 0) s.list[0][lane] = key;
  }
  __syncthreads();
  return s.list[0][lane];
}

// ---- look ---------------------------------------------------------------------------------------

// The matches (keys, one a lane) as the levels of a trie see them.
template <int kThreads>
class Levels {
 public:
  __device__ Levels(const NgramProposeParams& p, int64_t b, Shared<kThreads>& s, uint32_t key)
      : p_(p),
        s_(s),
        lane_(threadIdx.x % kWarpSize),
        key_(key),
        greedy_(!(p.temperature[b] >= kMinTemperature)),
        noise_key_(noise_key(p.seed, p.request[b], NoiseDomain::kTarget)) {
#pragma unroll
    for (int n = 1; n <= kMaxNgram; ++n) {
      of_length_[n - 1] = __ballot_sync(kFullWarp, matched_of(key) == n);
    }
  }

  // Called by the whole block.
  __device__ void run() {
    const int warp = threadIdx.x / kWarpSize;
    float noise[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int level = warp + r * Shared<kThreads>::kWarps;
      if (level < p_.depth) noise[r] = read(level);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int level = warp + r * Shared<kThreads>::kWarps;
      if (level < p_.depth) count(level, noise[r]);
    }
    __syncthreads();
  }

 private:
  static constexpr int kRounds =
      (kMaxDepth + Shared<kThreads>::kWarps - 1) / Shared<kThreads>::kWarps;

  // Looks up the tokens of a level; returns their noise.
  __device__ float read(int level) {
    int32_t token = -1;
    if (key_ != 0) {
      int32_t sequence, position;
      place_of(key_, static_cast<int32_t>(p_.max_len), &sequence, &position);
      position += level + 1;
      if (position < s_.length[sequence]) {
        token = __ldg(p_.tokens + s_.slot[sequence] * p_.max_len + position);
      }
    }
    const unsigned equal = __match_any_sync(kFullWarp, token);
    s_.token[level][lane_] = token;
    s_.equal[level][lane_] = token < 0 ? 0 : equal;
    if (token < 0 || greedy_) return 0.0f;
    const Philox4 r = noise_words(noise_key_, s_.root + level + 1, token >> 2);
    const uint32_t low = token & 1 ? r.word[1] : r.word[0];
    const uint32_t high = token & 1 ? r.word[3] : r.word[2];
    return gumbel(token & 2 ? high : low);
  }

  // Finds who shares a node at a level, what it is worth and its place among its siblings.
  __device__ void count(int level, float noise) {
    unsigned parent = __ballot_sync(kFullWarp, key_ != 0);
    for (int above = 0; above < level; ++above) parent &= s_.equal[above][lane_];
    const int32_t token = s_.token[level][lane_];
    const unsigned node = parent & s_.equal[level][lane_];
    const unsigned family = parent & __ballot_sync(kFullWarp, token >= 0);
    uint64_t rank = 0;
    float gain = 0.0f;
    if (node != 0) {
      const int32_t weight = weigh(node);
      const float log_count = log_f32(static_cast<float>(weight));
      gain = log_share(weight, weigh(family));
      const float score = greedy_ ? log_count : keyed_score(log_count, 1.0f, noise);
      rank = lane_ == __ffs(node) - 1 ? rank_key(score, token) : 0;  // one lane speaks for a node
    }
    int place = 0;
#pragma unroll 8
    for (int other = 0; other < kWarpSize; ++other) {
      const uint64_t other_rank = __shfl_sync(kFullWarp, rank, other);
      place += (family >> other & 1) && other_rank > rank;
    }
    s_.node[level][lane_] = node;
    s_.gain[level][lane_] = gain;
    s_.place[level][lane_] = static_cast<uint8_t>(place);
  }

  // A match longer by one token weighs four times as much.
  __device__ int32_t weigh(unsigned lanes) const {
    int32_t sum = 0;
#pragma unroll
    for (int n = 1; n <= kMaxNgram; ++n) sum += __popc(lanes & of_length_[n - 1]) * match_weight(n);
    return sum;
  }

  const NgramProposeParams& p_;
  Shared<kThreads>& s_;
  int lane_;
  uint32_t key_;
  bool greedy_;
  NoiseKey noise_key_;
  unsigned of_length_[kMaxNgram];  // the lanes whose match is n + 1 tokens long
};

// ---- grow ---------------------------------------------------------------------------------------

// Writes the nodes with one warp, a match a lane.
template <int kThreads>
class Trie {
 public:
  __device__ Trie(const NgramProposeParams& p, int64_t b, const Shared<kThreads>& s)
      : nodes_(p.nodes),
        s_(s),
        first_(b * p.nodes.capacity),
        top_k_(static_cast<int>(p.top_k)),
        lane_(threadIdx.x % kWarpSize) {}

  // Returns the number of nodes.
  __device__ int32_t run(int depth) {
    if (lane_ == 0) write(0, s_.suffix[0], -1, 0.0f, 0);
    int32_t count = 1;
    for (int level = 0; level < depth; ++level) {
      const int32_t added = grow(level, count);
      if (added == 0) break;
      count += added;
    }
    return count;
  }

 private:
  __device__ void write(int64_t at, int32_t token, int32_t parent, float score, int32_t depth) {
    nodes_.token[first_ + at] = token;
    nodes_.parent[first_ + at] = parent;
    nodes_.score[first_ + at] = score;
    nodes_.depth[first_ + at] = depth;
  }

  // Appends one level's nodes, moves the lanes to them, and returns how many there are.
  __device__ int32_t grow(int level, int32_t count) {
    const unsigned lanes = s_.node[level][lane_];
    const int place = s_.place[level][lane_];
    const float score = add_rn(score_, s_.gain[level][lane_]);
    const int speaker = lanes != 0 ? __ffs(lanes) - 1 : lane_;
    const int32_t order = node_ << 8 | place;  // by parent, then by rank
    bool kept = node_ >= 0 && lanes != 0 && lane_ == speaker && place < top_k_;
    unsigned all = __ballot_sync(kFullWarp, kept);
    if (__popc(all) > top_k_) {
      int better = 0;
      for (unsigned rest = all; rest != 0; rest &= rest - 1) {
        const int other = __ffs(rest) - 1;
        const float other_score = __shfl_sync(kFullWarp, score, other);
        const int32_t other_order = __shfl_sync(kFullWarp, order, other);
        better += other_score > score || (other_score == score && other_order < order);
      }
      kept = kept && better < top_k_;
      all = __ballot_sync(kFullWarp, kept);
    }
    int32_t at = count;
    for (unsigned rest = all; rest != 0; rest &= rest - 1) {
      at += __shfl_sync(kFullWarp, order, __ffs(rest) - 1) < order;
    }
    if (kept) write(at, s_.token[level][lane_], node_, score, level + 1);
    node_ = __shfl_sync(kFullWarp, kept ? at : -1, speaker);
    score_ = score;  // lanes at one node have the same
    return __popc(all);
  }

  const NodeStore& nodes_;
  const Shared<kThreads>& s_;
  int64_t first_;
  int top_k_, lane_;
  int32_t node_ = 0;    // where this lane's match stands; -1 = nowhere any more
  float score_ = 0.0f;  // of that node
};

// ---- the kernel ---------------------------------------------------------------------------------

// Reads who the request and its group are; bad numbers set the status and are left out.
template <int kThreads>
__device__ void set_up(const NgramProposeParams& p, int64_t b, bool reports, Shared<kThreads>& s) {
  const int t = threadIdx.x;
  const int32_t own = p.slot[b], root = p.context_len[b];
  const int32_t slot = t < p.group_size ? p.group_slots[b * p.group_size + t] : -1;
  const bool known = own >= 0 && own < p.num_slots && root >= 0 && root < p.max_len;
  bool bad = t == 0 && !known && own != -1;
  if (t == 0) s.root = known ? root : -1;
  if (known && t < kMaxNgram) {
    s.suffix[t] = root >= t ? __ldg(p.tokens + own * p.max_len + root - t) : -1;
  }
  if (known && t < p.group_size) {
    const bool in_range = slot >= 0 && slot < p.num_slots;
    int32_t length = in_range ? p.length[slot] : 0;
    if (slot == own) length = root + 1;
    const bool fits = length >= 0 && length <= p.max_len;
    bad |= !fits || !(in_range || slot == -1);
    if (!fits) length = 0;
    s.slot[t] = slot;
    s.length[t] = length;
    s.chunks[t] = (max(length, 1) - 1 + kChunk - 1) / kChunk;
  }
  if (bad && reports) atomicOr(&p.status[b], kStatusBadLength);
  __syncthreads();
  if (known && t <= p.group_size) {
    int32_t sum = 0;
#pragma unroll 8
    for (int g = 0; g < t; ++g) sum += s.chunks[g];
    s.first_chunk[t] = sum;
  }
  __syncthreads();
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) propose_kernel(const NgramProposeParams p) {
  __shared__ Shared<kThreads> s;
  Team<kThreads> team;
  const int64_t b = team.item();
  set_up(p, b, team.rank() == 0, s);
  if (s.root < 0) {  // the same for the whole team
    if (team.thread() == 0) p.nodes.count[b] = 0;
    return;
  }
  const uint32_t key = merge_team(team, Scanner<kThreads>(p, s).run(team), s);
  if (team.rank() > 0) return;
  Levels<kThreads>(p, b, s, key).run();
  if (threadIdx.x >= kWarpSize) return;
  const int32_t count = Trie<kThreads>(p, b, s).run(static_cast<int>(p.depth));
  if (threadIdx.x == 0) p.nodes.count[b] = count;
}

}  // namespace

void ngram_propose_cuda(const NgramProposeParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "ngram_propose";
  const DeviceGuard guard(device);
  if (is_hopper()) {
    return launch(op, propose_kernel<kTeamThreads>,
                  {p.num_requests, kTeamThreads, 0, kMaxTeam, false}, as_stream(stream), p);
  }
  propose_kernel<kAloneThreads>
      <<<static_cast<unsigned>(p.num_requests), kAloneThreads, 0, as_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), op);
}

}  // namespace tlt
