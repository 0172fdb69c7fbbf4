// Attention of ragged rows over a paged cache, 16-bit, tensor cores (mma.sync, cp.async):
//
//   out[row, head] = sum_j softmax_j(scale * q . k_j) v_j    over the row's keys j = 0 .. position
//
// The query heads of a kv head and the rows of a request are packed into M, 16 (row, head) pairs a
// warp. A block owns one request, kv head and block of rows, and a range of splits of the keys
// (splits.h): it streams tiles of 64 keys and of 64 values through a ring in shared memory, once,
// and each warp folds them into its pairs alone, so a pair's bits do not depend on the block. With
// few blocks one more grid dimension shares out the splits and the rows' tails: partials go to the
// caller's workspace and a second launch folds them. Otherwise a block folds its own.
//
// Moves each key and value once per row block. head_dim 64 and 128, pages of 16 to 128 slots,
// groups to 8. Every address comes from a checked page; the grid depends on shapes alone.
#include <string>
#include <type_traits>

#include "attention/op.h"
#include "attention/plan.h"
#include "attention/tail.cuh"
#include "attention/tiles.cuh"

namespace tlt {
namespace {

constexpr int kMergeWarps = 4;

// Partials of the items of every (row, head): item 0 .. max_items - 1, then the tail.
struct Partials {
  float* acc;        // [max_items + 1, rows, heads, head_dim]; null: each block folds its own
  Softmax* softmax;  // [max_items + 1, rows, heads]
  int max_items, share;
};

struct Launch {
  TreeAttentionParams p;
  Partials partials;
  int group, row_blocks, page_shift;
  TileMaps maps;
};

__device__ __forceinline__ int64_t partial_index(const Launch& l, int64_t item, int64_t row,
                                                 int64_t head) {
  return (item * l.p.sequences.num_rows + row) * l.p.num_heads + head;
}

// Splits that item 0 takes, from the first on; it folds them in registers.
__device__ __forceinline__ int64_t first_splits(const Launch& l, const Request& r) {
  const int64_t splits = splits_below(r.context * 3 / (2 * l.partials.share));
  return splits < 1 ? 1 : splits;
}

struct KeyRange {
  int begin, end;  // positions
};

// Keys of item `item` of a row block whose tile keys end at `end`. The items after the first take
// a split each, the last split first, since late splits are the large ones.
__device__ __forceinline__ KeyRange item_keys(const Launch& l, const Request& r, int64_t item,
                                              int end, int64_t* index) {
  *index = 0;
  if (l.partials.acc == nullptr) return {0, end};
  const int64_t first = first_splits(l, r);
  if (item == 0) return {0, min(end, static_cast<int>(split_begin(first)))};
  const int64_t split = splits_below(end) - item;
  if (split < first) return {0, 0};
  *index = split - first + 1;
  return {static_cast<int>(split_begin(split)), min(end, static_cast<int>(split_begin(split + 1)))};
}

template <int kDim>
constexpr int kTailStride = kDim + 8;  // floats between tails in shared memory: no bank conflicts

template <int kWarps>
constexpr int kRingTiles = kWarps == 4 ? 5 : 8;  // two blocks a multiprocessor, or one

// Shared memory of a block: the ring of tiles, which the tails use after it, and the totals of
// splits done, kept out of the registers that the tiles need.
template <int kDim, int kWarps>
struct Shared {
  static constexpr int kPairs = kWarps * kMmaRows;
  static constexpr int kRing = kRingTiles<kWarps>;
  struct Tails {
    float acc[kPairs][kTailStride<kDim>];
    TailScratch<kDim> scratch[kWarps];
    Softmax softmax[kPairs];
  };
  union {
    Ring<kDim, kRing> ring;
    Tails tails;
  };
  float2 total[kWarps][kDim / 4][kWarpSize];  // accumulators of a lane, a column of its own
  uint64_t full[kRing];                       // barriers of the ring (sm_90)
  int bad_from;                               // first position whose page is bad
};

// The rows of one block: m = row * group + head.
template <typename T, int kDim, int kWarps>
class RowBlock {
 public:
  __device__ __forceinline__ RowBlock(const Launch& l, const Request& r, int64_t kv_head,
                                      int64_t row, Shared<kDim, kWarps>* shared,
                                      RingPlace<kRingTiles<kWarps>>* place)
      : l_(l), p_(l.p), r_(r), kv_head_(kv_head), row_(row), shared_(*shared), place_(*place) {
    num_rows_ = static_cast<int>(min(r.num_rows - row, int64_t{kWarps * kMmaRows / l.group}));
    warp_ = threadIdx.x / kWarpSize;
    lane_ = threadIdx.x % kWarpSize;
  }

  // Folds the tile keys of one item; returns what the warp's rows have.
  __device__ __forceinline__ void run(int64_t item) {
    int64_t index;
    const int end = tile_keys(p_, r_, row_ + num_rows_);
    const KeyRange keys = item_keys(l_, r_, item, end, &index);
    if (keys.begin >= keys.end && l_.partials.acc != nullptr) return;
    TileLoader<T, kDim, kWarps * kWarpSize> loader(p_, l_.maps, r_, static_cast<int>(kv_head_),
                                                   keys.begin, keys.end, l_.page_shift);
    const auto load_to = [&](int slot) {
      loader.load_next(shared_address(shared_.ring.tile[slot]), &shared_.full[slot]);
    };
    for (int i = 0; i < kRing - 1; ++i) load_to((place_.slot + i) % kRing);
    if (threadIdx.x == 0) shared_.bad_from = INT32_MAX;  // read after many barriers
    read_queries();
    WarpTile<T, kDim> tile(queries_, mul_rn(p_.scale, kInvLn2), &part_);
    clear_total();
    part_.clear();
    // Waits for the next tile, and loads another to where the last one was.
    const auto take_tile = [&] {
      const int slot = place_.slot;
      loader.template wait<kRing>(&shared_.full[slot], place_.parity);
      __syncthreads();  // the tile is there for all, and all have left the last one
      load_to(place_.before());
      place_.advance();
      return shared_address(shared_.ring.tile[slot]);
    };
    for (int key = keys.begin; key < keys.end; key += kTile) {
      const bool active = key < queries_.largest;
      const uint32_t tile_keys = take_tile();
      if (active) tile.fold_keys(key, tile_keys);
      const uint32_t tile_values = take_tile();
      if (active) tile.fold_values(key, tile_values);
      if (starts_split(key + kTile) || key + kTile >= keys.end) fold_part();
    }
    loader.publish_bad(&shared_.bad_from);
    wait_copies<0>();
    __syncthreads();  // the ring is free
    bad_from_ = shared_.bad_from;
    report_bad_pages();
    if (l_.partials.acc != nullptr) store_partial(index);
  }

  // Folds the tails, which are in shared memory, and writes the rows.
  __device__ __forceinline__ void finish() {
    fold_tails();
    store_out();
  }

  // Tails of this block's rows, a warp each: into the workspace, or for the block itself.
  __device__ __forceinline__ void run_tails(int first, int step) {
    for (int i = first; i < num_rows_; i += step) {
      Softmax* softmax = shared_.tails.softmax + i * l_.group;
      float* acc = shared_.tails.acc[i * l_.group];
      int64_t stride = kTailStride<kDim>;
      uint4* values = nullptr;
      if (l_.partials.acc != nullptr) {
        const int64_t at =
            partial_index(l_, l_.partials.max_items, r_.row + row_ + i, kv_head_ * l_.group);
        softmax = l_.partials.softmax + at;
        acc = l_.partials.acc + at * kDim;
        stride = kDim;
        values = reinterpret_cast<uint4*>(shared_.total[warp_]);  // no splits, no totals
        static_assert(sizeof(shared_.total[0]) == kTailKeys * kDim * sizeof(T));
      }
      attend_tail<T, kDim>(p_, r_, row_ + i, kv_head_, l_.group, kv_head_ == 0,
                           &shared_.tails.scratch[warp_], values, softmax, acc, stride);
    }
  }

 private:
  static constexpr int kRing = kRingTiles<kWarps>;

  // The (row, head) pair of this lane's low or high row.
  struct Pair {
    bool inside;
    int m, head;
    int64_t row;  // among all rows
  };

  __device__ __forceinline__ Pair pair(int half) const {
    const int m = warp_ * kMmaRows + lane_ / 4 + half * 8;
    const int row = m / l_.group;
    return {row < num_rows_, m, m - row * l_.group, r_.row + row_ + row};
  }

  __device__ __forceinline__ void read_queries() {
    int smallest = INT32_MAX, largest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      int end = kNoRow;
      const T* q = static_cast<const T*>(p_.q);
      const int position = at.inside ? p_.position[at.row] : 0;
      const bool good = at.inside && well_placed(p_, r_, at.row - r_.row, position);
      if (good) {
        end = static_cast<int>(tail_begin(position));
        q += at.row * p_.q_row_stride + (kv_head_ * l_.group + at.head) * p_.q_head_stride;
        smallest = min(smallest, end);
        largest = max(largest, end);
      }
      queries_.end[half] = end;
      const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q) + lane_ % 4;
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        queries_.q[step][half] = good ? pairs[step * 8] : 0;
        queries_.q[step][half + 2] = good ? pairs[step * 8 + 4] : 0;
      }
    }
    queries_.smallest = __reduce_min_sync(kFullWarp, smallest);
    queries_.largest = __reduce_max_sync(kFullWarp, largest);
  }

  // A lane's accumulators of the splits done: columns 8 n + 2 (lane % 4) and the next of a half.
  __device__ __forceinline__ float2& total(int half, int n) {
    return shared_.total[warp_][2 * n + half][lane_];
  }

  __device__ __forceinline__ void clear_total() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total_softmax_[half] = Softmax{};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) total(half, n) = make_float2(0.0f, 0.0f);
    }
  }

  // Folds the lane's accumulators of a half, given by column, into the total.
  template <typename Part>
  __device__ __forceinline__ void fold_into_total(int half, const Softmax& softmax, Part&& part) {
    float scale[2];
    if (!fold(&total_softmax_[half], softmax, scale)) return;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 before = total(half, n), more = part(n);
      total(half, n) =
          make_float2(folded(before.x, more.x, scale), folded(before.y, more.y, scale));
    }
  }

  __device__ __forceinline__ void fold_part() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fold_into_total(half, {part_.max[half], part_.sum[2 * half]}, [&](int n) {
        return make_float2(part_.acc[n][2 * half], part_.acc[n][2 * half + 1]);
      });
    }
    part_.clear();
  }

  // Whether a page that the pair's tile keys need was bad.
  __device__ __forceinline__ bool bad(int half) const {
    return queries_.end[half] != kNoRow && bad_from_ < queries_.end[half];
  }

  __device__ __forceinline__ void report_bad_pages() {
    const bool any = (pair(0).inside && bad(0)) || (pair(1).inside && bad(1));
    if (any && kv_head_ == 0) report_on_device(p_.sequences, r_.index, kStatusBadPage);
  }

  __device__ __forceinline__ void store_partial(int64_t item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const int64_t index = partial_index(l_, item, at.row, kv_head_ * l_.group + at.head);
      Softmax softmax = total_softmax_[half];
      if (bad(half)) softmax.sum = -1.0f;
      if (lane_ % 4 == 0) l_.partials.softmax[index] = softmax;
      float2* acc = reinterpret_cast<float2*>(l_.partials.acc + index * kDim) + lane_ % 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) acc[n * 4] = total(half, n);
    }
  }

  __device__ __forceinline__ void fold_tails() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const Softmax tail = shared_.tails.softmax[at.m];
      if (tail.sum < 0.0f || bad(half)) {
        total_softmax_[half].sum = -1.0f;
        continue;
      }
      const float2* acc = reinterpret_cast<const float2*>(shared_.tails.acc[at.m]) + lane_ % 4;
      fold_into_total(half, tail, [&](int n) { return acc[n * 4]; });
    }
  }

  __device__ __forceinline__ void store_out() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pair at = pair(half);
      if (!at.inside) continue;
      const Softmax& softmax = total_softmax_[half];
      const bool refused = softmax.sum < 0.0f;
      const int64_t head = kv_head_ * l_.group + at.head;
      const float inverse = refused ? 0.0f : __frcp_rn(softmax.sum);
      T* out = static_cast<T*>(p_.out) + at.row * p_.out_row_stride + head * p_.out_head_stride;
      uint32_t* pairs = reinterpret_cast<uint32_t*>(out) + lane_ % 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 acc = total(half, n);
        pairs[n * 4] = refused ? 0 : pack_pair<T>(mul_rn(acc.x, inverse), mul_rn(acc.y, inverse));
      }
      if (p_.lse != nullptr && lane_ % 4 == 0) {
        p_.lse[at.row * p_.lse_stride + head] = refused ? -INFINITY : lse_of(softmax);
      }
    }
  }

  const Launch& l_;
  const TreeAttentionParams& p_;
  const Request& r_;
  const int64_t kv_head_, row_;
  Shared<kDim, kWarps>& shared_;
  RingPlace<kRing>& place_;
  int num_rows_, warp_, lane_;
  int bad_from_;
  Queries<kDim> queries_;
  Fragment<kDim> part_;
  Softmax total_softmax_[2];
};

// Makes the barriers of a ring; the same code for sm_80, which has none.
template <int kRing>
__device__ __forceinline__ void init_ring(uint64_t (&full)[kRing]) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : full) init_barrier(&barrier, 1);
    fence_copies();
  }
  __syncthreads();
#endif
}

// Lets copies overwrite what this thread wrote to the ring's memory.
__device__ __forceinline__ void release_ring() {
#if __CUDA_ARCH__ >= 900
  fence_copies();
#endif
}

// Grid: (kv heads * row blocks, requests, items and tails).
template <typename T, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, kWarps == 4 ? 2 : 1)
    attend_kernel(const __grid_constant__ Launch l) {
  extern __shared__ __align__(1024) char memory[];
  auto* shared = reinterpret_cast<Shared<kDim, kWarps>*>(memory);
  launch_dependents();
  RingPlace<kRingTiles<kWarps>> place;
  init_ring(shared->full);
  const Request r = read_request(l.p, blockIdx.y);
  if (!r.good && blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    report_on_device(l.p.sequences, r.index, kStatusBadLength);
  }
  const int64_t kv_head = blockIdx.x / l.row_blocks;
  const int block_rows = kWarps * kMmaRows / l.group;
  for (int64_t row = int64_t{blockIdx.x % l.row_blocks} * block_rows; row < r.num_rows;
       row += int64_t{l.row_blocks} * block_rows) {
    RowBlock<T, kDim, kWarps> block(l, r, kv_head, row, shared, &place);
    const int item = blockIdx.z, tail_item = item - l.partials.max_items;
    const bool alone = l.partials.acc == nullptr;
    if (tail_item < 0) block.run(item);
    if (alone || tail_item >= 0) {
      const int first = alone ? 0 : tail_item * kWarps;
      block.run_tails(first + threadIdx.x / kWarpSize,
                      alone ? kWarps : (gridDim.z - l.partials.max_items) * kWarps);
    }
    if (alone) {
      __syncthreads();  // all tails are there
      block.finish();
    }
    release_ring();
    __syncthreads();  // the next turn reuses shared memory
  }
}

// Folds the partials of each (row, head): a warp each. Grid: (blocks by turns, requests).
template <typename T, int kDim>
__global__ void __launch_bounds__(kMergeWarps* kWarpSize)
    merge_kernel(const __grid_constant__ Launch l) {
  constexpr int kLaneDims = kDim / kWarpSize, kAhead = 12;
  const TreeAttentionParams& p = l.p;
  const Request r = read_request(p, blockIdx.y);
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first = int64_t{blockIdx.x} * kMergeWarps + threadIdx.x / kWarpSize;
  bool waited = false;
  for (int64_t i = first; i < r.num_rows * p.num_heads; i += int64_t{gridDim.x} * kMergeWarps) {
    const int64_t row = r.row + i / p.num_heads, head = i % p.num_heads;
    const int64_t tail = partial_index(l, l.partials.max_items, row, head);
    Softmax total;
    float acc[kLaneDims] = {};
    bool refused = !well_placed(p, r, row - r.row, p.position[row]);
    const int64_t splits = refused ? 0 : splits_below(tail_begin(p.position[row]));
    const int64_t first_item = first_splits(l, r);
    const int64_t items = splits == 0 ? 0 : splits <= first_item ? 1 : splits - first_item + 1;
    if (!waited) wait_for_prior_grid();  // what was read so far is older than that grid
    waited = true;
    for (int64_t item = 0; item <= items; item += kAhead) {
      Softmax part[kAhead];
      float value[kAhead][kLaneDims];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {  // all reads before the first fold
        if (item + a > items) break;
        const int64_t at = item + a == items ? tail : partial_index(l, item + a, row, head);
        part[a] = l.partials.softmax[at];
        const float* from = l.partials.acc + at * kDim + lane * kLaneDims;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) value[a][d] = from[d];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (item + a > items) break;
        float scale[2];
        refused |= part[a].sum < 0.0f;
        if (!fold(&total, part[a], scale)) continue;
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) acc[d] = folded(acc[d], value[a][d], scale);
      }
    }
    const float inverse = __frcp_rn(total.sum);
    T* out = static_cast<T*>(p.out) + row * p.out_row_stride + head * p.out_head_stride;
#pragma unroll
    for (int d = 0; d < kLaneDims; d += 2) {
      const uint32_t two = pack_pair<T>(mul_rn(acc[d], inverse), mul_rn(acc[d + 1], inverse));
      reinterpret_cast<uint32_t*>(out + lane * kLaneDims)[d / 2] = refused ? 0 : two;
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[row * p.lse_stride + head] = refused ? -INFINITY : lse_of(total);
    }
  }
}

CUtensorMap map_of(const TreeAttentionParams& p, const PagedCache& cache) {
  const Sequences& s = p.sequences;
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int64_t lines = p.head_dim * 2 / kLine;
  return make_tensor_map(
      cache.data,
      {kLine / 2, size(p.num_kv_heads), size(s.page_size), size(lines), size(s.num_pages)},
      {size(2 * cache.head_stride), size(2 * cache.slot_stride), kLine,
       size(2 * cache.page_stride)},
      {kLine / 2, 1, kStep, static_cast<cuuint32_t>(lines), 1});
}

template <typename T, int kDim, int kWarps>
void launch_attend(const Launch& l, const AttentionPlan& plan, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<kDim, kWarps>);
  const auto kernel = attend_kernel<T, kDim, kWarps>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "tree_attention: shared memory");
  const int64_t block_rows = kWarps * kMmaRows / l.group;
  const int64_t tails = l.partials.acc == nullptr ? 0 : (block_rows + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(l.p.num_kv_heads * plan.row_blocks),
                  static_cast<unsigned>(l.p.sequences.num_requests),
                  static_cast<unsigned>(l.partials.max_items + tails));
  kernel<<<grid, kWarps * kWarpSize, bytes, stream>>>(l);
  check_cuda(cudaGetLastError(), "tree_attention");
}

template <typename T, int kDim>
void launch_merge(const Launch& l, cudaStream_t stream) {
  const Sequences& s = l.p.sequences;
  const int64_t pairs = (s.num_rows + s.num_requests - 1) / s.num_requests * l.p.num_heads;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((pairs + kMergeWarps - 1) / kMergeWarps),
                        static_cast<unsigned>(s.num_requests));
  config.blockDim = dim3(kMergeWarps * kWarpSize);
  config.stream = stream;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = is_hopper() ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, merge_kernel<T, kDim>, l), "tree_attention: merge");
}

template <typename T, int kDim>
void launch(const Launch& l, const AttentionPlan& plan, cudaStream_t stream) {
  if (plan.warps == 4) {
    launch_attend<T, kDim, 4>(l, plan, stream);
  } else {
    launch_attend<T, kDim, 8>(l, plan, stream);
  }
  if (l.partials.acc != nullptr) launch_merge<T, kDim>(l, stream);
}

}  // namespace

void tree_attention_cuda(const TreeAttentionParams& p, void* workspace, int device,
                         uintptr_t stream) {
  const DeviceGuard guard(device);
  if (p.dtype == DType::kFloat32) return tree_attention_float_cuda(p, stream);
  const Sequences& s = p.sequences;
  AttentionPlan plan = plan_attention({s.num_requests, s.num_rows, p.num_heads, p.num_kv_heads,
                                       p.head_dim, s.max_pages * s.page_size});
  const auto group = static_cast<int>(p.num_heads / p.num_kv_heads);
  int page_shift = 0;
  while (int64_t{1} << page_shift < s.page_size) ++page_shift;
  Launch l{p, {}, group, static_cast<int>(plan.row_blocks), page_shift, {}};
  if (is_hopper()) l.maps = {map_of(p, p.k), map_of(p, p.v)};
  l.partials = {nullptr, nullptr, 1, 1};
  if (workspace != nullptr && plan.max_items > 1) {
    const int64_t partials = (plan.max_items + 1) * s.num_rows * p.num_heads;
    auto* acc = static_cast<float*>(workspace);
    l.partials = {acc, reinterpret_cast<Softmax*>(acc + partials * p.head_dim),
                  static_cast<int>(plan.max_items), static_cast<int>(plan.share)};
  }
  dispatch_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if constexpr (!std::is_same_v<T, float>) {
      if (p.head_dim == 64) return launch<T, 64>(l, plan, as_stream(stream));
      if (p.head_dim == 128) return launch<T, 128>(l, plan, as_stream(stream));
      throw std::invalid_argument("tree_attention: on a GPU a 16-bit head_dim is 64 or 128, got " +
                                  std::to_string(p.head_dim));
    }
  });
}

}  // namespace tlt
