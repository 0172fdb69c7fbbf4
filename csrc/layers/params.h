// Arguments of the layer kernels. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace tlt {

struct RmsNormParams {
  const void* x;       // [rows, dim], dtype
  const void* weight;  // [dim], dtype
  void* out;           // [rows, dim], dtype; may be x itself
  int64_t rows, dim;
  int64_t x_stride, out_stride;  // of a row
  float eps;
  DType dtype;
};

struct SiluMulParams {
  const void* x;  // [rows, 2 * dim], dtype: gate | up
  void* out;      // [rows, dim], dtype
  int64_t rows, dim;
  int64_t x_stride, out_stride;  // of a row
  DType dtype;
};

struct LinearParams {
  const void* x;            // [rows, in_dim], dtype
  const void* norm_weight;  // [in_dim], dtype; null: no norm
  const void* weight;       // [out_dim, in_dim], dtype; silu_mul: out_dim / 2 of gate, then of up
  const void* bias;         // [out_dim], dtype; may be null; silu_mul: null
  const void* residual;     // [rows, out_dim], out_dtype; may be null or out; silu_mul: null
  void* out;                // [rows, out_dim], out_dtype; silu_mul: [rows, out_dim / 2]
  int64_t rows, in_dim, out_dim;
  int64_t x_stride, weight_stride, residual_stride, out_stride;  // of a row
  float eps;                                                     // of the norm
  int parts;                                                     // of in_dim: 8, or a rank's share
  DType dtype, out_dtype;                                        // out_dtype: dtype or float32
  bool pdl;         // programmatic dependent launch: weights are read before prior kernels end
  bool pdl_tables;  // so are the fields of `sequences`, positions and cos_sin of appended rows
};

constexpr int kMaxRanks = 8;
constexpr int kMaxFoldBlocks = 512;  // of a launch of fold_partials that waits for other ranks

struct FoldParams {
  const float* partial[kMaxRanks];    // of each rank: [rows, dim]
  int64_t partial_stride[kMaxRanks];  // of a row
  int ranks;                          // 1, 2, 4 or 8
  // Flags of each rank, [kMaxFoldBlocks, ranks], zero at first; null: no rank is waited for.
  uint32_t* flags[kMaxRanks];
  int rank;              // this one
  int64_t timeout_ns;    // of a wait for another rank
  const void* bias;      // [dim], bias_dtype; may be null
  const void* residual;  // [rows, dim], dtype; may be null, may be out itself
  void* out;             // [rows, dim], dtype
  int64_t rows, dim;
  int64_t residual_stride, out_stride;  // of a row
  DType dtype, bias_dtype;
};

}  // namespace tlt
