// A warp's work on a row of draft logits: values and noise of a tile of ids, and the list of the
// best children.
#pragma once

#include "common/status.h"
#include "sampling/gumbel_max.cuh"
#include "tree/exp_sum.h"
#include "tree/params.h"

namespace tlt {

// Capacity of a warp's list: the best K and one candidate per lane.
constexpr int kListRows = (kMaxTopK + kWarpSize - 1) / kWarpSize + 1;
TLT_HD int list_capacity(int top_k) {
  return ((top_k + kWarpSize - 1) / kWarpSize + 1) * kWarpSize;
}

struct alignas(16) Candidate {
  uint64_t key;  // rank_key(score, target id); 0: none
  float value;   // input of the log-softmax: scaled logit or score
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

// The best candidates of one warp, in its own shared memory: unordered, and possibly more than
// top_k until `keep_best` ranks them by counting.
class WarpList {
 public:
  __device__ WarpList(Candidate* entries, int top_k)
      : entries_(entries), top_k_(top_k), capacity_(list_capacity(top_k)) {}

  // Adds the lanes' candidates. Called by whole warps.
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

  // Writes the best top_k in rank order, then empty entries; returns how many there are. `out` may
  // be the candidates' own memory.
  __device__ int keep_best(Candidate* out) const {
    const int lane = threadIdx.x % kWarpSize;
    Candidate mine[kListRows];
    int rank[kListRows];
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      if (r * kWarpSize >= num_) break;
      rank[r] = 0;
      const int i = r * kWarpSize + lane;
      mine[r] = i < num_ ? entries_[i] : Candidate{};
#pragma unroll 4
      for (int j = 0; j < num_; ++j) {
        const uint64_t other = entries_[j].key;
        rank[r] += other > mine[r].key || (other == mine[r].key && j < i);
      }
    }
    __syncwarp();  // all lanes have read what is overwritten next
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      if (r * kWarpSize >= max(num_, top_k_)) break;
      const int i = r * kWarpSize + lane;
      if (r * kWarpSize < num_ && i < num_ && rank[r] < top_k_) out[rank[r]] = mine[r];
      if (i >= num_ && i < top_k_) out[i] = Candidate{};
    }
    __syncwarp();
    return min(num_, top_k_);
  }

  // A score that top_k ids are known to reach; `lower_bound`: one that some id of each lane
  // reaches.
  __device__ float threshold(float lower_bound) {
    if (top_k_ <= kWarpSize && __any_sync(kFullWarp, lower_bound > floor_)) {
      floor_ = fmaxf(floor_, nth_largest(lower_bound, top_k_));
    }
    return floor_;
  }

 private:
  Candidate* const entries_;  // [capacity]
  const int top_k_, capacity_;
  int num_ = 0;
  float floor_ = kNegInf;
};

// Bypasses L1, so that a later load sees what was written in between.
__device__ __forceinline__ uint32_t load_from_l2(const int32_t* from) {
  uint32_t word;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(word) : "l"(from));
  return word;
}

// Columns of a row that are read.
__device__ __forceinline__ int32_t num_columns(const ExpandTreeParams& p) {
  return static_cast<int32_t>(p.d2t != nullptr || p.draft_vocab < p.vocab_size ? p.draft_vocab
                                                                               : p.vocab_size);
}

// The ids of a lane in a tile, in registers.
template <typename T, int kTileIds>
class DraftTile {
 public:
  static constexpr int32_t kTile = kWarpSize * kTileIds;  // of a warp

  // Issues loads that depend only on addresses. Ids past the row are not read.
  __device__ __forceinline__ void fetch(const ExpandTreeParams& p, const RowData<T>& row,
                                        int32_t first) {
    const RowData<float> ids(p.d2t, 0, 0, row.vocab_size);
    raw_ = row.template load<kTileIds>(first);
    if (p.d2t != nullptr) ids_ = ids.load<kTileIds>(first);
  }

  // Computes logits / T from what was fetched. Returns status bits.
  __device__ __forceinline__ int32_t prepare(const ExpandTreeParams& p, const Row<T>& row,
                                             int32_t first) {
    int32_t status = kStatusOk;
    float x[kTileIds];
    if (row.clean(raw_, x, &largest_)) status |= kStatusNanDraft;
    largest_ = row.scaled(largest_);
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) value_[i] = row.scaled(x[i]);
    if (p.d2t == nullptr) return status;
    const uint32_t vocab = num_targets(p);
    bool bad = false;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) bad |= ids_.word[i] >= vocab;
    if (!bad) return status;
    largest_ = kNegInf;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      if (ids_.word[i] >= vocab) {  // can never be drawn
        if (first + i < row.vocab_size) status |= kStatusBadToken;
        value_[i] = kNegInf;
      }
      largest_ = fmaxf(largest_, value_[i]);
    }
    return status;
  }

  // Adds exp(value * inverse) of the ids of a group: those of a lane, or of two neighbouring lanes.
  // Called by whole warps.
  __device__ __forceinline__ void weigh(float inverse, ExpSum& sum) const {
    static_assert(kTileIds == kGroup || 2 * kTileIds == kGroup);
    constexpr bool kHalf = kTileIds < kGroup;
    float largest = mul_rn(largest_, inverse);
    if (kHalf) largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    const float reference = ExpSum::reference_of(largest);
    const auto weight = [&](int i) {
      return exp_f32(add_rn(mul_rn(value_[i], inverse), -reference));
    };
    const auto quad = [&](int i) {
      return add_rn(add_rn(weight(i), weight(i + 1)), add_rn(weight(i + 2), weight(i + 3)));
    };
    const float first = quad(0);
    const float mass =
        add_rn(first, kHalf ? __shfl_xor_sync(kFullWarp, first, 1) : quad(4 % kTileIds));
    if (!kHalf || threadIdx.x % 2 == 0) sum.add(ExpSum::of_group(reference, mass));
  }

 protected:
  __device__ static uint32_t num_targets(const ExpandTreeParams& p) {
    return static_cast<uint32_t>(min(p.vocab_size, int64_t{1} << 31));
  }

  __device__ __forceinline__ void expect(const Draw& draw) {
    expected_request_low_ = draw.key.request_low;
    expected_request_high_ = draw.key.request_high;
    expected_position_ = draw.position;
  }
  __device__ __forceinline__ bool expected(const Draw& draw) const {
    return expected_request_low_ == draw.key.request_low &&
           expected_request_high_ == draw.key.request_high && expected_position_ == draw.position;
  }

  Raw<T, kTileIds> raw_;
  Raw<float, kTileIds> ids_;
  uint32_t expected_request_low_, expected_request_high_;
  int32_t expected_position_;
  bool precomputed_ = false;
  float value_[kTileIds];
  float largest_ = kNegInf;  // of the values
};

// A tile with the noise of all ids, for warps that have it computed before the wait.
template <typename T, int kTileIds>
class NoisyTile : public DraftTile<T, kTileIds> {
 public:
  __device__ explicit NoisyTile(uint32_t*) {}  // all in registers

  // Computes the noise of a tile for the expected draw, before the wait for the previous kernel.
  // The values that it reads may be outdated: `draw` compares them with the current ones.
  __device__ __forceinline__ void precompute(const ExpandTreeParams& p, const Draw& expected,
                                             int32_t first) {
    this->expect(expected);
    precomputed_ = first + kTileIds <= p.draft_vocab;
    if (!precomputed_) return;
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        expected_id_.word[i] = load_from_l2(p.d2t + first + i);
      }
    }
    make_noise(p, expected, expected_id_, first);
  }

  // Computes the noise of the ids, unless it is precomputed; values become scores if
  // `perturbed`. Called by whole warps.
  __device__ __forceinline__ void draw(const ExpandTreeParams& p, const Draw& noise, bool perturbed,
                                       int32_t first) {
    bool right = precomputed_ && this->expected(noise);
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) right &= expected_id_.word[i] == ids_.word[i];
    }
    precomputed_ = false;  // valid for the first tile only
    if (!__all_sync(kFullWarp, right)) make_noise(p, noise, ids_, first);
    if (!perturbed) return;
    largest_ = kNegInf;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      value_[i] = add_rn(value_[i], noise_[i]);
      largest_ = fmaxf(largest_, value_[i]);
    }
  }

  // Passes candidates to the list; `exact`: values are scores. Called by whole warps.
  template <typename List>
  __device__ __forceinline__ void offer(const ExpandTreeParams& p, bool exact, int32_t first,
                                        List& list) const {
    float score[kTileIds], highest = kNegInf;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      score[i] = exact ? value_[i] : add_rn(value_[i], noise_[i]);
      highest = fmaxf(highest, score[i]);
    }
    const float threshold = list.threshold(highest);
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      left |= score[i] >= threshold && score[i] > kNegInf ? 1u << i : 0u;
    }
    while (__any_sync(kFullWarp, left != 0)) {
      const int at = left == 0 ? 0 : __ffs(left) - 1;
      float value = value_[0], best = score[0];
      uint32_t id = ids_.word[0];
#pragma unroll
      for (int i = 1; i < kTileIds; ++i) {
        value = at == i ? value_[i] : value;
        best = at == i ? score[i] : best;
        id = at == i ? ids_.word[i] : id;
      }
      if (p.d2t == nullptr) id = static_cast<uint32_t>(first + at);
      list.take(left != 0, rank_key(best, id), value);
      left &= left - 1;
    }
  }

 private:
  __device__ __forceinline__ void make_noise(const ExpandTreeParams& p, const Draw& noise,
                                             const Raw<float, kTileIds>& ids, int32_t first) {
    static_assert(kTileIds % 4 == 0 && kTileIds <= kGroup);
    if (p.d2t != nullptr) {
#pragma unroll
      for (int i = 0; i < kTileIds; ++i) {
        noise_[i] = noise.noise(noise.group_word(ids.word[i] / kGroup), ids.word[i]);
      }
      return;
    }
    const auto id = static_cast<uint32_t>(first);  // its tile is in one group
    const uint32_t word = noise.group_word(id / kGroup);
#pragma unroll
    for (int i = 0; i < kTileIds; i += 4) {
      const Philox4 r = noise.rest_words((id + i) / 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        noise_[i + j] = -log_f32(group_exponential(word, r.word[j], id + i + j));
      }
    }
  }

  using Base = DraftTile<T, kTileIds>;
  using Base::ids_, Base::largest_, Base::precomputed_, Base::value_;
  Raw<float, kTileIds> expected_id_;
  float noise_[kTileIds] = {};
};

}  // namespace tlt
