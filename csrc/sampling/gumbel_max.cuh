// The Gumbel-max search on the GPU: the best keyed score of a row, logit / T + noise of the id.
//
// Noise in full would cost more than the read. The word of a group of eight ids bounds their noise
// (common/noise.h): it is at most -ln(u / 8), so no id of the group beats a score that is already
// reached if u > 8 exp(largest logit / T - reached). A lane takes four groups that share a call of
// Philox, and compares their words with these bounds. The few groups that may win are scored by the
// warp, a lane an id.
#pragma once

#include "common/noise.h"
#include "sampling/row.cuh"

namespace tlt {

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLn2 = 0.693147182f;

// The noise of one draw.
struct Draw {
  const RoundKeys& keys;  // in constant memory
  NoiseKey key;           // of the target
  int32_t position;

  // Words of groups g, g + 32, g + 64, g + 96, where g has this index (place_of_group).
  __device__ __forceinline__ Philox4 words(uint32_t index) const {
    return philox(index, key.request_high);
  }
  __device__ __forceinline__ uint32_t group_word(uint32_t group) const {
    const GroupPlace place = place_of_group(group);
    return word_at(words(place.index), place.word);
  }
  // Words of ids 4 * quad .. 4 * quad + 3 beside the minimum of their group.
  __device__ __forceinline__ Philox4 rest_words(uint32_t quad) const {
    return philox(quad, rest_key(key).request_high);
  }
  // The exponential of an id; its noise is -log of it.
  __device__ __forceinline__ float exponential(uint32_t word, uint32_t id) const {
    return group_exponential(word, word_at(rest_words(id / 4), id % 4), id);
  }
  __device__ __forceinline__ float noise(uint32_t word, uint32_t id) const {
    return -log_f32(exponential(word, id));
  }

 private:
  __device__ __forceinline__ Philox4 philox(uint32_t index, uint32_t high) const {
    Philox4 c{{index, static_cast<uint32_t>(position), key.request_low, high}};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      philox_round(c, keys.word[round][0], keys.word[round][1]);
    }
    return c;
  }
};

constexpr int kLaneGroups = 4;                   // groups of a lane: those of a call of Philox
constexpr int32_t kApart = kNoiseSpan * kGroup;  // ids from one of them to the next
static_assert(kNoiseSpan == kWarpSize && kNoiseGroup == kGroup);

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

  // Takes two groups of each lane without noise, the ids of the first before those of the second.
  // `highest` is the largest logit of the warp. Called by whole warps; few pass the first test.
  template <typename T>
  __device__ __forceinline__ void update_greedy(float highest, const Raw<T>& raw0,
                                                const Raw<T>& raw1, float largest0, float largest1,
                                                int32_t first) {
    if (!(highest > reached)) return;
    reached = highest;
    const unsigned low = __ballot_sync(kFullWarp, largest0 == highest);
    const unsigned high = __ballot_sync(kFullWarp, largest1 == highest);
    const int owner = __ffs(low != 0 ? low : high) - 1;
    if (static_cast<int>(threadIdx.x % kWarpSize) != owner) return;
    float x[kGroup];
    Raw<T> raw;  // selected by words: a reference would move both to local memory
#pragma unroll
    for (size_t i = 0; i < sizeof(raw) / 4; ++i)
      raw.word[i] = low != 0 ? raw0.word[i] : raw1.word[i];
    expand(raw, x);
    const int32_t start = low != 0 ? first : first + kApart;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) offer(x[i], x[i], start + i);
  }

  // Whether an id of a group with this word and with logits up to `largest` could still win or tie.
  // As E >= u = (word / 8 + 1/2) / 2^29, that needs u / 8 <= exp(largest / T - reached), or word /
  // 512 <= 2^26 exp(largest / T - reached). The slack covers every rounding. The word becomes a
  // float by its bits: a conversion would take the unit of the exponentials.
  template <typename T>
  __device__ __forceinline__ bool may_win(const Row<T>& row, float largest, uint32_t word) const {
    const float slack = fma_rn(fabsf(reached), 0x1p-19f, 26.01f);
    const float power = fma_rn(largest, row.log2_scale, fma_rn(reached, -kLog2E, slack));
    return as_float(as_bits(0x1p23f) | word >> 9) <= add_rn(exp2_approx(power), 0x1p23f + 1.0f);
  }

  // Takes a lane's groups, kApart ids apart. `largest` holds their largest logits.
  // `logit_of(group, owner, id)` reads an id of a group of the lane `owner`. `publish(score)` is
  // called with a new best score of the warp. Called by whole warps.
  template <typename T, typename LogitOf, typename Publish>
  __device__ __forceinline__ void update(const Row<T>& row, const float (&largest)[kLaneGroups],
                                         int32_t first, const Draw& draw, const Philox4& words,
                                         LogitOf&& logit_of, Publish&& publish) {
    uint32_t may = 0;  // a bit for each group
#pragma unroll
    for (int group = 0; group < kLaneGroups; ++group) {
      may |= may_win(row, largest[group], words.word[group]) ? 1u << group : 0u;
    }
    if (!__any_sync(kFullWarp, may != 0)) return;
    __syncwarp();  // lanes read logits that others may have replaced
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int group = 0; group < kLaneGroups; ++group) {
      unsigned owners = __ballot_sync(kFullWarp, may >> group & 1);
      if (owners == 0) continue;
      const uint32_t mine = word_at(words, group);
      for (; owners != 0; owners = drop_lowest(owners, kWarpSize / kGroup)) {
        const unsigned left = drop_lowest(owners, lane / kGroup);  // eight lanes take a group each
        const int owner = left != 0 ? __ffs(left) - 1 : 0;
        const uint32_t word = __shfl_sync(kFullWarp, mine, owner);
        const int32_t id = first + (owner - lane) * kGroup + group * kApart + lane % kGroup;
        const float logit = logit_of(group, owner, id);
        const float candidate = add_rn(row.scaled(logit), draw.noise(word, id));
        if (left != 0) offer(candidate, logit, id);
      }
      const float best = warp_max(score);
      if (best > reached) publish(reached = best);
    }
  }

  // A lower bound of the score of an id that has the minimum of its group, without a precise
  // logarithm: its noise is at least -ln(u / 8) + ln(1 - u), and the last term is above -0.3 where
  // u < 1/4, and above -0.02 where u < 1/64. Rounding is monotone, so the score computed with the
  // lower noise does not exceed the true score.
  template <typename T>
  __device__ static float lower_bound(const Row<T>& row, float logit, uint32_t word) {
    const float u = mul_rn(add_rn(static_cast<float>(word >> 3), 0.5f), 0x1p-29f);
    const float above = word < 1u << 26 ? -0.02f : -0.3f;
    const float noise = add_rn(fma_rn(log2_approx(u), -kLn2, 3 * kLn2), above);
    const bool valid = word < 1u << 30 && !row.is_bad(logit);
    return valid ? add_rn(row.scaled(logit), noise) : kNegInf;
  }

 private:
  __device__ __forceinline__ static unsigned drop_lowest(unsigned bits, int count) {
#pragma unroll
    for (int i = 0; i < kWarpSize / kGroup; ++i) bits = i < count ? bits & (bits - 1) : bits;
    return bits;
  }
};

}  // namespace tlt
