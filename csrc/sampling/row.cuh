// One row of logits on the GPU: groups of kGroup ids, and the race for the best keyed score. The
// formulas are those of row.h; tokens are the CPU's bit for bit.
//
// Noise costs more than the read. Philox runs once for four ids, and only where the largest variate
// could still win. A Gumbel variate is at most -ln(u), so an id loses for sure against a score
// already reached if u > exp(logit / T - reached). Eight ids share that bound, of their largest
// logit, as one integer that their words are compared with; few ids take logs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "common/mma.cuh"
#include "common/noise.h"
#include "common/team.cuh"
#include "sampling/params.h"

namespace tlt {

constexpr int kThreads = 512;  // with 128 registers each: a warp has much to do at once
constexpr int kGroup = 8;      // neighbouring ids a lane takes at once: 16 bytes of a 16-bit dtype
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kNegInf = -INFINITY;

// 2^x by the special function unit: 2 ulp, the same on every launch.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger, or NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Raw bits of a group, or of fewer ids.
template <typename T, int kIds = kGroup>
struct Raw {
  uint32_t word[sizeof(T) * kIds / 4];
};

template <int kIds>
__device__ __forceinline__ void expand(const Raw<float, kIds>& raw, float (&x)[kIds]) {
#pragma unroll
  for (int i = 0; i < kIds; ++i) x[i] = as_float(raw.word[i]);
}

template <int kIds>
__device__ __forceinline__ void expand(const Raw<__nv_bfloat16, kIds>& raw, float (&x)[kIds]) {
#pragma unroll
  for (int i = 0; i < kIds; i += 2) {
    x[i] = as_float(raw.word[i / 2] << 16);
    x[i + 1] = as_float(raw.word[i / 2] & 0xffff0000u);
  }
}

template <int kIds>
__device__ __forceinline__ void expand(const Raw<__half, kIds>& raw, float (&x)[kIds]) {
#pragma unroll
  for (int i = 0; i < kIds; i += 2) {
    const uint32_t word = raw.word[i / 2];
    x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
    x[i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
}

// The largest logit of a group; NaN if one is.
template <int kIds>
__device__ __forceinline__ float largest_of(const Raw<float, kIds>& raw) {
  float most = as_float(raw.word[0]);
#pragma unroll
  for (int i = 1; i < kIds; ++i) most = max_nan(most, as_float(raw.word[i]));
  return most;
}

template <typename Pair, typename T, int kIds>
__device__ __forceinline__ float largest_of_pairs(const Raw<T, kIds>& raw) {
  const auto pair = [&](int i) { return *reinterpret_cast<const Pair*>(&raw.word[i]); };
  Pair most = pair(0);
#pragma unroll
  for (int i = 1; i < kIds / 2; ++i) most = __hmax2_nan(most, pair(i));
  return max_nan(__low2float(most), __high2float(most));
}

template <int kIds>
__device__ __forceinline__ float largest_of(const Raw<__nv_bfloat16, kIds>& raw) {
  return largest_of_pairs<__nv_bfloat162>(raw);
}

template <int kIds>
__device__ __forceinline__ float largest_of(const Raw<__half, kIds>& raw) {
  return largest_of_pairs<__half2>(raw);
}

template <typename T>
constexpr uint32_t kNegInfBits = 0xff800000u;
template <>
constexpr uint32_t kNegInfBits<__nv_bfloat16> = 0xff80u;
template <>
constexpr uint32_t kNegInfBits<__half> = 0xfc00u;

// Where a row of logits lies.
template <typename T>
struct RowData {
  const T* logits;
  int32_t vocab_size;
  bool aligned;

  __device__ RowData(const void* base, int64_t stride, int64_t index, int64_t vocab)
      : logits(static_cast<const T*>(base) + index * stride),
        vocab_size(static_cast<int32_t>(vocab)),
        aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0) {}

  // The bits of ids first .. first + kIds - 1, a multiple of kIds; ids past the vocabulary are not
  // read: -inf.
  template <int kIds = kGroup>
  __device__ __forceinline__ Raw<T, kIds> load(int32_t first) const {
    constexpr int kWords = sizeof(Raw<T, kIds>) / 4;
    Raw<T, kIds> raw;
    if (aligned && first + kIds <= vocab_size) {
      if constexpr (kWords == 1) {
        raw.word[0] = __ldg(reinterpret_cast<const uint32_t*>(logits + first));
      } else if constexpr (kWords == 2) {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(logits + first));
        raw = {v.x, v.y};
      } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
          const uint4 v = __ldg(reinterpret_cast<const uint4*>(logits + first) + i / 4);
          raw.word[i] = v.x;
          raw.word[i + 1] = v.y;
          raw.word[i + 2] = v.z;
          raw.word[i + 3] = v.w;
        }
      }
      return raw;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        raw.word[i] = bits_at(first + i);
      } else {
        raw.word[i] = bits_at(first + 2 * i) | bits_at(first + 2 * i + 1) << 16;
      }
    }
    return raw;
  }

  // Starts copying a group to this thread's slots of shared memory; `read` takes it once the copies
  // have landed.
  __device__ __forceinline__ void stage(int32_t first, uint4* slot) const {
    constexpr int kParts = sizeof(Raw<T>) / 16;
    if (aligned && first + kGroup <= vocab_size) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        copy_async_16(shared_address(slot + i), reinterpret_cast<const uint4*>(logits + first) + i,
                      true);
      }
      return;
    }
    write(load(first), slot);
  }

  __device__ __forceinline__ static void write(const Raw<T>& raw, uint4* slot) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Raw<T>) / 16); ++i) {
      slot[i] = make_uint4(raw.word[4 * i], raw.word[4 * i + 1], raw.word[4 * i + 2],
                           raw.word[4 * i + 3]);
    }
  }

  __device__ __forceinline__ static Raw<T> read(const uint4* slot) {
    Raw<T> raw;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Raw<T>) / 16); ++i) {
      const uint4 v = slot[i];
      raw.word[4 * i] = v.x;
      raw.word[4 * i + 1] = v.y;
      raw.word[4 * i + 2] = v.z;
      raw.word[4 * i + 3] = v.w;
    }
    return raw;
  }

 private:
  __device__ __forceinline__ uint32_t bits_at(int32_t id) const {
    if (id >= vocab_size) return kNegInfBits<T>;
    if constexpr (sizeof(T) == 4) {
      return as_bits(__ldg(logits + id));
    } else {
      return __ldg(reinterpret_cast<const unsigned short*>(logits) + id);
    }
  }
};

template <typename T>
struct Row : RowData<T> {
  float inv_temperature;
  float log2_scale;  // logit * log2_scale = log2(exp(logit / T))
  bool greedy;

  __device__ Row(const RowData<T>& data, float temperature)
      : RowData<T>(data), greedy(!(temperature >= kMinTemperature)) {
    inv_temperature = greedy ? 1.0f : __fdiv_rn(1.0f, temperature);
    log2_scale = mul_rn(inv_temperature, kLog2E);
  }

  __device__ float scaled(float logit) const { return mul_rn(logit, inv_temperature); }

  // What sums of exponentials subtract, finite for any logit.
  __device__ float shift(float largest) const {
    return fmaxf(mul_rn(largest, log2_scale), -FLT_MAX);
  }

  // exp(logit / T) / 2^shift, for sums only: never for a score or a kept set.
  __device__ float exp_of(float logit, float shift) const {
    return exp2_approx(fma_rn(logit, log2_scale, -shift));
  }

  // Whether the largest of some logits, or NaN, tells of one that must lose.
  __device__ bool is_bad(float largest) const { return !(scaled(largest) < INFINITY); }

  // Makes -inf of logits that are NaN or +inf once scaled.
  template <int kIds>
  __device__ void drop_bad(Raw<T, kIds>& raw) const {
    float x[kIds];
    expand(raw, x);
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      if (!is_bad(x[i])) continue;
      if constexpr (sizeof(T) == 4) {
        raw.word[i] = kNegInfBits<T>;
      } else {
        const int low = 16 * (i % 2);
        raw.word[i / 2] = (raw.word[i / 2] & ~(0xffffu << low)) | kNegInfBits<T> << low;
      }
    }
  }

  // Cleaned logits and the largest; true if one was bad.
  template <int kIds>
  __device__ __forceinline__ bool clean(Raw<T, kIds> raw, float (&x)[kIds], float* largest) const {
    *largest = largest_of(raw);
    const bool bad = is_bad(*largest);
    if (bad) {
      drop_bad(raw);
      *largest = largest_of(raw);
    }
    expand(raw, x);
    return bad;
  }
};

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

// At least gumbel(word), by 2e-3 at most where u is small: -ln(1 - u) >= u.
__device__ __forceinline__ float gumbel_bound(uint32_t word) {
  const float u = mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f);
  return fma_rn(log2_approx(u), -0.693147182f, 1e-3f);
}

// Noise words of kGroups groups of a lane, the first ids `apart` from each other.
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

// A lane's best candidate so far, and a score that somebody is known to reach.
struct Race {
  float score = kNegInf, logit = kNegInf;
  int32_t token = -1;
  float reached = kNegInf;

  // Ids come in rising order, so only a higher score replaces.
  __device__ __forceinline__ void offer(float new_score, float new_logit, int32_t id) {
    if (new_score > score) {
      score = new_score;
      logit = new_logit;
      token = id;
    }
  }

  template <typename T, typename Again>
  __device__ __forceinline__ void run_greedy(const Row<T>& row, float largest, int32_t first,
                                             Again&& again) {
    if (!(row.scaled(largest) > score)) return;
    float x[kGroup];
    again(x);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) offer(row.scaled(x[i]), x[i], first + i);
  }

  // 2^32 times the largest u at which a logit could still reach what somebody has, with slack for
  // every rounding on the way: u <= exp(logit / T - reached). An id may win if its word is at most
  // that, and none can if it is below 1/2, as u is half a step at least.
  template <typename T>
  __device__ __forceinline__ float reach(const Row<T>& row, float logit) const {
    const float slack = fma_rn(fabsf(reached), 0x1p-19f, 32.01f);
    return exp2_approx(fma_rn(logit, row.log2_scale, fma_rn(reached, -kLog2E, slack)));
  }

  // Takes kGroups groups, the first ids of a lane's `apart` from each other. `largest` are their
  // largest logits; `words` are made here, and only if an id may win, unless they are `made`;
  // `again(group, x)` gives the logits, which few groups need; `raise(score)` is told a new best of
  // the warp. Called by whole warps.
  template <int kGroups, typename T, typename Again, typename Raise>
  __device__ __forceinline__ void run(const Row<T>& row, const float (&largest)[kGroups],
                                      int32_t first, int32_t apart, const Draw& draw,
                                      Words<kGroups>& words, bool made, Again&& again,
                                      Raise&& raise) {
    uint32_t most[kGroups];
    bool reachable = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float limit = reach(row, largest[group]);
      reachable |= limit >= 0.5f;
      most[group] = __float2uint_rz(limit);  // saturates
    }
    if (!__any_sync(kFullWarp, reachable)) return;
    if (!made) words.make(draw, first, apart);
    bool hopeful[kGroups], any = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t least = 0xffffffffu;
#pragma unroll
      for (int i = 0; i < kGroup; i += 2) {
        least = __vimin3_u32(words.of[group][i], words.of[group][i + 1], least);
      }
      hopeful[group] = least <= most[group];
      any |= hopeful[group];
    }
    if (!__any_sync(kFullWarp, any)) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (!__any_sync(kFullWarp, hopeful[group])) continue;
      float x[kGroup];
      again(group, x);
      compete(row, x, words.of[group], first + group * apart);
    }
    const float best = warp_max(score);
    if (best > reached) raise(reached = best);
  }

  // A lower bound of the best score among the first four ids of a group, without a log's full
  // price: gumbel(word) >= -ln(u) + ln(1 - u), which is above bound - 0.3 where u < 1/4 and above
  // bound - 0.02 where u < 1/64. Rounding is monotone, so the score that a logit reaches with the
  // lower variate is not above its true score.
  template <typename T>
  __device__ static float sure_score(const Row<T>& row, const float (&x)[kGroup],
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
  // Exact scores of the ids that may win by their own logit, one a lane at a time: few, where the
  // group's largest logit let them pass.
  template <typename T>
  __device__ __forceinline__ void compete(const Row<T>& row, const float (&x)[kGroup],
                                          const uint32_t (&word)[kGroup], int32_t first) {
    uint32_t left = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      left |= word[i] <= __float2uint_rz(reach(row, x[i])) ? 1u << i : 0u;
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

// What a row amounts to. `token` is -1 and the row dead where no logit is finite.
struct RowResult {
  float max;    // largest logit; -FLT_MAX if none is above it
  float sum;    // of exp_of(logit, shift(max))
  float logit;  // of the winner
  int32_t token, bad;

  __device__ bool dead() const { return token < 0; }

  // Natural log of exp(logit / T) over the sum of all.
  template <typename T>
  __device__ float logprob(const Row<T>& row, float of_logit) const {
    if (dead()) return kNegInf;
    const float power = fma_rn(of_logit, row.log2_scale, -row.shift(max));
    const float logprob = add_rn(mul_rn(power, 0.693147182f), -log_f32(fmaxf(sum, FLT_MIN)));
    return fminf(logprob, 0.0f);  // the shift is rounded, so the largest logit's power is not 0
  }
};

}  // namespace tlt
