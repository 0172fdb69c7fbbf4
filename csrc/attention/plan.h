// How the work of a tree_attention launch is spread over blocks. Any plan gives the same bits.
#pragma once

#include <cstdint>

namespace tlt {

struct AttentionPlan {
  int64_t warps;       // of a block; each owns 16 (row, head) pairs of one kv head
  int64_t row_blocks;  // blocks that share the rows of a request, by turns
  int64_t items;       // blocks that share the keys of a row block; 1: no partials
  int64_t partials;    // that they leave of a row and head, at most
  int64_t merge_rows;  // pairs of a row and a kv head that a block of the merge finishes at once
  int64_t workspace_bytes;
  bool cluster;  // one launch of clusters does it all, where the card has them
};

struct AttentionShape {
  int64_t num_requests, num_rows, num_heads, num_kv_heads, head_dim, max_slots;
};

AttentionPlan plan_attention(const AttentionShape& shape);

}  // namespace tlt
