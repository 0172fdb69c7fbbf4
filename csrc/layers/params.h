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

}  // namespace tlt
