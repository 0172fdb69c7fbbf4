// The sum of exponentials of a row, for the log-softmax of its children: integers that CPU and GPU
// may add in any order, before the row's largest value is found.
//
//   x_i   input of the log-softmax; eight consecutive draft ids are a group g
//   R_g = 16 * round(max x_i / 16)
//   F_g = floor(2^30 * sum of exp(x_i - R_g)), the sum in float32: ((0 1) (2 3)) ((4 5) (6 7))
//   S_k = sum of F_g over the groups with R_g = R - 16 * k, where R = max R_g
//   sum = 2^-30 * e^R * (S_0 + e^-16 S_1 + e^-32 S_2)
//
// Groups with R_g < R - 32 are left out: their terms are at most e^-32 of the largest. Sums of 2.8
// million ids fit into 64 bits, since F_g is at most 2^30 * 8 e^8. A score has the rounding error
// of its x_i, up to 2^-24 |x_i|.
#pragma once

#include "common/math.h"

namespace tlt {

struct ExpSum {
  static constexpr int kParts = 3;
  float reference = -INFINITY;  // R of what was added; -inf: no term above 0
  int64_t part[kParts] = {};

  TLT_HD static float reference_of(float largest) {
    return mul_rn(rintf(mul_rn(largest, 0x1p-4f)), 16.0f);
  }

  // `mass`: the float32 sum of a group.
  TLT_HD static ExpSum of_group(float reference, float mass) {
    return {reference, {static_cast<int64_t>(mul_rn(mass, 0x1p30f))}};
  }

  // Takes a reference that is not lower. Groups more than 32 below it are dropped.
  TLT_HD void raise(float to) {
    const float by = add_rn(to, -reference);
    part[2] = by == 0.0f ? part[2] : by == 16.0f ? part[1] : by == 32.0f ? part[0] : 0;
    part[1] = by == 0.0f ? part[1] : by == 16.0f ? part[0] : 0;
    part[0] = by == 0.0f ? part[0] : 0;
    reference = to;
  }

  TLT_HD void add(ExpSum other) {
    const float highest = other.reference > reference ? other.reference : reference;
    raise(highest);
    other.raise(highest);
    for (int k = 0; k < kParts; ++k) part[k] += other.part[k];
  }

  // log(sum) - R
  TLT_HD float log() const {
    const float low = add_rn(mul_rn(static_cast<float>(part[1]), 1.12535175e-7f),
                             mul_rn(static_cast<float>(part[2]), 1.26641655e-14f));
    return log_f32(mul_rn(add_rn(static_cast<float>(part[0]), low), 0x1p-30f));
  }
};

}  // namespace tlt
