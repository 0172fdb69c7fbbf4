// Arguments of the n-gram drafter, and the arithmetic that CPU and GPU share bit for bit.
#pragma once

#include <cstdint>

#include "common/math.h"
#include "tree/params.h"

namespace tlt {

constexpr int kMaxNgram = 8;     // longest suffix that is compared
constexpr int kMaxMatches = 32;  // matches of a proposal: one lane of a warp each
constexpr int kMaxGroup = 128;   // sequences that a request searches

struct NgramProposeParams {
  const int32_t* tokens;       // [num_slots, max_len], token at each absolute position
  const int32_t* length;       // [num_slots], tokens that are set
  const int32_t* group_slots;  // [B, group_size]; -1 = none
  const int32_t* slot;         // [B]; -1 = inert
  const int32_t* context_len;  // [B], position of the root
  NodeStore nodes;             // written from entry 0 on, or not at all
  const float* temperature;    // [B]
  const int64_t* request;      // [B]
  int32_t* status;             // [B]
  int64_t num_requests, group_size, num_slots, max_len;
  int64_t depth, top_k, max_ngram, min_ngram;
  bool keep_unmatched;  // a request without a match keeps its nodes
  uint64_t seed;
};

// A match as one number; the largest is the best. Longer matches come first, then the earlier
// sequence of the group, then the later position. 0 = none.
constexpr int kPlaceBits = 28;
constexpr uint32_t kMaxPlaces = 1u << kPlaceBits;  // group_size * max_len at most
static_assert(kMaxNgram < 1 << (32 - kPlaceBits));

TLT_HD uint32_t match_key(int32_t matched, int32_t sequence, int32_t position, int32_t max_len) {
  const uint32_t order = static_cast<uint32_t>(sequence) * static_cast<uint32_t>(max_len) +
                         static_cast<uint32_t>(max_len - 1 - position);
  return static_cast<uint32_t>(matched) << kPlaceBits | (kMaxPlaces - 1 - order);
}

TLT_HD int32_t matched_of(uint32_t key) { return static_cast<int32_t>(key >> kPlaceBits); }

TLT_HD void place_of(uint32_t key, int32_t max_len, int32_t* sequence, int32_t* position) {
  const uint32_t order = kMaxPlaces - 1 - (key & (kMaxPlaces - 1));
  *sequence = static_cast<int32_t>(order / static_cast<uint32_t>(max_len));
  *position = max_len - 1 - static_cast<int32_t>(order % static_cast<uint32_t>(max_len));
}

// The weight of a match: each further matching token multiplies it by four. Sums over all matches
// stay exact in float32.
TLT_HD int32_t match_weight(int32_t matched) { return 1 << 2 * (matched - 1); }
static_assert(2 * (kMaxNgram - 1) <= 19, "32 matches of the largest weight stay below 2^24");

// Log-probability of a child with weight `count` of its parent's `total`. One more stands for all
// unseen tokens.
TLT_HD float log_share(int32_t count, int32_t total) {
  return add_rn(log_f32(static_cast<float>(count)), -log_f32(static_cast<float>(total + 1)));
}

}  // namespace tlt
