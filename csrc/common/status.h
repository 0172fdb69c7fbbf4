// Per-request status words. They report errors that only the device can detect, such as a NaN or a
// page id outside the pool, without a crash. An op ORs bits into the caller's word; 0 = no error.
#pragma once

#include <cstdint>

namespace tlt {

enum Status : int32_t {
  kStatusOk = 0,
  kStatusNanLogits = 1 << 0,  // a NaN or +inf logit (treated as the lowest), no finite logit, or
                              // a NaN temperature (greedy)
  kStatusBadTree = 1 << 1,    // a parent or ancestor that is no earlier row or node
  kStatusBadToken = 1 << 2,   // a drafted token or d2t entry outside the vocabulary (ignored)
  kStatusBadPage = 1 << 3,    // a block-table entry outside the pool was needed (row skipped)
  kStatusBadLength = 1 << 4,  // a length or position outside its table (row skipped)
  kStatusNanDraft = 1 << 5,   // a NaN or +inf draft logit, or an invalid draft probability
};

}  // namespace tlt
