// The verification path through a draft tree, which verify_tree and verify_rejection share (CPU).
#pragma once

#include <algorithm>
#include <cmath>

#include "common/noise.h"
#include "common/status.h"
#include "sampling/params.h"
#include "sampling/row.h"

namespace tlt {

inline const void* row_pointer(const void* base, DType dtype, int64_t stride, int64_t row) {
  return static_cast<const char*>(base) + row * stride * bytes_of(dtype);
}

inline RowSetting setting_of(const SamplingArrays& s, int64_t i) {
  return {s.temperature[i], s.top_k[i], s.top_p[i]};
}

// A NaN temperature samples greedily and is reported.
inline int32_t check_temperature(const SamplingArrays& s, int64_t i) {
  return std::isnan(s.temperature[i]) ? kStatusNanLogits : kStatusOk;
}

// The rows of one request.
struct Tree {
  const VerifyParams& p;
  int64_t request;          // index in the batch
  int64_t first, num_rows;  // rows first .. first + num_rows - 1 of the packed arrays

  int32_t token(int64_t node) const { return p.tree.tokens[first + node]; }
  bool has_parent(int64_t node, int64_t parent) const {
    return p.tree.parents[first + node] == parent;
  }
  bool in_vocabulary(int64_t node) const { return token(node) >= 0 && token(node) < p.vocab_size; }
  int32_t next_position(int64_t node) const { return p.position[first + node] + 1; }
  NoiseKey key(NoiseDomain domain) const {
    return noise_key(p.sampling.seed, p.sampling.request[request], domain);
  }
};

struct Step {
  int32_t token;  // the target's token at this node
  int64_t child;  // the child with that token, -1 if it was not drafted
};

// Malformed links and ids are reported and never followed: a parent counts only if it precedes its
// child, so every path ends.
inline int32_t check_tree(const Tree& tree) {
  int32_t status = kStatusOk;
  if (tree.num_rows > 0 && !tree.has_parent(0, -1)) status |= kStatusBadTree;
  for (int64_t node = 1; node < tree.num_rows; ++node) {
    const int32_t parent = tree.p.tree.parents[tree.first + node];
    if (parent < 0 || parent >= node) status |= kStatusBadTree;
    if (!tree.in_vocabulary(node)) status |= kStatusBadToken;
  }
  return status;
}

// Emits tokens along the path that step(tree, node, row, &status) gives, up to a stop id, the limit
// or the width of the outputs.
template <typename F>
void emit_path(const VerifyParams& p, int64_t b, F&& step) {
  p.out.num_emitted[b] = 0;
  p.out.finish[b] = kRunning;
  const int64_t first = p.row_start[b], end = p.row_start[b + 1];
  if (first == end) return;
  if (first < 0 || end < first || end > p.num_rows || end - first > kMaxTreeRows) {
    p.status[b] |= kStatusBadLength;
    return;
  }
  const Tree tree{p, b, first, end - first};
  const int32_t* stop = p.stop_ids + b * p.stop_stride;
  const int32_t limit = std::max(p.limit[b], 0);
  const int64_t most = std::min<int64_t>(limit, p.out.max_emitted);
  int32_t status = check_tree(tree) | check_temperature(p.sampling, b);
  LogitsRow& row = thread_row();
  int64_t count = 0;
  for (int64_t node = 0; node >= 0 && count < most; ++count) {
    row.read(row_pointer(p.logits, p.dtype, p.logits_stride, first + node), p.dtype, p.vocab_size,
             setting_of(p.sampling, b));
    status |= row.status();
    const Step next = step(tree, node, row, &status);
    p.out.emitted[b * p.out.emitted_stride + count] = next.token;
    p.out.logprobs[b * p.out.logprobs_stride + count] = row.logprob(next.token);
    if (p.out.filtered_logprobs != nullptr) {
      p.out.filtered_logprobs[b * p.out.filtered_stride + count] = row.filtered_logprob(next.token);
    }
    p.out.path[b * p.out.path_stride + count] = static_cast<int32_t>(node);
    if (std::find(stop, stop + p.num_stop_ids, next.token) != stop + p.num_stop_ids) {
      p.out.finish[b] = kStopId;
      ++count;
      break;
    }
    node = next.child;
  }
  if (p.out.finish[b] == kRunning && count == limit) p.out.finish[b] = kLimit;
  p.out.num_emitted[b] = static_cast<int32_t>(count);
  p.status[b] |= status;
}

}  // namespace tlt
