#include "attention/op.h"

#include <cmath>
#include <string>

#include "common/dispatch.h"

namespace tlt {

void tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out, const Tensor& row_start, const Tensor& context_len,
                    const Tensor& position, const Tensor& block_table, const Tensor& status,
                    const Tensor& ancestors, const Tensor& slot_base, std::optional<double> scale,
                    const Tensor& lse, uintptr_t stream) {
  constexpr const char* op = "tree_attention";
  const Arg q_arg(op, "q", q), out_arg(op, "out", out);
  q_arg.is(kFloating).dense_last().shape({kAny, kAny, kAny});
  check_caches(op, k_cache, v_cache, "q", q);
  const int64_t rows = q.shape[0], heads = q.shape[1], kv_heads = k_cache.shape[2];
  q_arg.shape({rows, heads, k_cache.shape[3]});
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    q_arg.fail("a multiple of the " + std::to_string(kv_heads) + " kv heads",
               std::to_string(heads) + " heads");
  }
  out_arg.on(q).is_like("q", q).dense_last().shape({rows, heads, q.shape[2]});
  Arg(op, "position", position).on(q).is({DType::kInt32}).dense().shape({rows});
  const SequenceArgs args{row_start, context_len, block_table, status, &slot_base};
  const Sequences sequences =
      check_sequences(op, q, args, rows, k_cache.shape[0], k_cache.shape[1]);
  if (ancestors.defined()) {
    const Arg arg(op, "ancestors", ancestors);
    arg.on(q).is({DType::kUInt8}).dense_last().shape({rows, kMaxDepth});
  }
  if (lse.defined()) {
    Arg(op, "lse", lse).on(q).is({DType::kFloat32}).dense_last().shape({rows, heads});
  }
  require(!scale || std::isfinite(*scale), op, "scale: expected a finite number");
  if (rows == 0 || sequences.num_requests == 0) return;
  const double softmax_scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.shape[2])));
  const TreeAttentionParams params{q.data,
                                   out.data,
                                   lse.ptr<float>(),
                                   position.ptr<int32_t>(),
                                   ancestors.ptr<uint8_t>(),
                                   paged_cache(k_cache),
                                   paged_cache(v_cache),
                                   sequences,
                                   heads,
                                   kv_heads,
                                   q.shape[2],
                                   q.stride[0],
                                   q.stride[1],
                                   out.stride[0],
                                   out.stride[1],
                                   lse.stride[0],
                                   ancestors.stride[0],
                                   static_cast<float>(softmax_scale),
                                   q.dtype};
  dispatch_device(op, q, [&] { tree_attention_cpu(params); }, [&] { no_cuda_kernel(op); });
  (void)stream;
}

}  // namespace tlt
