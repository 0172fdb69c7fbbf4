#include "common/paged.h"

#include "common/limits.h"

namespace tlt {

Sequences check_sequences(const char* op, const Tensor& anchor, const RowsArgs& rows,
                          int64_t num_rows, int64_t num_pages, int64_t page_size) {
  const Arg row_start(op, "row_start", rows.row_start);
  row_start.on(anchor).is({DType::kInt32}).dense().shape({kAny});
  if (rows.row_start.shape[0] < 1) row_start.fail("one entry more than requests", "none");
  const int64_t requests = rows.row_start.shape[0] - 1;
  const auto per_request = [&](const char* name, const Tensor& tensor) {
    Arg(op, name, tensor).on(anchor).is({DType::kInt32}).dense().shape({requests});
  };
  per_request("context_len", rows.context_len);
  const Arg table(op, "block_table", rows.block_table);
  table.on(anchor).is({DType::kInt32}).dense_last().shape({requests, kAny});
  per_request("status", rows.status);
  const bool has_base = rows.slot_base.defined();
  if (has_base) per_request("slot_base", rows.slot_base);
  return {rows.row_start.ptr<int32_t>(),
          rows.context_len.ptr<int32_t>(),
          has_base ? rows.slot_base.ptr<int32_t>() : nullptr,
          rows.block_table.ptr<int32_t>(),
          rows.status.ptr<int32_t>(),
          requests,
          num_rows,
          rows.block_table.stride[0],
          rows.block_table.shape[1],
          num_pages,
          page_size};
}

void check_caches(const char* op, const Tensor& k_cache, const Tensor& v_cache,
                  const char* like_name, const Tensor& like) {
  const Arg k(op, "k_cache", k_cache), v(op, "v_cache", v_cache);
  k.on(like).is_like(like_name, like).separate().shape({kAny, kAny, kAny, kAny});
  const int64_t* shape = k_cache.shape;
  v.on(like).is_like(like_name, like).separate();
  v.shape({shape[0], shape[1], shape[2], shape[3]});
  if (shape[1] < 1) k.fail("a page size of 1 or more", std::to_string(shape[1]));
  if (shape[3] < 8 || shape[3] > kMaxHeadDim || shape[3] % 8 != 0) {
    k.fail("a head size that is a multiple of 8 up to " + std::to_string(kMaxHeadDim),
           std::to_string(shape[3]));
  }
}

PagedCache paged_cache(const Tensor& cache) {
  return {cache.data, cache.stride[0], cache.stride[1], cache.stride[2]};
}

}  // namespace tlt
