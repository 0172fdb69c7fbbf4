#include "attention/plan.h"

#include <algorithm>

#include "attention/splits.h"

namespace tlt {
namespace {

// Of an H100 or H200. Not that of the device: a workspace is sized by shapes alone.
constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kMmaRows = 16;

// The largest number of partials of any length up to `max_slots`: it occurs just past the start of
// a split.
template <int kDim>
int64_t most_partials(int64_t max_slots, int64_t items, int64_t small_items) {
  using C = Cuts<kDim>;
  int64_t most = 1;
  const int64_t slots = std::min<int64_t>(max_slots, kMaxTileKeys);
  for (int64_t split = 0; C::split_begin(split) < slots; ++split) {
    const auto end = static_cast<uint32_t>(C::split_begin(split) + 1);
    const uint32_t second =
        C::item_begin(end, static_cast<uint32_t>(small_items), share_of(items - small_items), 1);
    most = std::max(most, split + 2 - int64_t{C::splits_below(second)});
  }
  return most;
}

// Enough items to give each multiprocessor one block, which leaves room for the merge. Two small
// blocks per multiprocessor where fewer multiprocessors are idle then, or where one block cannot
// use the full memory bandwidth: a tile of 64 dimensions has half the bytes and takes as long.
int64_t items_for(const AttentionShape& shape, int64_t blocks, int64_t warps) {
  const bool light = shape.head_dim <= 64 && warps == 4;
  if (blocks >= (light ? kMultiprocessors : kMultiprocessors * 4 / 5)) return 1;
  const bool two = light || (warps == 4 && 2 * blocks >= kMultiprocessors * 9 / 10);
  return (two ? 2 : 1) * kMultiprocessors / blocks;
}

// A split of 128 keys takes half the time of one of 512 and stores a partial, too. So a block with
// the four or eight first splits of a short context finishes last. If there is room for second
// blocks on some multiprocessors, each of these splits gets a block.
int64_t small_items_for(const AttentionShape& shape, int64_t blocks, const AttentionPlan& plan) {
  constexpr int64_t kSlots = 16384, kRoom = kMultiprocessors * 3 / 2;
  constexpr int64_t kSplits = Cuts<128>::kSmallSplits;
  const bool pays = plan.warps == 4 && shape.head_dim > 64 && shape.max_slots <= kSlots;
  return pays && plan.items >= 16 && blocks * (plan.items + kSplits) <= kRoom ? kSplits : 0;
}

// The smallest number of rows per merge block with which all blocks are resident together. Where
// the first launch has one block of four warps per multiprocessor, one merge block of eight warps
// runs concurrently with it. One of its warps computes all tails while keys are streamed; there is
// no shared memory for more. Otherwise two merge blocks start after it.
void plan_merge(const AttentionShape& shape, AttentionPlan* plan) {
  const int64_t tails = shape.num_rows * shape.num_kv_heads;
  const int64_t group = shape.num_heads / shape.num_kv_heads, warps = group * shape.head_dim / 64;
  const bool concurrent = plan->warps == 4 && shape.head_dim > 64 && group <= 4 && plan->alone;
  const int64_t slots = (concurrent ? 1 : 2) * kMultiprocessors;
  plan->merge_rows = std::clamp<int64_t>((tails - 1) / slots + 1, 1, concurrent ? 8 : 4);
  plan->tail_warps = concurrent ? 1 : std::min(warps, plan->merge_rows);
}

// A card runs fewer blocks in clusters than alone: 15 clusters at two blocks per multiprocessor,
// spread unevenly, so clusters pay only for short contexts. With 128 dimensions the first block of
// a cluster takes all surplus splits: 3 of them cost nothing, since it then has 512 keys like the
// others. With 64 dimensions all blocks have the same number of keys, 512 up to a length of 8,192
// and 1,024 above.
constexpr int64_t kClusters = 15, kClusterSlots = 6144, kLightClusterSlots = 9216;
static_assert(kLightClusterSlots <= ClusterCuts<64>::kMaxKeys);

bool fits_clusters(const AttentionShape& shape, const AttentionPlan& plan, int64_t blocks) {
  const int64_t most = shape.head_dim <= 64 ? kLightClusterSlots : kClusterSlots;
  return plan.warps == 4 && blocks <= kClusters && shape.max_slots <= most;
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape) {
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t rows = (shape.num_rows + shape.num_requests - 1) / shape.num_requests;
  AttentionPlan plan{};
  plan.warps = rows * group <= 4 * kMmaRows ? 4 : 8;
  const int64_t block_rows = std::max<int64_t>(1, plan.warps * kMmaRows / group);
  plan.row_blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
  const int64_t blocks = shape.num_requests * shape.num_kv_heads * plan.row_blocks;
  plan.items = items_for(shape, blocks, plan.warps);
  plan.small_items = small_items_for(shape, blocks, plan);
  plan.items += plan.small_items;
  plan.alone = blocks * plan.items <= kMultiprocessors;
  plan.cluster = fits_clusters(shape, plan, blocks);
  plan_merge(shape, &plan);
  if (plan.items > 1) {
    const auto most = shape.head_dim <= 64 ? most_partials<64> : most_partials<128>;
    plan.partials = most(shape.max_slots, plan.items, plan.small_items);
    const int64_t partial = (shape.head_dim + 2) * static_cast<int64_t>(sizeof(float));
    plan.workspace_bytes = plan.partials * shape.num_rows * shape.num_heads * partial;
  }
  return plan;
}

}  // namespace tlt
