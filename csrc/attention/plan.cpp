#include "attention/plan.h"

#include <algorithm>

#include "attention/splits.h"

namespace tlt {
namespace {

constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kFew = kMultiprocessors * 4 / 5;  // blocks: fewer than that share the keys
constexpr int64_t kMmaRows = 16;

// The most items that any length to `max_slots` has: just past the start of some split.
int64_t most_items(int64_t max_slots, int64_t share) {
  int64_t most = 1;
  for (int64_t split = 0; split_begin(split) < max_slots; ++split) {
    most = std::max(most, split + 2 - splits_of_first_item(split_begin(split) + 1, share));
  }
  return most;
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t rows = (shape.num_rows + shape.num_requests - 1) / shape.num_requests;
  AttentionPlan plan{};
  plan.warps = rows * group <= 4 * kMmaRows ? 4 : 8;
  const int64_t block_rows = plan.warps * kMmaRows / group;
  plan.row_blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
  const int64_t blocks = shape.num_requests * shape.num_kv_heads * plan.row_blocks;
  const int64_t slots = kMultiprocessors * (plan.warps == 4 ? 2 : 1);  // blocks in flight
  plan.share = std::clamp<int64_t>(blocks * kWholeShare / slots, 1, kWholeShare);
  plan.max_items = blocks < kFew ? most_items(shape.max_slots, plan.share) : 1;
  if (plan.max_items > 1) {
    const int64_t partial = (shape.head_dim + 2) * static_cast<int64_t>(sizeof(float));
    plan.workspace_bytes = plan.max_items * shape.num_rows * shape.num_heads * partial;
  }
  return plan;
}

}  // namespace tlt
