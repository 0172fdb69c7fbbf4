// The trie of `ngram_propose` (steps `levels` and `grow` of kernel.cu).
#pragma once

#include "common/noise.h"
#include "ngram/scan.cuh"

namespace tlt::ngram {

// ---- levels -------------------------------------------------------------------------------------

// The levels of the trie for the matches (keys, one in each lane).
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
    return target_noise(noise_key_, s_.root + level + 1, static_cast<uint32_t>(token));
  }

  // Finds the lanes that share a node at a level, its log share and its rank among its siblings.
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
      rank = lane_ == __ffs(node) - 1 ? rank_key(score, token) : 0;  // one lane represents a node
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

  // One more matching token multiplies the weight by four.
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
  unsigned of_length_[kMaxNgram];  // the lanes whose match has n + 1 tokens
};

// ---- grow ---------------------------------------------------------------------------------------

// Writes the nodes with one warp, one match for each lane.
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
    const int first_lane = lanes != 0 ? __ffs(lanes) - 1 : lane_;
    const int32_t order = node_ << 8 | place;  // by parent, then by rank
    bool kept = node_ >= 0 && lanes != 0 && lane_ == first_lane && place < top_k_;
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
    node_ = __shfl_sync(kFullWarp, kept ? at : -1, first_lane);
    score_ = score;  // lanes at one node have the same
    return __popc(all);
  }

  const NodeStore& nodes_;
  const Shared<kThreads>& s_;
  int64_t first_;
  int top_k_, lane_;
  int32_t node_ = 0;    // the node of this lane's match; -1 = its path was pruned or ended
  float score_ = 0.0f;  // of that node
};

}  // namespace tlt::ngram
