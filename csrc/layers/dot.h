// The inner product of the CPU layers: out[m, n] = dot(x[m], w[n]) in float32.
//
// Every dot is summed the same way. K is cut into blocks of 64; part w sums the blocks w, w +
// parts, w + 2 parts, ... Within a part element k goes to lane k % 16 by a fused multiply-add, in
// rising k, the tail padded with zeros, and the 16 lanes are folded pairwise (i + 8, i + 4, i + 2,
// i + 1). The parts are added as a binary tree. So the bits of an output depend only on its two
// rows: not on the register tile that computed it, on the number of rows, or on the machine's
// vector width.
#pragma once

#include <cstdint>
#include <vector>

namespace tlt {

struct DotBlock {
  const float* x;  // [rows, depth]
  int64_t x_stride, rows;
  const float* w;  // [cols, depth]
  int64_t w_stride, cols;
  int64_t depth;
  int parts;   // 1, 2, 4 or 8
  float* out;  // [rows, cols]
  int64_t out_stride;
};

struct DotVariant {
  const char* name;
  void (*run)(const DotBlock&);
};

// The variants that this machine can run, best first.
const std::vector<DotVariant>& dot_variants();

inline void dot_rows(const DotBlock& block) { dot_variants().front().run(block); }

}  // namespace tlt
