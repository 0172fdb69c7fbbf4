// CPU cache kernels.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "common/limits.h"
#include "common/parallel.h"
#include "kv/op.h"

namespace tlt {
namespace {

template <typename T>
T* head_at(const PagedCache& cache, const Place& place, int64_t head) {
  return static_cast<T*>(cache.data) + place.page * cache.page_stride +
         place.offset * cache.slot_stride + head * cache.head_stride;
}

// RMS norm (if there is a weight), then RoPE on the pairs (i, i + dim / 2). out may be x.
template <typename T>
void norm_and_rotate(const T* x, const T* weight, float eps, const float* cos_sin, int64_t dim,
                     T* out) {
  float value[kMaxHeadDim];
  float squares = 0.0f;
  for (int64_t i = 0; i < dim; ++i) {
    value[i] = to_float(x[i]);
    squares += value[i] * value[i];
  }
  if (weight != nullptr) {
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) {  // rounded before and after the weight, as rms_norm does
      const float normed = to_float(from_float<T>(value[i] * scale));
      value[i] = to_float(from_float<T>(normed * to_float(weight[i])));
    }
  }
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float cosine = cos_sin[i], sine = cos_sin[half + i];
    out[i] = from_float<T>(value[i] * cosine - value[half + i] * sine);
    out[half + i] = from_float<T>(value[half + i] * cosine + value[i] * sine);
  }
}

template <typename T>
void append_row(const AppendKvParams& p, int64_t request, int64_t row, int64_t slot) {
  const T* qkv = static_cast<const T*>(p.qkv) + row * p.qkv_stride;
  T* q_out = static_cast<T*>(p.q_out) + row * p.q_row_stride;
  Place place;
  int32_t bits = locate(p.sequences, request, slot, &place);
  if (p.position[row] < 0 || p.position[row] >= p.max_position) bits |= kStatusBadLength;
  if (bits != kStatusOk) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      std::fill_n(q_out + h * p.q_head_stride, p.head_dim, from_float<T>(0.0f));
    }
    return report(p.sequences, request, bits);
  }
  const float* cos_sin = p.cos_sin + p.position[row] * p.cos_sin_stride;
  const T* k = qkv + p.num_heads * p.head_dim;
  const T* v = k + p.num_kv_heads * p.head_dim;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    norm_and_rotate(qkv + h * p.head_dim, static_cast<const T*>(p.q_norm), p.eps, cos_sin,
                    p.head_dim, q_out + h * p.q_head_stride);
  }
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    norm_and_rotate(k + h * p.head_dim, static_cast<const T*>(p.k_norm), p.eps, cos_sin, p.head_dim,
                    head_at<T>(p.k, place, h));
    std::copy_n(v + h * p.head_dim, p.head_dim, head_at<T>(p.v, place, h));
  }
}

// kStatusOk if every kept slot and its destination can be used, else the status bits of the
// reasons.
int32_t check_path(const CommitPathParams& p, int64_t request) {
  const Sequences& s = p.sequences;
  const int32_t* path = p.path + request * p.path_stride;
  const int64_t kept = p.num_emitted[request], context = s.context_len[request];
  int64_t begin, end;
  if (!rows_of(s, request, &begin, &end) || context < 0 || kept < 0 || kept > p.path_len) {
    return kStatusBadLength;
  }
  int32_t bad_slot = kStatusOk;
  for (int64_t i = 0; i < kept; ++i) {
    const bool rising = i == 0 ? path[0] == 0 : path[i] > path[i - 1];
    if (!rising || path[i] >= end - begin) return kStatusBadTree;
    Place place;
    bad_slot |= locate(s, request, context + i, &place);
    bad_slot |= locate(s, request, context + path[i], &place);
  }
  return bad_slot;
}

void move_heads(const CommitPathParams& p, const LayeredCache& cache, const Place& from,
                const Place& to) {
  for (int64_t layer = 0; layer < p.num_layers; ++layer) {
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const auto at = [&](const Place& place) {
        const PagedCache& c = cache.layer;
        return static_cast<char*>(c.data) +
               (layer * cache.layer_stride + place.page * c.page_stride +
                place.offset * c.slot_stride + head * c.head_stride) *
                   p.element_bytes;
      };
      std::memcpy(at(to), at(from), p.head_bytes);
    }
  }
}

void commit_request(const CommitPathParams& p, int64_t request) {
  const Sequences& s = p.sequences;
  if (const int32_t bits = check_path(p, request)) return report(s, request, bits);
  const int32_t* path = p.path + request * p.path_stride;
  const int64_t context = s.context_len[request];
  // path[i] >= i, so in ascending order no slot is overwritten before it is moved
  for (int64_t i = 0; i < p.num_emitted[request]; ++i) {
    Place from, to;
    locate(s, request, context + path[i], &from);
    locate(s, request, context + i, &to);
    if (path[i] != i) {
      move_heads(p, p.k, from, to);
      move_heads(p, p.v, from, to);
    }
    if (p.features == nullptr) continue;
    const int64_t row = s.row_start[request] + path[i];
    const int64_t slot = to.page * p.feature_page_stride + to.offset * p.feature_slot_stride;
    std::memcpy(p.features + slot * p.feature_element_bytes,
                p.feature_rows + row * p.feature_row_stride * p.feature_element_bytes,
                p.feature_bytes);
  }
  p.context_len[request] += p.num_emitted[request];
}

}  // namespace

void append_kv_cpu(const AppendKvParams& p) {
  dispatch_floating(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const Sequences& s = p.sequences;
    const int64_t row_work = 8 * (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
    for (int64_t request = 0; request < s.num_requests; ++request) {
      int64_t first, last;
      if (!rows_of(s, request, &first, &last)) {
        report(s, request, kStatusBadLength);
        continue;
      }
      const int64_t slot = first_slot(s, request);
      parallel_for(last - first, row_work, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) append_row<T>(p, request, first + i, slot + i);
      });
    }
  });
}

void commit_path_cpu(const CommitPathParams& p) {
  const int64_t slot_work = p.num_layers * p.num_kv_heads * p.head_bytes / 4;
  parallel_for(p.sequences.num_requests, p.path_len * slot_work, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) commit_request(p, request);
  });
}

void copy_pages_cpu(const CopyPagesParams& p) {
  const auto inside = [&](int64_t page) { return 0 <= page && page < p.num_pages; };
  parallel_for(p.num_layers, p.count * p.page_bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t layer = begin; layer < end; ++layer) {
      char* pages = p.cache + layer * p.layer_bytes;
      for (int64_t i = 0; i < p.count; ++i) {
        if (!inside(p.source[i]) || !inside(p.destination[i])) continue;  // a padded entry
        if (p.source[i] == p.destination[i]) continue;
        std::memcpy(pages + p.destination[i] * p.page_stride_bytes,
                    pages + p.source[i] * p.page_stride_bytes, p.page_bytes);
      }
    }
  });
}

}  // namespace tlt
