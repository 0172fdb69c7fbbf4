// Keyed noise: the randomness of a token is a pure function of (seed, request, position, token).
//
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with
//   key     = the run's 64-bit seed
//   counter = (id >> 2, position, low 32 bits of request, high 30 bits of request | domain << 30)
//   word    = id & 3
// so four neighbouring token ids share one evaluation. The noise never depends on the batch row,
// the bucket or the number of calls: that makes speculation exact token by token.
#pragma once

#include "common/math.h"

namespace tlt {

enum class NoiseDomain : uint32_t {
  kTarget = 0,    // Gumbel noise of the target's tokens; drafting uses the same on purpose
  kAccept = 1,    // uniforms of classical rejection; id = index of the draft
  kResidual = 2,  // Gumbel noise of draws from a residual distribution
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
#if defined(__CUDA_ARCH__)  // written out: the compiler adds the high words of the factors, which
                            // are 0
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

// The words of ids 4 * quad .. 4 * quad + 3 at one position.
TLT_HD Philox4 noise_words(const NoiseKey& key, int32_t position, uint32_t quad) {
  return philox(quad, static_cast<uint32_t>(position), key.request_low, key.request_high,
                key.seed_low, key.seed_high);
}

// Standard Gumbel variate -log(-log(1 - u)), u = (word + 1/2) / 2^32 in the open unit interval. The
// inner log works on whichever of u and 1 - u is small, so both tails keep full float32 resolution.
TLT_HD float gumbel(uint32_t word) {
  const float u = mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f);
  const float v = mul_rn(add_rn(static_cast<float>(~word), 0.5f), 0x1p-32f);
  float exponent, f;
  split_float(v, &exponent, &f);
  const bool near_zero = u < 0.25f;  // then 1 - u has exponent 0 and log(1 - u) = log_parts(0, -u)
  const float exponential = -log_parts(near_zero ? 0.0f : exponent, near_zero ? -u : f);
  return -log_f32(exponential);
}

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
