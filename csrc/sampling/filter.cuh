// top-k and top-p of one row, by the cluster that scored it and holds it in shared memory.
// The kept sets are exactly those of the CPU: ids are ordered by (logit desc, id asc), weights are
// integers.
//
// Where only the token is needed, top-p does not compute the smallest kept logit. It draws the best
// score among the ids that rank before a bound, at first all. The drawn id is kept, and the draw
// final, if the mass of the ids that rank before it is less than top_p of the whole mass.
// Otherwise it becomes the bound of the next draw. Most rows end after one test. The test stores a
// bit for every id before the bound; if these are few, the next draw and test visit only them. A
// float32 sum decides, unless it is within kDoubt of the threshold; then the integer sums decide.
#pragma once

#include "sampling/id_bits.cuh"
#include "sampling/scan.cuh"

namespace tlt {

constexpr float kDoubt = 1e-4f;           // the error of float32 sums of 2^22 terms is smaller
constexpr float kScaledDoubt = 0x1p-21f;  // the relative error of a weight grows with logit / T

struct Setting {
  int32_t top_k;
  float top_p;
  bool has_top_k, has_top_p;

  __device__ Setting(const SamplingArrays& s, int64_t i, int64_t vocab_size)
      : Setting(s.top_k[i], s.top_p[i], vocab_size) {}
  __device__ Setting(int32_t top_k, float top_p, int64_t vocab_size) : top_k(top_k), top_p(top_p) {
    has_top_k = top_k > 0 && top_k < vocab_size;
    has_top_p = top_p < 1.0f;
  }
  __device__ bool has_filter() const { return has_top_k || has_top_p; }
};

// Ascending order of the key is (logit descending, id ascending).
__device__ __forceinline__ uint64_t sort_key(float logit, int32_t id) {
  return static_cast<uint64_t>(~ascending(logit)) << 32 | static_cast<uint32_t>(id);
}

constexpr uint64_t kKeepAll = ~uint64_t{0};

constexpr int kBins = 16;
constexpr int kColumns = 64;  // of bins: lanes of a warp never use the same one, warps rarely do

struct SelectScratch {
  unsigned long long bins[kBins][kColumns];
  uint64_t of_block[2][kBins];
  uint64_t of_cluster[kBins];
};

__device__ inline SelectScratch& select_scratch() {
  __shared__ SelectScratch scratch;  // shared by all selections of a kernel
  return scratch;
}

constexpr int kFewBits = 12;  // of a thread: visiting them costs less than visiting all its groups

struct Choice {
  int32_t token;
  float logit;
};

template <typename T>
class Filter {
 public:
  __device__ Filter(Cluster<kThreads>& cluster, const Scanner<T>& scanner, const Row<T>& row,
                    float max_logit)
      : cluster_(cluster),
        scanner_(scanner),
        row_(row),
        max_(row.scaled(max_logit)),
        shift_(row.shift(max_logit)),
        doubt_(kDoubt + fabsf(max_) * kScaledDoubt),
        one_(row.exp_of(max_logit, shift_)) {}

  // The largest sort key that top-k and top-p keep.
  __device__ uint64_t cut(const Setting& setting) {
    uint64_t cut = kKeepAll;
    if (setting.has_top_k) {
      const uint64_t wanted = setting.top_k;
      cut = select([](uint64_t, float) { return uint64_t{1}; },
                   [wanted](uint64_t count) { return count >= wanted; });
    }
    if (!setting.has_top_p) return cut;
    const double wanted = share_of(setting.top_p, mass(cut));
    return select([&](uint64_t key, float s) { return key <= cut ? weight(s) : 0; },
                  [wanted](uint64_t sum) { return static_cast<double>(sum) >= wanted; });
  }

  // Integer mass of the ids up to a sort key.
  __device__ uint64_t mass(uint64_t cut) {
    uint64_t sum = 0;
    for_each([&](int32_t id, float x, float s) {
      if (sort_key(x, id) <= cut) sum += weight(s);
    });
    return cluster_.sum(sum);
  }

  // The token of the best score among the ids up to a sort key.
  __device__ int32_t best(uint64_t cut, const Draw& draw) {
    const auto kept = [=](int32_t id, float x) { return sort_key(x, id) <= cut; };
    const float least = from_ascending(~static_cast<uint32_t>(cut >> 32));
    return winner_of(search_groups(kept, least, draw));
  }

  // The token under top-p alone, starting from the winner over all ids.
  __device__ Choice descend(Choice choice, float top_p, float sum, const Draw& draw) {
    IdBits<T> bits;
    bool few = false;
    while (true) {
      const auto is_before = [=](int32_t id, float x) {
        return x > choice.logit || (x == choice.logit && id < choice.token);
      };
      float before = few ? narrow_before(is_before, bits) : mark_before(choice, bits);
      before = cluster_.sum(before);
      if (before < 0.5f * one_) return choice;  // the first id is always kept
      if (before < (top_p - doubt_) * sum) return choice;
      if (!(before > (top_p + doubt_) * sum)) {
        const double wanted = share_of(top_p, mass(kKeepAll));
        const uint64_t key = sort_key(choice.logit, choice.token);
        if (static_cast<double>(mass(key - 1)) < wanted) return choice;
      }
      few = scanner_.keeps_row() && !__any_sync(kFullWarp, bits.count() > kFewBits);
      const int32_t token = winner_of(few ? search_bits(is_before, bits, draw)
                                          : search_groups(is_before, choice.logit, draw));
      choice = {token, logit(token)};
    }
  }

  __device__ float logit(int32_t token) const { return as_float32(row_.logits[token]); }

  // Natural log of a token's weight over an integer mass, as on the CPU.
  __device__ float log_ratio(int32_t token, uint64_t mass) const {
    const float total = mul_rn(static_cast<float>(static_cast<int64_t>(mass)), 0x1p-40f);
    return add_rn(add_rn(row_.scaled(logit(token)), -max_), -log_f32(total));
  }

  // Calls f(id, logit, scaled) on this thread's ids; NaN and +inf come as -inf. The calls of
  // kAtOnce groups are unrolled.
  template <int kAtOnce = kStepGroups, typename F>
  __device__ void for_each(F&& f) {
    scanner_.template for_each_step<kAtOnce>(row_, [&](int32_t first, const Raw<T>(&raw)[kAtOnce]) {
#pragma unroll
      for (int group = 0; group < kAtOnce; ++group) {
        float x[kGroup];
        expand(raw[group], x);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          const int32_t id = first + group * kApart + i;
          if (id < row_.vocab_size) f(id, x[i], row_.scaled(x[i]));
        }
      }
    });
  }

  __device__ uint64_t weight(float scaled) const {
    return static_cast<uint64_t>(__float2ll_rz(mul_rn(exp_f32(add_rn(scaled, -max_)), 0x1p40f)));
  }

 private:
  // The best score among the ids for which `kept(id, logit)` is true; none has a logit below
  // `least`. It starts from the scores that the scan computed for some of them.
  template <typename Kept>
  __device__ GumbelMax search_groups(Kept&& kept, float least, const Draw& draw) {
    GumbelMax gumbel_max;
    gumbel_max.reached = scanner_.best_kept_score(kept);
    const auto logit_of = [&](int, int, int32_t id) {
      const float x = id < row_.vocab_size ? logit(id) : kNegInf;
      return !row_.is_bad(x) && kept(id, x) ? x : kNegInf;
    };
    scanner_.for_each_step(row_, [&](int32_t first, const Raw<T>(&raw)[kStepGroups]) {
      const Philox4 words = draw.words(place_of_group(first / kGroup).index);
      float largest[kStepGroups];
#pragma unroll
      for (int group = 0; group < kStepGroups; ++group) {
        const float most = largest_of(raw[group]);
        largest[group] = most >= least ? most : kNegInf;
      }
      gumbel_max.update(row_, largest, first, draw, words, logit_of, [](float) {});
    });
    return gumbel_max;
  }

  // The same for the ids whose bit is set, which are those that `kept` accepts. Ids are visited in
  // ascending order.
  template <typename Kept>
  __device__ GumbelMax search_bits(Kept&& kept, IdBits<T> bits, const Draw& draw) {
    GumbelMax gumbel_max;
    gumbel_max.reached = scanner_.best_kept_score(kept);
    while (bits.any()) {
      const int place = bits.first();
      bits.drop(place);
      float x;
      const int32_t id = scanner_.id_at(place, &x);
      const uint32_t word = draw.group_word(static_cast<uint32_t>(id) / kGroup);
      if (!gumbel_max.may_win(row_, x, word)) continue;
      gumbel_max.offer(add_rn(row_.scaled(x), draw.noise(word, static_cast<uint32_t>(id))), x, id);
      gumbel_max.reached = fmaxf(gumbel_max.reached, gumbel_max.score);
    }
    __syncwarp();
    return gumbel_max;
  }

  __device__ int32_t winner_of(const GumbelMax& gumbel_max) {
    const uint64_t mine = gumbel_max.token < 0
                              ? 0
                              : rank_key(gumbel_max.score, static_cast<uint32_t>(gumbel_max.token));
    return static_cast<int32_t>(~static_cast<uint32_t>(cluster_.max(mine, uint64_t{0})));
  }

  // Returns this thread's mass of the ids that rank before a choice, and sets the bits of those
  // ids. Equal logits rank by their ids, so an id ranks before the choice if its logit exceeds a
  // bar: the choice's logit or, for ids below the choice's, the next lower float.
  __device__ float mark_before(const Choice& choice, IdBits<T>& bits) {
    const float below = nextafterf(choice.logit, kNegInf);
    float before = 0.0f;
    bits = IdBits<T>{};
    scanner_.for_each_step(row_, [&](int32_t first, const Raw<T>(&raw)[kStepGroups]) {
      uint32_t have = 0;
      float largest = kNegInf;
#pragma unroll
      for (int group = 0; group < kStepGroups; ++group) {
        largest = fmaxf(largest, largest_of(raw[group]));
      }
      if (largest >= choice.logit) {
#pragma unroll
        for (int group = 0; group < kStepGroups; ++group) {
          const int32_t ahead = choice.token - (first + group * kApart);  // its ids below the token
          float x[kGroup], sum;
          uint32_t bits_of_group;
          expand(raw[group], x);
          const auto take = [&](auto&& bar_of) {
            bits_of_group = 0;
            sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
              const bool has = x[i] > bar_of(i);
              bits_of_group |= has ? 1u << (kGroup - 1 - i) : 0u;
              sum += has ? row_.exp_of(x[i], shift_) : 0.0f;
            }
          };
          const float bar = ahead > 0 ? below : choice.logit;
          take([=](int) { return bar; });
          if (ahead > 0 && ahead < kGroup) {  // the token's own group
            take([&](int i) { return i < ahead ? below : choice.logit; });
          }
          have = have << kGroup | bits_of_group;
          before += sum;
        }
      }
      bits.push(have);
    });
    return before;
  }

  // The same, if the ids are among those whose bit is set.
  template <typename IsBefore>
  __device__ float narrow_before(IsBefore&& is_before, IdBits<T>& bits) {
    float before = 0.0f;
    for (IdBits<T> left = bits; left.any();) {
      const int place = left.first();
      left.drop(place);
      float x;
      const int32_t id = scanner_.id_at(place, &x);
      if (is_before(id, x)) {
        before += row_.exp_of(x, shift_);
      } else {
        bits.drop(place);
      }
    }
    __syncwarp();
    return before;
  }

  __device__ static double share_of(float top_p, uint64_t mass) {
    return __dmul_rn(static_cast<double>(top_p), static_cast<double>(mass));
  }

  // The smallest key for which the weights of all keys up to it satisfy `reached`: a radix descent,
  // four bits a pass. Integer sums do not depend on the order.
  template <typename Weight, typename Reached>
  __device__ uint64_t select(Weight weight, Reached reached) {
    SelectScratch& scratch = select_scratch();
    auto& bins = scratch.bins;
    auto& of_block = scratch.of_block;
    auto& of_cluster = scratch.of_cluster;
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    uint64_t prefix = 0, below = 0;
    int turn = 0;
    for (int shift = 60; shift >= 0; shift -= 4) {
      if (shift < 32 && (row_.vocab_size - 1) >> shift == 0) continue;  // no id has this digit
      for (int i = threadIdx.x; i < kBins * kColumns; i += kThreads) (&bins[0][0])[i] = 0;
      __syncthreads();
      for_each([&](int32_t id, float x, float s) {
        const uint64_t key = sort_key(x, id);
        if (shift < 60 && (key ^ prefix) >> (shift + 4) != 0) return;
        const uint64_t more = weight(key, s);
        if (more > 0) {
          atomicAdd(&scratch.bins[key >> shift & (kBins - 1)][threadIdx.x % kColumns], more);
        }
      });
      __syncthreads();
      for (int bin = warp; bin < kBins; bin += kWarps) {
        uint64_t sum = 0;
        for (int i = lane; i < kColumns; i += kWarpSize) sum += bins[bin][i];
        sum = warp_reduce(sum, Sum());
        if (lane == 0) of_block[turn][bin] = sum;
      }
      cluster_.sync();
      if (threadIdx.x < kBins) {
        uint64_t sum = 0;
        for (int i = 0; i < cluster_.size(); ++i)
          sum += *cluster_.remote(&of_block[turn][threadIdx.x], i);
        of_cluster[threadIdx.x] = sum;
      }
      turn ^= 1;
      __syncthreads();
      uint64_t digit = 0;
      while (digit < kBins - 1 && !(of_cluster[digit] > 0 && reached(below + of_cluster[digit]))) {
        below += of_cluster[digit++];
      }
      prefix |= digit << shift;
    }
    cluster_.sync();  // the bins may be reused
    return prefix;
  }

  Cluster<kThreads>& cluster_;
  const Scanner<T>& scanner_;
  const Row<T>& row_;
  float max_;    // largest scaled logit
  float shift_;  // of the float32 sums
  float doubt_;  // largest relative difference from the integer masses
  float one_;    // weight of the largest logit in them: 1, except for the rounding of the shift
};

struct DrawResult {
  int32_t token;
  float logprob, filtered_logprob;
};

// The token of a row under the setting of its request, from the result of the unfiltered scan.
template <typename T>
__device__ DrawResult resolve(Cluster<kThreads>& cluster, const Scanner<T>& scanner,
                              const Row<T>& row, const RowResult& result, const Setting& setting,
                              const Draw& draw, bool want_filtered) {
  if (result.has_no_finite()) return {0, kNegInf, kNegInf};
  if (!setting.has_filter() || (!want_filtered && row.greedy)) {
    const float logprob = result.logprob(row, result.logit);
    return {result.token, logprob, logprob};
  }
  Filter<T> filter(cluster, scanner, row, result.max);
  Choice choice{result.token, result.logit};
  float filtered = 0.0f;
  if (!want_filtered && !setting.has_top_k) {
    choice = filter.descend(choice, setting.top_p, result.sum, draw);
  } else {
    const uint64_t cut = filter.cut(setting);
    if (!row.greedy && sort_key(choice.logit, choice.token) > cut) {
      choice.token = filter.best(cut, draw);
      choice.logit = filter.logit(choice.token);
    }
    if (want_filtered) filtered = filter.log_ratio(choice.token, filter.mass(cut));
  }
  return {choice.token, result.logprob(row, choice.logit), filtered};
}

}  // namespace tlt
