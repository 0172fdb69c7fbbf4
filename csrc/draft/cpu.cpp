// CPU version of the drafter's inputs: gathers around rms_norm.
#include <cstring>

#include "common/parallel.h"
#include "draft/op.h"
#include "layers/op.h"

namespace tlt {
namespace {

// Writes one half of a row; zeros if `from` is null.
void norm_half(const DraftInputsParams& p, const char* from, const void* weight, char* to) {
  if (from == nullptr) {
    std::memset(to, 0, static_cast<size_t>(p.dim * bytes_of(p.dtype)));
    return;
  }
  rms_norm_cpu({from, weight, to, 1, p.dim, p.dim, p.dim, p.eps, p.dtype});
}

void assemble_row(const DraftInputsParams& p, int64_t r) {
  const int64_t bytes = bytes_of(p.dtype), token = embedding_row(p, r), source = hidden_row(p, r);
  const auto at = [&](const void* base, int64_t index, int64_t stride) {
    return index < 0 ? nullptr : static_cast<const char*>(base) + index * stride * bytes;
  };
  const char* hidden = at(p.hidden, source, p.hidden_stride);
  char* out = static_cast<char*>(p.out) + r * p.out_stride * bytes;
  norm_half(p, at(p.embedding, token, p.embedding_stride), p.input_norm, out);
  norm_half(p, hidden, p.hidden_norm, out + p.dim * bytes);
  if (p.ids != nullptr) return;
  char* copy = static_cast<char*>(p.hidden_out) + r * p.hidden_out_stride * bytes;
  if (hidden == nullptr) {
    std::memset(copy, 0, static_cast<size_t>(p.dim * bytes));
  } else {
    std::memcpy(copy, hidden, static_cast<size_t>(p.dim * bytes));
  }
  p.position[r] = p.root_position[r / p.width] + p.depth;
}

}  // namespace

void draft_inputs_cpu(const DraftInputsParams& p) {
  parallel_for(p.rows, 4 * p.dim, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) assemble_row(p, r);
  });
}

}  // namespace tlt
