// Arguments of the draft-tree kernels. All arrays but the logits are dense.
#pragma once

#include <cstdint>

#include "common/limits.h"
#include "common/noise.h"
#include "common/tensor.h"

namespace tlt {

// Candidate nodes of B requests. Entry 0 is the root; parents come before their children. Entries
// from `count` on are scratch.
struct NodeStore {
  int32_t* token;    // [B, capacity]
  int32_t* parent;   // [B, capacity], store index; -1 at the root
  float* score;      // [B, capacity], cumulative log-probability; at most the parent's
  int32_t* depth;    // [B, capacity], 0 at the root
  int32_t* count;    // [B]
  int64_t capacity;  // C
};

struct ExpandTreeParams {
  const void* draft_logits;                    // [B * F, draft_vocab], dtype
  const int32_t* frontier;                     // [B, F], store index or -1
  NodeStore nodes;                             // new nodes are appended
  int32_t* next_frontier;                      // [B, K], store index or -1
  int32_t* next_row;                           // [B, K], row of draft_logits the node came from
  uint8_t* next_ancestors;                     // [B, K, kMaxDepth], in-flight drafter slots
  const float* temperature;                    // [B]
  const int64_t* request;                      // [B]
  const int32_t* root_position;                // [B]
  int32_t* status;                             // [B]
  const int32_t* d2t;                          // [draft_vocab], target ids; may be null (identity)
  const uint8_t* frontier_ancestors;           // [B, F, kMaxDepth]; may be null (first level)
  int64_t num_requests, frontier_rows, top_k;  // B, F, K
  int64_t draft_vocab, logits_stride;
  int64_t slot_base;  // in-flight drafter slot of frontier row 0
  int64_t vocab_size;
  float score_temperature;  // 0: scores are log-softmax(draft logit / T); else of
                            // (draft logit / T + noise) / score_temperature
  uint64_t seed;
  RoundKeys round_keys;  // of the seed
  DType dtype;
};

// Whether children need no rank: one frontier row with one child.
inline bool is_chain(const ExpandTreeParams& p) { return p.frontier_rows == 1 && p.top_k == 1; }

struct SelectNodesParams {
  NodeStore nodes;                       // read only
  const int32_t* root_position;          // [B]
  int32_t *tokens, *parents, *position;  // [B * num_verify], packed
  uint8_t* ancestors;                    // [B * num_verify, kMaxDepth]
  int32_t* source;                       // [B * num_verify], store index
  int32_t* row_start;                    // [B + 1]
  int64_t num_requests, num_verify;
};

}  // namespace tlt
