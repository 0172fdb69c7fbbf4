// verify_rejection on the GPU: the rule of rejection.cpp, entry by entry, with the same bits.
//
// One cluster per request. The distributions are not stored: an entry of the target or draft
// distribution after some rejections is a function of its logit, its draft probability and two
// factors per rejection, so every pass over the vocabulary recomputes it (Distributions::at). Sums
// are integers and maxima do not depend on the order. This op is the reference rule, written for
// correctness: two passes per rejected draft.
#include "sampling/filter.cuh"
#include "sampling/op.h"
#include "sampling/path.cuh"

namespace tlt {
namespace {

constexpr float kMaxProb = 1.001f;  // rounding may make a probability slightly larger than 1
// Groups of ids whose entries are unrolled: an entry is long, and all four take minutes to compile.
constexpr int kUnrolled = 1;

// Division by the largest entry, then scaling to sum 1; not valid where nothing is left, and the
// distribution is then kept as it is.
struct Normalizer {
  float largest, factor;
  bool valid;

  __device__ float operator()(float x) const { return mul_rn(__fdiv_rn(x, largest), factor); }
};

struct Entry {
  float target, draft;
};

struct Rejected {
  int32_t token;
  Normalizer target, draft;
};

// The distributions at a node. `rejected` is in shared memory, everything else is uniform.
template <typename T>
struct Distributions {
  const Row<T>& row;
  const float* draft_probs;  // of the node; null if deterministic
  float max;
  int32_t one_hot;  // the only token, or -1
  uint64_t cut;     // largest kept sort key
  Normalizer target, draft;
  const Rejected* rejected;
  int count = 0;

  // The target's entry before normalisation.
  __device__ float raw_target(int32_t id, float x, float s) const {
    if (one_hot >= 0) return id == one_hot ? 1.0f : 0.0f;
    return sort_key(x, id) <= cut ? exp_f32(add_rn(s, -max)) : 0.0f;
  }

  // What remains after `token` is rejected, before normalisation.
  __device__ Entry without(Entry e, int32_t id, int32_t token) const {
    const bool removed = id == token;
    if (draft_probs == nullptr) return {removed ? 0.0f : e.target, 0.0f};
    return {fmaxf(add_rn(e.target, -e.draft), 0.0f), removed ? 0.0f : e.draft};
  }

  __device__ Entry at(int32_t id, float x, float s) const {
    Entry e{raw_target(id, x, s), draft_probs == nullptr ? 0.0f : draft_probs[id]};
    if (target.valid) e.target = target(e.target);
    if (draft.valid) e.draft = draft(e.draft);
    for (int i = 0; i < count; ++i) {
      const Entry left = without(e, id, rejected[i].token);
      if (rejected[i].target.valid) e.target = rejected[i].target(left.target);
      e.draft = rejected[i].draft.valid ? rejected[i].draft(left.draft) : 0.0f;
    }
    return e;
  }

  __device__ Entry at(int32_t id) const {
    float x = as_float32(row.logits[id]), s = row.scaled(x);
    if (!(s < INFINITY)) x = s = kNegInf;
    return at(id, x, s);
  }
};

// Normalises both parts of the entries that entry(id, logit, scaled) gives.
template <typename T, typename F>
__device__ void normalise(Cluster<kThreads>& cluster, Filter<T>& filter, F&& entry,
                          Normalizer* target, Normalizer* draft) {
  Entry largest{0.0f, 0.0f};
  filter.template for_each<kUnrolled>([&](int32_t id, float x, float s) {
    const Entry e = entry(id, x, s);
    largest = {fmaxf(largest.target, e.target), fmaxf(largest.draft, e.draft)};
  });
  *target = {cluster.max(largest.target, 0.0f), 0.0f, false};
  *draft = {cluster.max(largest.draft, 0.0f), 0.0f, false};
  target->valid = target->largest >= FLT_MIN;
  draft->valid = draft->largest >= FLT_MIN;
  int64_t mass[2] = {0, 0};
  const auto part = [](float x, const Normalizer& normal) {
    return normal.valid ? __float2ll_rz(mul_rn(__fdiv_rn(x, normal.largest), 0x1p40f)) : 0;
  };
  filter.template for_each<kUnrolled>([&](int32_t id, float x, float s) {
    const Entry e = entry(id, x, s);
    mass[0] += part(e.target, *target);
    mass[1] += part(e.draft, *draft);
  });
  target->factor = __fdiv_rn(0x1p40f, static_cast<float>(cluster.sum(mass[0])));
  draft->factor = __fdiv_rn(0x1p40f, static_cast<float>(cluster.sum(mass[1])));
}

// Winner of log probability + noise, ties by the lower id.
template <typename T>
__device__ int32_t draw_from(Cluster<kThreads>& cluster, Filter<T>& filter,
                             const Distributions<T>& distributions, const NoiseKey& key,
                             int32_t position) {
  uint64_t best = 0;
  filter.template for_each<kUnrolled>([&](int32_t id, float x, float s) {
    const float prob = distributions.at(id, x, s).target;
    if (prob < FLT_MIN) return;  // log_f32 takes normal numbers
    const uint32_t word = noise_word(key, position, static_cast<uint32_t>(id));
    const float score = keyed_score(log_f32(prob), 1.0f, gumbel(word));
    const uint64_t rank = rank_key(score, static_cast<uint32_t>(id));
    best = rank > best ? rank : best;
  });
  return static_cast<int32_t>(~static_cast<uint32_t>(cluster.max(best, uint64_t{0})));
}

__device__ float accept_uniform(const VerifyParams& p, int64_t b, int32_t position, int child) {
  const NoiseKey key = noise_key(p.sampling.seed, p.sampling.request[b], NoiseDomain::kAccept);
  return uniform_open(noise_word(key, position, static_cast<uint32_t>(child)));
}

// True if every entry of a draft row is a probability; NaN is not one.
__device__ bool is_distribution(Cluster<kThreads>& cluster, const float* q, int64_t n) {
  int32_t bad = 0;
  for (int64_t i = cluster.thread(); i < n; i += cluster.threads()) {
    bad |= !(q[i] >= 0.0f) | !(q[i] <= kMaxProb);
  }
  return cluster.sum(bad) == 0;
}

// One cluster per request.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    rejection_kernel(const __grid_constant__ VerifyParams p) {
  extern __shared__ uint4 shared[];
  __shared__ TreeRows tree;
  __shared__ Rejected rejected[kMaxTreeRows];
  Cluster<kThreads> cluster;
  Scanner<T> scanner(cluster, shared, p.vocab_size);
  const int64_t b = cluster.item();
  const Setting setting(p.sampling, b, p.vocab_size);
  const StopRule stop(p, b);
  const int32_t tree_status = tree.load(p, b);
  emit_path(
      p, b, tree, stop, cluster.rank() == 0 && threadIdx.x == 0, tree_status,
      [&](int node, int32_t* status) {
        const int64_t at = tree.first + node;
        const int32_t position = p.position[at] + 1;
        const Row<T> row({p.logits, p.logits_stride, at, p.vocab_size}, p.sampling.temperature[b]);
        scanner.start(row);
        const RowResult result =
            scanner.score(row, false, Draw{p.sampling.round_keys, {}, 0}, Broadcast::kAll);
        if (result.bad) *status |= kStatusNanLogits;
        Filter<T> filter(cluster, scanner, row, result.max);
        const bool certain = result.has_no_finite() || row.greedy;
        const bool wants_filtered = p.out.filtered_logprobs != nullptr;
        const bool cuts = setting.has_filter() && !result.has_no_finite();
        const uint64_t cut = cuts && (wants_filtered || !certain) ? filter.cut(setting) : kKeepAll;
        bool has_children = false;
        for (int child = node + 1; child < tree.num_rows; ++child) {
          has_children |= tree.parents[child] == node;
        }
        const float* draft_probs =
            p.deterministic || !has_children ? nullptr : p.draft_probs + at * p.draft_stride;
        bool useful = has_children;
        if (draft_probs != nullptr && !is_distribution(cluster, draft_probs, p.vocab_size)) {
          *status |= kStatusNanDraft;
          useful = false;
          draft_probs = nullptr;
        }
        Distributions<T> distributions{
            row, draft_probs, row.scaled(result.max), certain ? max(result.token, 0) : -1, cut, {},
            {},  rejected};
        Normalizer target, draft;
        normalise(
            cluster, filter,
            [&](int32_t id, float x, float s) {
              return Entry{distributions.raw_target(id, x, s),
                           draft_probs == nullptr ? 0.0f : draft_probs[id]};
            },
            &target, &draft);
        distributions.target = target;
        distributions.draft = draft;
        useful = useful && (p.deterministic || draft.valid);
        int32_t token = -1;
        int accepted = -1;
        for (int child = node + 1; useful && accepted < 0 && child < tree.num_rows; ++child) {
          const int32_t drafted = tree.tokens[child];
          if (tree.parents[child] != node || drafted < 0 || drafted >= p.vocab_size) continue;
          const Entry entry = distributions.at(drafted);
          const float proposed = p.deterministic ? 1.0f : entry.draft;
          if (!(proposed > 0.0f)) continue;  // a duplicate, or not drawn from the draft
          if (mul_rn(accept_uniform(p, b, position, child), proposed) < entry.target) {
            token = drafted;
            accepted = child;
            break;
          }
          normalise(
              cluster, filter,
              [&](int32_t id, float x, float s) {
                return distributions.without(distributions.at(id, x, s), id, drafted);
              },
              &target, &draft);
          if (threadIdx.x == 0) rejected[distributions.count] = {drafted, target, draft};
          __syncthreads();
          ++distributions.count;
          useful = p.deterministic || draft.valid;
        }
        if (token < 0) {
          const NoiseKey key =
              noise_key(p.sampling.seed, p.sampling.request[b], NoiseDomain::kResidual);
          token = draw_from(cluster, filter, distributions, key, position);
        }
        const float logprob = result.logprob(row, filter.logit(token));
        float filtered = logprob;
        if (wants_filtered && cut != kKeepAll) filtered = filter.log_ratio(token, filter.mass(cut));
        return Step{{token, logprob, filtered}, accepted};
      });
  scanner.leave();
}

}  // namespace

void verify_rejection_cuda(const VerifyParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    ClusterShape shape =
        row_launch<T>("verify_rejection", rejection_kernel<T>, p.num_requests, p.vocab_size);
    shape.pdl = false;
    launch_cluster_per_item("verify_rejection", rejection_kernel<T>, shape, as_stream(stream), p);
  });
}

}  // namespace tlt
