// CPU version of gather_new_rows.
#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "kv/op.h"

namespace tlt {
namespace {

void gather_request(const GatherNewRowsParams& p, int64_t request) {
  const Sequences& s = p.sequences;
  const int64_t begin = p.row_start[request], count = p.row_start[request + 1] - begin;
  const int64_t first = s.context_len[request] - count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t t = first + i, row = begin + i;
    p.ids[row] = p.tokens[p.slot[request] * p.tokens_stride + t + 1];
    p.position[row] = static_cast<int32_t>(t);
    char* out = p.rows + row * p.row_bytes;
    Place place;
    if (const int32_t bits = locate(s, request, t, &place)) {
      report(s, request, bits);
      std::memset(out, 0, p.feature_bytes);
      continue;
    }
    std::memcpy(out, p.features + place.page * p.page_bytes + place.offset * p.slot_bytes,
                p.feature_bytes);
  }
}

}  // namespace

void gather_new_rows_cpu(const GatherNewRowsParams& p) {
  const Sequences& s = p.sequences;
  int64_t total = 0;
  for (int64_t request = 0; request < s.num_requests; ++request) {
    int32_t bits;
    const int64_t count = new_rows_of(p, request, &bits);
    report(s, request, bits);
    p.row_start[request] = static_cast<int32_t>(total);
    p.first[request] = s.context_len[request] - static_cast<int32_t>(count);
    total += count;
    p.last[request] = count == 0 ? 0 : static_cast<int32_t>(total - 1);
  }
  p.row_start[s.num_requests] = static_cast<int32_t>(total);
  std::fill(p.ids + total, p.ids + s.num_requests * p.most, 0);
  std::fill(p.position + total, p.position + s.num_requests * p.most, 0);
  parallel_for(s.num_requests, p.most * p.feature_bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) gather_request(p, request);
  });
}

}  // namespace tlt
