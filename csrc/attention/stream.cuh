// Streams the keys and values of one kv head, tile by tile, from their pages through a ring in
// shared memory: keys, values, keys, ... Positions past the end, and bad pages, are read as zeros.
//
// A tile is [head_dim / 64 lines][64 keys][128 bytes], in the swizzle of ldmatrix and wgmma. On
// sm_90 producer warps copy it, one lane per line of 16 keys; the arrival of its bytes completes a
// "full" barrier, the warps that release it complete an "empty" barrier. On sm_80 every thread
// copies its chunks, and the block's barrier serves for both.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"

namespace tlt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

constexpr int kProducerWarps = 4;  // on sm_90, after the consumer warps
constexpr int kTileSteps = kTile / kStep;
constexpr int kLine = 128;  // contiguous bytes of a key

template <int kDim>
constexpr int kTileBytes = kTile * kDim * 2;  // of keys, or of values

constexpr int kLineBytes = kTile * kLine;  // of a tile

// Byte offset of 16-byte chunk `chunk` of a key in its tile.
__device__ __forceinline__ uint32_t chunk_offset(int key, int chunk) {
  return chunk / 8 * kLineBytes + key * kLine + ((chunk % 8 ^ (key & 7)) << 4);
}

template <int kDim, int kRing>
struct Ring {
  char tile[kRing][kTileBytes<kDim>];
};

// A position in the ring and the parity of its round; lives as long as the block.
template <int kRing>
struct RingCursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kRing) slot = 0, parity ^= 1;
  }
};

// Barriers of the ring (sm_90): the bytes of a tile have arrived; all warps have released it.
template <int kRing>
struct RingBarriers {
  uint64_t full[kRing], empty[kRing];
};

struct TileMaps {
  CUtensorMap k, v;  // [pages, lines of a key, page size, kv heads, 64]; unused before sm_90
};

// Which keys a block streams: positions [begin, end) of one request and kv head.
struct KeyRange {
  int begin, end;
};

struct KeySource {
  const TreeAttentionParams& p;
  const TileMaps& maps;
  const int32_t* table;  // pages of the request
  int kv_head, page_shift, num_pages;
  KeyRange keys;

  __device__ __forceinline__ KeySource(const TreeAttentionParams& p, const TileMaps& maps,
                                       int64_t request, int64_t kv_head, int page_shift,
                                       const KeyRange& keys)
      : p(p),
        maps(maps),
        table(p.sequences.block_table + request * p.sequences.table_stride),
        kv_head(static_cast<int>(kv_head)),
        page_shift(page_shift),
        num_pages(static_cast<int>(min(p.sequences.num_pages, int64_t{INT32_MAX}))),
        keys(keys) {}

  __device__ __forceinline__ int page_at(int position) const {
    return position < keys.end ? __ldcg(table + (position >> page_shift)) : -1;
  }
  __device__ __forceinline__ bool good(int page) const { return page >= 0 && page < num_pages; }
  __device__ __forceinline__ int offset_of(int position) const {
    return position & ((1 << page_shift) - 1);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

template <typename T, int kDim, int kWarps, int kRing>
class KeyStream {
 public:
  __device__ __forceinline__ KeyStream(const KeySource& source, Ring<kDim, kRing>* ring,
                                       RingBarriers<kRing>*, RingCursor<kRing>* cursor)
      : source_(source),
        ring_(*ring),
        cursor_(*cursor),
        ahead_(*cursor),
        key_(source.keys.begin),
        chunk_(threadIdx.x % kChunks),
        row_(threadIdx.x / kChunks),
        k_(array_of(source.p.k)),
        v_(array_of(source.p.v)) {
    find_pages();
    for (int i = 0; i < kRing - 1; ++i) load_next();
  }

  __device__ __forceinline__ uint32_t acquire_keys() { return acquire(); }
  __device__ __forceinline__ uint32_t acquire_values() { return acquire(); }
  __device__ __forceinline__ void release_keys() { cursor_.advance(); }
  __device__ __forceinline__ void release_values() { cursor_.advance(); }

  // Stores the first position whose page is bad.
  __device__ __forceinline__ void finish(int* bad_from) {
    wait_copies<0>();
    if (threadIdx.x < kTileSteps) bad_from[threadIdx.x] = bad_from_;
  }

 private:
  static constexpr int kChunks = kDim * 2 / 16;
  static constexpr int kRowsAPass = kWarps * kWarpSize / kChunks;
  static_assert(kRowsAPass <= 2 * kStep && kTile % kRowsAPass == 0);

  struct Array {
    const T* data;  // of this thread's chunk
    int64_t page_stride, slot_stride;
  };

  // Waits until the next tile is complete for all threads, and loads a tile into the slot of the
  // previous one.
  __device__ __forceinline__ uint32_t acquire() {
    wait_copies<kRing - 2>();
    __syncthreads();
    load_next();
    return shared_address(ring_.tile[cursor_.slot]);
  }

  __device__ __forceinline__ Array array_of(const PagedCache& cache) const {
    const T* data = static_cast<const T*>(cache.data);
    return {data + source_.kv_head * cache.head_stride + chunk_ * 8, cache.page_stride,
            cache.slot_stride};
  }

  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) page_[i] = source_.page_at(key_ + i * kStep);
  }

  __device__ __forceinline__ void load_next() {
    if (key_ < source_.keys.end) {
      // By value: a reference to one of the two would put both in local memory.
      load({values_next_ ? v_.data : k_.data, values_next_ ? v_.page_stride : k_.page_stride,
            values_next_ ? v_.slot_stride : k_.slot_stride},
           shared_address(ring_.tile[ahead_.slot]));
      if (values_next_) {
        key_ += kTile;
        find_pages();
      }
      values_next_ = !values_next_;
      ahead_.advance();
    }
    commit_copies();
  }

  __device__ __forceinline__ void load(const Array& array, uint32_t to) {
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) {
      const int at = key_ + i * kStep;
      if (at < source_.keys.end && !source_.good(page_[i])) bad_from_ = min(bad_from_, at);
    }
#pragma unroll
    for (int first = 0; first < kTile; first += kRowsAPass) {
      int page = page_[first / kStep];
      if (kRowsAPass > kStep && row_ >= kStep) page = page_[(first + kRowsAPass / 2) / kStep];
      const bool valid = source_.good(page);
      const int row = first + row_;
      const T* from = array.data;
      if (valid) {
        from += page * array.page_stride + source_.offset_of(key_ + row) * array.slot_stride;
      }
      copy_async_16(to + chunk_offset(row, chunk_), from, valid);
    }
  }

  const KeySource& source_;
  Ring<kDim, kRing>& ring_;
  RingCursor<kRing>& cursor_;
  RingCursor<kRing> ahead_;
  int key_;
  bool values_next_ = false;
  const int chunk_, row_;
  const Array k_, v_;
  int page_[kTileSteps];
  int bad_from_ = INT32_MAX;
};

#else

// The stream for a consumer warp.
template <typename T, int kDim, int kWarps, int kRing>
class KeyStream {
 public:
  __device__ __forceinline__ KeyStream(const KeySource&, Ring<kDim, kRing>* ring,
                                       RingBarriers<kRing>* barriers, RingCursor<kRing>* cursor)
      : ring_(*ring), barriers_(*barriers), keys_(*cursor), values_(*cursor) {
    values_.advance();
  }

  // Keys may be acquired before the values of the previous tile; each kind is released before the
  // next of it is acquired.
  __device__ __forceinline__ uint32_t acquire_keys() { return acquire(keys_); }
  __device__ __forceinline__ uint32_t acquire_values() { return acquire(values_); }
  __device__ __forceinline__ void release_keys() { release(&keys_); }
  __device__ __forceinline__ void release_values() { release(&values_); }
  __device__ __forceinline__ void finish(int*) {}

 private:
  using Cursor = RingCursor<kRing>;

  __device__ __forceinline__ uint32_t acquire(const Cursor& cursor) {
    wait_barrier(&barriers_.full[cursor.slot], cursor.parity);
    return shared_address(ring_.tile[cursor.slot]);
  }

  __device__ __forceinline__ void release(Cursor* cursor) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive(&barriers_.empty[cursor->slot]);
    cursor->advance();
    cursor->advance();
  }

  Ring<kDim, kRing>& ring_;
  RingBarriers<kRing>& barriers_;
  Cursor& keys_;  // the block's cursor, which is past all tiles when this one is
  Cursor values_;
};

// Prefetches keys and values `first` to `last` of the stream into L2, two producer warps for each.
// It is only a hint, so the block table may be out of date.
template <int kDim>
__device__ __forceinline__ void prefetch_keys(const KeySource& source, int first, int last) {
  constexpr int kLines = kDim * 2 / kLine, kLanes = kProducerWarps * kWarpSize / 2;
  const int lane = threadIdx.x % kLanes, line = lane % kLines;
  const CUtensorMap* map = threadIdx.x / kLanes % 2 ? &source.maps.v : &source.maps.k;
  const int end = min(source.keys.begin + last, source.keys.end);
#pragma unroll 1
  for (int at = source.keys.begin + first + lane / kLines * kStep; at < end;
       at += kLanes / kLines * kStep) {
    const int page = source.page_at(at);
    if (source.good(page)) {
      prefetch_box(map, 0, source.kv_head, source.offset_of(at), line, page);
    }
  }
}

// The work of a producer warp. 1 << `loader_shift` of them, up to 4, share the steps of all tiles,
// one lane per line of 16 keys (a warp issues its boxes one after the other, some 100 cycles each).
// They store the first position whose page is bad. Keys from `committed` on may be written by the
// previous kernel. When the ring is full, the keys after those, up to key `ahead` of the stream,
// are prefetched into L2.
template <int kDim, int kRing>
__device__ __forceinline__ void produce_tiles(const KeySource& source, int loader_shift,
                                              int committed, int ahead, Ring<kDim, kRing>* ring,
                                              RingBarriers<kRing>* barriers,
                                              RingCursor<kRing>* cursor, int* bad_from) {
  constexpr int kLines = kDim * 2 / kLine, kFull = kRing / 2 * kTile;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % kProducerWarps;
  if (warp >> loader_shift > 0) return;
  static_assert(kTileSteps == 4);
  const int shift = 2 - loader_shift, steps = 1 << shift;  // no divisions before the first tile
  const int line = lane >> shift, step = (warp << shift) + (lane & (steps - 1));
  const uint32_t to = shared_address(ring) + line * kLineBytes + step * (kStep * kLine);
  int bad = INT32_MAX;
  int at = source.keys.begin + step * kStep;
  int page = source.page_at(at);
#pragma unroll 1
  for (int key = source.keys.begin; key < source.keys.end; key += kTile, at += kTile) {
    const int next_page = source.page_at(at + kTile);
    const bool good = source.good(page);
    if (at < source.keys.end && !good) bad = min(bad, at);
    if (min(key + kTile, source.keys.end) > committed) wait_for_prior_grid();
    if (key - source.keys.begin == kFull) prefetch_keys<kDim>(source, kFull, ahead);
#pragma unroll
    for (int values = 0; values < 2; ++values) {
      uint64_t* full = &barriers->full[cursor->slot];
      wait_barrier(&barriers->empty[cursor->slot], cursor->parity ^ 1);
      if (lane == 0) arrive_expecting(full, kTileBytes<kDim> >> loader_shift);
      __syncwarp();
      if (line < kLines) {  // a page outside the cache reads as zeros
        copy_box(to + cursor->slot * kTileBytes<kDim>, values ? &source.maps.v : &source.maps.k, 0,
                 source.kv_head, source.offset_of(at), line, good ? page : source.num_pages, full);
      }
      cursor->advance();
    }
    page = next_page;
  }
  if (lane < steps) bad_from[step] = bad;
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
// Never called for sm_80.
template <int kDim, int kRing>
__device__ __forceinline__ void produce_tiles(const KeySource&, int, int, int, Ring<kDim, kRing>*,
                                              RingBarriers<kRing>*, RingCursor<kRing>*, int*) {}
template <int kDim>
__device__ __forceinline__ void prefetch_keys(const KeySource&, int, int) {}
#endif

}  // namespace tlt
