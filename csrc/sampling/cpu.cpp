// CPU sampling: `sample` row by row, `verify_tree` only at the rows of the path.
#include "common/parallel.h"
#include "sampling/op.h"
#include "sampling/path.h"
#include "sampling/row.h"

namespace tlt {
namespace {

constexpr int64_t kWorkPerId = 10;  // about 10 operations to score an id

Step follow_sample(const Tree& tree, int64_t node, LogitsRow& row) {
  const int32_t token = row.sample(tree.key(NoiseDomain::kTarget), tree.next_position(node));
  for (int64_t child = node + 1; child < tree.num_rows; ++child) {
    if (tree.has_parent(child, node) && tree.token(child) == token) return {token, child};
  }
  return {token, -1};
}

}  // namespace

void sample_cpu(const SampleParams& p) {
  parallel_for(p.rows, kWorkPerId * p.vocab_size, [&](int64_t begin, int64_t end) {
    LogitsRow& row = thread_row();
    for (int64_t i = begin; i < end; ++i) {
      row.read(row_pointer(p.logits, p.dtype, p.logits_stride, i), p.dtype, p.vocab_size,
               setting_of(p.sampling, i));
      const NoiseKey key = noise_key(p.sampling.seed, p.sampling.request[i], NoiseDomain::kTarget);
      p.tokens[i] = row.sample(key, p.position[i]);
      p.logprobs[i] = row.logprob(p.tokens[i]);
      if (p.filtered_logprobs != nullptr) {
        p.filtered_logprobs[i] = row.filtered_logprob(p.tokens[i]);
      }
      p.status[i] |= row.status() | check_temperature(p.sampling, i);
    }
  });
}

void verify_tree_cpu(const VerifyParams& p) {
  parallel_for(p.num_requests, 2 * kWorkPerId * p.vocab_size, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      emit_path(p, b, [](const Tree& tree, int64_t node, LogitsRow& row, int32_t*) {
        return follow_sample(tree, node, row);
      });
    }
  });
}

}  // namespace tlt
