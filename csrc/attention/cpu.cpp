// CPU attention of ragged rows over a paged cache.
//
//   out[row, head] = sum_j softmax_j(scale * q . k_j) v_j    over the row's keys j = 0 .. position
//
// Row invariance: keys are taken in position order, in blocks that begin at multiples of kBlock,
// with an online softmax over blocks. A score is one chain of fma over the head; weights are summed
// over a block by lane = position mod kBlock; values are added one after the other. So the bits of
// a row are a function of its q and its keys in position order. They do not depend on the slots, on
// which keys are committed, or on other rows.
//
// One work item is up to kRows rows of a request and one kv head. Blocks of keys that all of them
// share are loaded once (transposed, in float32); the others are gathered row by row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention/op.h"
#include "common/dtype.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace tlt {
namespace {

constexpr int kBlock = 32;  // keys a block
constexpr int kRows = 8;    // rows a work item
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Up to kRows rows of one request.
struct RowGroup {
  int64_t request, row, num_rows, slot;  // slot of the first row
};

struct Softmax {
  float max, sum;
};

// A block of keys (transposed) and values of one kv head.
struct KeyBlock {
  float* keys;    // [head_dim, kBlock]
  float* values;  // [kBlock, head_dim]
};

// out[i] += sum_j weight[j] * values[j, i] for kWidth dimensions, in ascending order of j.
template <int kWidth>
__attribute__((always_inline)) inline void add_values(const float* weight, const float* values,
                                                      int64_t stride, int count, float* out) {
  float sum[kWidth];
  for (int i = 0; i < kWidth; ++i) sum[i] = out[i];
  for (int j = 0; j < count; ++j) {
    for (int i = 0; i < kWidth; ++i) sum[i] = fma_rn(weight[j], values[j * stride + i], sum[i]);
  }
  for (int i = 0; i < kWidth; ++i) out[i] = sum[i];
}

// Folds the first `count` keys of a block into one row of one head.
TLT_SIMD void attend(const KeyBlock& block, int count, int64_t head_dim, const float* q,
                     Softmax* softmax, float* out) {
  float score[kBlock] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int j = 0; j < kBlock; ++j) {
      score[j] = fma_rn(q[d], block.keys[d * kBlock + j], score[j]);
    }
  }
  float max = softmax->max;
  for (int j = count; j < kBlock; ++j) score[j] = -kInfinity;
  for (int j = 0; j < kBlock; ++j) max = score[j] > max ? score[j] : max;
  if (max > softmax->max) {
    const float rescale = exp_f32(softmax->max - max);
    softmax->max = max;
    softmax->sum *= rescale;
    for (int64_t d = 0; d < head_dim; ++d) out[d] *= rescale;
  }
  float weight[kBlock], lane[kBlock];
  for (int j = 0; j < kBlock; ++j) {
    const float x = score[j] - max;
    weight[j] = lane[j] = x == x ? exp_f32(x) : x;  // a NaN score gives a NaN result
  }
  for (int width = kBlock / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  }
  softmax->sum += lane[0];
  int64_t d = 0;
  for (; d + 64 <= head_dim; d += 64) {
    add_values<64>(weight, block.values + d, head_dim, count, out + d);
  }
  for (; d < head_dim; d += 8) {
    add_values<8>(weight, block.values + d, head_dim, count, out + d);
  }
}

// The slots of a row's keys that are not committed: its ancestors in flight, then itself.
struct OwnKeys {
  int64_t slot[kMaxDepth + kRows];
  int count;
};

// Fills in a row's own keys. `shared` is the number of slots that all rows of its group attend to.
int32_t find_own_keys(const TreeAttentionParams& p, const RowGroup& group, int64_t row,
                      int64_t shared, OwnKeys* own) {
  const Sequences& s = p.sequences;
  const int64_t own_slot = group.slot + (row - group.row);
  const int64_t context = s.context_len[group.request];
  own->count = 0;
  if (p.ancestors == nullptr) {
    if (p.position[row] != own_slot) return kStatusBadLength;
    for (int64_t slot = shared; slot < own_slot; ++slot) own->slot[own->count++] = slot;
  } else {
    const int64_t depth = p.position[row] - context;
    if (depth < 0 || depth > kMaxDepth) return kStatusBadLength;
    const uint8_t* ancestors = p.ancestors + row * p.ancestor_stride;
    for (int64_t i = 0; i < depth; ++i) {
      // Slots must rise and precede the row: whatever the array holds, only older slots are read.
      const bool rising = i == 0 || ancestors[i] > ancestors[i - 1];
      if (!rising || context + ancestors[i] >= own_slot) return kStatusBadTree;
      own->slot[own->count++] = context + ancestors[i];
    }
  }
  own->slot[own->count++] = own_slot;
  for (int i = 0; i < own->count; ++i) {
    Place place;
    if (const int32_t bits = locate(s, group.request, own->slot[i], &place)) return bits;
  }
  return kStatusOk;
}

template <typename T>
class GroupAttention {
 public:
  GroupAttention(const TreeAttentionParams& p, const RowGroup& group, int64_t kv_head)
      : p_(p), group_(group), kv_head_(kv_head), heads_(p.num_heads / p.num_kv_heads) {
    const int64_t dim = p.head_dim, queries = group.num_rows * heads_;
    thread_local std::vector<float> scratch;
    scratch.resize(4 * kBlock * dim + 2 * queries * dim);
    thread_local std::vector<Softmax> softmax;
    softmax.assign(queries, {-kInfinity, 0.0f});
    float* next = scratch.data();
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    for (KeyBlock& block : block_) block = {take(kBlock * dim), take(kBlock * dim)};
    q_ = take(queries * dim);
    out_ = take(queries * dim);
    softmax_ = softmax.data();
    std::fill_n(out_, queries * dim, 0.0f);
  }

  void run() {
    const Sequences& s = p_.sequences;
    const bool chain = p_.ancestors == nullptr;
    const int64_t shared = chain ? group_.slot : s.context_len[group_.request];
    int32_t shared_bits = check_slots(s, group_.request, 0, shared);
    if (group_.slot < 0) shared_bits = kStatusBadLength;
    bool any = false;
    for (int64_t i = 0; i < group_.num_rows; ++i) {
      int32_t bits = shared_bits;
      if (!bits) bits = find_own_keys(p_, group_, group_.row + i, shared, &own_[i]);
      report(s, group_.request, bits);
      good_[i] = bits == kStatusOk;
      any |= good_[i];
      if (good_[i]) load_q(i);
    }
    if (any) attend_keys(shared);
    for (int64_t i = 0; i < group_.num_rows; ++i) store(i);
  }

 private:
  void attend_keys(int64_t shared) {
    int64_t slot = 0;
    for (; slot + kBlock <= shared; slot += kBlock) {
      for (int j = 0; j < kBlock; ++j) load_key(block_[0], j, slot + j);
      for (int64_t i = 0; i < group_.num_rows; ++i) {
        if (good_[i]) attend_row(i, block_[0], kBlock);
      }
    }
    // The last shared keys stay in their lanes; each row appends its own keys.
    const int rest = static_cast<int>(shared - slot);
    for (int j = 0; j < rest; ++j) load_key(block_[0], j, slot + j);
    for (int64_t i = 0; i < group_.num_rows; ++i) {
      if (!good_[i]) continue;
      const int count = rest + own_[i].count;
      for (int j = rest; j < count; ++j) {
        load_key(block_[j / kBlock], j % kBlock, own_[i].slot[j - rest]);
      }
      attend_row(i, block_[0], std::min(count, kBlock));
      if (count > kBlock) attend_row(i, block_[1], count - kBlock);
    }
  }

  void load_key(const KeyBlock& block, int lane, int64_t slot) {
    Place place{};  // checked before, cannot fail
    locate(p_.sequences, group_.request, slot, &place);
    const auto at = [&](const PagedCache& cache) {
      return static_cast<const T*>(cache.data) + place.page * cache.page_stride +
             place.offset * cache.slot_stride + kv_head_ * cache.head_stride;
    };
    const T *key = at(p_.k), *value = at(p_.v);
    for (int64_t d = 0; d < p_.head_dim; ++d) block.keys[d * kBlock + lane] = to_float(key[d]);
    float* values = block.values + lane * p_.head_dim;
    for (int64_t d = 0; d < p_.head_dim; ++d) values[d] = to_float(value[d]);
  }

  void attend_row(int64_t i, const KeyBlock& block, int count) {
    for (int64_t n = i * heads_; n < (i + 1) * heads_; ++n) {
      attend(block, count, p_.head_dim, q_ + n * p_.head_dim, &softmax_[n], out_ + n * p_.head_dim);
    }
  }

  void load_q(int64_t i) {
    for (int64_t h = 0; h < heads_; ++h) {
      const T* q = static_cast<const T*>(p_.q) + (group_.row + i) * p_.q_row_stride +
                   (kv_head_ * heads_ + h) * p_.q_head_stride;
      float* to = q_ + (i * heads_ + h) * p_.head_dim;
      for (int64_t d = 0; d < p_.head_dim; ++d) to[d] = to_float(q[d]) * p_.scale;
    }
  }

  void store(int64_t i) {
    for (int64_t h = 0; h < heads_; ++h) {
      const int64_t row = group_.row + i, head = kv_head_ * heads_ + h, n = i * heads_ + h;
      const Softmax& softmax = softmax_[n];
      T* out = static_cast<T*>(p_.out) + row * p_.out_row_stride + head * p_.out_head_stride;
      for (int64_t d = 0; d < p_.head_dim; ++d) {
        out[d] = from_float<T>(good_[i] ? out_[n * p_.head_dim + d] / softmax.sum : 0.0f);
      }
      if (p_.lse == nullptr) continue;
      p_.lse[row * p_.lse_stride + head] =
          good_[i] ? softmax.max + log_f32(softmax.sum) : -kInfinity;
    }
  }

  const TreeAttentionParams& p_;
  const RowGroup group_;
  const int64_t kv_head_, heads_;  // heads of this kv head
  KeyBlock block_[2];
  float *q_, *out_;  // [num_rows * heads, head_dim]
  Softmax* softmax_;
  OwnKeys own_[kRows];
  bool good_[kRows];
};

}  // namespace

void tree_attention_cpu(const TreeAttentionParams& p) {
  const Sequences& s = p.sequences;
  thread_local std::vector<RowGroup> scratch;
  std::vector<RowGroup>& groups = scratch;  // worker threads must see this thread's list
  groups.clear();
  int64_t keys = 0;
  for (int64_t request = 0; request < s.num_requests; ++request) {
    int64_t begin, end;
    if (!rows_of(s, request, &begin, &end)) {
      report(s, request, kStatusBadLength);
      continue;
    }
    for (int64_t row = begin; row < end; row += kRows) {
      const int64_t slot = first_slot(s, request) + (row - begin);
      groups.push_back({request, row, std::min<int64_t>(kRows, end - row), slot});
      keys += groups.back().num_rows * std::max<int64_t>(1, slot);
    }
  }
  if (groups.empty()) return;
  const int64_t items = static_cast<int64_t>(groups.size()) * p.num_kv_heads;
  const int64_t work = keys * p.num_heads * p.head_dim / (4 * items);
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    parallel_for(items, work, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        GroupAttention<T>(p, groups[item / p.num_kv_heads], item % p.num_kv_heads).run();
      }
    });
  });
}

}  // namespace tlt
