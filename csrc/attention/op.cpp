#include "attention/op.h"

#include <cmath>
#include <string>

#include "attention/plan.h"
#include "common/dispatch.h"

namespace tlt {
namespace {

constexpr int64_t kVector = 16;  // bytes of the GPU's loads

// Every row, head, slot and page of a 16-bit array starts at a multiple of 16 bytes.
void check_alignment(const Arg& arg, const Tensor& tensor) {
  const int64_t elements = kVector / bytes_of(tensor.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % kVector == 0;
  for (int i = 0; i + 1 < tensor.ndim; ++i) aligned &= tensor.stride[i] % elements == 0;
  if (!aligned) arg.fail("data and strides that are multiples of 16 bytes on a GPU", "others");
}

// What the tensor-core kernels are written for; float32 takes all that the CPU takes.
void check_gpu_shapes(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                      const Tensor& out) {
  if (q.dtype == DType::kFloat32) return;
  const Arg q_arg(op, "q", q), k_arg(op, "k_cache", k_cache), v_arg(op, "v_cache", v_cache);
  const int64_t dim = q.shape[2], page = k_cache.shape[1], group = q.shape[1] / k_cache.shape[2];
  if (dim != 64 && dim != 128) q_arg.fail("head_dim 64 or 128 on a GPU", std::to_string(dim));
  if (group > 8) q_arg.fail("at most 8 heads a kv head on a GPU", std::to_string(group));
  if (page != 16 && page != 32 && page != 64 && page != 128) {
    k_arg.fail("a page size of 16, 32, 64 or 128 on a GPU", std::to_string(page));
  }
  check_alignment(q_arg, q);
  check_alignment(k_arg, k_cache);
  check_alignment(v_arg, v_cache);
  check_alignment(Arg(op, "out", out), out);
}

}  // namespace

int64_t attention_workspace_bytes(int64_t num_requests, int64_t num_rows, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t max_slots) {
  const auto inside = [](int64_t count, int64_t low, int64_t high) {
    return low <= count && count <= high;
  };
  constexpr int64_t kMost = 1 << 16;  // keeps products of counts within 63 bits
  const bool valid = inside(num_requests, 0, INT32_MAX) && inside(num_rows, 0, INT32_MAX) &&
                     inside(num_heads, 1, kMost) && inside(num_kv_heads, 1, kMost) &&
                     inside(head_dim, 1, kMost) && max_slots >= 0 && num_heads % num_kv_heads == 0;
  require(
      valid, "attention_workspace_bytes",
      "expected counts, of heads and head_dim up to 2^16, of requests and rows below 2^31, with "
      "num_heads a multiple of num_kv_heads");
  if (num_requests == 0 || num_rows == 0) return 0;
  return plan_attention({num_requests, num_rows, num_heads, num_kv_heads, head_dim, max_slots})
      .workspace_bytes;
}

void tree_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& out, const RowsArgs& rows, const Tensor& ancestors,
                    std::optional<double> scale, const Tensor& lse, const Tensor& workspace,
                    bool pdl, uintptr_t stream) {
  constexpr const char* op = "tree_attention";
  const Arg q_arg(op, "q", q), out_arg(op, "out", out);
  q_arg.is(kFloating).dense_last().shape({kAny, kAny, kAny});
  check_caches(op, k_cache, v_cache, "q", q);
  const int64_t num_rows = q.shape[0], heads = q.shape[1], kv_heads = k_cache.shape[2];
  q_arg.shape({num_rows, heads, k_cache.shape[3]});
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    q_arg.fail("a multiple of the " + std::to_string(kv_heads) + " kv heads",
               std::to_string(heads) + " heads");
  }
  out_arg.on(q).is_like("q", q).separate().shape({num_rows, heads, q.shape[2]});
  Arg(op, "position", rows.position).on(q).is({DType::kInt32}).dense().shape({num_rows});
  const Sequences sequences =
      check_sequences(op, q, rows, num_rows, k_cache.shape[0], k_cache.shape[1]);
  if (ancestors.defined()) {
    const Arg arg(op, "ancestors", ancestors);
    arg.on(q).is({DType::kUInt8}).dense_last().shape({num_rows, kMaxDepth});
  }
  if (lse.defined()) {
    Arg(op, "lse", lse).on(q).is({DType::kFloat32}).separate().shape({num_rows, heads});
  }
  if (workspace.defined()) {
    const Arg arg(op, "workspace", workspace);
    arg.on(q).is({DType::kUInt8}).dense().shape({kAny});
  }
  if (q.is_cuda()) check_gpu_shapes(op, q, k_cache, v_cache, out);
  require(!scale || std::isfinite(*scale), op, "scale: expected a finite number");
  if (num_rows == 0 || sequences.num_requests == 0) return;
  if (q.is_cuda() && q.dtype != DType::kFloat32 && workspace.defined()) {
    const int64_t wanted =
        attention_workspace_bytes(sequences.num_requests, num_rows, heads, kv_heads, q.shape[2],
                                  sequences.max_pages * sequences.page_size);
    const bool fits =
        workspace.shape[0] >= wanted && reinterpret_cast<uintptr_t>(workspace.data) % kVector == 0;
    if (!fits) {
      Arg(op, "workspace", workspace)
          .fail(std::to_string(wanted) + " bytes, aligned to 16 (attention_workspace_bytes)",
                std::to_string(workspace.shape[0]));
    }
  }
  const double softmax_scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.shape[2])));
  const TreeAttentionParams params{q.data,
                                   out.data,
                                   lse.ptr<float>(),
                                   rows.position.ptr<int32_t>(),
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
                                   q.dtype,
                                   pdl};
  dispatch_device(
      op, q, [&] { tree_attention_cpu(params); },
      [&] { tree_attention_cuda(params, workspace.data, q.device.device_id, stream); });
}

}  // namespace tlt
