// The matches of `ngram_propose`: shared memory of a block, sorted lists of a warp, the search, and
// the merge of all lists (steps `scan` and `merge` of kernel.cu).
#pragma once

#include "common/rows.cuh"
#include "ngram/op.h"

namespace tlt::ngram {

constexpr int kLoad = 4;  // tokens a lane reads at once
constexpr int kChunk = kWarpSize * kLoad;
constexpr int kUnroll = 4;  // chunks that a warp has in flight
static_assert(kMaxMatches == kWarpSize);

// Shared memory of a block: the request and its group.
template <int kThreads>
struct Shared {
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kMaxGroup < kThreads && kPortableCluster <= kWarps);

  int32_t suffix[kMaxNgram];  // the request's last tokens, newest first; -1 before its start
  int32_t root;               // its position; below 0: no work
  int32_t slot[kMaxGroup];
  int32_t length[kMaxGroup];
  int32_t chunks[kMaxGroup];
  int32_t first_chunk[kMaxGroup + 1];     // chunks of the sequences before
  uint32_t list[kWarps][kMaxMatches];     // keys, largest first
  uint32_t queue[kWarps][2 * kWarpSize];  // keys that wait to be merged
  // For each level of the trie and each match:
  int32_t token[kMaxDepth][kMaxMatches];   // the next token; -1 = none
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

// The best keys that one warp has found.
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

// A chunk of a sequence, loaded by a warp.
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

  // The best keys of this warp's chunks.
  __device__ uint32_t run(const Cluster<kThreads>& cluster) {
    Best best(s_.queue[threadIdx.x / kWarpSize], lane_);
    const int32_t chunks = s_.first_chunk[p_.group_size];
    const int32_t warps = cluster.threads() / kWarpSize;
    for (int32_t first = cluster.thread() / kWarpSize; first < chunks; first += warps * kUnroll) {
      Chunk chunk[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (first + u * warps < chunks) chunk[u] = load(first + u * warps);
      }
      // A loop over element 0: the instruction cache is cold, so the code has one copy.
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

  // Positions from here on have no continuation.
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

// Merges the keys of `count` warps, a power of 2, into the first. Called by the whole block.
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

// The same for a cluster; every warp of the first block gets the result.
template <int kThreads>
__device__ uint32_t merge_cluster(const Cluster<kThreads>& cluster, uint32_t key,
                                  Shared<kThreads>& s) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  key = merge_warps(key, Shared<kThreads>::kWarps, s);
  if (warp == 0) s.list[0][lane] = key;
  if (cluster.size() > 1) {
    cluster.sync();
    if (cluster.rank() == 0 && warp < cluster.size())
      key = cluster.remote(&s.list[0][0], warp)[lane];
    cluster.sync();  // the lists are read; the other blocks may exit
    if (cluster.rank() > 0) return 0;
    key = merge_warps(key, cluster.size(), s);
    if (warp == 0) s.list[0][lane] = key;
  }
  __syncthreads();
  return s.list[0][lane];
}

}  // namespace tlt::ngram
