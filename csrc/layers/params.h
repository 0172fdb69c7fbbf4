// Arguments of the layer kernels. Strides are in elements.
#pragma once

#include <cstdint>

#include "common/tensor.h"

namespace tlt {

struct RmsNormParams {
  const void* x;       // [rows, dim], dtype
  const void* weight;  // [dim], dtype
  void* out;           // [rows, dim], dtype; may be x itself; null where a linear follows
  int64_t rows, dim;
  int64_t x_stride, out_stride;  // of a row
  float eps;
  DType dtype;
};

struct SiluMulParams {
  const void* x;  // [rows, 2 * dim], dtype: gate | up
  void* out;      // [rows, dim], dtype; null where a linear follows
  int64_t rows, dim;
  int64_t x_stride, out_stride;  // of a row
  DType dtype;
};

struct LinearParams {
  const void* x;         // [rows, in_dim], dtype; null where a norm or an activation comes before
  const void* weight;    // [out_dim, in_dim], dtype
  const void* bias;      // [out_dim], dtype; may be null
  const void* residual;  // [rows, out_dim], out_dtype; may be null, may be out itself
  void* out;             // [rows, out_dim], out_dtype
  int64_t rows, in_dim, out_dim;
  int64_t x_stride, weight_stride, residual_stride, out_stride;  // of a row
  DType dtype, out_dtype;                                        // out_dtype: dtype or float32
  bool early;  // on a GPU the launch may begin, and read weights, while earlier kernels run
};

}  // namespace tlt
