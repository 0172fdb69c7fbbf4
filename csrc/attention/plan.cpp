#include "attention/plan.h"

#include <algorithm>

#include "attention/splits.h"

namespace tlt {
namespace {

constexpr int64_t kSlots = 264;   // blocks in flight: two on each of 132 multiprocessors
constexpr int64_t kMinShare = 3;  // fewer blocks than a third of the slots: share the keys
constexpr int64_t kMmaRows = 16;

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t rows = (shape.num_rows + shape.num_requests - 1) / shape.num_requests;
  AttentionPlan plan{};
  plan.warps = rows * group <= 4 * kMmaRows ? 4 : 8;
  const int64_t block_rows = plan.warps * kMmaRows / group;
  plan.row_blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
  plan.share =
      kSlots / std::max<int64_t>(1, shape.num_requests * shape.num_kv_heads * plan.row_blocks);
  plan.max_items = std::max<int64_t>(1, splits_below(shape.max_slots));
  if (plan.share < kMinShare) plan.max_items = 1;
  if (plan.max_items > 1) {
    const int64_t partial = (shape.head_dim + 2) * static_cast<int64_t>(sizeof(float));
    plan.workspace_bytes = (plan.max_items + 1) * shape.num_rows * shape.num_heads * partial;
  }
  return plan;
}

}  // namespace tlt
