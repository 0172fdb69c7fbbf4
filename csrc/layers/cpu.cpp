// CPU layers. One row, one fixed order of additions: the bits of a row never depend on its
// neighbours.
#include <cmath>

#include "common/dtype.h"
#include "common/parallel.h"
#include "layers/op.h"

namespace tlt {
namespace {

constexpr int kLanes = 16;

// Sums value(i) over [0, n) in 16 interleaved lanes, then folds the lanes pairwise.
template <typename F>
float lane_sum(int64_t n, F&& value) {
  float lane[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) lane[i % kLanes] += value(i);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

template <typename T>
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    const float squares =
        lane_sum(p.dim, [&](int64_t i) { return to_float(x[i]) * to_float(x[i]); });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(p.dim) + p.eps);
    for (int64_t i = 0; i < p.dim; ++i) {
      // Rounding to the storage type before the weight is what the models were trained with.
      const float normed = to_float(from_float<T>(to_float(x[i]) * scale));
      out[i] = from_float<T>(normed * to_float(weight[i]));
    }
  }
}

}  // namespace

void rms_norm_cpu(const RmsNormParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.rows, 8 * p.dim,
                 [&](int64_t begin, int64_t end) { rms_norm_rows<T>(p, begin, end); });
  });
}

}  // namespace tlt
