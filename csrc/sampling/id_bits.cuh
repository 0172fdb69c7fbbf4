// A set of the ids that a thread holds of a row.
#pragma once

#include "sampling/rounds.cuh"

namespace tlt {

// One bit for each of a thread's ids of a row that is kept in shared memory, a word a step; the
// last id has the lowest bit.
template <typename T>
struct IdBits {
  static constexpr int kWords = kDepth<T>;
  static_assert(kStepGroups * kGroup == 32);
  uint32_t word[kWords] = {};

  // Appends a step, whose first id has the highest bit.
  __device__ __forceinline__ void push(uint32_t step) {
#pragma unroll
    for (int i = kWords - 1; i > 0; --i) word[i] = word[i - 1];
    word[0] = step;
  }
  __device__ __forceinline__ int count() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) count += __popc(word[i]);
    return count;
  }
  __device__ __forceinline__ bool any() const {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) any |= word[i];
    return any != 0;
  }
  // The position of the first id whose bit is set; there must be one.
  __device__ __forceinline__ int first() const {
    uint32_t highest = word[0];
    int last = 31;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      if (word[i] == 0) continue;
      highest = word[i];
      last = 32 * i + 31;
    }
    return last - __clz(highest);
  }
  __device__ __forceinline__ void drop(int place) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] &= ~(place / 32 == i ? 1u << place % 32 : 0u);
  }
};

}  // namespace tlt
