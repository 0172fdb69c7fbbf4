// What a warp makes of a row of draft logits: values and noise of a tile of ids, and the list of
// the best children.
#pragma once

#include "common/status.h"
#include "sampling/row.cuh"
#include "tree/params.h"

namespace tlt {

constexpr int kTreeWarps = 16;  // with ids
constexpr int kTreeThreads = (kTreeWarps + 1) * kWarpSize;
constexpr int kTileIds = kGroup;                 // of a lane
constexpr int32_t kTile = kWarpSize * kTileIds;  // of a warp
constexpr int kListRows = (kMaxTopK + kWarpSize - 1) / kWarpSize;

struct alignas(16) Candidate {
  uint64_t key;  // rank_key(score, target id); 0 is nobody
  float value;   // that the log-softmax takes: scaled logit or score
  int32_t unused;

  __device__ int32_t token() const { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }
};

// The largest of the lanes' keys.
__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t highest = __reduce_max_sync(kFullWarp, high);
  const uint32_t low = high == highest ? static_cast<uint32_t>(key) : 0;
  return static_cast<uint64_t>(highest) << 32 | __reduce_max_sync(kFullWarp, low);
}

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

// The best candidates that one warp has seen, best first: entry j is in lane j % 32's row j / 32.
struct WarpList {
  uint64_t key[kListRows] = {};
  float value[kListRows] = {};
  const int top_k;

  __device__ explicit WarpList(int top_k) : top_k(top_k) {}

  // A candidate has no chance without a larger key; 0 while there is room.
  __device__ uint64_t worst() const {
    uint64_t last = 0;
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      if (r * kWarpSize < top_k) last = __shfl_sync(kFullWarp, key[r], (top_k - 1) % kWarpSize);
    }
    return last;
  }

  __device__ void insert(uint64_t new_key, float new_value) {
    const int lane = threadIdx.x % kWarpSize;
    int place = 0;
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      if (r * kWarpSize < top_k) place += __popc(__ballot_sync(kFullWarp, key[r] >= new_key));
    }
#pragma unroll
    for (int r = kListRows - 1; r >= 0; --r) {
      if (r * kWarpSize >= top_k) continue;
      uint64_t before_key = __shfl_up_sync(kFullWarp, key[r], 1);
      float before_value = __shfl_up_sync(kFullWarp, value[r], 1);
      if (r > 0) {
        const uint64_t last_key = __shfl_sync(kFullWarp, key[r > 0 ? r - 1 : 0], kWarpSize - 1);
        const float last_value = __shfl_sync(kFullWarp, value[r > 0 ? r - 1 : 0], kWarpSize - 1);
        before_key = lane == 0 ? last_key : before_key;
        before_value = lane == 0 ? last_value : before_value;
      }
      const int entry = r * kWarpSize + lane;
      if (entry == place) {
        key[r] = new_key;
        value[r] = new_value;
      } else if (entry > place) {
        key[r] = before_key;
        value[r] = before_value;
      }
    }
  }

  // Takes the lanes' candidates, best first, until the list wants no more. Called by whole warps.
  __device__ void take(uint64_t new_key, float new_value) {
    while (__any_sync(kFullWarp, new_key > worst())) {
      const uint64_t best = warp_max(new_key);
      const int owner = __ffs(__ballot_sync(kFullWarp, new_key == best)) - 1;
      insert(best, __shfl_sync(kFullWarp, new_value, owner));
      if (static_cast<int>(threadIdx.x % kWarpSize) == owner) new_key = 0;
    }
  }

  __device__ void write(Candidate* out) const {
#pragma unroll
    for (int r = 0; r < kListRows; ++r) {
      const int entry = r * kWarpSize + threadIdx.x % kWarpSize;
      if (entry < top_k) out[entry] = {key[r], value[r], 0};
    }
  }
};

// A lane's ids of a tile. They lie in shared memory, in columns that no other thread touches, so
// that loops over them need not be unrolled: a kernel this short pays for every instruction that it
// fetches.
template <typename T>
class DraftTile {
 public:
  static constexpr size_t kBytes = 3 * kTileIds * kTreeThreads * sizeof(float);

  __device__ explicit DraftTile(float* shared)
      : value_(shared + threadIdx.x),
        upper_(value_ + kTileIds * kTreeThreads),
        token_(reinterpret_cast<int32_t*>(upper_ + kTileIds * kTreeThreads)) {}

  // Reads that wait for nothing but their addresses. Ids past the row are not read.
  __device__ void fetch(const ExpandTreeParams& p, const RowData<T>& row, int32_t first) {
    const RowData<float> ids(p.d2t, 0, 0, row.vocab_size);
    first_ = first;
    raw_ = row.load(first);
    if (p.d2t != nullptr) ids_ = ids.load(first);
  }

  // Makes values of what was fetched: logits / T, or scores if `perturbed`, and what may become of
  // them. Returns status bits.
  __device__ int32_t prepare(const ExpandTreeParams& p, const Row<T>& row, const Draw& draw,
                             bool perturbed) {
    const int32_t status = scale(p, row);
    largest_ = kNegInf;
    sure_ = kNegInf;
#pragma unroll 1
    for (int quad = 0; quad < kTileIds / 4; ++quad) {
      const int from = 4 * quad * kTreeThreads;
      Philox4 r{};
      if (!row.greedy && p.d2t == nullptr) r = draw.words(static_cast<uint32_t>(token_[from]) / 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = from + i * kTreeThreads;
        float value = value_[at], upper = value, lower = value;
        if (!row.greedy) {
          const uint32_t word = p.d2t != nullptr ? draw.word(token_[at]) : r.word[i];
          if (perturbed) {
            value_[at] = value = upper = lower = add_rn(value, gumbel(word));
          } else {
            const float bound = gumbel_bound(word);  // as in Race::sure_score
            upper = add_rn(value, bound);
            lower = word < 1u << 30 ? add_rn(value, add_rn(bound, -0.3f)) : kNegInf;
          }
        }
        upper_[at] = upper;
        largest_ = fmaxf(largest_, value);
        sure_ = fmaxf(sure_, lower);
      }
    }
    return status;
  }

  __device__ float largest() const { return largest_; }

  // Hands to the list what may belong there; `exact`: values are scores. Only ids whose largest
  // variate would do take logs. Called by whole warps.
  __device__ void offer(const Draw& draw, bool exact, WarpList& list) const {
    // A score that top_k ids reach for sure stands in for a list that is not full.
    const uint64_t worst = list.worst();
    const float threshold = worst != 0 ? from_ascending(static_cast<uint32_t>(worst >> 32))
                            : list.top_k <= kWarpSize ? nth_largest(sure_, list.top_k)
                                                      : kNegInf;
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < kTileIds; ++i) {
      const float upper = upper_[i * kTreeThreads];
      left |= upper >= threshold && upper > kNegInf ? 1u << i : 0u;
    }
    while (__any_sync(kFullWarp, left != 0)) {
      const int at = left == 0 ? 0 : (__ffs(left) - 1) * kTreeThreads;
      const float value = value_[at];
      const int32_t token = token_[at];
      const float score = exact ? value : add_rn(value, gumbel(draw.word(token)));
      list.take(left == 0 ? 0 : rank_key(score, static_cast<uint32_t>(token)), value);
      left &= left - 1;
    }
  }

  // Sum of the integer weights floor(2^40 * exp((value - max) * inverse)).
  __device__ int64_t weigh(float max, float inverse) const {
    int64_t sum = 0;
#pragma unroll 4
    for (int i = 0; i < kTileIds; ++i) {
      const float scaled = mul_rn(add_rn(value_[i * kTreeThreads], -max), inverse);
      sum += __float2ll_rz(mul_rn(exp_f32(scaled), 0x1p40f));
    }
    return sum;
  }

 private:
  __device__ int32_t scale(const ExpandTreeParams& p, const Row<T>& row) const {
    int32_t status = kStatusOk;
    float x[kGroup], largest;
    if (row.clean(raw_, x, &largest)) status |= kStatusNanDraft;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      float value = row.scaled(x[i]);
      int32_t token = first_ + i;
      if (p.d2t != nullptr) {
        token = static_cast<int32_t>(ids_.word[i]);
        if (token < 0 || token >= p.vocab_size) {  // can never be drawn
          value = kNegInf;
          token = 0;
          if (first_ + i < row.vocab_size) status |= kStatusBadToken;
        }
      }
      value_[i * kTreeThreads] = value;
      token_[i * kTreeThreads] = token;
    }
    return status;
  }

  float* const value_;
  float* const upper_;  // at least the score
  int32_t* const token_;
  Raw<T> raw_;
  Raw<float> ids_;
  int32_t first_ = 0;
  float largest_ = kNegInf, sure_ = kNegInf;  // of the values; a score that one id reaches
};

}  // namespace tlt
