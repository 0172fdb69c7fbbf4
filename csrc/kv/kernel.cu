// Cache kernels: append_kv, commit_path, copy_pages. All are bound by the bytes that they move.
//
// append_kv: one warp owns one head of one row (query, key or value), so the bits of a row do not
// depend on other rows; without norms, one thread owns eight pairs of a head, in chunks of 16
// bytes. commit_path: a thread owns one word of a slot, of the keys or values of a layer or of the
// features, and moves it along the path from the front: a kept slot never precedes its destination,
// so later sources are still intact. A second launch then advances the lengths, which the first one
// reads. copy_pages: a block owns a part of one page of one layer; a thread copies words of it.
#include <array>
#include <type_traits>

#include "common/device.cuh"
#include "common/mma.cuh"
#include "kv/append.cuh"
#include "kv/op.h"
#include "kv/words.cuh"

namespace tlt {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kChunkThreads = 128;
constexpr int kLanePairs = 4;      // of a half head of 128
constexpr int kPrefetchMoves = 4;  // loads of a path before the first of their stores
constexpr int64_t kMaxBlocks = 1024;

unsigned blocks_for(int64_t work, int64_t per_block) {
  const int64_t blocks = (work + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kMaxBlocks ? kMaxBlocks : blocks);
}

// ---- append_kv ----------------------------------------------------------------------------------

// RMS norm (if there is a weight), then RoPE on the pairs (i, i + dim / 2). out may be x: a lane
// writes what it read.
template <typename T>
__device__ void norm_and_rotate(const T* x, const T* weight, float eps, const float* cos_sin,
                                int half, T* out) {
  const int lane = threadIdx.x % kWarpSize;
  float low[kLanePairs], high[kLanePairs], squares = 0.0f;
#pragma unroll
  for (int n = 0; n < kLanePairs; ++n) {
    const int i = n * kWarpSize + lane;
    low[n] = i < half ? as_float32(x[i]) : 0.0f;
    high[n] = i < half ? as_float32(x[half + i]) : 0.0f;
    squares = fma_rn(low[n], low[n], fma_rn(high[n], high[n], squares));
  }
  if (weight != nullptr) {
    const float mean = __fdiv_rn(warp_sum_all(squares), static_cast<float>(2 * half));
    const float scale = __frcp_rn(__fsqrt_rn(add_rn(mean, eps)));
#pragma unroll
    for (int n = 0; n < kLanePairs; ++n) {
      const int i = n * kWarpSize + lane;
      if (i >= half) break;
      low[n] = rounded_to<T>(rounded_to<T>(low[n] * scale) * as_float32(weight[i]));
      high[n] = rounded_to<T>(rounded_to<T>(high[n] * scale) * as_float32(weight[half + i]));
    }
  }
#pragma unroll
  for (int n = 0; n < kLanePairs; ++n) {
    const int i = n * kWarpSize + lane;
    if (i >= half) break;
    const float2 turned = rotated(low[n], high[n], cos_sin[i], cos_sin[half + i]);
    out[i] = as_storage<T>(turned.x);
    out[half + i] = as_storage<T>(turned.y);
  }
}

// Grid: (blocks, in a grid-stride loop; requests).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendKvParams p) {
  launch_dependents();
  wait_for_prior_grid();
  const Sequences& s = p.sequences;
  const int64_t request = blockIdx.y;
  const int lane = threadIdx.x % kWarpSize;
  int64_t begin, end;
  if (!rows_of(s, request, &begin, &end)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report_on_device(s, request, kStatusBadLength);
    return;
  }
  const int64_t slot = first_slot(s, request), heads = p.num_heads + 2 * p.num_kv_heads;
  const int64_t first = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  for (int64_t i = first; i < (end - begin) * heads; i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = begin + i / heads, head = i % heads;
    const T* x = static_cast<const T*>(p.qkv) + row * p.qkv_stride + head * p.head_dim;
    const RowPlace at = place_row(p, request, row, slot + row - begin);
    const int32_t bits = at.status;
    if (head == 0 && lane == 0) report_on_device(s, request, bits);
    const float* cos_sin = p.cos_sin + (bits ? 0 : at.position) * p.cos_sin_stride;
    const int half = static_cast<int>(p.head_dim / 2);
    if (head < p.num_heads) {
      T* out = static_cast<T*>(p.q_out) + row * p.q_row_stride + head * p.q_head_stride;
      if (bits) {
        for (int d = lane; d < p.head_dim; d += kWarpSize) out[d] = as_storage<T>(0.0f);
      } else {
        norm_and_rotate(x, static_cast<const T*>(p.q_norm), p.eps, cos_sin, half, out);
      }
    } else if (bits) {
      continue;
    } else if (head < p.num_heads + p.num_kv_heads) {
      norm_and_rotate(x, static_cast<const T*>(p.k_norm), p.eps, cos_sin, half,
                      slot_of<T>(p.k, at.place, head - p.num_heads));
    } else {
      T* out = slot_of<T>(p.v, at.place, head - p.num_heads - p.num_kv_heads);
      for (int d = lane; d < p.head_dim; d += kWarpSize) out[d] = x[d];
    }
  }
}

// The same for 16-bit heads without norms, in whole chunks: one thread has a chunk of both halves.
template <typename T>
__global__ void __launch_bounds__(kChunkThreads)
    append_chunks_kernel(const __grid_constant__ AppendKvParams p) {
  launch_dependents();
  wait_for_prior_grid();
  const Sequences& s = p.sequences;
  const int64_t request = blockIdx.y;
  int64_t begin, end;
  if (!rows_of(s, request, &begin, &end)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) report_on_device(s, request, kStatusBadLength);
    return;
  }
  const int64_t slot = first_slot(s, request);
  const int half = static_cast<int>(p.head_dim / 2);
  const auto heads = static_cast<unsigned>(p.num_heads + 2 * p.num_kv_heads);
  const unsigned head_chunks = half / 8, row_chunks = heads * head_chunks;
  const unsigned count = static_cast<unsigned>(end - begin) * row_chunks;
  for (unsigned i = blockIdx.x * kChunkThreads + threadIdx.x; i < count;
       i += gridDim.x * kChunkThreads) {
    const unsigned nth = i / row_chunks, chunk = i % row_chunks;
    const HeadPair pair = {static_cast<int>(chunk / head_chunks),
                           static_cast<int>(chunk % head_chunks * 8)};
    const int64_t row = begin + nth;
    const T* x =
        static_cast<const T*>(p.qkv) + row * p.qkv_stride + pair.head * p.head_dim + pair.i;
    const uint4 low = *reinterpret_cast<const uint4*>(x);
    const uint4 high = *reinterpret_cast<const uint4*>(x + half);
    const RowPlace at = place_row(p, request, row, slot + nth);
    if (chunk == 0) report_on_device(s, request, at.status);
    store_pairs(pair_out<T>(p, row, pair, at), half, low, high,
                p.cos_sin + at.position * p.cos_sin_stride + pair.i);
  }
}

// ---- commit_path --------------------------------------------------------------------------------

// kStatusOk if every kept slot and its destination can be used. Called by one warp; the same result
// in all lanes.
__device__ int32_t check_path(const CommitPathParams& p, int64_t request) {
  const Sequences& s = p.sequences;
  const int32_t* path = p.path + request * p.path_stride;
  const int64_t kept = p.num_emitted[request], context = s.context_len[request];
  int64_t begin, end;
  if (!rows_of(s, request, &begin, &end) || context < 0 || kept < 0 || kept > p.path_len) {
    return kStatusBadLength;
  }
  int32_t bad_tree = kStatusOk, bad_slot = kStatusOk;
  for (int64_t i = threadIdx.x % kWarpSize; i < kept; i += kWarpSize) {
    const bool rising = i == 0 ? path[0] == 0 : path[i] > path[i - 1];
    if (!rising || path[i] >= end - begin) bad_tree = kStatusBadTree;
    Place place;
    bad_slot |= locate(s, request, context + i, &place);
    bad_slot |= locate(s, request, context + path[i], &place);
  }
  bad_tree = static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bad_tree)));
  bad_slot = static_cast<int32_t>(__reduce_or_sync(kFullWarp, static_cast<unsigned>(bad_slot)));
  return bad_tree ? bad_tree : bad_slot;  // if the path is invalid, its slots are meaningless
}

// One word of a slot: its address in slot `place`, and in row `row` of the recorded features.
template <typename Word>
struct Column {
  char* data;
  int64_t page_bytes, slot_bytes;
  __device__ Word* at(const Place& place) const {
    return reinterpret_cast<Word*>(data + place.page * page_bytes + place.offset * slot_bytes);
  }
};

template <typename Word>
__device__ void move_column(const CommitPathParams& p, int64_t request, const Column<Word>& column,
                            const char* rows) {
  const Sequences& s = p.sequences;
  const int32_t* path = p.path + request * p.path_stride;
  const int64_t kept = p.num_emitted[request], context = s.context_len[request];
  const auto slot_at = [&](int64_t slot) {
    Place place{};  // checked before, cannot fail
    locate(s, request, slot, &place);
    return column.at(place);
  };
  for (int64_t first = 0; first < kept; first += kPrefetchMoves) {
    Word word[kPrefetchMoves];
#pragma unroll
    for (int n = 0; n < kPrefetchMoves; ++n) {
      if (first + n >= kept) break;
      const int64_t slot = path[first + n];
      word[n] = rows == nullptr ? *slot_at(context + slot)
                                : *reinterpret_cast<const Word*>(
                                      rows + slot * p.feature_row_stride * p.feature_element_bytes);
    }
#pragma unroll
    for (int n = 0; n < kPrefetchMoves; ++n) {
      if (first + n >= kept) break;
      if (rows != nullptr || path[first + n] != first + n) *slot_at(context + first + n) = word[n];
    }
  }
}

// Grid: (blocks, in a grid-stride loop; requests).
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    move_kernel(const __grid_constant__ CommitPathParams p) {
  const int64_t request = blockIdx.y;
  wait_for_prior_grid();
  launch_dependents();
  if (check_path(p, request)) return;
  constexpr int64_t size = sizeof(Word);
  const int64_t head_words = p.head_bytes / size, slot_words = p.num_kv_heads * head_words;
  const int64_t cache_words = p.num_layers * slot_words;
  const int64_t feature_words = p.features == nullptr ? 0 : p.feature_bytes / size;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  // A rising path that ends at its own index is straight: its slots stay where they are.
  const int64_t kept = p.num_emitted[request];
  const bool still = kept == 0 || p.path[request * p.path_stride + kept - 1] == kept - 1;
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t i = first + (still ? 2 * cache_words : 0); i < 2 * cache_words + feature_words;
       i += step) {
    if (i >= 2 * cache_words) {
      const int64_t at = (i - 2 * cache_words) * size;
      const Column<Word> column{p.features + at, p.feature_page_stride * p.feature_element_bytes,
                                p.feature_slot_stride * p.feature_element_bytes};
      const int64_t row = p.sequences.row_start[request];
      move_column(p, request, column,
                  p.feature_rows + row * p.feature_row_stride * p.feature_element_bytes + at);
    } else {
      const LayeredCache& cache = i < cache_words ? p.k : p.v;
      const int64_t j = i % cache_words, layer = j / slot_words, head = j % slot_words / head_words;
      const int64_t elements = layer * cache.layer_stride + head * cache.layer.head_stride;
      char* data =
          static_cast<char*>(cache.layer.data) + elements * p.element_bytes + j % head_words * size;
      move_column(p, request,
                  Column<Word>{data, cache.layer.page_stride * p.element_bytes,
                               cache.layer.slot_stride * p.element_bytes},
                  nullptr);
    }
  }
}

// One warp per request: reports why move_kernel skipped it, or advances its length.
__global__ void __launch_bounds__(kThreads)
    advance_kernel(const __grid_constant__ CommitPathParams p) {
  const int64_t request = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  wait_for_prior_grid();
  launch_dependents();
  if (request >= p.sequences.num_requests) return;
  const int32_t bits = check_path(p, request);
  if (threadIdx.x % kWarpSize != 0) return;
  report_on_device(p.sequences, request, bits);
  if (!bits) p.context_len[request] += p.num_emitted[request];
}

// ---- copy_pages ---------------------------------------------------------------------------------

// Grid: (blocks, in a grid-stride loop; pairs; layers).
template <typename Word>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyPagesParams p) {
  const int64_t source = p.source[blockIdx.y], destination = p.destination[blockIdx.y];
  const auto inside = [&](int64_t page) { return 0 <= page && page < p.num_pages; };
  if (!inside(source) || !inside(destination) || source == destination) return;  // padding
  char* layer = p.cache + blockIdx.z * p.layer_bytes;
  const Word* from = reinterpret_cast<const Word*>(layer + source * p.page_stride_bytes);
  Word* to = reinterpret_cast<Word*>(layer + destination * p.page_stride_bytes);
  const int64_t words = p.page_bytes / sizeof(Word);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words;
       i += int64_t{gridDim.x} * kThreads) {
    to[i] = from[i];
  }
}

}  // namespace

void append_kv_cuda(const AppendKvParams& p, int device, uintptr_t stream) {
  const DeviceGuard guard(device);
  const Sequences& s = p.sequences;
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const int64_t rows = (s.num_rows + s.num_requests - 1) / s.num_requests;
  const unsigned requests = grid_axis("append_kv", "requests", s.num_requests);
  const bool normed = p.q_norm != nullptr || p.k_norm != nullptr;
  if (!normed && has_whole_chunks(p) && p.qkv_stride % 8 == 0 && address(p.qkv) % 16 == 0) {
    const int64_t chunks = rows * heads * (p.head_dim / 16);
    const KernelShape shape{blocks_for(chunks, kChunkThreads), kChunkThreads, 0, 1, requests};
    const auto kernel = p.dtype == DType::kFloat16 ? append_chunks_kernel<__half>
                                                   : append_chunks_kernel<__nv_bfloat16>;
    prefer_shared("append_kv", kernel);
    return launch_kernel("append_kv", kernel, shape, as_stream(stream), true, p);
  }
  const KernelShape shape{blocks_for(rows * heads, kWarps), kThreads, 0, 1, requests};
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    launch_kernel("append_kv", append_kernel<T>, shape, as_stream(stream), true, p);
  });
}

void commit_path_cuda(const CommitPathParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "commit_path";
  const DeviceGuard guard(device);
  const unsigned requests = grid_axis(op, "requests", p.sequences.num_requests);
  const int64_t element = p.element_bytes, feature = p.feature_element_bytes;
  const auto bytes = [&](const LayeredCache& c) {
    return std::array<int64_t, 5>{address(c.layer.data), c.layer_stride * element,
                                  c.layer.page_stride * element, c.layer.slot_stride * element,
                                  c.layer.head_stride * element};
  };
  const auto k = bytes(p.k), v = bytes(p.v);
  dispatch_word({k[0], k[1], k[2], k[3], k[4], v[0], v[1], v[2], v[3], v[4], p.head_bytes,
                 address(p.features), address(p.feature_rows), p.feature_bytes,
                 p.feature_page_stride * feature, p.feature_slot_stride * feature,
                 p.feature_row_stride * feature},
                [&](auto* tag) {
                  using Word = std::remove_pointer_t<decltype(tag)>;
                  const int64_t total =
                      2 * p.num_layers * p.num_kv_heads * p.head_bytes + p.feature_bytes;
                  const KernelShape shape{blocks_for(total / sizeof(Word), kThreads), kThreads, 0,
                                          1, requests};
                  launch_kernel(op, move_kernel<Word>, shape, as_stream(stream), true, p);
                });
  const KernelShape shape{(p.sequences.num_requests + kWarps - 1) / kWarps, kThreads};
  launch_kernel(op, advance_kernel, shape, as_stream(stream), true, p);
}

void copy_pages_cuda(const CopyPagesParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "copy_pages";
  const DeviceGuard guard(device);
  const unsigned pages = grid_axis(op, "pages", p.count);
  const unsigned layers = grid_axis(op, "layers", p.num_layers);
  dispatch_word(
      {address(p.cache), p.layer_bytes, p.page_stride_bytes, p.page_bytes}, [&](auto* tag) {
        using Word = std::remove_pointer_t<decltype(tag)>;
        const KernelShape shape{
            blocks_for(p.page_bytes / sizeof(Word), kThreads), kThreads, 0, 1, pages, layers};
        launch_kernel(op, copy_kernel<Word>, shape, as_stream(stream), false, p);
      });
}

}  // namespace tlt
