// The fused multiply-add is written as the instruction, because compilers contract a vector
// `a * b + c` in one tile and not in another. On a machine without the instruction, __builtin_fmaf
// gives the same bits, slowly.
#include "layers/dot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#define TLT_INLINE inline __attribute__((always_inline))

namespace tlt {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kBlockK = 64;  // elements of k of one block of a part

template <int kWidth>
struct Vector {
  typedef float type __attribute__((vector_size(kWidth * sizeof(float))));
};

// The 16 lanes of one sum, in registers of kWidth floats.
template <int kWidth>
struct Lanes {
  static constexpr int kParts = kLanes / kWidth;
  typename Vector<kWidth>::type part[kParts];
};

template <int kWidth>
TLT_INLINE Lanes<kWidth> load(const float* p) {
  Lanes<kWidth> v;
  for (int i = 0; i < v.kParts; ++i) std::memcpy(&v.part[i], p + i * kWidth, sizeof v.part[i]);
  return v;
}

template <int kWidth>
TLT_INLINE Lanes<kWidth> load_tail(const float* p, int64_t count) {
  float padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load<kWidth>(padded);
}

template <int kWidth>
TLT_INLINE void fma_into(Lanes<kWidth>& sum, const Lanes<kWidth>& a, const Lanes<kWidth>& b) {
  for (int i = 0; i < sum.kParts; ++i) {
    if constexpr (kWidth == 1) {
      sum.part[i][0] = __builtin_fmaf(a.part[i][0], b.part[i][0], sum.part[i][0]);
    } else {
      asm("vfmadd231ps %2, %1, %0" : "+v"(sum.part[i]) : "v"(a.part[i]), "vm"(b.part[i]));
    }
  }
}

// Adds the halves of every group of kGroup lanes: of a into the lower half, of b into the upper.
template <int kGroup, typename V, int... kLane>
TLT_INLINE V fold_halves(const V& a, const V& b, std::integer_sequence<int, kLane...>) {
  constexpr int half = kGroup / 2, width = sizeof...(kLane);
  return __builtin_shufflevector(a, b, (kLane % kGroup < half ? kLane : width + kLane)...) +
         __builtin_shufflevector(a, b,
                                 (kLane % kGroup < half ? kLane + half : width + kLane - half)...);
}

constexpr int reversed(int value, int width) {
  int result = 0;
  for (int bit = 1; bit < width; bit *= 2) result = result * 2 + (value / bit & 1);
  return result;
}

template <typename V, int... kLane>
TLT_INLINE V reverse_bits(const V& v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, reversed(kLane, sizeof...(kLane))...);
}

// Folds kCount sums at once, two vectors into one in each step; sum i goes to out[i].
template <int kWidth, int kGroup, int kCount, typename V>
TLT_INLINE void fold_vectors(const V (&v)[kCount], float* out) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth>();
  if constexpr (kGroup == 1) {
    for (int i = 0; i < kCount; ++i) {
      const V ordered = reverse_bits(v[i], lanes);
      std::memcpy(out + i * kWidth, &ordered, sizeof ordered);
    }
  } else {
    constexpr int half_count = (kCount + 1) / 2;
    V next[half_count];
#pragma GCC unroll 8
    for (int i = 0; i < half_count; ++i) {
      next[i] = fold_halves<kGroup>(v[2 * i], v[std::min(2 * i + 1, kCount - 1)], lanes);
    }
    fold_vectors<kWidth, kGroup / 2>(next, out);
  }
}

template <int kWidth, int kCount>
TLT_INLINE void fold(const Lanes<kWidth>* sum, float* out) {
  typename Vector<kWidth>::type v[kCount];
#pragma GCC unroll 16
  for (int c = 0; c < kCount; ++c) {
    Lanes<kWidth> lanes = sum[c];
#pragma GCC unroll 4
    for (int parts = lanes.kParts / 2; parts > 0; parts /= 2) {
      for (int i = 0; i < parts; ++i) lanes.part[i] += lanes.part[i + parts];
    }
    v[c] = lanes.part[0];
  }
  fold_vectors<kWidth, kWidth>(v, out);
}

// The parts of kCount sums, added as a binary tree: one pending sum for each level.
template <int kCount>
struct Tree {
  float pending[4][kCount];

  TLT_INLINE void add(int part, float (&sums)[kCount]) {
    int level = 0;
    for (; part >> level & 1; ++level) {
      for (int i = 0; i < kCount; ++i) sums[i] = pending[level][i] + sums[i];
    }
    std::memcpy(pending[level], sums, sizeof sums);
  }

  // The total of the first `count` of `parts`. The others are 0, which makes a sum of -0 a +0.
  TLT_INLINE void total(int count, int parts, float (&sums)[kCount]) const {
    for (float& sum : sums) sum = count < parts ? 0.0f : -0.0f;
    for (int level = 0; level < 4; ++level) {
      if ((count >> level & 1) == 0) continue;
      for (int i = 0; i < kCount; ++i) sums[i] = pending[level][i] + sums[i];
    }
  }
};

// One register tile: kRows rows of x against kCols rows of w, over the whole depth.
template <int kWidth, int kRows, int kCols>
TLT_INLINE void tile(const DotBlock& b, int64_t row, int64_t col) {
  const float* x = b.x + row * b.x_stride;
  const float* w = b.w + col * b.w_stride;
  float* out = b.out + row * b.out_stride + col;
  Lanes<kWidth> sum[kRows * kCols];
  const auto step = [&](int64_t k, auto load_at) __attribute__((always_inline)) {
    Lanes<kWidth> x_lanes[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) x_lanes[i] = load_at(x + i * b.x_stride + k);
#pragma GCC unroll 4
    for (int j = 0; j < kCols; ++j) {
      const float* w_row = w + j * b.w_stride;
      // Prefetches the next tile's weights: the hardware prefetcher loses its stream between short
      // rows.
      if (row == 0) __builtin_prefetch(w_row + kCols * b.w_stride + k);
      const Lanes<kWidth> w_lanes = load_at(w_row + k);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) fma_into(sum[i * kCols + j], x_lanes[i], w_lanes);
    }
  };
  constexpr int kSums = std::max(kLanes, kRows * kCols);
  const int count = static_cast<int>(std::min<int64_t>(b.parts, (b.depth + kBlockK - 1) / kBlockK));
  float sums[kSums];
  Tree<kSums> tree;
  for (int part = 0; part < count; ++part) {
    for (Lanes<kWidth>& lanes : sum) lanes = {};
    for (int64_t block = part * kBlockK; block < b.depth; block += b.parts * kBlockK) {
      const int64_t end = std::min(block + kBlockK, b.depth);
      int64_t k = block;
      for (; k + kLanes <= end; k += kLanes) {
        step(k, [](const float* p) __attribute__((always_inline)) { return load<kWidth>(p); });
      }
      if (k < end) {
        step(k, [rest = end - k](const float* p)
                    __attribute__((always_inline)) { return load_tail<kWidth>(p, rest); });
      }
    }
    fold<kWidth, kRows * kCols>(sum, sums);
    tree.add(part, sums);
  }
  tree.total(count, b.parts, sums);
  for (int i = 0; i < kRows; ++i) {
    std::memcpy(out + i * b.out_stride, sums + i * kCols, kCols * sizeof(float));
  }
}

template <int kWidth, int kRows, int kCols>
TLT_INLINE void row_tile(const DotBlock& b, int64_t row) {
  int64_t col = 0;
  for (; col + kCols <= b.cols; col += kCols) tile<kWidth, kRows, kCols>(b, row, col);
  for (; col < b.cols; ++col) tile<kWidth, kRows, 1>(b, row, col);
}

// Tiles of kRows x kCols fill the machine's registers; leftover rows go one at a time.
template <int kWidth, int kRows, int kCols>
TLT_INLINE void run_block(const DotBlock& b) {
  int64_t row = 0;
  for (; row + kRows <= b.rows; row += kRows) row_tile<kWidth, kRows, kCols>(b, row);
  for (; row < b.rows; ++row) row_tile<kWidth, 1, 4>(b, row);
}

#if defined(__x86_64__)
__attribute__((target("arch=x86-64-v4"))) void run_v4(const DotBlock& b) { run_block<16, 4, 4>(b); }

__attribute__((target("arch=x86-64-v3"))) void run_v3(const DotBlock& b) { run_block<8, 2, 2>(b); }
#endif

void run_portable(const DotBlock& b) { run_block<1, 1, 4>(b); }

std::vector<DotVariant> find_variants() {
  std::vector<DotVariant> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd")) {
    found.push_back({"x86-64-v4", run_v4});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    found.push_back({"x86-64-v3", run_v3});
  }
#endif
  found.push_back({"portable", run_portable});
  return found;
}

}  // namespace

const std::vector<DotVariant>& dot_variants() {
  static const std::vector<DotVariant> variants = find_variants();
  return variants;
}

}  // namespace tlt
