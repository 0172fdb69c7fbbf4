// CPU draft trees. Every loop over a vocabulary runs in blocks of kLanes with the lanes innermost,
// so that the compiler vectorises it; sums are integers, so they do not depend on the order.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "common/noise.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "common/status.h"
#include "tree/exp_sum.h"
#include "tree/op.h"

namespace tlt {
namespace {

constexpr int kLanes = 16;
constexpr int kBlock = 64;  // ids whose noise is computed together
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// score[i] = scaled[i] + noise of target_id[i] for one block. The noise of a draft id is that of
// its target id, whose neighbours are usually other draft ids, so each lane evaluates Philox for
// itself.
TLT_SIMD void add_noise(const float* scaled, const int32_t* target_id, const NoiseKey& key,
                        int32_t position, float* score) {
  float exponential[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    exponential[i] = target_exponential(key, position, static_cast<uint32_t>(target_id[i]));
  }
  for (int i = 0; i < kBlock; ++i) score[i] = add_rn(scaled[i], -log_f32(exponential[i]));
}

TLT_SIMD float max_of(const float* value, int64_t n) {
  float lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = kNegInf;
  for (int64_t block = 0; block < n; block += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      lane[i] = value[block + i] > lane[i] ? value[block + i] : lane[i];
    }
  }
  return *std::max_element(lane, lane + kLanes);
}

// Sum of exp(value * inverse) over a padded row.
TLT_SIMD ExpSum exp_sum(const float* value, int64_t n, float inverse) {
  constexpr int kGroup = kNoiseGroup;
  ExpSum sum;
  for (int64_t block = 0; block < n; block += kBlock) {
    float x[kBlock], weight[kBlock], reference[kBlock / kGroup];
    for (int i = 0; i < kBlock; ++i) x[i] = value[block + i] * inverse;
    for (int g = 0; g < kBlock / kGroup; ++g) {
      float largest = x[g * kGroup];
      for (int i = 1; i < kGroup; ++i) {
        largest = x[g * kGroup + i] > largest ? x[g * kGroup + i] : largest;
      }
      reference[g] = ExpSum::reference_of(largest);
    }
    for (int i = 0; i < kBlock; ++i) weight[i] = exp_f32(x[i] - reference[i / kGroup]);
    for (int g = 0; g < kBlock / kGroup; ++g) {
      const float* w = weight + g * kGroup;
      const float mass = ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
      sum.add(ExpSum::of_group(reference[g], mass));
    }
  }
  return sum;
}

// out[i] = logit / T, or -inf if that is NaN or +inf; returns whether any was.
template <typename T>
TLT_HD bool scale(const T* logits, int64_t n, float inv_temperature, float* out) {
  int32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float x = mul_rn(to_float(logits[i]), inv_temperature);
    const bool good = x < -kNegInf;  // false for NaN too
    out[i] = good ? x : kNegInf;
    bad |= !good;
  }
  return bad != 0;
}

TLT_SIMD bool scale_row(const float* logits, int64_t n, float inv_temperature, float* out) {
  return scale(logits, n, inv_temperature, out);
}
TLT_SIMD bool scale_row(const Float16* logits, int64_t n, float inv_temperature, float* out) {
  return scale(logits, n, inv_temperature, out);
}
TLT_SIMD bool scale_row(const BFloat16* logits, int64_t n, float inv_temperature, float* out) {
  return scale(logits, n, inv_temperature, out);
}

// One row of draft logits, prepared: arrays of padded(draft_vocab), reused by a thread.
struct DraftRow {
  std::vector<float> scaled;  // logit / T; -inf where the id can never be drawn
  std::vector<float> score;   // scaled + noise
  std::vector<int32_t> target_id;

  // Returns status bits. Ids outside the target's vocabulary can never be drawn.
  template <typename T>
  int32_t load(const ExpandTreeParams& p, const T* logits, float inv_temperature) {
    const int64_t size = padded(p.draft_vocab);
    scaled.resize(size);
    score.resize(size);
    target_id.resize(size);
    // Without d2t, columns past the true vocabulary are padding of the head: they are not read.
    const int64_t n = p.d2t != nullptr ? p.draft_vocab : std::min(p.draft_vocab, p.vocab_size);
    int32_t bits = scale_row(logits, n, inv_temperature, scaled.data()) ? kStatusNanDraft : 0;
    std::fill(scaled.begin() + n, scaled.end(), kNegInf);
    if (p.d2t == nullptr) {
      std::iota(target_id.begin(), target_id.end(), 0);
      return bits;
    }
    std::copy(p.d2t, p.d2t + n, target_id.begin());
    std::fill(target_id.begin() + n, target_id.end(), 0);
    for (int64_t i = 0; i < n; ++i) {
      if (target_id[i] >= 0 && target_id[i] < p.vocab_size) continue;
      scaled[i] = kNegInf;
      bits |= kStatusBadToken;
    }
    return bits;
  }
};

struct Child {
  float score;
  int32_t token;
  int64_t draft_id;
};

bool ranks_before(const Child& a, const Child& b) {
  return a.score != b.score ? a.score > b.score : a.token < b.token;
}

// The best children so far, in rank order.
struct ChildList {
  Child child[kMaxTopK];
  int64_t top_k, count = 0;
  float threshold = kNegInf;  // a lower score cannot enter the list

  explicit ChildList(int64_t top_k) : top_k(top_k) {}

  void offer(const Child& offered) {
    if (count == top_k) {
      if (!ranks_before(offered, child[count - 1])) return;
      --count;
    }
    int64_t at = count++;
    for (; at > 0 && ranks_before(offered, child[at - 1]); --at) child[at] = child[at - 1];
    child[at] = offered;
    if (count == top_k) threshold = child[count - 1].score;
  }
};

// Scores a row block by block and keeps the best. Noise is computed only for blocks whose largest
// logit could still enter the list, unless the log-softmax needs all scores.
ChildList best_children(const ExpandTreeParams& p, DraftRow& row, bool greedy, const NoiseKey& key,
                        int32_t position) {
  ChildList best(p.top_k);
  const bool all = p.score_temperature > 0 && !is_chain(p);
  for (int64_t block = 0; block < padded(p.draft_vocab); block += kBlock) {
    const float* scaled = row.scaled.data() + block;
    float* score = row.score.data() + block;
    const float bound = max_of(scaled, kBlock);
    const bool reachable = bound > kNegInf && bound + kMaxNoise >= best.threshold;
    if (greedy) {
      std::copy(scaled, scaled + kBlock, score);
    } else if (reachable || all) {
      add_noise(scaled, row.target_id.data() + block, key, position, score);
    }
    for (int i = 0; reachable && i < kBlock; ++i) {
      if (score[i] == kNegInf || score[i] < best.threshold) continue;
      best.offer({score[i], row.target_id[block + i], block + i});
    }
  }
  return best;
}

void report(const ExpandTreeParams& p, int64_t b, int32_t bits) {
  // Rows of one request may be on several threads.
  if (bits != 0) __atomic_fetch_or(&p.status[b], bits, __ATOMIC_RELAXED);
}

// Whether all F * K children fit behind a valid count.
bool has_room(const ExpandTreeParams& p, int64_t b) {
  const int64_t count = p.nodes.count[b];
  return count >= 1 && count + p.frontier_rows * p.top_k <= p.nodes.capacity;
}

// Writes the children of one frontier row at count + f * K of its request; token -1 ends them.
template <typename T>
void draft_children(const ExpandTreeParams& p, int64_t row_index, DraftRow& row) {
  const int64_t b = row_index / p.frontier_rows, f = row_index % p.frontier_rows;
  const int32_t parent = p.frontier[row_index];
  const NodeStore& nodes = p.nodes;
  if (!has_room(p, b)) return report(p, b, parent >= 0 ? kStatusBadLength : 0);
  const int64_t first = b * nodes.capacity;
  const int64_t place = first + nodes.count[b] + f * p.top_k;
  nodes.token[place] = -1;
  if (parent < 0) return;
  if (parent >= nodes.count[b] || nodes.depth[first + parent] < 0 ||
      nodes.depth[first + parent] >= kMaxDepth || std::isnan(nodes.score[first + parent])) {
    return report(p, b, kStatusBadTree);
  }
  const bool greedy = is_greedy(p.temperature[b]);
  const T* logits = static_cast<const T*>(p.draft_logits) + row_index * p.logits_stride;
  report(p, b, row.load(p, logits, inverse_temperature(p.temperature[b])));
  const ChildList best =
      best_children(p, row, greedy, noise_key(p.seed, p.request[b], NoiseDomain::kTarget),
                    p.root_position[b] + nodes.depth[first + parent] + 1);
  if (best.count == 0) return;
  if (is_chain(p)) {
    nodes.token[place] = best.child[0].token;
    nodes.score[place] = nodes.score[first + parent];
    return;
  }
  const int64_t n = padded(p.draft_vocab);
  const bool perturbed = p.score_temperature > 0;
  const std::vector<float>& value = perturbed ? row.score : row.scaled;
  const float inverse = perturbed ? 1.0f / p.score_temperature : 1.0f;
  const ExpSum sum = exp_sum(value.data(), n, inverse);
  const float log_sum = sum.log();
  for (int k = 0; k < best.count; ++k) {
    const float log_prob = (value[best.child[k].draft_id] * inverse - sum.reference) - log_sum;
    nodes.token[place + k] = best.child[k].token;
    nodes.score[place + k] = nodes.score[first + parent] + std::fmin(log_prob, 0.0f);
  }
  if (best.count < p.top_k) nodes.token[place + best.count] = -1;
}

// Closes the gaps between the rows' children, links them, and picks the next frontier.
void append_children(const ExpandTreeParams& p, int64_t b, std::vector<int32_t>& row_of,
                     std::vector<int32_t>& order) {
  const NodeStore& nodes = p.nodes;
  const int64_t first = b * nodes.capacity;
  const int32_t begin = has_room(p, b) ? nodes.count[b] : 0;
  int32_t end = begin;
  row_of.clear();
  order.clear();
  for (int64_t f = 0; begin > 0 && f < p.frontier_rows; ++f) {
    const int32_t parent = p.frontier[b * p.frontier_rows + f];
    for (int64_t k = 0; k < p.top_k; ++k) {
      const int64_t from = first + begin + f * p.top_k + k;
      if (nodes.token[from] < 0) break;
      nodes.token[first + end] = nodes.token[from];
      nodes.score[first + end] = nodes.score[from];
      nodes.parent[first + end] = parent;
      nodes.depth[first + end] = nodes.depth[first + parent] + 1;
      row_of.push_back(static_cast<int32_t>(f));
      order.push_back(end++);
    }
  }
  if (begin > 0) nodes.count[b] = end;
  const int64_t kept = std::min<int64_t>(p.top_k, order.size());
  const float* score = nodes.score + first;
  std::partial_sort(order.begin(), order.begin() + kept, order.end(), [&](int32_t x, int32_t y) {
    return score[x] != score[y] ? score[x] > score[y] : x < y;
  });
  for (int64_t k = 0; k < p.top_k; ++k) {
    const int64_t out = b * p.top_k + k;
    uint8_t* ancestors = p.next_ancestors + out * kMaxDepth;
    std::fill(ancestors, ancestors + kMaxDepth, 0);
    p.next_frontier[out] = k < kept ? order[k] : -1;
    p.next_row[out] = 0;
    if (k >= kept) continue;
    const int64_t row = b * p.frontier_rows + row_of[order[k] - begin];
    p.next_row[out] = static_cast<int32_t>(row);
    if (p.frontier_ancestors == nullptr) continue;  // the root's drafter entry is committed
    const int32_t in_flight = nodes.depth[first + order[k]] - 1;
    const uint8_t* inherited = p.frontier_ancestors + row * kMaxDepth;
    std::copy(inherited, inherited + std::max(0, in_flight - 1), ancestors);
    if (in_flight > 0) {
      ancestors[in_flight - 1] = static_cast<uint8_t>(p.slot_base + row % p.frontier_rows);
    }
  }
}

// Chooses the nodes of one request; returns how many, and writes their store indices, ordered by
// (depth, index), to `chosen`. Candidates are visited in rank order and taken if their parent was
// taken before: scores fall along a path, so this gives the best connected tree.
struct Selector {
  std::vector<int32_t> candidates;
  std::vector<uint8_t> taken;

  int64_t run(const SelectNodesParams& p, int64_t b, int32_t* chosen) {
    const int64_t count = p.nodes.count[b], first = b * p.nodes.capacity;
    if (count < 1 || count > p.nodes.capacity) return 0;
    const int32_t *token = p.nodes.token + first, *parent = p.nodes.parent + first;
    const int32_t* depth = p.nodes.depth + first;
    const float* score = p.nodes.score + first;
    taken.assign(count, 0);
    candidates.clear();
    for (int32_t i = 1; i < count; ++i) {
      const bool linked = parent[i] >= 0 && parent[i] < i && depth[i] <= kMaxDepth &&
                          depth[i] == (parent[i] == 0 ? 0 : depth[parent[i]]) + 1;
      if (linked && !std::isnan(score[i])) candidates.push_back(i);
    }
    const auto ranks_after = [&](int32_t x, int32_t y) {
      return score[x] != score[y] ? score[x] < score[y] : x > y;
    };
    std::make_heap(candidates.begin(), candidates.end(), ranks_after);
    chosen[0] = 0;
    taken[0] = 1;
    int64_t rows = 1;
    while (rows < p.num_verify && !candidates.empty()) {
      std::pop_heap(candidates.begin(), candidates.end(), ranks_after);
      const int32_t node = candidates.back();
      candidates.pop_back();
      const bool duplicate = std::any_of(chosen + 1, chosen + rows, [&](int32_t other) {
        return parent[other] == parent[node] && token[other] == token[node];
      });
      if (!taken[parent[node]] || duplicate) continue;
      taken[node] = 1;
      chosen[rows++] = node;
    }
    std::sort(chosen + 1, chosen + rows, [&](int32_t x, int32_t y) {
      return depth[x] != depth[y] ? depth[x] < depth[y] : x < y;
    });
    return rows;
  }
};

// Writes the packed rows of one request whose chosen nodes lie in source[begin, end).
void write_rows(const SelectNodesParams& p, int64_t b, int64_t begin, int64_t end,
                std::vector<int32_t>& row_of) {
  const int64_t first = b * p.nodes.capacity;
  row_of.resize(p.nodes.capacity);
  for (int64_t row = begin; row < end; ++row) {
    const int32_t node = p.source[row];
    const int32_t depth = row == begin ? 0 : p.nodes.depth[first + node];
    const int32_t parent = row == begin ? -1 : row_of[p.nodes.parent[first + node]];
    row_of[node] = static_cast<int32_t>(row - begin);
    p.tokens[row] = p.nodes.token[first + node];
    p.parents[row] = parent;
    p.position[row] = p.root_position[b] + depth;
    uint8_t* ancestors = p.ancestors + row * kMaxDepth;
    std::fill(ancestors, ancestors + kMaxDepth, 0);
    if (depth == 0) continue;
    const uint8_t* inherited = p.ancestors + (begin + parent) * kMaxDepth;
    std::copy(inherited, inherited + depth - 1, ancestors);
    ancestors[depth - 1] = static_cast<uint8_t>(parent);
  }
}

}  // namespace

void expand_tree_cpu(const ExpandTreeParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(p.num_requests * p.frontier_rows, 16 * p.draft_vocab,
                 [&](int64_t begin, int64_t end) {
                   thread_local DraftRow row;
                   for (int64_t i = begin; i < end; ++i) draft_children<T>(p, i, row);
                 });
  });
  std::vector<int32_t> row_of, order;
  for (int64_t b = 0; b < p.num_requests; ++b) append_children(p, b, row_of, order);
}

void select_nodes_cpu(const SelectNodesParams& p) {
  // Chosen nodes are kept at b * num_verify of `source`, counts in row_start, until all are known.
  parallel_for(p.num_requests, 20 * p.nodes.capacity, [&](int64_t begin, int64_t end) {
    thread_local Selector selector;
    for (int64_t b = begin; b < end; ++b) {
      const int64_t rows = selector.run(p, b, p.source + b * p.num_verify);
      p.row_start[b + 1] = static_cast<int32_t>(rows);
    }
  });
  std::vector<int32_t> row_of;
  p.row_start[0] = 0;
  for (int64_t b = 0; b < p.num_requests; ++b) {
    const int64_t rows = p.row_start[b + 1], start = p.row_start[b];
    const int32_t* chosen = p.source + b * p.num_verify;
    std::copy(chosen, chosen + rows, p.source + start);  // moves down or stays
    p.row_start[b + 1] = static_cast<int32_t>(start + rows);
    write_rows(p, b, start, start + rows, row_of);
  }
  std::fill(p.source + p.row_start[p.num_requests], p.source + p.num_requests * p.num_verify, -1);
}

}  // namespace tlt
