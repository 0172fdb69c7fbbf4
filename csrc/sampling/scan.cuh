// A cluster reads one row of logits once, in the rounds that rounds.cuh loads.
//
// Warps need a good score before they test ids against it: the best of the first round, whose noise
// is computed while the round is copied.
//
// A half of a step produces its largest logit and the sum of 2^(logit * c - largest * c), c =
// log2(e) / T. That sum and the sum over halves have a fixed order for a given vocabulary: a tree
// over a lane's ids and a butterfly over lanes; then halves strided over lanes, and a butterfly. So
// the log-prob of a row has the same bits in every op, batch, launch and cluster. It is within
// float32 rounding of the CPU's exact sum.
#pragma once

#include "sampling/rounds.cuh"

namespace tlt {

struct alignas(8) HalfSum {
  float max;  // largest logit; -FLT_MAX if none is above it
  float sum;  // of exp_of(logit, shift(max))
};

struct alignas(16) WarpBest {
  uint64_t key;  // rank_key(score, id); 0 if no logit is finite
  float logit;
  int32_t bad;  // the row holds a NaN or +inf

  __device__ int32_t token() const {
    return key == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(key));
  }
  __device__ float score() const { return from_ascending(static_cast<uint32_t>(key >> 32)); }
};

// Which threads get the result of a row from `Scanner::score`. The warp that reports always gets
// all of it.
enum class Broadcast {
  kReporter,  // no other thread; for the last row
  kWinner,    // every thread has the winner
  kAll,       // every thread has everything
};

// Whether two rows have separate memory for their sums, so that one row's sums are folded while the
// next row is scored.
constexpr int32_t kMostStepsInTurn = 256;
constexpr int kHalves = 2;  // of a step
TLT_HD bool in_turn(int64_t steps, int64_t rounds, int64_t depth) {
  return rounds <= depth && steps <= kMostStepsInTurn;
}

// How many blocks share each row: as many as run concurrently, none without work, and enough to
// hold the row in shared memory.
template <typename T, typename Params>
ClusterShape row_launch(const char* op, void (*kernel)(Params), int64_t items, int64_t vocab_size) {
  require(vocab_size <= kMaxGpuVocabulary, op,
          "vocab_size: expected at most " + std::to_string(kMaxGpuVocabulary) + " on a GPU, got " +
              std::to_string(vocab_size));
  const bool hopper = has_hopper_code(op, kernel);
  const int64_t steps = ceil_div(vocab_size, kStep);
  const int64_t most = depth_of<T>(hopper);
  const auto shape_of = [&](unsigned cluster) -> ClusterShape {
    const int64_t rounds = ceil_div(ceil_div(steps, cluster), kWarps);
    const int64_t depth = rounds < most ? rounds : most;
    const int64_t slots = depth * kStepGroups * kParts<T> * kThreads * sizeof(uint4);
    const int64_t sums = (in_turn(steps, rounds, most) ? 2 : 1) * kHalves * steps * sizeof(HalfSum);
    return {items, kThreads, static_cast<int>(slots + sums), cluster, true};
  };
  ClusterShape best = shape_of(1);
  for (int cluster = 2; cluster <= kPortableCluster && cluster * kWarps < 2 * steps; ++cluster) {
    if (!hopper) break;
    const ClusterShape shape = shape_of(cluster);
    if (best.cluster * kWarps * most >= steps && max_active_clusters(op, kernel, shape) < items) {
      break;
    }
    best = shape;
  }
  return best;
}

template <typename T>
class Scanner : public Rounds<T> {
  using Base = Rounds<T>;

 public:
  // `shared` has the size that row_launch computes.
  __device__ Scanner(Cluster<kThreads>& cluster, uint4* shared, int64_t vocab_size)
      : Base(cluster, shared, vocab_size),
        sums_(reinterpret_cast<HalfSum*>(shared + min(rounds_, kDepth<T>) * kStepGroups *
                                                      kParts<T> * kThreads)) {
    if (threadIdx.x < 2) scratch().reached[threadIdx.x] = ascending(kNegInf);
    // Before the first copy is issued: arriving waits for this thread's memory accesses.
    cluster_.arrive();
  }

  // The result of the row whose copies were started. Without noise the winner is the largest logit.
  __device__ __forceinline__ RowResult score(const Row<T>& row, bool noisy, const Draw& draw,
                                             Broadcast broadcast) {
    return score(row, noisy, draw, broadcast, row, false);
  }

  // The same; if `has_next`, it also issues the copies of the next row over this one. keeps_row()
  // must then hold, and the next call must be for that row.
  __device__ __forceinline__ RowResult score(const Row<T>& row, bool noisy, const Draw& draw,
                                             Broadcast broadcast, const RowData<T>& next,
                                             bool has_next) {
    wait_for_cluster_start();
    Scratch& shared = scratch();
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    if (threadIdx.x == 0) shared.reached[turn_ ^ 1] = ascending(kNegInf);  // no row uses it now
    uint32_t* const reached =
        cluster_.remote(&shared.reached[turn_], min(lane, cluster_.size() - 1));
    const auto publish = [&](float score) {  // saves work, and only changes which ids are skipped
      if (lane < cluster_.size()) atomicMax(reached, ascending(score));
    };
    GumbelMax gumbel_max;
    bool bad = false;
    RowData<T> source = row;  // row of the copies that are issued next
    if (has_next) source = next;
    HalfSum* to = cluster_.remote(sums_of(turn_), 0) + kHalves * first_step_;
    int32_t step = first_step_;
    int place = 0;
#pragma unroll 1
    for (int round = 0; round < rounds_; ++round) {
      Philox4 words{};
      if (noisy) words = draw.words(static_cast<uint32_t>(step * kWarpSize + lane));
      wait_for(place);
      if (noisy && round == 0) {
        if (step < end_) publish(lower_bound(row, words));
        __syncthreads();
      }
      if (step < end_) {
        gumbel_max.reached =
            fmaxf(gumbel_max.reached, from_ascending(as_volatile(shared.reached[turn_])));
        score_step(row, step, slots_ + place * kStageSlots, noisy, draw, words, gumbel_max, &bad,
                   publish, to);
      }
      const int follows = has_next ? round : round + kDepth<T>;
      if (follows < rounds_) refill(source, follows, place);
      place = place + 1 == kDepth<T> ? 0 : place + 1;
      to += kHalves * kWarps;
      step += kWarps;
    }
    in_flight_ = has_next ? rounds_ : 0;
    const uint64_t mine = gumbel_max.token < 0 ? 0 : rank_key(gumbel_max.score, gumbel_max.token);
    const WarpBest best = best_of_warp({mine, gumbel_max.logit, bad});
    if (lane < cluster_.size()) {
      cluster_.remote(shared.best[turn_], lane)[cluster_.rank() * kWarps + warp] = best;
    }
    cluster_.sync();
    RowResult result{};
    const bool reports = cluster_.rank() == 0 && warp == kWarps - 1;
    if (reports || broadcast != Broadcast::kReporter) {
      const WarpBest winner = best_of_cluster();
      result = {0.0f, 0.0f, winner.logit, winner.token(), winner.bad || winner.key == 0};
    }
    if (reports) fold_sums(row, &result);
    if (broadcast == Broadcast::kAll) {
      if (reports && lane < cluster_.size()) *cluster_.remote(&shared.result, lane) = result;
      cluster_.sync();
      result = shared.result;
    } else if (broadcast == Broadcast::kWinner && !in_turn(num_steps_, rounds_, kDepth<T>)) {
      cluster_.sync();  // the sums are overwritten next
    }
    turn_ ^= 1;
    return result;
  }

  // The thread that writes the result of the cluster. It belongs to the last warp of the first
  // block, which has one step less than others if the division leaves a remainder, and so has time
  // to fold the sums.
  __device__ bool reports() const {
    return cluster_.rank() == 0 && threadIdx.x == (kWarps - 1) * kWarpSize;
  }

  // The last call: the shared memory of a block must exist until all blocks have read it.
  __device__ void leave() const {
    if (ready_) cluster_.arrive();
    cluster_.wait();
  }

  // Of the row that was scored last: the best score among the warps' winners for which `kept(id,
  // logit)` is true, -inf without one. It does not exceed the best score of all ids for which it is
  // true.
  template <typename Kept>
  __device__ float best_kept_score(Kept&& kept) const {
    const WarpBest* const best = scratch().best[turn_ ^ 1];
    float score = kNegInf;
    for (int warp = threadIdx.x % kWarpSize; warp < num_warps(); warp += kWarpSize) {
      const WarpBest winner = best[warp];
      if (winner.key != 0 && kept(winner.token(), winner.logit)) {
        score = fmaxf(score, winner.score());
      }
    }
    return warp_max(score);
  }

 private:
  struct Scratch {
    uint32_t reached[2];  // a score that some id of the row reaches: of this row and the next
    WarpBest best[2][kPortableCluster * kWarps];  // of all warps of the cluster
    RowResult result;
  };
  __device__ static Scratch& scratch() {
    __shared__ Scratch shared;
    return shared;
  }
  __device__ static uint32_t as_volatile(const uint32_t& x) {
    return *static_cast<const volatile uint32_t*>(&x);
  }

  // A score that an id of the warp's first step reaches: the best among the ids that have the
  // minima of the lanes' groups.
  __device__ __forceinline__ float lower_bound(const Row<T>& row, const Philox4& words) const {
    float bound = kNegInf;
#pragma unroll
    for (int group = 0; group < kStepGroups; ++group) {
      const uint32_t word = words.word[group];
      const float logit = logit_at(slots_ + group * kGroupSlots, word % kGroup);
      bound = fmaxf(bound, GumbelMax::lower_bound(row, logit, word));
    }
    return warp_max(bound);
  }

  __device__ __forceinline__ static float logit_at(const uint4* slot, uint32_t i) {
    return as_float32(reinterpret_cast<const T*>(slot)[i]);
  }

  // The search precedes the sum, which needs the registers of the words. Lane 0 writes the sum of
  // the first half to `to`, lane 16 that of the second.
  template <typename Publish>
  __device__ __forceinline__ void score_step(const Row<T>& row, int32_t step, uint4* slot,
                                             bool noisy, const Draw& draw, const Philox4& words,
                                             GumbelMax& gumbel_max, bool* bad, Publish&& publish,
                                             HalfSum* to) const {
    constexpr int kHalfGroups = kStepGroups / kHalves;
    static_assert(kHalves == 2 && kHalfGroups == 2);
    Raw<T> raw[kStepGroups];
    float largest[kStepGroups], max[kHalves];
    const auto find_largest = [&] {
#pragma unroll
      for (int group = 0; group < kStepGroups; ++group) largest[group] = largest_of(raw[group]);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        max[half] = max_nan(largest[2 * half], largest[2 * half + 1]);
      }
    };
#pragma unroll
    for (int group = 0; group < kStepGroups; ++group) {
      raw[group] = RowData<T>::read(slot + group * kGroupSlots);
    }
    find_largest();
    if (row.is_bad(max_nan(max[0], max[1]))) {  // rare: replaces bad logits in shared memory
      *bad = true;
#pragma unroll
      for (int group = 0; group < kStepGroups; ++group) {
        row.drop_bad(raw[group]);
        RowData<T>::write(raw[group], slot + group * kGroupSlots);
      }
      fence_copies();
      find_largest();
    }
    const int lane = threadIdx.x % kWarpSize;
    if (noisy) {
      gumbel_max.update(
          row, largest, first_id(step, 0), draw, words,
          [&](int group, int owner, int32_t id) {
            return logit_at(slot + group * kGroupSlots + (owner - lane) * kParts<T>, id % kGroup);
          },
          publish);
    }
    float sum[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int group = half * kHalfGroups;
      max[half] = warp_max(max[half]);
      if (!noisy) {
        gumbel_max.update_greedy(max[half], raw[group], raw[group + 1], largest[group],
                                 largest[group + 1], first_id(step, group));
      }
      max[half] = fmaxf(max[half], -FLT_MAX);
      sum[half] =
          add_rn(sum_of(row, raw[group], max[half]), sum_of(row, raw[group + 1], max[half]));
    }
    // A butterfly of both halves at once: lanes below 16 continue with the first.
    const bool upper = lane >= kWarpSize / 2;
    const float other = __shfl_xor_sync(kFullWarp, upper ? sum[0] : sum[1], kWarpSize / 2);
    float all = add_rn(upper ? sum[1] : sum[0], other);
#pragma unroll
    for (int apart = kWarpSize / 4; apart > 0; apart /= 2) {
      all = add_rn(all, __shfl_xor_sync(kFullWarp, all, apart));
    }
    if (lane % (kWarpSize / 2) == 0) to[upper] = {upper ? max[1] : max[0], all};
  }

  // A lane's part of the sum.
  __device__ __forceinline__ static float sum_of(const Row<T>& row, const Raw<T>& raw, float max) {
    const float shift = row.shift(max);
    float x[kGroup], e[kGroup];
    expand(raw, x);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) e[j] = row.exp_of(x[j], shift);
    const float low = add_rn(add_rn(e[0], e[1]), add_rn(e[2], e[3]));
    const float high = add_rn(add_rn(e[4], e[5]), add_rn(e[6], e[7]));
    return add_rn(low, high);
  }

  __device__ static WarpBest best_of_warp(WarpBest mine) {
    const uint64_t key = warp_max(mine.key);
    const int owner = __ffs(__ballot_sync(kFullWarp, mine.key == key)) - 1;
    return {key, __shfl_sync(kFullWarp, mine.logit, owner), __any_sync(kFullWarp, mine.bad)};
  }

  // Folds the sums of the halves. Called by the warp that reports.
  __device__ void fold_sums(const Row<T>& row, RowResult* result) const {
    const HalfSum* const sums = sums_of(turn_);
    const int lane = threadIdx.x % kWarpSize;
    constexpr int kBatch = 10;
    float max = -FLT_MAX, sum = 0.0f;
    const int32_t num_sums = kHalves * num_steps_;
    for (int32_t base = lane; base < num_sums; base += kBatch * kWarpSize) {
      HalfSum part[kBatch];
      float larger = max;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int32_t half = base + k * kWarpSize;
        part[k] = half < num_sums ? sums[half] : HalfSum{-FLT_MAX, 0.0f};
        larger = fmaxf(larger, part[k].max);
      }
      const float shift = row.shift(larger);
      sum = mul_rn(sum, exp2_approx(add_rn(row.shift(max), -shift)));
      max = larger;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        sum = fma_rn(part[k].sum, exp2_approx(add_rn(row.shift(part[k].max), -shift)), sum);
      }
    }
    result->max = warp_max(max);
    result->sum =
        warp_sum_all(mul_rn(sum, exp2_approx(add_rn(row.shift(max), -row.shift(result->max)))));
  }

  // Folds the winners of all warps of the cluster. Called by whole warps.
  __device__ WarpBest best_of_cluster() const {
    constexpr int kOfLane = kPortableCluster * kWarps / kWarpSize;
    const WarpBest* const best = scratch().best[turn_];
    WarpBest part[kOfLane], mine{};
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int warp = i * kWarpSize + threadIdx.x % kWarpSize;
      part[i] = warp < num_warps() ? best[warp] : WarpBest{};
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool better = part[i].key > mine.key;
      mine = {better ? part[i].key : mine.key, better ? part[i].logit : mine.logit,
              mine.bad | part[i].bad};
    }
    return best_of_warp(mine);
  }

  // The sums of a row, in the first block.
  __device__ HalfSum* sums_of(int turn) const {
    return sums_ + (in_turn(num_steps_, rounds_, kDepth<T>) ? turn * kHalves * num_steps_ : 0);
  }

  using Base::cluster_, Base::num_steps_, Base::first_step_, Base::end_, Base::rounds_,
      Base::slots_, Base::in_flight_, Base::ready_, Base::kStageSlots, Base::kGroupSlots;
  using Base::wait_for, Base::first_id, Base::wait_for_cluster_start, Base::num_warps, Base::refill;
  HalfSum* const sums_;  // [1 or 2, num_steps, kHalves]
  int turn_ = 0;         // which of the two buffers the next row uses
};

}  // namespace tlt
