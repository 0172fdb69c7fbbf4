// A warp's work on a row of draft logits where few ids get their noise.
#pragma once

#include "tree/draft.cuh"

namespace tlt {

constexpr int kSpanGroups = 4 * kNoiseSpan;  // groups that one call of Philox a lane serves
constexpr int kMaxSpans = 4;
constexpr int kQueue = 2 * kWarpSize;  // ids that wait for their score
constexpr int kNoiseWords = kMaxSpans * kSpanGroups;
constexpr int kTileWords = kNoiseWords + 3 * kQueue;  // memory of a warp

// A tile that draws the noise of few ids. The word of a group bounds the noise of its ids. The
// noise itself takes another call of Philox for each id, which only those take that may be among
// the best. They are collected until each lane has one. Words and target ids are in shared memory,
// because registers have no variable index.
template <typename T, int kTileIds>
class LazyTile : public DraftTile<T, kTileIds> {
 public:
  // `memory`: of the warp, [kTileWords].
  __device__ explicit LazyTile(uint32_t* memory) : memory_(memory) {}

  // Computes the words of a tile for the expected draw, before the wait for the previous kernel.
  // The values that it reads may be outdated: `confirm` compares them with the current ones. Called
  // by whole warps.
  __device__ __forceinline__ void precompute(const ExpandTreeParams& p, const Draw& expected,
                                             int32_t first) {
    this->expect(expected);
    precomputed_ = true;
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        ids_.word[i] =
            first + i < p.draft_vocab ? load_from_l2(p.d2t + first + i) : kNegInfBits<float>;
      }
    }
    make_words(p, expected, first);
  }

  // Drops what is precomputed unless it is that of the tile that was fetched. Called by whole
  // warps.
  __device__ __forceinline__ void confirm(const ExpandTreeParams& p, const Draw& draw) {
    if (!precomputed_) return;
    bool right = this->expected(draw);
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) right &= *id_slot(i) == ids_.word[i];
    }
    precomputed_ = __all_sync(kFullWarp, right);
  }

  // Computes the words of the ids' groups, unless they are precomputed. Called by whole warps.
  __device__ __forceinline__ void draw(const ExpandTreeParams& p, const Draw& noise, bool greedy,
                                       int32_t first) {
    if (greedy) {
      keep_ids(p, first);
    } else if (!precomputed_) {
      make_words(p, noise, first);
    }
    precomputed_ = false;  // valid for the first tile only
  }

  // Passes candidates to the list, all of them with the `last` tile. Called by whole warps.
  template <typename List>
  __device__ __forceinline__ void offer(const Draw& draw, bool greedy, bool last, List& list) {
    float upper[kTileIds];
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      upper[i] = value_[i];
      if (greedy) continue;
      const float noise = log2_approx(least_exponential(*word_slot(i))) * -kLn2;  // within 1e-3
      upper[i] = add_rn(value_[i], add_rn(noise, 1e-3f));
    }
    if (greedy) reached_ = fmaxf(reached_, largest_);
    float threshold = list.threshold(greedy ? reached_ : kNegInf);
    uint32_t left = (1u << kTileIds) - 1;
    bool more = true;
    while (more) {  // each lane's most promising id, then its next one
      int at = 0;
      float highest = kNegInf, value = 0.0f;
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        const bool higher = (left >> i & 1) != 0 && upper[i] > highest;
        at = higher ? i : at;
        highest = higher ? upper[i] : highest;
        value = higher ? value_[i] : value;
      }
      left &= ~(1u << at);
      const bool has = highest >= threshold && highest > kNegInf;
      const unsigned takers = __ballot_sync(kFullWarp, has);
      if (has) {
        uint32_t* const to =
            queue() + num_queued_ + __popc(takers & ((1u << threadIdx.x % kWarpSize) - 1));
        to[0] = as_bits(value);
        to[kQueue] = *id_slot(at);
        to[2 * kQueue] = *word_slot(at);
      }
      num_queued_ += __popc(takers);
      more = takers != 0;
      if (num_queued_ >= kWarpSize || (num_queued_ > 0 && !more && last)) {
        const float score = score_queued(draw, greedy, threshold, list);
        if (more && !greedy) {
          reached_ = fmaxf(reached_, score);
          threshold = list.threshold(reached_);
        }
      }
    }
  }

 private:
  // Scores the ids that were queued last, one a lane, and returns the lane's score.
  template <typename List>
  __device__ __forceinline__ float score_queued(const Draw& draw, bool greedy, float threshold,
                                                List& list) {
    __syncwarp();
    const int count = min(num_queued_, kWarpSize), lane = threadIdx.x % kWarpSize;
    num_queued_ -= count;
    const uint32_t* const from = queue() + num_queued_ + min(lane, count - 1);
    const float value = as_float(from[0]);
    const uint32_t id = from[kQueue], word = from[2 * kQueue];
    __syncwarp();  // other lanes overwrite these entries next
    const float score = greedy ? value : add_rn(value, draw.noise(word, id));
    list.take(lane < count && score >= threshold, rank_key(score, id), value);
    return lane < count ? score : kNegInf;
  }

  // Values, target ids and words, [3, kQueue].
  __device__ uint32_t* queue() const { return memory_ + kNoiseWords; }

  // A lane's words of the groups, and its target ids.
  __device__ uint32_t* word_slot(int i) const {
    return memory_ + i * kWarpSize + threadIdx.x % kWarpSize;
  }
  __device__ uint32_t* id_slot(int i) const { return word_slot(kTileIds + i); }

  __device__ __forceinline__ void keep_ids(const ExpandTreeParams& p, int32_t first) const {
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      *id_slot(i) = p.d2t != nullptr ? ids_.word[i] : static_cast<uint32_t>(first + i);
    }
  }

  // A lower bound of the exponentials of a group, u / 8 <= -log(1 - u) / 8. The word becomes a
  // float by its bits: a conversion would take the unit of the logarithms.
  __device__ __forceinline__ static float least_exponential(uint32_t word) {
    const float u = add_rn(as_float(as_bits(1.0f) | word >> 9), -1.0f);
    return mul_rn(add_rn(u, 0x1p-30f), 0.125f);
  }

  // Computes the words of the ids' groups. Sorted ids are in few spans of groups, whose words the
  // lanes compute together.
  __device__ __forceinline__ void make_words(const ExpandTreeParams& p, const Draw& noise,
                                             int32_t first) {
    static_assert(kTileIds <= kGroup && 2 * kTileIds <= kMaxSpans * kLaneGroups);
    if (p.d2t == nullptr) {  // all in one group
      const uint32_t word = noise.group_word(static_cast<uint32_t>(first) / kGroup);
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) *word_slot(i) = word;
      keep_ids(p, first);
      return;
    }
    const uint32_t vocab = this->num_targets(p);
    uint32_t low = ~0u, high = 0;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      const bool good = ids_.word[i] < vocab;
      low = good ? min(low, ids_.word[i]) : low;
      high = good ? max(high, ids_.word[i]) : high;
    }
    low = __reduce_min_sync(kFullWarp, low) / (kSpanGroups * kGroup);
    high = __reduce_max_sync(kFullWarp, high) / (kSpanGroups * kGroup);
    if (high - low >= kMaxSpans) {
      keep_ids(p, first);
#pragma unroll 1
      for (int i = 0; i < kTileIds; ++i) *word_slot(i) = noise.group_word(*id_slot(i) / kGroup);
      return;
    }
#pragma unroll 1
    for (uint32_t span = low; span <= high; ++span) {
      const Philox4 words = noise.words(span * kNoiseSpan + threadIdx.x % kWarpSize);
#pragma unroll
      for (uint32_t i = 0; i < kLaneGroups; ++i) {
        *word_slot(span % kMaxSpans * kLaneGroups + i) = words.word[i];
      }
    }
    __syncwarp();
    uint32_t word[kTileIds];
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) word[i] = memory_[ids_.word[i] / kGroup % kNoiseWords];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) *word_slot(i) = word[i];
    keep_ids(p, first);
  }

  using Base = DraftTile<T, kTileIds>;
  using Base::ids_, Base::largest_, Base::precomputed_, Base::value_;
  uint32_t* const memory_;
  int num_queued_ = 0;
  float reached_ = kNegInf;  // by an id of this lane
};

template <typename T, typename Size>
using TileOf = std::conditional_t<Size::kLazy, LazyTile<T, Size::kIds>, NoisyTile<T, Size::kIds>>;

}  // namespace tlt
