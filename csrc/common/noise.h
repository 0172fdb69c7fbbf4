// Keyed noise: the randomness of a token is a pure function of (seed, request, position, token).
//
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with
//   key     = the run's 64-bit seed
//   counter = (index, position, bits 0 to 31 of request, bits 32 to 61 | domain << 30)
// and one of its four words. The noise never depends on the batch row, the bucket or the number of
// calls: that makes speculation exact token by token.
//
// The Gumbel noise of the target is -log X with independent exponentials X. Eight consecutive ids
// are a group. The minimum of eight exponentials is E / 8 for a standard exponential E, at a
// uniform place, and the others are that minimum plus fresh exponentials. So one word of a group
// gives its minimum and the place, which bounds the noise of all its ids. A search computes the
// words of the other ids ("rest") only for the few groups that can still win.
//   word of a group: domain kTarget, index = group / 128 * 32 + group % 32, word group / 32 % 4;
//                    the upper 29 bits give E, the lower 3 the place
//   word of an id:   domain kRest, index = id / 4, word id % 4
// Words of other domains belong to ids in the same way as those of kRest.
#pragma once

#include "common/math.h"

namespace tlt {

// The version of the definition above; another one draws other tokens from the same seed.
constexpr int kNoiseVersion = 2;

enum class NoiseDomain : uint32_t {
  kTarget = 0,    // group words of the target's Gumbel noise; drafting uses the same on purpose
  kAccept = 1,    // uniforms of classical rejection; id = index of the draft
  kResidual = 2,  // Gumbel noise of draws from a residual distribution
  kRest = 3,      // the target's ids beside the minimum of their group
};

struct NoiseKey {
  uint32_t seed_low, seed_high;        // run seed
  uint32_t request_low, request_high;  // request_high carries the domain in its top two bits
};

struct Philox4 {
  uint32_t word[4];
};

TLT_HD NoiseKey noise_key(uint64_t seed, int64_t request, NoiseDomain domain) {
  const uint64_t id = static_cast<uint64_t>(request);
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(id),
          (static_cast<uint32_t>(id >> 32) & 0x3fffffffu) | static_cast<uint32_t>(domain) << 30};
}

TLT_HD void mul_wide(uint32_t a, uint32_t b, uint32_t* high, uint32_t* low) {
#if defined(__CUDA_ARCH__)
  // In PTX: for a C++ product the compiler also adds the high words of the factors, which are 0.
  asm("{ .reg .b64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
      : "=r"(*low), "=r"(*high)
      : "r"(a), "r"(b));
#else
  const uint64_t product = static_cast<uint64_t>(a) * b;
  *high = static_cast<uint32_t>(product >> 32);
  *low = static_cast<uint32_t>(product);
#endif
}

TLT_HD void philox_round(Philox4& c, uint32_t k0, uint32_t k1) {
  uint32_t high0, low0, high1, low1;
  mul_wide(0xD2511F53u, c.word[0], &high0, &low0);
  mul_wide(0xCD9E8D57u, c.word[2], &high1, &low1);
  c = {{high1 ^ c.word[1] ^ k0, low1, high0 ^ c.word[3] ^ k1, low0}};
}

constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;  // each round adds them to the key

TLT_HD Philox4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                      uint32_t k1) {
  Philox4 c{{c0, c1, c2, c3}};
  for (int round = 0; round < 10; ++round, k0 += kWeyl0, k1 += kWeyl1) philox_round(c, k0, k1);
  return c;
}

// The keys of all rounds, computed on the host to save instructions in the kernel.
struct RoundKeys {
  uint32_t word[10][2];
};

inline RoundKeys round_keys(uint64_t seed) {
  RoundKeys keys;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (auto& word : keys.word) {
    word[0] = k0;
    word[1] = k1;
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return keys;
}

// The four words of an index.
TLT_HD Philox4 noise_words(const NoiseKey& key, int32_t position, uint32_t index) {
  return philox(index, static_cast<uint32_t>(position), key.request_low, key.request_high,
                key.seed_low, key.seed_high);
}

// An array with a variable index would not be in registers.
TLT_HD uint32_t word_at(const Philox4& words, uint32_t at) {
  const uint32_t low = at & 1 ? words.word[1] : words.word[0];
  const uint32_t high = at & 1 ? words.word[3] : words.word[2];
  return at & 2 ? high : low;
}

// The word of an id.
TLT_HD uint32_t noise_word(const NoiseKey& key, int32_t position, uint32_t id) {
  return word_at(noise_words(key, position, id / 4), id % 4);
}

// Standard exponential -log(1 - u), given u and v = 1 - u in the open unit interval. The log works
// on whichever of the two is small, so both tails keep full float32 resolution.
TLT_HD float exponential_of(float u, float v) {
  float exponent, f;
  split_float(v, &exponent, &f);
  const bool near_zero = u < 0.25f;  // then 1 - u has exponent 0 and log(1 - u) = log_parts(0, -u)
  return -log_parts(near_zero ? 0.0f : exponent, near_zero ? -u : f);
}

// The same for u = (word + 1/2) / 2^32.
TLT_HD float exponential(uint32_t word) {
  return exponential_of(mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f),
                        mul_rn(add_rn(static_cast<float>(~word), 0.5f), 0x1p-32f));
}

// Standard Gumbel variate.
TLT_HD float gumbel(uint32_t word) { return -log_f32(exponential(word)); }

constexpr uint32_t kNoiseGroup = 8;  // ids of a group: 16 bytes of a 16-bit dtype
constexpr uint32_t kNoiseSpan = 32;  // a call of Philox serves groups g, g + 32, g + 64 and g + 96

// Where the word of a group is.
struct GroupPlace {
  uint32_t index, word;
};
TLT_HD GroupPlace place_of_group(uint32_t group) {
  return {group / (4 * kNoiseSpan) * kNoiseSpan + group % kNoiseSpan, group / kNoiseSpan % 4};
}

// The smallest exponential of a group, from 2^-33 on: a single id keeps the resolution of 32 bits.
TLT_HD float group_minimum(uint32_t word) {
  return mul_rn(exponential_of(mul_rn(add_rn(static_cast<float>(word >> 3), 0.5f), 0x1p-29f),
                               mul_rn(add_rn(static_cast<float>(~word >> 3), 0.5f), 0x1p-29f)),
                0.125f);
}

TLT_HD bool has_minimum(uint32_t word, uint32_t id) {
  return word % kNoiseGroup == id % kNoiseGroup;
}

// The exponential of an id, from its group's word and its own.
TLT_HD float group_exponential(uint32_t word, uint32_t rest, uint32_t id) {
  const float minimum = group_minimum(word);
  return has_minimum(word, id) ? minimum : add_rn(minimum, exponential(rest));
}

TLT_HD NoiseKey rest_key(const NoiseKey& target) {
  return {target.seed_low, target.seed_high, target.request_low,
          target.request_high | static_cast<uint32_t>(NoiseDomain::kRest) << 30};
}

TLT_HD uint32_t group_word(const NoiseKey& key, int32_t position, uint32_t group) {
  const GroupPlace place = place_of_group(group);
  return word_at(noise_words(key, position, place.index), place.word);
}

// The exponential of an id of the target; `key` is that of kTarget.
TLT_HD float target_exponential(const NoiseKey& key, int32_t position, uint32_t id) {
  return group_exponential(group_word(key, position, id / kNoiseGroup),
                           noise_word(rest_key(key), position, id), id);
}

// The Gumbel noise of an id of the target.
TLT_HD float target_noise(const NoiseKey& key, int32_t position, uint32_t id) {
  return -log_f32(target_exponential(key, position, id));
}

// An upper bound of the noise of a group's ids; log_f32 is monotone within less than the slack.
TLT_HD float group_bound(uint32_t word) { return add_rn(-log_f32(group_minimum(word)), 1e-5f); }

constexpr float kMaxNoise = 22.9f;  // above the noise of every id

// Uniform in the open interval (0, 1): 23 random bits and a half, exact in float32.
TLT_HD float uniform_open(uint32_t word) {
  return mul_rn(add_rn(static_cast<float>(word >> 9), 0.5f), 0x1p-23f);
}

// A temperature below this means greedy sampling. Above it, 1/T and logit / T stay finite.
constexpr float kMinTemperature = 1e-6f;
constexpr float kMinInverse = 1e-30f;

TLT_HD bool is_greedy(float temperature) { return !(temperature >= kMinTemperature); }

// The factor of the logits: 1/T, or 1 for greedy sampling. It is never 0, so that a logit of -inf
// stays -inf at an infinite temperature, where all others tie.
TLT_HD float inverse_temperature(float temperature) {
  if (is_greedy(temperature)) return 1.0f;
  const float inverse = 1.0f / temperature;
  return inverse > kMinInverse ? inverse : kMinInverse;
}

// The score by which every kernel ranks tokens. A row with temperature 0 uses inv_temperature 1 and
// no noise.
TLT_HD float keyed_score(float logit, float inv_temperature, float noise) {
  return add_rn(mul_rn(logit, inv_temperature), noise);
}

}  // namespace tlt
