// ngram_propose on the GPU: the same trees as cpu.cpp, bit for bit.
//
// One block a request, three steps:
//   scan   Its warps share out the group's tokens in chunks of 128, latest first. A lane looks at
//          four tokens; where one equals the root it counts how far back the texts agree. A warp
//          holds the best kMaxMatches of its matches as sorted keys, one a lane; newcomers that
//          beat the least wait in a queue of its own until there are 32, are sorted and merged in.
//   merge  The warps' lists meet in log2 rounds. Keys are totally ordered, so neither the split of
//          the work nor the order of arrival shows.
//   grow   Warp d looks up what the 32 matches have at depth d + 1 and its noise; then one warp
//          builds the trie level by level, a match a lane: lanes with the same (parent, token) are
//          one child, its count a weighted population count of their mask.
// Moves 4 bytes a token of the group, once, normally out of the L2.
#include "common/noise.h"
#include "common/status.h"
#include "common/team.cuh"
#include "ngram/op.h"

namespace tlt {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLoad = 4;  // tokens a lane reads at once
constexpr int kChunk = kWarpSize * kLoad;
constexpr int kUnroll = 4;  // chunks that a warp has on their way
static_assert(kMaxMatches == kWarpSize);
static_assert(kMaxDepth <= kWarps);

// What the block knows of the request and its group.
struct Shared {
  int32_t suffix[kMaxNgram];  // the request's last tokens, newest first; -1 before its start
  int32_t slot[kMaxGroup];
  int32_t length[kMaxGroup];
  int32_t first_chunk[kMaxGroup + 1];     // chunks of the sequences before
  int32_t root;                           // its position; below 0: nothing to do
  uint32_t list[kWarps][kMaxMatches];     // keys, largest first
  uint32_t queue[kWarps][2 * kWarpSize];  // keys that wait to be merged
  int32_t token[kMaxDepth][kMaxMatches];  // what follows a match at depth d + 1; -1 = nothing
  float noise[kMaxDepth][kMaxMatches];
};

// ---- sorted lists of a warp, one key a lane
// ------------------------------------------------------

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

// The 32 largest of a sorted list and of newcomers in any order. Called, not inlined: a graph finds
// the instruction cache cold, and this is most of the code.
__device__ __noinline__ uint32_t take_keys(uint32_t sorted, uint32_t fresh, int lane) {
  return merge_keys(sorted, sort_keys(fresh, lane), lane);
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
    key_ = take_keys(key_, fresh, lane_);
    least_ = __shfl_sync(kFullWarp, key_, kWarpSize - 1);
  }

  uint32_t* queue_;  // [64]
  int lane_, waiting_ = 0;
  uint32_t key_ = 0, least_ = 0;
};

// ---- scan
// ----------------------------------------------------------------------------------------

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
  const int32_t* text = nullptr;
  int32_t sequence = 0;
  int32_t position = 0;  // of the lane's first token
  int32_t end = 0;       // places from here on have nothing after them
  int4 tokens{};
};

class Scanner {
 public:
  __device__ Scanner(const NgramProposeParams& p, Shared& s)
      : p_(p),
        s_(s),
        lane_(threadIdx.x % kWarpSize),
        aligned_(p.max_len % kLoad == 0 && reinterpret_cast<uintptr_t>(p.tokens) % 16 == 0) {}

  __device__ uint32_t run(int warp) {
    Best best(s_.queue[warp], lane_);
    const int32_t chunks = s_.first_chunk[p_.group_size];
    for (int32_t first = warp; first < chunks; first += kWarps * kUnroll) {
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * kWarps < chunks) chunk[u] = load(first + u * kWarps);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) match(chunk[u], best);
    }
    return best.finish();
  }

 private:
  __device__ __forceinline__ Chunk load(int32_t index) {
    while (index >= s_.first_chunk[sequence_ + 1]) ++sequence_;  // a warp's indices only grow
    const int32_t from_start = s_.first_chunk[sequence_ + 1] - 1 - index;
    Chunk chunk;
    chunk.text = p_.tokens + s_.slot[sequence_] * p_.max_len;
    chunk.sequence = sequence_;
    chunk.end = s_.length[sequence_] - 1;
    chunk.position = from_start * kChunk + lane_ * kLoad;
    chunk.tokens = load_tokens(chunk.text, chunk.position, chunk.end, aligned_);
    return chunk;
  }

  __device__ __forceinline__ void match(const Chunk& chunk, Best& best) {
    const int32_t root = s_.suffix[0];
    unsigned hits = 0;  // a bit for each of the lane's tokens
    if (chunk.position < chunk.end) {
      hits = (chunk.tokens.x == root) | (chunk.tokens.y == root) << 1 |
             (chunk.tokens.z == root) << 2 | (chunk.tokens.w == root) << 3;
      hits &= (1u << min(kLoad, chunk.end - chunk.position)) - 1;
    }
    while (__any_sync(kFullWarp, hits)) {
      uint32_t key = 0;
      if (hits != 0) {
        const int place = 31 - __clz(hits);
        hits ^= 1u << place;
        const int32_t position = chunk.position + place;
        const int32_t matched = count_matched(chunk.text, position);
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
  Shared& s_;
  int lane_, sequence_ = 0;
  bool aligned_;
};

// ---- grow
// ----------------------------------------------------------------------------------------

// What the 32 matches (keys, one a lane) have at `depth`, and its noise. One warp a depth.
__device__ void look_ahead(const NgramProposeParams& p, int64_t b, uint32_t key, int depth,
                           Shared& s) {
  const int lane = threadIdx.x % kWarpSize;
  int32_t token = -1;
  if (key != 0) {
    int32_t sequence, position;
    place_of(key, static_cast<int32_t>(p.max_len), &sequence, &position);
    if (position + depth < s.length[sequence]) {
      token = __ldg(p.tokens + s.slot[sequence] * p.max_len + position + depth);
    }
  }
  float noise = 0.0f;
  if (token >= 0 && p.temperature[b] >= kMinTemperature) {
    const NoiseKey noise_of = noise_key(p.seed, p.request[b], NoiseDomain::kTarget);
    const Philox4 r = noise_words(noise_of, s.root + depth, token >> 2);
    const uint32_t low = token & 1 ? r.word[1] : r.word[0];
    const uint32_t high = token & 1 ? r.word[3] : r.word[2];
    noise = gumbel(token & 2 ? high : low);
  }
  s.token[depth - 1][lane] = token;
  s.noise[depth - 1][lane] = noise;
}

// Builds the trie with one warp, a match a lane.
class Trie {
 public:
  __device__ Trie(const NgramProposeParams& p, int64_t b, const Shared& s, uint32_t key)
      : p_(p),
        s_(s),
        first_(b * p.nodes.capacity),
        lane_(threadIdx.x % kWarpSize),
        greedy_(!(p.temperature[b] >= kMinTemperature)),
        node_(key == 0 ? -1 : 0) {
#pragma unroll
    for (int n = 1; n <= kMaxNgram; ++n) {
      of_length_[n - 1] = __ballot_sync(kFullWarp, matched_of(key) == n);
    }
  }

  // Returns the number of nodes.
  __device__ int32_t run() {
    if (lane_ == 0) write(0, s_.suffix[0], -1, 0.0f, 0);
    int32_t count = 1;
    for (int depth = 1; depth <= p_.depth; ++depth) {
      const int32_t token = node_ >= 0 ? s_.token[depth - 1][lane_] : -1;
      if (token < 0) node_ = -1;
      if (!__any_sync(kFullWarp, token >= 0)) break;
      count += grow(token, depth, count);
    }
    return count;
  }

 private:
  // A match longer by one token weighs four times as much.
  __device__ int32_t weigh(unsigned lanes) const {
    int32_t sum = 0;
#pragma unroll
    for (int n = 1; n <= kMaxNgram; ++n) sum += __popc(lanes & of_length_[n - 1]) * match_weight(n);
    return sum;
  }

  __device__ void write(int64_t at, int32_t token, int32_t parent, float score, int32_t depth) {
    p_.nodes.token[first_ + at] = token;
    p_.nodes.parent[first_ + at] = parent;
    p_.nodes.score[first_ + at] = score;
    p_.nodes.depth[first_ + at] = depth;
  }

  // Appends one level's nodes, moves the lanes to them, and returns how many there are.
  __device__ int32_t grow(int32_t token, int depth, int32_t count) {
    const uint64_t child = token < 0 ? ~uint64_t{0} : static_cast<uint64_t>(node_) << 32 | token;
    const unsigned same = __match_any_sync(kFullWarp, child);
    const unsigned family = __match_any_sync(kFullWarp, node_);
    const int speaker = __ffs(same) - 1;  // of the lanes at one child
    const int32_t weight = weigh(same);
    const float log_count = token < 0 ? 0.0f : log_f32(static_cast<float>(weight));
    const float score = token < 0 ? 0.0f : add_rn(score_, log_share(weight, weigh(family)));
    const float noise = s_.noise[depth - 1][lane_];
    const uint64_t rank =
        rank_key(greedy_ ? log_count : keyed_score(log_count, 1.0f, noise), token);

    // Siblings by rank, the best top_k of them; then the level's top_k by score.
    bool kept = token >= 0 && lane_ == speaker;
    const unsigned children = __ballot_sync(kFullWarp, kept);
    int place = 0;  // among its siblings
    for (unsigned rest = children; rest != 0; rest &= rest - 1) {
      const int other = __ffs(rest) - 1;
      const int32_t other_node = __shfl_sync(kFullWarp, node_, other);
      const uint64_t other_rank = __shfl_sync(kFullWarp, rank, other);
      place += other_node == node_ && other_rank > rank;
    }
    kept = kept && place < p_.top_k;
    unsigned level = __ballot_sync(kFullWarp, kept);
    const int32_t order = node_ << 8 | place;  // by parent, then by rank
    if (__popc(level) > p_.top_k) {
      int better = 0;
      for (unsigned rest = level; rest != 0; rest &= rest - 1) {
        const int other = __ffs(rest) - 1;
        const float other_score = __shfl_sync(kFullWarp, score, other);
        const int32_t other_order = __shfl_sync(kFullWarp, order, other);
        better += other_score > score || (other_score == score && other_order < order);
      }
      kept = kept && better < p_.top_k;
      level = __ballot_sync(kFullWarp, kept);
    }
    int32_t at = count;
    for (unsigned rest = level; rest != 0; rest &= rest - 1) {
      at += __shfl_sync(kFullWarp, order, __ffs(rest) - 1) < order;
    }
    if (kept) write(at, token, node_, score, depth);
    const int32_t node = __shfl_sync(kFullWarp, kept ? at : -1, speaker);
    score_ = __shfl_sync(kFullWarp, score, speaker);
    node_ = token < 0 ? -1 : node;
    return __popc(level);
  }

  const NgramProposeParams& p_;
  const Shared& s_;
  int64_t first_;
  int lane_;
  bool greedy_;
  int32_t node_;                   // where this lane's match stands; -1 = nowhere any more
  float score_ = 0.0f;             // of that node
  unsigned of_length_[kMaxNgram];  // the lanes whose match is n + 1 tokens long
};

// ---- the block
// -----------------------------------------------------------------------------------

// Reads who the request and its group are; bad numbers set the status and are left out.
__device__ void set_up(const NgramProposeParams& p, int64_t b, Shared& s) {
  const int t = threadIdx.x;
  const int32_t own = p.slot[b], root = p.context_len[b];
  const bool known = own >= 0 && own < p.num_slots && root >= 0 && root < p.max_len;
  bool bad = t == 0 && !known && own != -1;
  if (t == 0) s.root = known ? root : -1;
  if (known && t < kMaxNgram) {
    s.suffix[t] = root >= t ? __ldg(p.tokens + own * p.max_len + root - t) : -1;
  }
  if (known && t < p.group_size) {
    const int32_t slot = p.group_slots[b * p.group_size + t];
    const bool in_range = slot >= 0 && slot < p.num_slots;
    int32_t length = in_range ? p.length[slot] : 0;
    if (slot == own) length = root + 1;
    bad |= length < 0 || length > p.max_len || !(in_range || slot == -1);
    if (length < 0 || length > p.max_len) length = 0;
    s.slot[t] = slot;
    s.length[t] = length;
  }
  if (bad) atomicOr(&p.status[b], kStatusBadLength);
  __syncthreads();
  if (known && t <= p.group_size) {
    int32_t chunks = 0;
    for (int g = 0; g < t; ++g) chunks += (max(s.length[g], 1) - 1 + kChunk - 1) / kChunk;
    s.first_chunk[t] = chunks;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) propose_kernel(const NgramProposeParams p) {
  __shared__ Shared s;
  const int64_t b = blockIdx.x;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  set_up(p, b, s);
  if (s.root < 0) {
    if (threadIdx.x == 0) p.nodes.count[b] = 0;
    return;
  }
  uint32_t key = Scanner(p, s).run(warp);
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) s.list[warp][lane] = key;
    __syncthreads();
    if (warp < half) key = merge_keys(key, s.list[warp + half][lane], lane);
  }
  if (warp == 0) s.list[0][lane] = key;
  __syncthreads();
  key = s.list[0][lane];
  if (warp < p.depth) look_ahead(p, b, key, warp + 1, s);
  __syncthreads();
  if (warp > 0) return;
  const int32_t count = Trie(p, b, s, key).run();
  if (lane == 0) p.nodes.count[b] = count;
}

}  // namespace

void ngram_propose_cuda(const NgramProposeParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  propose_kernel<<<static_cast<unsigned>(p.num_requests), kThreads, 0, as_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), "ngram_propose");
}

}  // namespace tlt
