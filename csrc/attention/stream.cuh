// Streams the keys and values of one kv head, tile by tile, from their pages through a ring in
// shared memory: keys, values, keys, ... Positions from the end on, and bad pages, become zeros.
//
// A tile is [head_dim / 64][64 keys][128 bytes], swizzled so that ldmatrix has no bank conflicts.
// On sm_90 eight lanes ask for it, a box of 16 slots each, and its bytes complete a barrier; on
// sm_80 every thread copies its chunks.
#pragma once

#include "attention/canonical.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"

namespace tlt {

constexpr int kTileSteps = kTile / kStep;
constexpr int kLine = 128;  // bytes of a key that lie together

template <int kDim>
constexpr int kTileBytes = kTile * kDim * 2;  // of keys, or of values

// Byte offset of 16-byte chunk `chunk` of a key in its tile.
template <int kDim>
__device__ __forceinline__ uint32_t chunk_offset(int key, int chunk) {
  return key / kStep * (kStep * kDim * 2) + chunk / 8 * (kStep * kLine) + key % kStep * kLine +
         ((chunk % 8 ^ (key & 7)) << 4);
}

template <int kDim, int kRing>
struct Ring {
  char tile[kRing][kTileBytes<kDim>];
};

// What all threads of a block know of the ring; lives as long as the block.
template <int kRing>
struct RingPlace {
  int slot = 0;         // of the tile taken next
  uint32_t parity = 0;  // of its barrier
  __device__ __forceinline__ int before() const { return slot == 0 ? kRing - 1 : slot - 1; }
  __device__ __forceinline__ void advance() {
    if (++slot == kRing) slot = 0, parity ^= 1;
  }
};

struct TileMaps {
  CUtensorMap k, v;  // [pages, lines of a key, page size, kv heads, 64]; unused before sm_90
};

// Pages of the next tile, a step each: what both ways of copying share.
struct PageCursor {
  const int32_t* table;
  int key, end, num_pages, shift;
  bool values_next = false;

  __device__ __forceinline__ PageCursor(const TreeAttentionParams& p, const Request& r, int begin,
                                        int end, int shift)
      : table(p.sequences.block_table + r.index * p.sequences.table_stride),
        key(begin),
        end(end),
        num_pages(static_cast<int>(min(p.sequences.num_pages, int64_t{INT32_MAX}))),
        shift(shift) {}

  __device__ __forceinline__ int page_of(int step) const {
    const int at = key + step * kStep;
    return at < end ? table[at >> shift] : -1;
  }
  __device__ __forceinline__ bool good(int page) const { return page >= 0 && page < num_pages; }
  __device__ __forceinline__ int offset_of(int at) const { return at & ((1 << shift) - 1); }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

template <typename T, int kDim, int kThreads>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const TreeAttentionParams& p, const TileMaps&,
                                        const Request& r, int kv_head, int begin, int end,
                                        int shift)
      : pages_(p, r, begin, end, shift),
        chunk_(threadIdx.x % kChunks),
        row_(threadIdx.x / kChunks),
        k_{static_cast<const T*>(p.k.data) + kv_head * p.k.head_stride + chunk_ * 8,
           p.k.page_stride, p.k.slot_stride},
        v_{static_cast<const T*>(p.v.data) + kv_head * p.v.head_stride + chunk_ * 8,
           p.v.page_stride, p.v.slot_stride} {
    find_pages();
  }

  __device__ __forceinline__ void load_next(uint32_t to, uint64_t*) {
    if (pages_.key < pages_.end) {
      const bool values = pages_.values_next;
      // By value: a reference to one of the two would put both in local memory.
      load({values ? v_.data : k_.data, values ? v_.page_stride : k_.page_stride,
            values ? v_.slot_stride : k_.slot_stride},
           to);
      if (values) {
        pages_.key += kTile;
        find_pages();
      }
      pages_.values_next = !values;
    }
    commit_copies();
  }

  template <int kRing>
  __device__ __forceinline__ void wait(uint64_t*, uint32_t) {
    wait_copies<kRing - 2>();
  }

  __device__ __forceinline__ void publish_bad(int* bad_from) {
    if (threadIdx.x == 0) *bad_from = bad_from_;
  }

 private:
  static constexpr int kChunks = kDim * 2 / 16;
  static constexpr int kRowsAPass = kThreads / kChunks;
  static_assert(kRowsAPass <= 2 * kStep && kTile % kRowsAPass == 0);

  struct Source {
    const T* data;  // of this thread's chunk
    int64_t page_stride, slot_stride;
  };

  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) page_[i] = pages_.page_of(i);
  }

  __device__ __forceinline__ void load(const Source& source, uint32_t to) {
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) {
      const int at = pages_.key + i * kStep;
      if (at < pages_.end && !pages_.good(page_[i])) bad_from_ = min(bad_from_, at);
    }
#pragma unroll
    for (int first = 0; first < kTile; first += kRowsAPass) {
      int page = page_[first / kStep];
      if (kRowsAPass > kStep && row_ >= kStep) page = page_[(first + kRowsAPass / 2) / kStep];
      const bool valid = pages_.good(page);
      const int row = first + row_;
      const T* from = source.data;
      if (valid) {
        from += page * source.page_stride + pages_.offset_of(pages_.key + row) * source.slot_stride;
      }
      copy_async_16(to + chunk_offset<kDim>(row, chunk_), from, valid);
    }
  }

  PageCursor pages_;
  const int chunk_, row_;
  const Source k_, v_;
  int page_[kTileSteps];
  int bad_from_ = INT32_MAX;
};

#else

// Warp w < 4 asks for step w of each tile, by one lane; the others only wait.
template <typename T, int kDim, int kThreads>
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const TreeAttentionParams& p, const TileMaps& maps,
                                        const Request& r, int kv_head, int begin, int end,
                                        int shift)
      : pages_(p, r, begin, end, shift), maps_(maps), kv_head_(kv_head) {
    static_assert(kThreads / kWarpSize >= kTileSteps);
    step_ = threadIdx.x / kWarpSize;
    asks_ = step_ < kTileSteps && threadIdx.x % kWarpSize == 0;
    if (asks_) page_ = pages_.page_of(step_);
  }

  __device__ __forceinline__ void load_next(uint32_t to, uint64_t* barrier) {
    if (!asks_ || pages_.key >= pages_.end) return;
    if (step_ == 0) arrive_expecting(barrier, kTileBytes<kDim>);
    const int at = pages_.key + step_ * kStep;
    const bool valid = pages_.good(page_);
    if (at < pages_.end && !valid) bad_from_ = min(bad_from_, at);
    // All lines of 16 slots; a page outside the cache reads as zeros.
    copy_box(to + step_ * (kStep * kDim * 2), pages_.values_next ? &maps_.v : &maps_.k, 0, kv_head_,
             pages_.offset_of(at), 0, valid ? page_ : pages_.num_pages, barrier);
    if (pages_.values_next) {
      pages_.key += kTile;
      page_ = pages_.page_of(step_);
    }
    pages_.values_next = !pages_.values_next;
  }

  template <int kRing>
  __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
    wait_barrier(barrier, parity);
  }

  // Lowers *bad_from to the first position whose page is bad, of the tiles loaded.
  __device__ __forceinline__ void publish_bad(int* bad_from) {
    if (asks_ && bad_from_ != INT32_MAX) atomicMin(bad_from, bad_from_);
  }

 private:
  PageCursor pages_;
  const TileMaps& maps_;
  const int kv_head_;
  int step_, page_ = -1;
  bool asks_;
  int bad_from_ = INT32_MAX;
};

#endif

}  // namespace tlt
