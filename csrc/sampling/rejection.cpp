// Classical rejection sampling over a draft tree (CPU): multi-round over siblings.
//
// At a node with target distribution r and draft distribution q, child x is accepted if u * q(x) <
// r(x). Otherwise r <- max(r - q, 0) and q <- q without x, both normalised, and the next sibling is
// tried. If no sibling is left, the token is drawn from r. A one-hot proposal (deterministic
// drafts) has q(x) = 1, so its rejection removes x from r. Sums are integers as in row.h: no result
// depends on an order.
#include <algorithm>
#include <cfloat>
#include <vector>

#include "common/parallel.h"
#include "common/simd.h"
#include "sampling/op.h"
#include "sampling/path.h"
#include "sampling/row.h"

namespace tlt {
namespace {

constexpr float kMaxProb = 1.001f;  // rounding may make a probability slightly larger than 1

// True if every entry is a probability; NaN is not one.
TLT_SIMD bool is_distribution(const float* q, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= !(q[i] >= 0.0f) | !(q[i] <= kMaxProb);
  return bad == 0;
}

TLT_SIMD int64_t mass_of_probs(const float* x, int64_t n) {
  int64_t mass = 0;
  for (int64_t i = 0; i < n; ++i) mass += static_cast<int64_t>(mul_rn(x[i], kWeightScale));
  return mass;
}

TLT_SIMD void scale_by(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] = mul_rn(x[i], factor);
}

// Divides by the largest entry first, so that the weights of a small remainder keep their
// resolution. False if nothing is left.
bool normalise(std::vector<float>& x) {
  const float largest = *std::max_element(x.begin(), x.end());
  if (!(largest >= FLT_MIN)) return false;
  const int64_t n = static_cast<int64_t>(x.size());
  for (float& value : x) value /= largest;
  scale_by(x.data(), n, kWeightScale / static_cast<float>(mass_of_probs(x.data(), n)));
  return true;
}

// The distributions of one thread, reused from node to node.
struct Distributions {
  std::vector<float> target, draft, residual;
};

// target <- normalised max(target - draft, 0); unchanged where rounding leaves nothing.
void take_residual(Distributions& distributions) {
  distributions.residual.resize(distributions.target.size());
  for (size_t i = 0; i < distributions.target.size(); ++i) {
    distributions.residual[i] = std::max(distributions.target[i] - distributions.draft[i], 0.0f);
  }
  if (normalise(distributions.residual)) distributions.target.swap(distributions.residual);
}

void remove_token(std::vector<float>& probs, int32_t token) {
  const float removed = probs[token];
  probs[token] = 0.0f;
  if (!normalise(probs)) probs[token] = removed;
}

// Winner of log probability + noise, ties by the lower id.
int32_t draw(const std::vector<float>& probs, const NoiseKey& key, int32_t position) {
  int32_t best_id = -1;
  float best = 0.0f;
  for (size_t id = 0; id < probs.size(); ++id) {
    if (probs[id] < FLT_MIN) continue;  // log_f32 takes normal numbers
    const uint32_t word = noise_word(key, position, static_cast<uint32_t>(id));
    const float score = keyed_score(log_f32(probs[id]), 1.0f, gumbel(word));
    if (best_id < 0 || score > best) {
      best = score;
      best_id = static_cast<int32_t>(id);
    }
  }
  return best_id;
}

float accept_uniform(const Tree& tree, int32_t position, int64_t child) {
  return uniform_open(
      noise_word(tree.key(NoiseDomain::kAccept), position, static_cast<uint32_t>(child)));
}

// Reads the draft distribution of a node's children; false if it cannot be used.
bool read_draft(const Tree& tree, int64_t node, std::vector<float>& draft, int32_t* status) {
  const VerifyParams& p = tree.p;
  const float* q = p.draft_probs + (tree.first + node) * p.draft_stride;
  if (!is_distribution(q, p.vocab_size)) {
    *status |= kStatusNanDraft;
    return false;
  }
  draft.assign(q, q + p.vocab_size);
  return normalise(draft);
}

bool has_children(const Tree& tree, int64_t node) {
  for (int64_t child = node + 1; child < tree.num_rows; ++child) {
    if (tree.has_parent(child, node)) return true;
  }
  return false;
}

Step accept_or_reject(const Tree& tree, int64_t node, LogitsRow& row, int32_t* status) {
  thread_local Distributions distributions;
  const bool deterministic = tree.p.deterministic;
  const int32_t position = tree.next_position(node);
  distributions.target.resize(tree.p.vocab_size);
  row.distribution(distributions.target.data());
  normalise(distributions.target);
  bool useful = has_children(tree, node) &&
                (deterministic || read_draft(tree, node, distributions.draft, status));
  for (int64_t child = node + 1; useful && child < tree.num_rows; ++child) {
    if (!tree.has_parent(child, node) || !tree.in_vocabulary(child)) continue;
    const int32_t token = tree.token(child);
    const float proposed = deterministic ? 1.0f : distributions.draft[token];
    if (!(proposed > 0.0f)) continue;  // a duplicate, or not drawn from the draft
    if (mul_rn(accept_uniform(tree, position, child), proposed) < distributions.target[token]) {
      return {token, child};
    }
    if (deterministic) {
      remove_token(distributions.target, token);
    } else {
      take_residual(distributions);
      distributions.draft[token] = 0.0f;
      useful = normalise(distributions.draft);
    }
  }
  return {draw(distributions.target, tree.key(NoiseDomain::kResidual), position), -1};
}

}  // namespace

void verify_rejection_cpu(const VerifyParams& p) {
  parallel_for(p.num_requests, 40 * p.vocab_size, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) emit_path(p, b, accept_or_reject);
  });
}

}  // namespace tlt
