#include "kv/op.h"

#include <string>

#include "common/dispatch.h"

namespace tlt {

AppendKvParams check_append(const char* op, const char* like_name, const Tensor& like,
                            const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& cos_sin, const RowsArgs& rows) {
  check_caches(op, k_cache, v_cache, like_name, like);
  const int64_t num_rows = like.shape[0], head_dim = k_cache.shape[3];
  const Arg q_arg(op, "q_out", q_out), table_arg(op, "cos_sin", cos_sin);
  q_arg.on(like).is_like(like_name, like).separate().shape({num_rows, kAny, head_dim});
  if (q_out.shape[1] < 1) q_arg.fail("1 head or more", "0");
  table_arg.on(like).is({DType::kFloat32}).dense_last().shape({kAny, head_dim});
  Arg(op, "position", rows.position).on(like).is({DType::kInt32}).dense().shape({num_rows});
  AppendKvParams params{};
  params.q_out = q_out.data;
  params.cos_sin = cos_sin.ptr<float>();
  params.position = rows.position.ptr<int32_t>();
  params.k = paged_cache(k_cache);
  params.v = paged_cache(v_cache);
  params.sequences = check_sequences(op, like, rows, num_rows, k_cache.shape[0], k_cache.shape[1]);
  params.num_heads = q_out.shape[1];
  params.num_kv_heads = k_cache.shape[2];
  params.head_dim = head_dim;
  params.max_position = cos_sin.shape[0];
  params.q_row_stride = q_out.stride[0];
  params.q_head_stride = q_out.stride[1];
  params.cos_sin_stride = cos_sin.stride[0];
  params.dtype = like.dtype;
  return params;
}

void append_kv(const Tensor& qkv, const Tensor& q_out, const Tensor& k_cache, const Tensor& v_cache,
               const Tensor& cos_sin, const RowsArgs& rows, const Tensor& q_norm,
               const Tensor& k_norm, double eps, uintptr_t stream) {
  constexpr const char* op = "append_kv";
  const Arg qkv_arg(op, "qkv", qkv);
  qkv_arg.is(kFloating).dense_last().shape({kAny, kAny});
  AppendKvParams params = check_append(op, "qkv", qkv, q_out, k_cache, v_cache, cos_sin, rows);
  const int64_t heads = params.num_heads + 2 * params.num_kv_heads;
  qkv_arg.shape({qkv.shape[0], heads * params.head_dim});
  for (const auto& [name, norm] : {std::pair{"q_norm", &q_norm}, std::pair{"k_norm", &k_norm}}) {
    if (!norm->defined()) continue;
    Arg(op, name, *norm).on(qkv).is_like("qkv", qkv).dense().shape({params.head_dim});
  }
  require(eps >= 0, op, "eps: expected 0 or more, got " + std::to_string(eps));
  if (qkv.shape[0] == 0 || params.sequences.num_requests == 0) return;
  params.qkv = qkv.data;
  params.qkv_stride = qkv.stride[0];
  params.q_norm = q_norm.data;
  params.k_norm = k_norm.data;
  params.eps = static_cast<float>(eps);
  dispatch_device(
      op, qkv, [&] { append_kv_cpu(params); },
      [&] { append_kv_cuda(params, qkv.device.device_id, stream); });
}

void commit_path(const Tensor& k_cache, const Tensor& v_cache, const CommitRows& rows,
                 const Tensor& path, const Tensor& num_emitted, const Tensor& features,
                 const Tensor& feature_rows, uintptr_t stream) {
  constexpr const char* op = "commit_path";
  const Arg k_arg(op, "k_cache", k_cache), v_arg(op, "v_cache", v_cache);
  k_arg.is(kFloating).separate().shape({kAny, kAny, kAny, kAny, kAny});
  const int64_t* shape = k_cache.shape;
  v_arg.on(k_cache).is_like("k_cache", k_cache).separate();
  v_arg.shape({shape[0], shape[1], shape[2], shape[3], shape[4]});
  if (shape[2] < 1) k_arg.fail("a page size of 1 or more", std::to_string(shape[2]));
  require(features.defined() == feature_rows.defined(), op,
          "features and feature_rows: expected both or neither");
  int64_t num_rows = INT32_MAX;  // without features no array is indexed by row
  if (features.defined()) {
    const Arg features_arg(op, "features", features), rows_arg(op, "feature_rows", feature_rows);
    features_arg.on(k_cache).is(kFloating).separate().shape({shape[1], shape[2], kAny});
    rows_arg.on(k_cache).is_like("features", features).dense_last();
    rows_arg.shape({kAny, features.shape[2]});
    num_rows = feature_rows.shape[0];
  }
  const Sequences sequences = check_sequences(op, k_cache, rows, num_rows, shape[1], shape[2]);
  const int64_t requests = sequences.num_requests;
  Arg(op, "path", path).on(k_cache).is({DType::kInt32}).dense_last().shape({requests, kAny});
  Arg(op, "num_emitted", num_emitted).on(k_cache).is({DType::kInt32}).dense().shape({requests});
  if (requests == 0) return;
  const auto layered = [](const Tensor& cache) {
    const PagedCache layer{cache.data, cache.stride[1], cache.stride[2], cache.stride[3]};
    return LayeredCache{layer, cache.stride[0]};
  };
  const int64_t bytes = bytes_of(k_cache.dtype), feature_bytes = bytes_of(features.dtype);
  const CommitPathParams params{layered(k_cache),
                                layered(v_cache),
                                features.ptr<char>(),
                                feature_rows.ptr<char>(),
                                path.ptr<int32_t>(),
                                num_emitted.ptr<int32_t>(),
                                rows.context_len.ptr<int32_t>(),
                                sequences,
                                shape[0],
                                shape[3],
                                shape[4] * bytes,
                                bytes,
                                features.shape[2] * feature_bytes,
                                feature_bytes,
                                features.stride[0],
                                features.stride[1],
                                feature_rows.stride[0],
                                path.shape[1],
                                path.stride[0]};
  dispatch_device(
      op, k_cache, [&] { commit_path_cpu(params); },
      [&] { commit_path_cuda(params, k_cache.device.device_id, stream); });
}

void copy_pages(const Tensor& cache, const Tensor& source, const Tensor& destination,
                uintptr_t stream) {
  constexpr const char* op = "copy_pages";
  const Arg cache_arg(op, "cache", cache);
  cache_arg.is(kFloating);
  if (cache.ndim < 3) cache_arg.fail("3 to 6 axes", std::to_string(cache.ndim));
  Tensor page = cache;  // the axes inside one page
  page.ndim = cache.ndim - 2;
  for (int i = 0; i < page.ndim; ++i) {
    page.shape[i] = cache.shape[i + 2];
    page.stride[i] = cache.stride[i + 2];
  }
  Arg(op, "cache: a page", page).dense();
  Arg(op, "source", source).on(cache).is({DType::kInt32}).dense().shape({kAny});
  const Arg destination_arg(op, "destination", destination);
  destination_arg.on(cache).is({DType::kInt32}).dense().shape({source.shape[0]});
  if (source.shape[0] == 0 || cache.numel() == 0) return;
  const int64_t bytes = bytes_of(cache.dtype);
  const CopyPagesParams params{
      cache.ptr<char>(),       source.ptr<int32_t>(),   destination.ptr<int32_t>(),
      source.shape[0],         cache.shape[0],          cache.shape[1],
      cache.stride[0] * bytes, cache.stride[1] * bytes, page.numel() * bytes};
  dispatch_device(
      op, cache, [&] { copy_pages_cpu(params); },
      [&] { copy_pages_cuda(params, cache.device.device_id, stream); });
}

void gather_new_rows(const Tensor& features, const GatherRows& rows, const GatherTokens& table,
                     const Tensor& num_new, const NewRowsArgs& out, uintptr_t stream) {
  constexpr const char* op = "gather_new_rows";
  const Arg features_arg(op, "features", features), ids_arg(op, "ids", out.ids);
  features_arg.is(kFloating).dense_last().shape({kAny, kAny, kAny});
  if (features.shape[1] < 1) features_arg.fail("a page size of 1 or more", "0");
  Arg(op, "tokens", table.tokens).on(features).is({DType::kInt32}).dense_last().shape({kAny, kAny});
  ids_arg.on(features).is({DType::kInt32}).dense().shape({kAny});
  const int64_t num_rows = out.ids.shape[0];
  Arg(op, "position", rows.position).on(features).is({DType::kInt32}).dense().shape({num_rows});
  const Sequences sequences =
      check_sequences(op, features, rows, num_rows, features.shape[0], features.shape[1]);
  const int64_t requests = sequences.num_requests;
  const std::pair<const char*, const Tensor*> of_request[] = {
      {"slot", &table.slot}, {"num_new", &num_new}, {"first", &out.first}, {"last", &out.last}};
  for (const auto& [name, tensor] : of_request) {
    Arg(op, name, *tensor).on(features).is({DType::kInt32}).dense().shape({requests});
  }
  const int64_t most = requests == 0 ? 0 : num_rows / requests;
  if (most * requests != num_rows || (most == 0 && requests > 0)) {
    ids_arg.fail("the same number of rows for each of " + std::to_string(requests) + " requests",
                 std::to_string(num_rows));
  }
  const Arg out_arg(op, "out.features", out.features);
  out_arg.on(features).is_like("features", features).separate();
  out_arg.shape({num_rows, features.shape[2]});
  const int64_t bytes = bytes_of(features.dtype);
  const GatherNewRowsParams params{features.ptr<char>(),
                                   table.tokens.ptr<int32_t>(),
                                   table.slot.ptr<int32_t>(),
                                   num_new.ptr<int32_t>(),
                                   rows.row_start.ptr<int32_t>(),
                                   out.ids.ptr<int32_t>(),
                                   rows.position.ptr<int32_t>(),
                                   out.first.ptr<int32_t>(),
                                   out.last.ptr<int32_t>(),
                                   out.features.ptr<char>(),
                                   sequences,
                                   most,
                                   table.tokens.shape[0],
                                   table.tokens.shape[1],
                                   table.tokens.stride[0],
                                   features.shape[2] * bytes,
                                   features.stride[0] * bytes,
                                   features.stride[1] * bytes,
                                   out.features.stride[0] * bytes};
  dispatch_device(
      op, features, [&] { gather_new_rows_cpu(params); },
      [&] { gather_new_rows_cuda(params, features.device.device_id, stream); });
}

}  // namespace tlt
