// One row of logits on the GPU: reading it in groups of kGroup ids, and the race for the best keyed
// score. The formulas are those of row.h; tokens are the CPU's bit for bit.
//
// A warp owns a *chunk* of kChunk neighbouring ids, a cut that depends on the vocabulary alone. Of
// a chunk it keeps a Partial: the largest scaled logit, the sum of exp(scaled - largest), and the
// winner. The log-sum-exp has one order for a given vocabulary: lane by lane within a chunk, then a
// butterfly over lanes, then chunks strided over lanes, then a butterfly. So a row's log-prob has
// the same bits in every op, batch and launch; it is within float32 rounding of the CPU's exact
// sum.
//
// Noise costs more than the read. Philox runs once for four ids. A Gumbel variate is at most
// -ln(u) of its word, so a group whose largest logit plus the bound of its smallest word stays
// below a score already seen cannot win and takes no log; nor does it take Philox where even the
// largest variate would not do.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "common/noise.h"
#include "common/team.cuh"
#include "sampling/params.h"

namespace tlt {

constexpr int kThreads = 256;
constexpr int kGroup = 8;  // neighbouring ids a lane takes at once: 16 bytes of a 16-bit dtype
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kNegInf = -INFINITY;

struct alignas(16) Partial {
  float max;     // of scaled logits; -FLT_MAX if none is above it
  float sum;     // of exp(scaled - max)
  float score;   // of the winner; -inf if no logit is finite
  float scaled;  // the winner's logit / T
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

// exp(x), x <= 0, for sums only: never for a score or a kept set.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(mul_rn(x, kLog2E)); }

// The larger, or NaN if either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// Calls f with a null pointer of the device's storage type.
template <typename F>
void dispatch_storage(const char* op, DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<__half*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<__nv_bfloat16*>(nullptr));
    default:
      throw DTypeError(std::string(op) + ": no kernel for " + name_of(dtype));
  }
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

template <typename T>
struct Row {
  const T* logits;
  int32_t vocab_size;
  float inv_temperature;
  bool greedy, aligned;

  __device__ Row(const void* base, int64_t stride, int64_t index, int64_t vocab, float temperature)
      : logits(static_cast<const T*>(base) + index * stride),
        vocab_size(static_cast<int32_t>(vocab)),
        greedy(!(temperature >= kMinTemperature)),
        aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
    inv_temperature = greedy ? 1.0f : __fdiv_rn(1.0f, temperature);
  }

  __device__ float scaled(float logit) const { return mul_rn(logit, inv_temperature); }

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

  // Cleaned logits and their scaled values; true if one was NaN or +inf, and is now -inf.
  __device__ __forceinline__ bool clean(const Raw<T>& raw, float (&x)[kGroup], float (&s)[kGroup],
                                        float* largest) const {
    expand(raw, x);
    float most = kNegInf;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      s[i] = scaled(x[i]);
      most = max_nan(most, s[i]);
    }
    const bool bad = !(most < INFINITY);
    if (bad) {
      most = kNegInf;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const bool good = s[i] < INFINITY;
        x[i] = good ? x[i] : kNegInf;
        s[i] = good ? s[i] : kNegInf;
        most = fmaxf(most, s[i]);
      }
    }
    *largest = most;
    return bad;
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

// A lane's best candidate so far, and a score that the warp is known to reach.
struct Race {
  float score = kNegInf, scaled = kNegInf;
  int32_t token = -1;
  float reached = kNegInf;

  // Ids come in rising order, so only a higher score replaces.
  __device__ __forceinline__ void offer(float new_score, float new_scaled, int32_t id) {
    if (new_score > score) {
      score = new_score;
      scaled = new_scaled;
      token = id;
    }
  }

  // `largest` is the largest of s. Called by whole warps.
  __device__ __forceinline__ void run_greedy(const float (&s)[kGroup], float largest,
                                             int32_t first) {
    if (!(largest > score)) return;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) offer(s[i], s[i], first + i);
  }

  __device__ __forceinline__ void run(const float (&s)[kGroup], float largest, int32_t first,
                                      const Draw& draw) {
    if (!__any_sync(kFullWarp, add_rn(largest, kMaxGumbelScore) >= reached)) return;
    uint32_t word[kGroup];
    uint32_t smallest = 0xffffffffu;
#pragma unroll
    for (int quad = 0; quad < kGroup / 4; ++quad) {
      const Philox4 r =
          noise_words(draw.key, draw.position, static_cast<uint32_t>(first) / 4 + quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[4 * quad + i] = r.word[i];
        smallest = min(smallest, r.word[i]);
      }
    }
    const bool hopeful = add_rn(largest, gumbel_bound(smallest)) >= reached;
    if (__any_sync(kFullWarp, hopeful)) compete(s, word, first);
  }

 private:
  static constexpr float kMaxGumbelScore = 22.9f;  // above gumbel(0), the largest there is

  __device__ __forceinline__ void compete(const float (&s)[kGroup], const uint32_t (&word)[kGroup],
                                          int32_t first) {
    float bound[kGroup];
    float sure = kNegInf;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      bound[i] = gumbel_bound(word[i]);
      // u < 1/4: gumbel(word) >= -ln(u) + ln(1 - u) > bound - 0.3. Rounding is monotone, so the
      // score that this logit reaches with the lower variate is not above its true score.
      if (word[i] < 1u << 30) sure = fmaxf(sure, add_rn(s[i], add_rn(bound[i], -0.3f)));
    }
    reached = fmaxf(reached, warp_max(sure));
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (add_rn(s[i], bound[i]) >= reached) offer(add_rn(s[i], gumbel(word[i])), s[i], first + i);
    }
    reached = fmaxf(reached, warp_max(score));
  }
};

// What a row amounts to. `token` is -1 and the row dead where no logit is finite.
struct RowResult {
  float max, sum, scaled;
  int32_t token, bad;

  __device__ bool dead() const { return token < 0; }
  __device__ float logprob(float scaled_token, float total) const {
    return dead() ? kNegInf : add_rn(add_rn(scaled_token, -max), -log_f32(total));
  }
};

// Folds the warp's lanes: largest, sum, winner.
__device__ __forceinline__ Partial fold(float max, float sum, float score, float scaled,
                                        int32_t token, bool bad) {
  Partial out{};
  out.max = warp_max(max);
  out.sum = warp_reduce(mul_rn(sum, exp_approx(add_rn(max, -out.max))), Sum());
  out.score = warp_max(score);
  const bool first = ascending(score) == ascending(out.score) && token >= 0;
  const uint32_t id = first ? static_cast<uint32_t>(token) : 0xffffffffu;
  const uint32_t lowest = __reduce_min_sync(kFullWarp, id);
  const unsigned owner = __ballot_sync(kFullWarp, first && id == lowest);
  out.scaled = __shfl_sync(kFullWarp, scaled, owner == 0 ? 0 : __ffs(owner) - 1);
  out.token = static_cast<int32_t>(lowest);  // -1 if nobody has one
  out.bad = __any_sync(kFullWarp, bad);
  return out;
}

// One warp reads one chunk. Without noise the winner is the largest logit.
template <typename T>
__device__ Partial scan_chunk(const Row<T>& row, int32_t chunk, bool noisy, const Draw& draw) {
  constexpr int32_t kStep = kWarpSize * kGroup;
  static_assert(kChunk % kStep == 0);
  const int32_t begin = chunk * static_cast<int32_t>(kChunk);
  const int32_t end = min(begin + static_cast<int32_t>(kChunk), row.vocab_size);
  const int32_t lane_first = threadIdx.x % kWarpSize * kGroup;
  Race race;
  float max = -FLT_MAX, sum = 0.0f;
  bool bad = false;
  Raw<T> next = row.load(begin + lane_first);
#pragma unroll 1
  for (int32_t base = begin; base < end; base += kStep) {
    const Raw<T> raw = next;  // one group is on its way while another is worked on
    if (base + kStep < end) next = row.load(base + kStep + lane_first);
    const int32_t first = base + lane_first;
    float x[kGroup], s[kGroup], largest;
    bad |= row.clean(raw, x, s, &largest);
    const float old = max;
    max = fmaxf(max, largest);
    float part[kGroup];
#pragma unroll
    for (int j = 0; j < kGroup; ++j) part[j] = exp_approx(add_rn(s[j], -max));
#pragma unroll
    for (int width = kGroup / 2; width > 0; width /= 2) {
#pragma unroll
      for (int j = 0; j < width; ++j) part[j] = add_rn(part[j], part[j + width]);
    }
    sum = fma_rn(sum, exp_approx(add_rn(old, -max)), part[0]);
    noisy ? race.run(s, largest, first, draw) : race.run_greedy(s, largest, first);
  }
  return fold(max, sum, race.score, race.scaled, race.token, bad);
}

// One warp folds the partials of a row.
__device__ __forceinline__ RowResult merge_row(const Partial* partials, int64_t num_chunks) {
  Partial mine{-FLT_MAX, 0.0f, kNegInf, kNegInf, -1, 0, {}};
  for (int64_t i = threadIdx.x % kWarpSize; i < num_chunks; i += kWarpSize) {
    const Partial p = partials[i];
    const float max = fmaxf(mine.max, p.max);
    mine.sum = add_rn(mul_rn(mine.sum, exp_approx(add_rn(mine.max, -max))),
                      mul_rn(p.sum, exp_approx(add_rn(p.max, -max))));
    mine.max = max;
    if (p.score > mine.score) {  // chunks come in rising order: a tie keeps the lower id
      mine.score = p.score;
      mine.scaled = p.scaled;
      mine.token = p.token;
    }
    mine.bad |= p.bad;
  }
  const Partial all = fold(mine.max, mine.sum, mine.score, mine.scaled, mine.token, mine.bad);
  return {all.max, all.sum, all.scaled, all.token, all.bad || all.token < 0};
}

// A block reads a whole row by itself; `partials` is shared memory of chunks_of(vocab_size).
template <typename T>
__device__ RowResult scan_row(const Row<T>& row, bool noisy, const Draw& draw, Partial* partials) {
  const int64_t num_chunks = chunks_of(row.vocab_size);
  __syncthreads();  // a row read before may still be in use
  for (int64_t i = threadIdx.x / kWarpSize; i < num_chunks; i += kThreads / kWarpSize) {
    const Partial partial = scan_chunk(row, static_cast<int32_t>(i), noisy, draw);
    if (threadIdx.x % kWarpSize == 0) partials[i] = partial;
  }
  __syncthreads();
  return merge_row(partials, num_chunks);
}

}  // namespace tlt
