// Parts of the wgmma kernel (linear_hopper.cu): its tiles and who takes which, the loads, the
// products and what becomes of their sums.
#pragma once

#include <algorithm>

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "layers/columns.cuh"
#include "layers/decode.cuh"
#include "layers/products.cuh"

namespace tlt {

constexpr int kGroup = 4 * kWarpSize;  // threads of a warpgroup
constexpr int kLineBytes = kBlockK * 2;
constexpr int kMaxStages = 10;
constexpr int kMaxShared = 227 * 1024;

template <int kGroups_, int kRows_, int kHeld_, bool kTurns_ = false>
struct Tile {
  static constexpr int kGroups = kGroups_;  // that multiply
  static constexpr int kRows = kRows_;      // of x
  static constexpr int kHeld = kHeld_;      // parts of K summed side by side
  // Of two parts one is multiplied while the other is added, and their blocks do not alternate.
  static constexpr bool kTurns = kTurns_;
  static_assert(!kTurns || kHeld == 2);
  static constexpr int kPerSm = kGroups == 1 ? 2 : 1;  // blocks that fit beside each other
  static constexpr int kWeightRows = 64 * kGroups;
  static constexpr int kThreads = (kGroups + 1) * kGroup;
  static constexpr int kSums = kWeightRows * kRows;
  static constexpr int kTurnRows = std::min(kRows, 32);  // turned from wgmma's layout at once
  static constexpr int kTurn = kTurnRows * 64;
  static constexpr int kStageBytes = (kWeightRows + kRows) * kLineBytes;
  static constexpr int kStages = std::min(
      kMaxStages, (kMaxShared / kPerSm - 1024 * (kPerSm + 1) - kGroups * kTurn * 4) / kStageBytes);
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kTurn * 4;
  static constexpr int kMaxSplitParts = std::min(kHeld, 4);  // of a block, where a cluster shares
  // A block starts with kStartRegisters a thread; those that multiply take what the others give.
  static constexpr int kStartRegisters = 65536 / (kPerSm * kThreads) / 8 * 8;
  static constexpr int kRegisters = kGroups == 1 ? 208 : kGroups == 2 ? 232 : 160;
  static constexpr int kLoadRegisters = kGroups == 3 ? 32 : 40;
  static_assert(kGroups * kRegisters + kLoadRegisters <= (kGroups + 1) * kStartRegisters,
                "a warpgroup would wait for registers forever");
  static_assert(kMaxSplitParts * kSums * 4 <= kStages * kStageBytes, "sums reuse the ring");
};

struct Grid {
  int tile_rows;  // weight rows of a tile, a multiple of 8; of 16 where they are gates and ups
  int row_tiles, tiles, blocks;
  int split;  // blocks of a cluster that share the parts of a tile
};

// First rows of a tile; those of the same weights are neighbours.
__device__ __forceinline__ int first_x_row(const Grid& g, int tile, int rows) {
  return tile % g.row_tiles * rows;
}

__device__ __forceinline__ int first_w_row(const Grid& g, int tile) {
  return tile / g.row_tiles * g.tile_rows;
}

// What a block does: parts [begin, end) of tiles `tile`, `tile + step`, ...
struct Work {
  int num_blocks, begin, end, tile, step;
  __device__ Work(const LinearParams& p, const Grid& grid)
      : num_blocks(num_blocks_of(p)), tile(blockIdx.x / grid.split), step(gridDim.x / grid.split) {
    const int parts = (kParts + grid.split - 1) / grid.split;
    begin = static_cast<int>(blockIdx.x % grid.split) * parts;
    end = min(begin + parts, kParts);
  }
};

// A place in the ring, and the phase of its barriers.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

// By one thread: fills the weights' half of the ring, or that of x, in the order of sum_held.
template <typename Of, bool kWeights>
__device__ __forceinline__ void load_operand(const Work& work, const Grid& grid, bool pairs,
                                             const CUtensorMap* map, char* ring,
                                             Barriers* barriers) {
  const int rows = kWeights ? grid.tile_rows : Of::kRows;
  const uint32_t base = shared_address(ring) + (kWeights ? 0 : Of::kWeightRows * kLineBytes);
  RingPosition<Of::kStages> at;
  for (int tile = work.tile; tile < grid.tiles; tile += work.step) {
    const int row = kWeights ? first_w_row(grid, tile) : first_x_row(grid, tile, Of::kRows);
    const auto load = [&](int block) {
      uint64_t* full = &barriers->full[at.stage];
      wait_barrier(&barriers->empty[at.stage], at.parity ^ 1);
      arrive_expecting(full, rows * kLineBytes);
      const uint32_t to = base + at.stage * Of::kStageBytes;
      kWeights&& pairs ? copy_pairs(to, map, block * kBlockK, row, full)
                       : copy_rows(to, map, block * kBlockK, row, full);
      at.advance();
    };
    const int beside = Of::kTurns && grid.split == 1 ? 1 : Of::kHeld;
    for (int first = work.begin; first < work.end; first += beside) {
      const int held = min(beside, work.end - first);
      for (int block = first; block < work.num_blocks; block += kParts) {
        const int end = min(block + held, work.num_blocks);
#pragma unroll 1
        for (int i = block; i < end; ++i) load(i);
      }
    }
  }
}

// Puts 8x8 matrices of 16-bit values into shared memory, transposed; lane l gives the address of
// row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b,
                                                          uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a,
                                                          uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(a), "r"(b)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// f(j, c) for each sum that a lane holds of one part: see products.cuh.
template <int kRows, typename F>
__device__ __forceinline__ void for_each_sum(F&& f) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) f(j, c);
  }
}

// What a warpgroup multiplies, and what becomes of its sums.
template <typename T, typename Of>
class Multiplier {
 public:
  __device__ Multiplier(const LinearKernelParams& params, const Grid& grid, const Work& work,
                        char* ring, Barriers* barriers)
      : params_(params),
        p_(params.linear),
        grid_(grid),
        work_(work),
        ring_(ring),
        barriers_(barriers),
        lane_(threadIdx.x % kWarpSize),
        group_(threadIdx.x / kGroup),
        multiplies_(group_ * 64 < grid.tile_rows) {}

  // Sums the next tile.
  __device__ __forceinline__ void sum_tile(float (&total)[Of::kRows / 8][4]) {
    float acc[Of::kHeld][Of::kRows / 8][4];
    const auto add = [&](const float (&part)[Of::kRows / 8][4]) {
      for_each_sum<Of::kRows>([&](int j, int c) { total[j][c] += part[j][c]; });
    };
    if constexpr (Of::kTurns) {
      for_each_sum<Of::kRows>([&](int j, int c) { total[j][c] = 0.0f; });
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        multiply<false>(acc[part % 2]);
        if (part > 0) {  // the one before is done: it is added while this one is multiplied
          settle(acc[1 - part % 2]);
          add(acc[1 - part % 2]);
        }
#pragma unroll 1
        for (int block = part + kParts; block < work_.num_blocks; block += kParts) {
          multiply(acc[part % 2]);
        }
      }
      group_wait_for_all_but<0>();
      settle(acc[1]);
      add(acc[1]);
      release();
    } else {
      for_each_sum<Of::kRows>([&](int j, int c) { total[j][c] = -0.0f; });  // -0 + x is x
#pragma unroll 1
      for (int first = 0; first < kParts; first += Of::kHeld) {
        sum_held(acc, first);
#pragma unroll
        for (int i = 0; i < Of::kHeld; ++i) add(acc[i]);
      }
    }
  }

  // Where a cluster shares the parts: sums this block's, and keeps each in the ring's place.
  __device__ __forceinline__ void sum_parts() {
    float acc[Of::kHeld][Of::kRows / 8][4];
    sum_held(acc, work_.begin);
    asm volatile("bar.sync 1, %0;" ::"n"(Of::kGroups * kGroup) : "memory");  // the ring is read
    float* sums = reinterpret_cast<float*>(ring_) + group_ * 64;
    const int first = first_place<Of::kWeightRows>(threadIdx.x % kGroup);
#pragma unroll
    for (int i = 0; i < Of::kMaxSplitParts; ++i) {
      if (work_.begin + i >= work_.end) break;
      for_each_sum<Of::kRows>([&](int j, int c) {
        sums[i * Of::kSums + place<Of::kWeightRows>(first, j, c)] = acc[i][j][c];
      });
    }
  }

  // Whether outputs are whole chunks of 8 to which nothing is added but a bias.
  __device__ __forceinline__ bool packs() const {
    return params_.out_aligned && !p_.residual && p_.out_dtype == p_.dtype && p_.out_dim % 8 == 0;
  }

  // Stores a tile whose outputs are packed before they are turned: each word two rows of x, four
  // 8x8 matrices an instruction. A turned row has 128 bytes, its chunks in the order chunk ^ row.
  __device__ __forceinline__ void store_packed(float (&total)[Of::kRows / 8][4], int tile,
                                               float* turn) {
    constexpr int kTurned = std::min(Of::kRows, 2 * Of::kTurnRows);  // rows at once
    int thread = threadIdx.x % kGroup;
    asm volatile("" : "+r"(thread));  // what follows from it is worked out here, not kept meanwhile
    const int log = params_.silu_mul ? 2 : 3, chunk = thread & ((1 << log) - 1);
    const int col = group_ * 64 + (chunk << (6 - log)), warp = thread / kWarpSize;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    const int x_row = first_x_row(grid_, tile, Of::kRows);
    const int rows = min(static_cast<int>(p_.rows) - x_row, Of::kRows);
    T* out =
        static_cast<T*>(p_.out) + x_row * p_.out_stride + out_col(w_row + group_ * 64) + chunk * 8;
    const uint32_t base = shared_address(turn + group_ * Of::kTurn);
    float bias[2] = {};
    if (p_.bias) {
      const int64_t at = w_row + group_ * 64 + warp * 16 + thread % kWarpSize / 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (at + i * 8 < p_.out_dim)
          bias[i] = as_float32(static_cast<const T*>(p_.bias)[at + i * 8]);
      }
    }
    const auto add_bias = [&](int j, int c) {
      return p_.bias ? total[j][c] + bias[c / 2] : total[j][c];
    };
    const auto word = [&](int j, int half) {
      return pack_pair<T>(add_bias(j, 2 * half), add_bias(j, 2 * half + 1));
    };
    const auto place = [&](int row, int at) { return base + row * 128 + ((at ^ (row & 7)) * 16); };
    const int matrix = thread % kWarpSize / 8, matrix_row = thread % 8;
#pragma unroll
    for (int first = 0; first < Of::kRows; first += kTurned) {
      if (first >= rows) break;
      sync_group();  // the last rows are read
      if (params_.silu_mul) {
#pragma unroll
        for (int j = 0; j < kTurned / 8; j += 2) {
          const int k = first / 8 + j;
          store_matrices_transposed(place((j + matrix % 2) * 8 + matrix_row, warp),
                                    silu_mul_word<T>(word(k, 0), word(k, 1)),
                                    silu_mul_word<T>(word(k + 1, 0), word(k + 1, 1)));
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTurned / 8; j += 2) {
          const int k = first / 8 + j;
          store_matrices_transposed(place((j + matrix / 2) * 8 + matrix_row, warp * 2 + matrix % 2),
                                    word(k, 0), word(k, 1), word(k + 1, 0), word(k + 1, 1));
        }
      }
      sync_group();
      if (has_col) {
#pragma unroll 4
        for (int row = thread >> log; row < min(rows - first, kTurned); row += kGroup >> log) {
          *reinterpret_cast<uint4*>(out + (first + row) * p_.out_stride) =
              load_shared(place(row, chunk));
        }
      }
      __syncwarp();
    }
  }

  // Stores a tile's sums, kTurnRows rows at a time turned through shared memory.
  __device__ __forceinline__ void store_tile(const float (&total)[Of::kRows / 8][4], int tile,
                                             float* turn) {
    int thread = threadIdx.x % kGroup;
    asm volatile("" : "+r"(thread));  // what follows from it is worked out here, not kept meanwhile
    const int log = params_.silu_mul ? 2 : 3, columns = 1 << log;  // threads of a row
    const int turn_col = (thread & (columns - 1)) << (6 - log), col = group_ * 64 + turn_col;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    turn += group_ * Of::kTurn;
    const int first = first_place<64>(thread);
    int x_row = first_x_row(grid_, tile, Of::kRows);
#pragma unroll 1
    for (int part = 0; part < Of::kRows / Of::kTurnRows; ++part, x_row += Of::kTurnRows) {
      if (x_row >= p_.rows) break;
      const int end = min(x_row + Of::kTurnRows, static_cast<int>(p_.rows));
      sync_group();  // the last rows are read
#pragma unroll
      for (int i = 0; i < Of::kRows / Of::kTurnRows; ++i) {
        if (i != part) continue;
        for_each_sum<Of::kTurnRows>([&](int j, int c) {
          turn[place<64>(first, j, c)] = total[i * Of::kTurnRows / 8 + j][c];
        });
      }
      sync_group();
      if (has_col) {
        store_columns<T>(params_, out_col(w_row + col), x_row + (thread >> log), end, kGroup >> log,
                         [&](int row, float (&sum)[8]) {
                           load_8<T>(turn, sum_index<64>(row - x_row, turn_col), true, sum);
                           if (params_.silu_mul) {
                             float up[8];
                             load_8<T>(turn, sum_index<64>(row - x_row, turn_col + 8), true, up);
                             activate_8<T>(sum, up);
                           }
                         });
      }
    }
  }

  // Adds the parts of all blocks of a cluster for its share of the rows.
  template <typename Cluster>
  __device__ __forceinline__ void store_parts(const Cluster& cluster) {
    float* sums = reinterpret_cast<float*>(ring_);
    const int parts = (kParts + grid_.split - 1) / grid_.split, rank = work_.begin / parts;
    const int width = params_.silu_mul ? 16 : 8, columns = Of::kWeightRows / width;
    const int pass = Of::kGroups * kGroup / columns;
    const int thread = threadIdx.x, col = thread % columns * width;
    const int64_t w_row = first_w_row(grid_, work_.tile);
    const int x_row = first_x_row(grid_, work_.tile, Of::kRows);
    const int end = min(x_row + Of::kRows, static_cast<int>(p_.rows));
    if (col >= grid_.tile_rows || w_row + col >= p_.out_dim) return;
    const auto add_parts = [&](int row, int at, float (&sum)[8]) {
      float* mine = sums + sum_index<Of::kWeightRows>(row - x_row, at);
      float part[kParts][8];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        const float* theirs = cluster.map_shared_rank(mine, w / parts);
        load_8<T>(theirs, w % parts * Of::kSums, true, part[w]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        sum[c] = part[0][c];
#pragma unroll
        for (int w = 1; w < kParts; ++w) sum[c] += part[w][c];
      }
    };
    const int first = x_row + rank + thread / columns * grid_.split;
    store_columns<T>(params_, out_col(w_row + col), first, end, pass * grid_.split,
                     [&](int row, float (&sum)[8]) {
                       add_parts(row, col, sum);
                       if (params_.silu_mul) {
                         float up[8];
                         add_parts(row, col + 8, up);
                         activate_8<T>(sum, up);
                       }
                     });
  }

 private:
  __device__ __forceinline__ int64_t out_col(int64_t w_row) const {
    return params_.silu_mul ? w_row / 2 : w_row;  // of eight gates
  }

  // Where sum (j, c) of this lane lies among kCols columns: sum_index of row 8 j + 2 t + c % 2 and
  // column 16 warp + g + 8 (c / 2), as one of two registers and a constant.
  template <int kCols>
  static __device__ __forceinline__ int first_place(int thread) {
    static_assert(kCols % 32 == 0, "rows leave the bits that sum_index changes alone");
    const int t = thread % 4, col = thread / kWarpSize * 16 + thread % kWarpSize / 4;
    return t * 2 * kCols + (col ^ t * 8);
  }
  template <int kCols>
  static __device__ __forceinline__ int place(int first, int j, int c) {
    return (first ^ c / 2 * 8) + (j * 8 + c % 2) * kCols;
  }

  // Parts `first` to `first` + kHeld of the next tile, those of them that are this block's.
  __device__ __forceinline__ void sum_held(float (&acc)[Of::kHeld][Of::kRows / 8][4], int first) {
#pragma unroll
    for (int i = 0; i < Of::kHeld; ++i) {
      for_each_sum<Of::kRows>([&](int j, int c) { acc[i][j][c] = 0.0f; });
    }
#pragma unroll 1
    for (int block = first; block < work_.num_blocks; block += kParts) {
#pragma unroll
      for (int i = 0; i < Of::kHeld; ++i) {
        if (first + i < work_.end && block + i < work_.num_blocks) multiply(acc[i]);
      }
    }
    group_wait_for_all_but<0>();
#pragma unroll
    for (int i = 0; i < Of::kHeld; ++i) settle(acc[i]);
    release();
  }

  // Sums that are done may be read from here on.
  __device__ __forceinline__ void settle(float (&acc)[Of::kRows / 8][4]) {
    for_each_sum<Of::kRows>([&](int j, int c) { asm volatile("" : "+f"(acc[j][c])::"memory"); });
  }

  // Multiplies the next block of K; where not kAdd, as the first of its sums.
  template <bool kAdd = true>
  __device__ __forceinline__ void multiply(float (&acc)[Of::kRows / 8][4]) {
    wait_barrier(&barriers_->full[at_.stage], at_.parity);
    if constexpr (!kAdd) {
      for_each_sum<Of::kRows>([&](int j, int c) { asm volatile("" : "=f"(acc[j][c])); });
    }
    if (Of::kTurns || multiplies_) {  // rows that a tile lacks go nowhere
      const uint32_t stage = shared_address(ring_) + at_.stage * Of::kStageBytes;
      const SharedMatrix w(stage + group_ * 64 * kLineBytes);
      const SharedMatrix x(stage + Of::kWeightRows * kLineBytes);
      group_fence();
#pragma unroll
      for (int k = 0; k < kBlockK / 16; ++k) {
        kAdd || k > 0 ? multiply_64<T>(acc, w.at(k * 32), x.at(k * 32))
                      : multiply_64<T, false>(acc, w.at(k * 32), x.at(k * 32));
      }
      group_commit();
      group_wait_for_all_but<1>();
    }
    release();
    last_ = at_.stage;
    at_.advance();
  }

  // The stage before is read.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have seen the stage full: its barrier may turn again
    if (last_ >= 0 && lane_ == 0) arrive(&barriers_->empty[last_]);
    last_ = -1;
  }

  __device__ __forceinline__ void sync_group() const {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group_), "n"(kGroup) : "memory");
  }

  const LinearKernelParams& params_;
  const LinearParams& p_;
  const Grid& grid_;
  const Work& work_;
  char* ring_;
  Barriers* barriers_;
  const int lane_, group_;
  const bool multiplies_;
  RingPosition<Of::kStages> at_;
  int last_ = -1;  // the stage of the products under way
};

}  // namespace tlt
