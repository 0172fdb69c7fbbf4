// CPU layers. Each row has one fixed order of additions: its bits never depend on the other rows,
// on their number, or on how the work was cut for threads.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "common/math.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "kv/op.h"
#include "layers/dot.h"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int64_t kRowChunk = 64;     // rows of x that share one pass over the weights
constexpr int64_t kColumnBlock = 16;  // weight rows that stay in the L2 cache during such a pass

// Scratch memory of the calling thread, one buffer for each Purpose; lives as long as the thread.
template <typename Purpose>
float* scratch(int64_t count) {
  thread_local std::vector<float> buffer;
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// Rounds to the storage type T and returns the value as Out: T, or float as input of a linear.
template <typename T, typename Out>
inline __attribute__((always_inline)) Out rounded(float value) {
  if constexpr (std::is_same_v<T, Out>) {
    return from_float<T>(value);
  } else {
    return to_float(from_float<T>(value));
  }
}

template <typename T>
TLT_SIMD void widen(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(x[i]);
}

// ---- rms_norm -----------------------------------------------------------------------------------

template <typename T, typename Out>
TLT_SIMD void scale_row(const T* x, const T* weight, int64_t dim, float scale, Out* out) {
#pragma GCC ivdep  // out may be x itself
  for (int64_t i = 0; i < dim; ++i) {
    // Rounds to the storage type before the weight is applied, as in the models' training.
    const float normed = to_float(from_float<T>(to_float(x[i]) * scale));
    out[i] = rounded<T, Out>(normed * to_float(weight[i]));
  }
}

template <typename T, typename Out>
void rms_norm_row(const T* x, const T* weight, int64_t dim, float eps, Out* out) {
  const float* wide;
  if constexpr (std::is_same_v<T, float>) {
    wide = x;
  } else {
    float* buffer = scratch<struct NormRow>(dim);
    widen(x, dim, buffer);
    wide = buffer;
  }
  float squares;
  dot_rows({wide, 0, 1, wide, 0, 1, dim, 1, &squares, 1});
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
  scale_row(x, weight, dim, scale, out);
}

// ---- silu_mul -----------------------------------------------------------------------------------

// gate * sigmoid(gate). The argument of exp is 0 or less, so it neither overflows nor loses the
// small results of large negative gates.
inline __attribute__((always_inline)) float silu(float gate) {
  const float e = exp_f32(-std::fabs(gate));
  return gate * ((gate < 0.0f ? e : 1.0f) / (1.0f + e));
}

template <typename T>
TLT_SIMD void silu_mul_row(const T* x, int64_t dim, T* out) {
#pragma GCC ivdep  // out may be the gate itself
  for (int64_t i = 0; i < dim; ++i) {
    const float gated = to_float(from_float<T>(silu(to_float(x[i]))));
    out[i] = from_float<T>(gated * to_float(x[dim + i]));
  }
}

// ---- linear -------------------------------------------------------------------------------------

template <typename T>
const T* at(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

// out = sums (+ bias) (+ residual), rounded once.
template <typename T, typename Out>
void store_block(const LinearParams& p, int64_t row_begin, int64_t rows, int64_t col_begin,
                 int64_t cols, const float* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = row_begin + r;
    Out* out = static_cast<Out*>(p.out) + row * p.out_stride + col_begin;
    const T* bias = p.bias ? at<T>(p.bias, col_begin) : nullptr;
    const Out* residual =
        p.residual ? at<Out>(p.residual, row * p.residual_stride + col_begin) : nullptr;
    for (int64_t c = 0; c < cols; ++c) {
      float value = sums[r * kColumnBlock + c];
      if (bias) value += to_float(bias[c]);
      if (residual) value += to_float(residual[c]);
      out[c] = from_float<Out>(value);
    }
  }
}

// `count` weight rows as float32: the array itself, or a widened copy in scratch memory.
template <typename T>
const float* float_weight(const LinearParams& p, int64_t col, int64_t count, int64_t* stride) {
  const T* weight = at<T>(p.weight, col * p.weight_stride);
  *stride = p.weight_stride;
  if constexpr (std::is_same_v<T, float>) {
    return weight;
  } else {
    float* wide = scratch<struct WeightBlock>(kColumnBlock * p.in_dim);
    *stride = p.in_dim;
    for (int64_t c = 0; c < count; ++c) {
      widen(weight + c * p.weight_stride, p.in_dim, wide + c * p.in_dim);
    }
    return wide;
  }
}

// Multiplies one chunk of float32 rows by all weight rows. Threads divide the weight rows, so each
// is read from memory once.
template <typename T>
void linear_chunk(const LinearParams& p, const float* x, int64_t x_stride, int64_t row,
                  int64_t rows) {
  const int64_t blocks = (p.out_dim + kColumnBlock - 1) / kColumnBlock;
  const int64_t work = kColumnBlock * p.in_dim * (1 + rows / 16);
  parallel_for(blocks, work, [&](int64_t begin, int64_t end) {
    float sums[kRowChunk * kColumnBlock];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t col = block * kColumnBlock;
      const int64_t cols = std::min(kColumnBlock, p.out_dim - col);
      int64_t w_stride;
      const float* w = float_weight<T>(p, col, cols, &w_stride);
      dot_rows({x, x_stride, rows, w, w_stride, cols, p.in_dim, p.parts, sums, kColumnBlock});
      if (p.out_dtype == DType::kFloat32) {
        store_block<T, float>(p, row, rows, col, cols, sums);
      } else {
        store_block<T, T>(p, row, rows, col, cols, sums);
      }
    }
  });
}

// fill(row, out) writes one float32 row of the linear's input.
template <typename T, typename Fill>
void linear_filled(const LinearParams& p, Fill&& fill) {
  float* x = scratch<struct RowChunk>(std::min(kRowChunk, p.rows) * p.in_dim);
  for (int64_t row = 0; row < p.rows; row += kRowChunk) {
    const int64_t rows = std::min(kRowChunk, p.rows - row);
    parallel_for(rows, 2 * p.in_dim, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) fill(row + r, x + r * p.in_dim);
    });
    linear_chunk<T>(p, x, p.in_dim, row, rows);
  }
}

}  // namespace

void rms_norm_cpu(const RmsNormParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.rows, 2 * p.dim, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        rms_norm_row(at<T>(p.x, row * p.x_stride), at<T>(p.weight, 0), p.dim, p.eps,
                     static_cast<T*>(p.out) + row * p.out_stride);
      }
    });
  });
}

void silu_mul_cpu(const SiluMulParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.rows, 4 * p.dim, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        silu_mul_row(at<T>(p.x, row * p.x_stride), p.dim,
                     static_cast<T*>(p.out) + row * p.out_stride);
      }
    });
  });
}

void linear_rows_cpu(const LinearParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (p.norm_weight) {
      linear_filled<T>(p, [&](int64_t row, float* out) {
        rms_norm_row(at<T>(p.x, row * p.x_stride), at<T>(p.norm_weight, 0), p.in_dim, p.eps, out);
      });
    } else if constexpr (std::is_same_v<T, float>) {
      for (int64_t row = 0; row < p.rows; row += kRowChunk) {
        linear_chunk<T>(p, at<float>(p.x, row * p.x_stride), p.x_stride, row,
                        std::min(kRowChunk, p.rows - row));
      }
    } else {
      linear_filled<T>(
          p, [&](int64_t row, float* out) { widen(at<T>(p.x, row * p.x_stride), p.in_dim, out); });
    }
  });
}

void fold_partials_cpu(const FoldParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.rows, p.ranks * p.dim, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t col = 0; col < p.dim; ++col) {
          float sum[kMaxRanks];
          for (int r = 0; r < p.ranks; ++r) {
            sum[r] = p.partial[r][row * p.partial_stride[r] + col];
          }
          for (int apart = 1; apart < p.ranks; apart *= 2) {
            for (int r = 0; r < p.ranks; r += 2 * apart) sum[r] += sum[r + apart];
          }
          float value = sum[0];
          if (p.bias) {
            dispatch_floating(p.bias_dtype, [&](auto* bias) {
              value += to_float(at<std::remove_pointer_t<decltype(bias)>>(p.bias, col)[0]);
            });
          }
          if (p.residual) value += to_float(at<T>(p.residual, row * p.residual_stride + col)[0]);
          static_cast<T*>(p.out)[row * p.out_stride + col] = from_float<T>(value);
        }
      }
    });
  });
}

// Gate and up, or q, k and v, are in scratch memory between the two ops.
void linear_silu_mul_cpu(const LinearParams& p) {
  LinearParams to_scratch = p;
  to_scratch.out = scratch<struct GateUpRows>(p.rows * p.out_dim);
  to_scratch.out_stride = p.out_dim;
  linear_rows_cpu(to_scratch);
  silu_mul_cpu({to_scratch.out, p.out, p.rows, p.out_dim / 2, p.out_dim, p.out_stride, p.dtype});
}

void linear_append_cpu(const LinearParams& p, const AppendKvParams& append) {
  LinearParams to_scratch = p;
  AppendKvParams from_scratch = append;
  from_scratch.qkv = to_scratch.out = scratch<struct QkvRows>(p.rows * p.out_dim);
  from_scratch.qkv_stride = to_scratch.out_stride = p.out_dim;
  linear_rows_cpu(to_scratch);
  append_kv_cpu(from_scratch);
}

}  // namespace tlt
