// How the work of a tree_attention launch is distributed over blocks. Any plan gives the same bits.
#pragma once

#include <cstdint>

namespace tlt {

struct AttentionPlan {
  int64_t warps;        // of a block; each owns 16 (row, head) pairs of one kv head
  int64_t row_blocks;   // blocks that take the row blocks of a request in turn
  int64_t items;        // blocks that share the keys of a row block; 1: no partials
  int64_t small_items;  // of them, blocks that take one small split each
  int64_t partials;     // largest number of partials of a row and head
  int64_t merge_rows;   // (row, kv head) pairs that a merge block finishes together
  int64_t tail_warps;   // warps of a merge block that compute tails
  int64_t workspace_bytes;
  bool alone;    // no multiprocessor has two blocks
  bool cluster;  // one launch of clusters, if the card can run it
};

struct AttentionShape {
  int64_t num_requests, num_rows, num_heads, num_kv_heads, head_dim, max_slots;
};

AttentionPlan plan_attention(const AttentionShape& shape);

}  // namespace tlt
