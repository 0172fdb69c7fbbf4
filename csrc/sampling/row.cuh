// One row of logits on the GPU, in groups of kGroup ids, and the results of a scan of it. The
// formulas are those of row.h; tokens have the CPU's bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cfloat>

#include "common/mma.cuh"
#include "common/rows.cuh"
#include "sampling/params.h"

namespace tlt {

constexpr int kThreads = 512;  // with 128 registers each: a warp keeps many loads in flight
constexpr int kGroup = 8;  // consecutive ids that a lane takes together: 16 bytes of a 16-bit dtype
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kNegInf = -INFINITY;

// 2^x by the special function unit: 2 ulp, the same on every launch.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two, or NaN if one is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The raw bits of a group, or of fewer ids.
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

// The largest logit of a group; NaN if one is NaN.
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

// The address of a row of logits.
template <typename T>
struct RowData {
  const T* logits;
  int32_t vocab_size;
  bool aligned;

  __device__ RowData(const void* base, int64_t stride, int64_t index, int64_t vocab)
      : logits(static_cast<const T*>(base) + index * stride),
        vocab_size(static_cast<int32_t>(vocab)),
        aligned(reinterpret_cast<uintptr_t>(logits) % 16 == 0) {}

  // The bits of ids first .. first + kIds - 1; `first` is a multiple of kIds. Ids past the
  // vocabulary are not read and give -inf.
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

  // Starts copying a group to this thread's slots of shared memory; `read` takes it after the
  // copies have arrived.
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
      : RowData<T>(data),
        inv_temperature(inverse_temperature(temperature)),
        greedy(is_greedy(temperature)) {
    log2_scale = mul_rn(inv_temperature, kLog2E);
  }

  __device__ float scaled(float logit) const { return mul_rn(logit, inv_temperature); }

  // What sums of exponentials subtract; finite for any logit.
  __device__ float shift(float largest) const {
    return fmaxf(mul_rn(largest, log2_scale), -FLT_MAX);
  }

  // exp(logit / T) / 2^shift, for sums only: never for a score or a kept set.
  __device__ float exp_of(float logit, float shift) const {
    return exp2_approx(fma_rn(logit, log2_scale, -shift));
  }

  // Whether the largest of some logits (or NaN) shows that one of them is NaN, or +inf once scaled.
  __device__ bool is_bad(float largest) const { return !(scaled(largest) < INFINITY); }

  // Replaces logits that are NaN, or +inf once scaled, by -inf.
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

  // Cleaned logits and the largest of them; true if one was bad.
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

// The result of a scan. `token` is -1 where the row has no finite logit.
struct RowResult {
  float max;    // largest logit; -FLT_MAX if none is above it
  float sum;    // of exp_of(logit, shift(max))
  float logit;  // of the winner
  int32_t token, bad;

  __device__ bool has_no_finite() const { return token < 0; }

  // Natural log of exp(logit / T) over the sum of all.
  template <typename T>
  __device__ float logprob(const Row<T>& row, float of_logit) const {
    if (has_no_finite()) return kNegInf;
    const float power = fma_rn(of_logit, row.log2_scale, -row.shift(max));
    const float logprob = add_rn(mul_rn(power, 0.693147182f), -log_f32(fmaxf(sum, FLT_MIN)));
    // The shift is rounded, so the power of the largest logit is not exactly 0.
    return fminf(logprob, 0.0f);
  }
};

}  // namespace tlt
