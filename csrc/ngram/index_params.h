// Arguments of the n-gram drafter.
#pragma once

#include <cstdint>

#include "tree/params.h"

namespace tlt {

constexpr int kMaxOrder = 16;
constexpr int kMaxOccurrences = 64;  // places considered for one proposal, most recent first

struct ProposeParams {
  const int64_t* handle;         // [B]; -1 or a forgotten sequence: root only
  NodeStore nodes;               // written from entry 0 on
  const float* temperature;      // [B]
  const int64_t* request;        // [B]
  const int32_t* root_position;  // [B]
  int64_t num_requests, depth, top_k, min_order;
  uint64_t seed;
};

}  // namespace tlt
