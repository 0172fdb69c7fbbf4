// What a warp makes of a row of draft logits: values and noise of a tile of ids, and the list of
// the best children.
#pragma once

#include "common/status.h"
#include "sampling/gumbel_max.cuh"
#include "tree/params.h"

namespace tlt {

// Candidates that a warp holds: the best K, and one more a lane.
constexpr int kListRows = (kMaxTopK + kWarpSize - 1) / kWarpSize + 1;
TLT_HD int list_capacity(int top_k) {
  return ((top_k + kWarpSize - 1) / kWarpSize + 1) * kWarpSize;
}

struct alignas(16) Candidate {
  uint64_t key;  // rank_key(score, target id); 0 is nobody
  float value;   // that the log-softmax takes: scaled logit or score
  int32_t unused;

  __device__ int32_t token() const { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }
  __device__ float score() const { return from_ascending(static_cast<uint32_t>(key >> 32)); }
};

// The n-th largest of the lanes' values.
__device__ __forceinline__ float nth_largest(float value, int n) {
  uint32_t key = ascending(value), highest = 0;
  for (int i = 0; i < n; ++i) {
    highest = __reduce_max_sync(kFullWarp, key);
    const int owner = __ffs(__ballot_sync(kFullWarp, key == highest)) - 1;
    if (static_cast<int>(threadIdx.x % kWarpSize) == owner) key = 0;
  }
  return highest == 0 ? kNegInf : from_ascending(highest);
}

// The best candidates that one warp has seen, in its own shared memory: in no order, and more than
// top_k of them until `keep_best` ranks them by counting.
class WarpList {
 public:
  __device__ WarpList(Candidate* entries, int top_k)
      : entries_(entries), top_k_(top_k), capacity_(list_capacity(top_k)) {}

  // Takes the lanes' candidates. Called by whole warps.
  __device__ void take(bool has, uint64_t key, float value) {
    const unsigned takers = __ballot_sync(kFullWarp, has);
    if (num_ + __popc(takers) > capacity_) {
      num_ = keep_best(entries_);
      floor_ = fmaxf(floor_, entries_[top_k_ - 1].score());
    }
    const unsigned below = (1u << threadIdx.x % kWarpSize) - 1;
    if (has) entries_[num_ + __popc(takers & below)] = {key, value, 0};
    num_ += __popc(takers);
    __syncwarp();
  }

  // The best top_k, best first, then empty places; returns how many there are. `out` may be where
  // the candidates are.
  __device__ int keep_best(Candidate* out) const {
    const int lane = threadIdx.x % kWarpSize;
    Candidate mine[kListRows];
    int rank[kListRows];
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      rank[r] = 0;
      if (r * kWarpSize >= num_) continue;
      const int i = r * kWarpSize + lane;
      mine[r] = i < num_ ? entries_[i] : Candidate{};
#pragma unroll 4
      for (int j = 0; j < num_; ++j) {
        const uint64_t other = entries_[j].key;
        rank[r] += other > mine[r].key || (other == mine[r].key && j < i);
      }
    }
    __syncwarp();  // all have read what is written over
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      const int i = r * kWarpSize + lane;
      if (r * kWarpSize < num_ && i < num_ && rank[r] < top_k_) out[rank[r]] = mine[r];
      if (i >= num_ && i < top_k_) out[i] = Candidate{};
    }
    __syncwarp();
    return min(num_, top_k_);
  }

  // A score that top_k ids are known to reach; `sure` is one that some id of each lane reaches.
  __device__ float threshold(float sure) {
    if (top_k_ <= kWarpSize && __any_sync(kFullWarp, sure > floor_)) {
      floor_ = fmaxf(floor_, nth_largest(sure, top_k_));
    }
    return floor_;
  }

 private:
  Candidate* const entries_;  // [capacity]
  const int top_k_, capacity_;
  int num_ = 0;
  float floor_ = kNegInf;
};

// Reads past the nearest cache, so that a later read finds what was written in between.
__device__ __forceinline__ uint32_t load_shared_cache(const int32_t* from) {
  uint32_t word;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}

// A lane's ids of a tile, in registers.
template <typename T, int kTileIds>
class DraftTile {
 public:
  static constexpr int32_t kTile = kWarpSize * kTileIds;  // of a warp

  // Makes the noise of a tile for a likely draw, ahead of the wait for what comes before: nothing
  // that is read here needs to be right, as `draw` compares it with what is.
  __device__ __forceinline__ void guess(const ExpandTreeParams& p, const Draw& likely,
                                        int32_t first) {
    likely_request_low_ = likely.key.request_low;
    likely_request_high_ = likely.key.request_high;
    likely_position_ = likely.position;
    guessed_ = first + kTileIds <= p.draft_vocab;
    if (!guessed_) return;
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        likely_id_.word[i] = load_shared_cache(p.d2t + first + i);
      }
    }
    make_words(p, likely, likely_id_, first);
  }

  // Reads that wait for nothing but their addresses. Ids past the row are not read.
  __device__ __forceinline__ void fetch(const ExpandTreeParams& p, const RowData<T>& row,
                                        int32_t first) {
    const RowData<float> ids(p.d2t, 0, 0, row.vocab_size);
    first_ = first;
    raw_ = row.template load<kTileIds>(first);
    if (p.d2t != nullptr) ids_ = ids.load<kTileIds>(first);
  }

  // Makes values of what was fetched: logits / T. Returns status bits.
  __device__ __forceinline__ int32_t prepare(const ExpandTreeParams& p, const Row<T>& row) {
    int32_t status = kStatusOk;
    float x[kTileIds];
    if (row.clean(raw_, x, &largest_)) status |= kStatusNanDraft;
    largest_ = row.scaled(largest_);
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) value_[i] = row.scaled(x[i]);
    if (p.d2t == nullptr) return status;
    const auto vocab = static_cast<uint32_t>(min(p.vocab_size, int64_t{1} << 31));
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) bad |= ids_.word[i] >= vocab;
    if (!bad) return status;
    largest_ = kNegInf;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      if (ids_.word[i] >= vocab) {  // can never be drawn
        if (first_ + i < row.vocab_size) status |= kStatusBadToken;
        value_[i] = kNegInf;
        ids_.word[i] = 0;
      }
      largest_ = fmaxf(largest_, value_[i]);
    }
    return status;
  }

  // Makes the noise words of the ids, unless they are there; values become scores if `perturbed`.
  // Called by whole warps.
  __device__ __forceinline__ void draw(const ExpandTreeParams& p, const Draw& noise,
                                       bool perturbed) {
    bool right = guessed_ && likely_request_low_ == noise.key.request_low &&
                 likely_request_high_ == noise.key.request_high &&
                 likely_position_ == noise.position;
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) right &= likely_id_.word[i] == ids_.word[i];
    }
    guessed_ = false;  // the next tile is another
    if (!__all_sync(kFullWarp, right)) make_words(p, noise, ids_, first_);
    if (!perturbed) return;
    largest_ = kNegInf;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      value_[i] = add_rn(value_[i], gumbel(word_[i]));
      largest_ = fmaxf(largest_, value_[i]);
    }
  }

  __device__ float largest() const { return largest_; }

  // Hands to the list what may belong there; `exact`: values are scores. Only ids whose largest
  // variate would do take logs. Called by whole warps.
  __device__ __forceinline__ void offer(const ExpandTreeParams& p, bool exact,
                                        WarpList& list) const {
    float upper[kTileIds], sure = largest_;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) upper[i] = value_[i];
    if (!exact) {
      sure = kNegInf;
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        const float bound = gumbel_bound(word_[i]);  // as in GumbelMax::lower_bound
        upper[i] = add_rn(value_[i], bound);
        const float lower = add_rn(value_[i], add_rn(bound, -0.3f));
        if (word_[i] < 1u << 30) sure = fmaxf(sure, lower);
      }
    }
    const float threshold = list.threshold(sure);
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      left |= upper[i] >= threshold && upper[i] > kNegInf ? 1u << i : 0u;
    }
    while (__any_sync(kFullWarp, left != 0)) {
      const int at = left == 0 ? 0 : __ffs(left) - 1;
      float value = value_[0];
      uint32_t word = word_[0], id = ids_.word[0];
#pragma unroll
      for (int i = 1; i < kTileIds; ++i) {
        value = at == i ? value_[i] : value;
        word = at == i ? word_[i] : word;
        id = at == i ? ids_.word[i] : id;
      }
      if (p.d2t == nullptr) id = static_cast<uint32_t>(first_ + at);
      const float score = exact ? value : add_rn(value, gumbel(word));
      list.take(left != 0 && score >= threshold, rank_key(score, id), value);
      left &= left - 1;
    }
  }

  // Sum of the integer weights floor(2^40 * exp((value - max) * inverse)).
  __device__ __forceinline__ int64_t weigh(float max, float inverse) const {
    int64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      const float scaled = mul_rn(add_rn(value_[i], -max), inverse);
      sum += __float2ll_rz(mul_rn(exp_f32(scaled), 0x1p40f));
    }
    return sum;
  }

 private:
  __device__ __forceinline__ void make_words(const ExpandTreeParams& p, const Draw& noise,
                                             const Raw<float, kTileIds>& ids, int32_t first) {
    if (p.d2t != nullptr || kTileIds < 4) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        word_[i] = noise.word(p.d2t != nullptr ? ids.word[i] : static_cast<uint32_t>(first + i));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kTileIds; i += 4) {
      const Philox4 r = noise.words(static_cast<uint32_t>(first + i) / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) word_[i + j] = r.word[j];
    }
  }

  Raw<T, kTileIds> raw_;
  Raw<float, kTileIds> ids_, likely_id_;
  uint32_t likely_request_low_, likely_request_high_;
  int32_t likely_position_;
  bool guessed_ = false;
  float value_[kTileIds];
  uint32_t word_[kTileIds] = {};
  int32_t first_ = 0;
  float largest_ = kNegInf;  // of the values
};

}  // namespace tlt
