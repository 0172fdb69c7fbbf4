// The rows in flight and their keys: ragged rows over a paged cache. `tlt_ext/kv.py` defines the
// terms (slot, position, in flight).
//
// Only the device knows lengths, tables and positions. So every value read from them passes through
// `rows_of` and `locate`, which check its bounds before it becomes an address.
#pragma once

#include "common/groups.h"
#include "common/math.h"
#include "common/status.h"
#include "common/tensor.h"

namespace tlt {

// One layer of a cache, [num_pages, page_size, num_kv_heads, head_dim] with a dense last axis.
struct PagedCache {
  void* data;
  int64_t page_stride, slot_stride, head_stride;
};

struct Place {
  int64_t page, offset;
};

// The requests of a launch: their rows, and the pages that hold their slots.
struct Sequences {
  const int32_t* row_start;    // [num_requests + 1]
  const int32_t* context_len;  // [num_requests], committed slots
  const int32_t* slot_base;    // [num_requests], in-flight slot of the first row; null = 0
  const int32_t* block_table;  // [num_requests, max_pages], garbage past a request's end
  int32_t* status;             // [num_requests]
  int64_t num_requests, num_rows;
  int64_t table_stride, max_pages, num_pages, page_size;
};

// Rows [begin, end) of a request. False if row_start does not rise there or leaves the rows.
TLT_HD bool rows_of(const Sequences& s, int64_t request, int64_t* begin, int64_t* end) {
  *begin = s.row_start[request];
  *end = s.row_start[request + 1];
  return 0 <= *begin && *begin <= *end && *end <= s.num_rows;
}

// Slot of a request's first row of this launch. A negative length gives a slot that `locate`
// rejects.
TLT_HD int64_t first_slot(const Sequences& s, int64_t request) {
  const int64_t base = s.slot_base == nullptr ? 0 : s.slot_base[request];
  const int64_t context = s.context_len[request];
  return context < 0 || base < 0 ? INT64_MIN / 2 : context + base;
}

// Finds a slot's page. Returns a status bit: kStatusOk if `place` is valid.
TLT_HD int32_t locate(const Sequences& s, int64_t request, int64_t slot, Place* place) {
  if (slot < 0 || slot >= s.max_pages * s.page_size) return kStatusBadLength;
  const int64_t page = s.block_table[request * s.table_stride + slot / s.page_size];
  if (page < 0 || page >= s.num_pages) return kStatusBadPage;
  *place = {page, slot % s.page_size};
  return kStatusOk;
}

// Checks that slots [begin, end) can all be read.
TLT_HD int32_t check_slots(const Sequences& s, int64_t request, int64_t begin, int64_t end) {
  if (begin < 0 || end > s.max_pages * s.page_size) return kStatusBadLength;
  const int32_t* pages = s.block_table + request * s.table_stride;
  for (int64_t i = begin / s.page_size; i * s.page_size < end; ++i) {
    if (pages[i] < 0 || pages[i] >= s.num_pages) return kStatusBadPage;
  }
  return kStatusOk;
}

// Several threads may report on one request.
inline void report(const Sequences& s, int64_t request, int32_t bits) {
  if (bits != kStatusOk) __atomic_fetch_or(&s.status[request], bits, __ATOMIC_RELAXED);
}

// Checks all fields of `rows` but the positions; every array must be on the device of `anchor`.
Sequences check_sequences(const char* op, const Tensor& anchor, const RowsArgs& rows,
                          int64_t num_rows, int64_t num_pages, int64_t page_size);

// Checks the two caches of a layer: k sets the shape, v follows; dtype of `like`.
void check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                  const char* like_name, const Tensor& like);

PagedCache paged_cache(const Tensor& cache);

}  // namespace tlt
