// One row of logits on the GPU: reading it in groups of kGroup ids, and the race for the best keyed
// score. The formulas are those of row.h; tokens are the CPU's bit for bit.
//
// A warp owns a *chunk* of kChunk neighbouring ids, a cut that depends on the vocabulary alone. Of
// a chunk it keeps a Partial: the largest logit, the sum of 2^(logit * c - largest * c) with c =
// log2(e) / T, and the winner. That sum has one order for a given vocabulary: lane by lane within
// a chunk, then a butterfly over lanes, then chunks strided over lanes, then a butterfly. So a
// row's log-prob has the same bits in every op, batch and launch; it is within float32 rounding of
// the CPU's exact sum.
//
// Noise costs more than the read. Philox runs once for four ids, and only where the largest variate
// could still win. A Gumbel variate is at most -ln(u), so an id loses for sure against a score
// already reached if u > exp(logit / T - reached); the exponential is at hand from the sum, so the
// test is one multiply-add, and few ids take logs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "common/mma.cuh"
#include "common/noise.h"
#include "common/team.cuh"
#include "sampling/params.h"

namespace tlt {

constexpr int kThreads = 256;
constexpr int kGroup = 8;  // neighbouring ids a lane takes at once: 16 bytes of a 16-bit dtype
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kNegInf = -INFINITY;

struct alignas(16) Partial {
  float max;    // largest logit; -FLT_MAX if none is above it
  float sum;    // of exp_of(logit, shift(max))
  float score;  // of the winner; -inf if no logit is finite
  float logit;  // of the winner
  int32_t token;
  int32_t bad;  // a NaN or +inf was met
  int32_t unused[2];
};
static_assert(sizeof(Partial) == kPartialBytes);

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

// Raw bits of a group.
template <typename T>
struct Raw {
  uint32_t word[sizeof(T) * kGroup / 4];
};

__device__ __forceinline__ void expand(const Raw<float>& raw, float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = as_float(raw.word[i]);
}

__device__ __forceinline__ void expand(const Raw<__nv_bfloat16>& raw, float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    x[i] = as_float(raw.word[i / 2] << 16);
    x[i + 1] = as_float(raw.word[i / 2] & 0xffff0000u);
  }
}

__device__ __forceinline__ void expand(const Raw<__half>& raw, float (&x)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; i += 2) {
    const uint32_t word = raw.word[i / 2];
    x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
    x[i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
  }
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

  // The bits of ids first .. first + kGroup - 1; ids past the vocabulary are not read: -inf.
  __device__ __forceinline__ Raw<T> load(int32_t first) const {
    constexpr int kWords = sizeof(Raw<T>) / 4;
    Raw<T> raw;
    if (aligned && first + kGroup <= vocab_size) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(logits + first) + i / 4);
        raw.word[i] = v.x;
        raw.word[i + 1] = v.y;
        raw.word[i + 2] = v.z;
        raw.word[i + 3] = v.w;
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

  // Starts copying a group to this lane's slots of shared memory, kWarpSize apart; `read` takes it
  // once the copies have landed. No other lane touches the slots.
  __device__ __forceinline__ void stage(int32_t first, uint4* slot) const {
    constexpr int kParts = sizeof(Raw<T>) / 16;
    if (aligned && first + kGroup <= vocab_size) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        copy_async_16(shared_address(slot + i * kWarpSize),
                      reinterpret_cast<const uint4*>(logits + first) + i, true);
      }
      return;
    }
    const Raw<T> raw = load(first);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      slot[i * kWarpSize] = make_uint4(raw.word[4 * i], raw.word[4 * i + 1], raw.word[4 * i + 2],
                                       raw.word[4 * i + 3]);
    }
  }

  __device__ __forceinline__ static Raw<T> read(const uint4* slot) {
    Raw<T> raw;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Raw<T>) / 16); ++i) {
      const uint4 v = slot[i * kWarpSize];
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

  // Cleaned logits and the largest; true if one was NaN or +inf once scaled, and is now -inf.
  __device__ __forceinline__ bool clean(const Raw<T>& raw, float (&x)[kGroup],
                                        float* largest) const {
    expand(raw, x);
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kGroup; ++i) most = max_nan(most, x[i]);
    const bool bad = !(scaled(most) < INFINITY);
    if (bad) {
      most = kNegInf;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        x[i] = scaled(x[i]) < INFINITY ? x[i] : kNegInf;
        most = fmaxf(most, x[i]);
      }
    }
    *largest = most;
    return bad;
  }
};

// The noise of one draw.
struct Draw {
  NoiseKey key;
  int32_t position;
};

// At least gumbel(word), by 2e-3 at most where u is small: -ln(1 - u) >= u.
__device__ __forceinline__ float gumbel_bound(uint32_t word) {
  const float u = mul_rn(add_rn(static_cast<float>(word), 0.5f), 0x1p-32f);
  return fma_rn(log2_approx(u), -0.693147182f, 1e-3f);
}

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

  template <typename T>
  __device__ __forceinline__ void run_greedy(const Row<T>& row, const float (&x)[kGroup],
                                             float largest, int32_t first) {
    if (!(row.scaled(largest) > score)) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) offer(row.scaled(x[i]), x[i], first + i);
  }

  // e[i] = row.exp_of(logit, shift), `largest` the largest logit; `again(x)` gives the logits. What
  // few groups need (logits, words) is made again there, and costs no registers here. Called by
  // whole warps.
  template <typename T, typename Again>
  __device__ __forceinline__ void run(const Row<T>& row, const float (&e)[kGroup], float shift,
                                      float largest, int32_t first, const Draw& draw,
                                      Again&& again) {
    if (!__any_sync(kFullWarp, add_rn(row.scaled(largest), kMaxGumbelScore) >= reached)) return;
    // u <= exp(logit / T - reached) in steps of 2^-23, with slack for every rounding on the way.
    const float slack = fma_rn(fabsf(reached), 0x1p-19f, 23.01f);
    const float reach = exp2_approx(fminf(add_rn(fma_rn(reached, -kLog2E, shift), slack), 120.0f));
    bool hopeful = false;
#pragma unroll
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Philox4 r = quad_words(draw, first, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) hopeful |= may_win(r.word[i], e[4 * quad + i], reach);
    }
    if (!__any_sync(kFullWarp, hopeful)) return;
    float x[kGroup];
    again(x);
    compete(row, x, e, reach, first, draw);
  }

  // A lower bound of the best score among the first four ids of a group, without a log's full
  // price. u < 1/4: gumbel(word) >= -ln(u) + ln(1 - u) > bound - 0.3, and rounding is monotone, so
  // the score that a logit reaches with the lower variate is not above its true score.
  template <typename T>
  __device__ static float sure_score(const Row<T>& row, const float (&x)[kGroup], int32_t first,
                                     const Draw& draw) {
    const Philox4 r = quad_words(draw, first, 0);
    float sure = kNegInf;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float lower = add_rn(row.scaled(x[i]), add_rn(gumbel_bound(r.word[i]), -0.3f));
      if (r.word[i] < 1u << 30) sure = fmaxf(sure, lower);
    }
    return warp_max(sure);
  }

 private:
  static constexpr float kMaxGumbelScore = 22.9f;  // above gumbel(0), the largest there is

  __device__ static __forceinline__ Philox4 quad_words(const Draw& draw, int32_t first, int quad) {
    return noise_words(draw.key, draw.position, static_cast<uint32_t>(first) / 4 + quad);
  }

  // 2^23 + (word >> 9) as a float's bits, against 2^23 + 2 + e * reach; the 2 covers its rounding.
  __device__ static __forceinline__ bool may_win(uint32_t word, float e, float reach) {
    return as_float((word >> 9) + 0x4b000000u) <= fma_rn(e, reach, 0x1p23f + 2.0f);
  }

  // Exact scores of the ids that may win, one a lane at a time.
  template <typename T>
  __device__ __forceinline__ void compete(const Row<T>& row, const float (&x)[kGroup],
                                          const float (&e)[kGroup], float reach, int32_t first,
                                          const Draw& draw) {
    uint32_t word[kGroup];
    uint32_t left = 0;
#pragma unroll
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Philox4 r = quad_words(draw, first, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[4 * quad + i] = r.word[i];
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) left |= may_win(word[i], e[i], reach) ? 1u << i : 0u;
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
    reached = fmaxf(reached, warp_max(score));
  }
};

// What a row amounts to. `token` is -1 and the row dead where no logit is finite.
struct RowResult {
  float max, sum, logit;  // as in Partial
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

// Folds the warp's lanes: largest, sum, winner.
template <typename T>
__device__ __forceinline__ Partial fold(const Row<T>& row, float max, float sum, const Race& race,
                                        bool bad) {
  Partial out{};
  out.max = warp_max(max);
  out.sum =
      warp_reduce(mul_rn(sum, exp2_approx(add_rn(row.shift(max), -row.shift(out.max)))), Sum());
  const uint32_t order = ascending(race.score);
  const uint32_t highest = __reduce_max_sync(kFullWarp, order);
  const bool first = order == highest && race.token >= 0;
  const uint32_t id = first ? static_cast<uint32_t>(race.token) : 0xffffffffu;
  const uint32_t lowest = __reduce_min_sync(kFullWarp, id);
  const unsigned owner = __ballot_sync(kFullWarp, first && id == lowest);
  out.score = from_ascending(highest);
  out.logit = __shfl_sync(kFullWarp, race.logit, owner == 0 ? 0 : __ffs(owner) - 1);
  out.token = static_cast<int32_t>(lowest);  // -1 if nobody has one
  out.bad = __any_sync(kFullWarp, bad);
  return out;
}

constexpr int32_t kStep = kWarpSize * kGroup;  // ids that a warp takes at once
static_assert(kChunk % kStep == 0);

// Shared memory in which a warp's chunk lands, in 16-byte slots.
template <typename T>
constexpr int kStageSlots = static_cast<int>(kChunk * sizeof(T) / 16);

// Starts the copy of a whole chunk: what hides the latency of memory.
template <typename T>
__device__ __forceinline__ void stage_chunk(const RowData<T>& row, int32_t chunk, uint4* stage) {
  const int32_t lane = threadIdx.x % kWarpSize;
  constexpr int kSlots = kStageSlots<T> / (kChunk / kStep);
  const int32_t begin = chunk * static_cast<int32_t>(kChunk);
#pragma unroll
  for (int i = 0; i < static_cast<int>(kChunk / kStep); ++i) {
    const int32_t base = begin + i * kStep;
    if (base < row.vocab_size) row.stage(base + lane * kGroup, stage + i * kSlots + lane);
    if (i == 0) commit_copies();
  }
  commit_copies();
}

// One warp scores the chunk that it staged; without noise the winner is the largest logit.
// `share(score)` is told a score that this chunk reaches and returns one that the row reaches: it
// saves work and changes no result but who loses.
template <typename T, typename Share>
__device__ __forceinline__ Partial scan_chunk(const Row<T>& row, int32_t chunk, const uint4* stage,
                                              bool noisy, const Draw& draw, Share&& share) {
  constexpr int kSlots = kStageSlots<T> / (kChunk / kStep);
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t begin = chunk * static_cast<int32_t>(kChunk) + lane * kGroup;
  const int32_t end =
      min((chunk + 1) * static_cast<int32_t>(kChunk), row.vocab_size) + lane * kGroup;
  const uint4* slot = stage + lane;
  Race race;
  float max = -FLT_MAX, sum = 0.0f;
  bool bad = false;
  const auto work = [&](const Raw<T>& raw, int32_t first) {
    float x[kGroup], e[kGroup], largest;
    bad |= row.clean(raw, x, &largest);
    const float old = row.shift(max);
    max = fmaxf(max, largest);
    const float shift = row.shift(max);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) e[i] = row.exp_of(x[i], shift);
    const float low = add_rn(add_rn(e[0], e[1]), add_rn(e[2], e[3]));
    const float high = add_rn(add_rn(e[4], e[5]), add_rn(e[6], e[7]));
    sum = fma_rn(sum, exp2_approx(add_rn(old, -shift)), add_rn(low, high));
    if (noisy) {
      race.run(row, e, shift, largest, first, draw, [&](float (&same)[kGroup]) {
        float unused;
        row.clean(raw, same, &unused);
      });
    } else {
      race.run_greedy(row, x, largest, first);
    }
  };
  if (noisy) {
    wait_copies<1>();
    float x[kGroup], largest = kNegInf, sure = kNegInf;
    if (begin < end) {
      row.clean(row.read(slot), x, &largest);
      sure = Race::sure_score(row, x, begin, draw);
    }
    race.reached = share(sure);
  }
  wait_copies<0>();
#pragma unroll 1
  for (int32_t first = begin; first < end; first += kStep, slot += kSlots) {
    work(row.read(slot), first);
  }
  return fold(row, max, sum, race, bad);
}

// One warp folds the partials of a row.
template <typename T>
__device__ __forceinline__ RowResult merge_row(const Row<T>& row, const Partial* partials) {
  const int64_t num_chunks = chunks_of(row.vocab_size);
  float max = -FLT_MAX, sum = 0.0f;
  Race race;
  int32_t bad = 0;
  for (int64_t i = threadIdx.x % kWarpSize; i < num_chunks; i += kWarpSize) {
    const Partial p = partials[i];
    const float larger = fmaxf(max, p.max), shift = row.shift(larger);
    sum = add_rn(mul_rn(sum, exp2_approx(add_rn(row.shift(max), -shift))),
                 mul_rn(p.sum, exp2_approx(add_rn(row.shift(p.max), -shift))));
    max = larger;
    race.offer(p.score, p.logit, p.token);  // chunks come in rising order
    bad |= p.bad;
  }
  const Partial all = fold(row, max, sum, race, bad != 0);
  const bool dead = all.token < 0 || all.token >= row.vocab_size;
  return {all.max, all.sum, all.logit, dead ? -1 : all.token, all.bad || dead};
}

// Shared memory of scan_row: where the warps' chunks land, then the row's partials.
template <typename T>
int64_t scan_bytes(int64_t vocab_size) {
  return (kThreads / kWarpSize * kStageSlots<T> + chunks_of(vocab_size) * 2) * sizeof(uint4);
}
static_assert(kPartialBytes == 2 * sizeof(uint4));

// A block reads a whole row by itself.
template <typename T>
__device__ RowResult scan_row(const Row<T>& row, bool noisy, const Draw& draw, uint4* shared) {
  const int32_t num_chunks = static_cast<int32_t>(chunks_of(row.vocab_size));
  const int warp = threadIdx.x / kWarpSize;
  uint4* stage = shared + warp * kStageSlots<T>;
  Partial* partials = reinterpret_cast<Partial*>(shared + kThreads / kWarpSize * kStageSlots<T>);
  __syncthreads();  // a row read before may still be in use
  for (int32_t i = warp; i < num_chunks; i += kThreads / kWarpSize) {
    stage_chunk(row, i, stage);
    const Partial partial =
        scan_chunk(row, i, stage, noisy, draw, [](float score) { return score; });
    if (threadIdx.x % kWarpSize == 0) partials[i] = partial;
  }
  __syncthreads();
  return merge_row(row, partials);
}

}  // namespace tlt
