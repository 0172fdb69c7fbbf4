// Per-request status words: what only the device can see (a NaN, a page id past the pool) is
// reported here and never crashes. An op ORs bits into the caller's word; 0 means healthy.
#pragma once

#include <cstdint>

namespace tlt {

enum Status : int32_t {
  kStatusOk = 0,
  kStatusNanLogits = 1 << 0,  // a NaN or +inf logit (it lost every comparison), no finite logit, or
                              // a NaN temperature (greedy)
  kStatusBadTree = 1 << 1,    // a parent that is not an earlier row of the same request
  kStatusBadToken = 1 << 2,   // a drafted token outside the vocabulary (the draft was ignored)
  kStatusBadPage = 1 << 3,    // a block-table entry outside the pool was needed (row skipped)
  kStatusBadLength = 1 << 4,  // a length or position outside its table (row skipped)
  kStatusNanDraft = 1 << 5,   // a NaN in a draft distribution (the draft counted as useless)
};

}  // namespace tlt
