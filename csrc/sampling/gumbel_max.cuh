// The Gumbel-max search on the GPU: the best keyed score of a row, logit / T + gumbel(noise word of
// the id).
//
// Noise costs more than the read. Philox runs once for four ids, and only where the largest variate
// could still win. A Gumbel variate is at most -ln(u), so an id cannot beat a score that is already
// reached if u > exp(logit / T - reached). Eight ids share that bound, for their largest logit, as
// one integer that is compared with their noise words; only few ids need logarithms.
#pragma once

#include "common/noise.h"
#include "sampling/row.cuh"

namespace tlt {

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The noise of one draw.
struct Draw {
  const RoundKeys& keys;  // in constant memory
  NoiseKey key;
  int32_t position;

  __device__ __forceinline__ Philox4 words(uint32_t quad) const {
    Philox4 c{{quad, static_cast<uint32_t>(position), key.request_low, key.request_high}};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      philox_round(c, keys.word[round][0], keys.word[round][1]);
    }
    return c;
  }

  __device__ __forceinline__ uint32_t word(uint32_t id) const {
    const Philox4 r = words(id / 4);
    const uint32_t low = id & 1 ? r.word[1] : r.word[0], high = id & 1 ? r.word[3] : r.word[2];
    return id & 2 ? high : low;
  }
};

// An upper bound of gumbel(word), too high by at most 2e-3 where u is small: -ln(1 - u) >= u.
__device__ __forceinline__ float gumbel_bound(uint32_t word) {
  const float u = mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f);
  return fma_rn(log2_approx(u), -0.693147182f, 1e-3f);
}

// Noise words of the kGroups groups of a lane; the first ids of two groups are `apart` from each
// other.
template <int kGroups>
struct Words {
  uint32_t of[kGroups][kGroup];

  __device__ __forceinline__ void make(const Draw& draw, int32_t first, int32_t apart) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const Philox4 r = draw.words(static_cast<uint32_t>(first + group * apart) / 4 + quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) of[group][4 * quad + i] = r.word[i];
      }
    }
  }
};

// The best candidate of a lane so far, and a score that some id of the row is known to reach.
struct GumbelMax {
  float score = kNegInf, logit = kNegInf;
  int32_t token = -1;
  float reached = kNegInf;

  // Ids come in ascending order, so only a higher score replaces the best.
  __device__ __forceinline__ void offer(float new_score, float new_logit, int32_t id) {
    if (new_score > score) {
      score = new_score;
      logit = new_logit;
      token = id;
    }
  }

  template <typename T, typename LogitsOf>
  __device__ __forceinline__ void update_greedy(const Row<T>& row, float largest, int32_t first,
                                                LogitsOf&& logits_of) {
    if (!(row.scaled(largest) > score)) return;
    float x[kGroup];
    logits_of(x);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) offer(row.scaled(x[i]), x[i], first + i);
  }

  // The largest noise word with which a logit could still beat `reached`: 2^32 u for the largest u
  // that satisfies u <= exp(logit / T - reached), with slack for every rounding. Below 1/2 no word
  // can win, as u is at least half a step.
  template <typename T>
  __device__ __forceinline__ float max_winning_word(const Row<T>& row, float logit) const {
    const float slack = fma_rn(fabsf(reached), 0x1p-19f, 32.01f);
    return exp2_approx(fma_rn(logit, row.log2_scale, fma_rn(reached, -kLog2E, slack)));
  }

  // Takes kGroups groups; the first ids of two groups are `apart` from each other. `largest` holds
  // their largest logits. `words` is computed here, and only if an id may win, unless it is already
  // `made`. `logits_of(group, x)` reads the logits, which few groups need. `publish(score)` is
  // called with a new best score of the warp. Called by whole warps.
  template <int kGroups, typename T, typename LogitsOf, typename Publish>
  __device__ __forceinline__ void update(const Row<T>& row, const float (&largest)[kGroups],
                                         int32_t first, int32_t apart, const Draw& draw,
                                         Words<kGroups>& words, bool made, LogitsOf&& logits_of,
                                         Publish&& publish) {
    uint32_t most[kGroups];
    bool reachable = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float limit = max_winning_word(row, largest[group]);
      reachable |= limit >= 0.5f;
      most[group] = __float2uint_rz(limit);  // saturates
    }
    if (!__any_sync(kFullWarp, reachable)) return;
    if (!made) words.make(draw, first, apart);
    bool may_win[kGroups], any = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t least = 0xffffffffu;
#pragma unroll
      for (int i = 0; i < kGroup; i += 2) {
        least = __vimin3_u32(words.of[group][i], words.of[group][i + 1], least);
      }
      may_win[group] = least <= most[group];
      any |= may_win[group];
    }
    if (!__any_sync(kFullWarp, any)) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!__any_sync(kFullWarp, may_win[group])) continue;
      float x[kGroup];
      logits_of(group, x);
      score_exactly(row, x, words.of[group], first + group * apart);
    }
    const float best = warp_max(score);
    if (best > reached) publish(reached = best);
  }

  // A lower bound of the best score among the first four ids of a group, without a precise
  // logarithm: gumbel(word) >= -ln(u) + ln(1 - u), which is above the upper bound - 0.3 where u <
  // 1/4, and above it - 0.02 where u < 1/64. Rounding is monotone, so the score computed with the
  // lower variate does not exceed the true score.
  template <typename T>
  __device__ static float lower_bound(const Row<T>& row, const float (&x)[kGroup],
                                      const uint32_t (&word)[kGroup]) {
    float sure = kNegInf;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float above = word[i] < 1u << 26 ? -0.02f : -0.3f;
      const float lower = add_rn(row.scaled(x[i]), add_rn(gumbel_bound(word[i]), above));
      if (word[i] < 1u << 30) sure = fmaxf(sure, lower);
    }
    return warp_max(sure);
  }

 private:
  // Computes the exact scores of the ids that may win by their own logit, one per lane at a time.
  // They are few: the test of the group's largest logit removed most groups.
  template <typename T>
  __device__ __forceinline__ void score_exactly(const Row<T>& row, const float (&x)[kGroup],
                                                const uint32_t (&word)[kGroup], int32_t first) {
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      left |= word[i] <= __float2uint_rz(max_winning_word(row, x[i])) ? 1u << i : 0u;
    }
    while (__any_sync(kFullWarp, left != 0)) {
      const int at = left == 0 ? 0 : __ffs(left) - 1;
      float logit = x[0];
      uint32_t noise = word[0];
#pragma unroll
      for (int i = 1; i < kGroup; ++i) {
        logit = at == i ? x[i] : logit;
        noise = at == i ? word[i] : noise;
      }
      const float candidate = add_rn(row.scaled(logit), gumbel(noise));
      if (left != 0) offer(candidate, logit, first + at);
      left &= left - 1;
    }
  }
};

}  // namespace tlt
