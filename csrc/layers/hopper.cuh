// The products and the epilogue of the wgmma kernel (linear_hopper.cu).
#pragma once

#include "common/wgmma.cuh"
#include "layers/columns.cuh"
#include "layers/decode.cuh"
#include "layers/hopper_tiles.cuh"
#include "layers/products.cuh"

namespace tlt {

// The products and the epilogue of one warpgroup.
template <typename T, typename Of>
class Multiplier {
  using Sums = float (&)[Of::kColumns / 8][4];

 public:
  __device__ Multiplier(const LinearKernelParams& params, const Grid& grid, const Work& work,
                        char* ring, Barriers* barriers)
      : params_(params),
        p_(params.linear),
        grid_(grid),
        work_(work),
        ring_(ring),
        lane_(threadIdx.x % kWarpSize),
        group_(threadIdx.x / kGroup),
        across_(Of::kAcross == 1 ? 0 : group_ * 64),
        along_(Of::kAlong == 1 ? 0 : group_ / Of::kAcross * Of::kColumns),
        stages_(shared_address(ring)),
        full_(shared_address(barriers->full)),
        empty_(shared_address(barriers->empty)) {
    asm volatile(""
                 : "+r"(stages_), "+r"(full_), "+r"(empty_));  // not recomputed for each block of K
    describe();
  }

  // Sums the next tile.
  __device__ __forceinline__ void sum_tile(Sums total, float* turn) {
    float acc[3][Of::kColumns / 8][4];
    clear(total);
    if constexpr (Of::kAcross == 1) {
#pragma unroll 1
      for (int first = 0; first < work_.parts; first += 4) {
        sum_parts(acc, first, min(first + 4, work_.parts));
        add(total, acc[0]);
      }
    } else {
      if (work_.parts < 4) {
        sum_parts(acc, 0, work_.parts);
      } else {
        sum_all_parts(acc, total, turn);
      }
      add_saved(total, acc[0], turn);
    }
  }

  // For a cluster that shares the parts: sums this block's parts, a subtree, and stores the sum in
  // the memory of the ring.
  __device__ __forceinline__ void sum_share() {
    float acc[3][Of::kColumns / 8][4];
    sum_parts(acc, work_.begin, work_.end);
    sync_threads<1, Of::kGroups * kGroup>();  // the ring is read
    float* sums = reinterpret_cast<float*>(ring_) + along_ * Of::kWeightRows + across_;
    const int first = first_place<Of::kWeightRows>(threadIdx.x % kGroup);
    for_each_sum<Of::kColumns>(
        [&](int j, int c) { sums[place<Of::kWeightRows>(first, j, c)] = acc[0][j][c]; });
  }

  // Whether outputs are whole chunks of 8.
  __device__ __forceinline__ bool packs() const {
    return params_.out_aligned && p_.out_dtype == p_.dtype && p_.out_dim % 8 == 0;
  }

  // Prefetches the residual of a tile with packed outputs, into the memory where they are
  // transposed.
  __device__ __forceinline__ void load_residual(int tile, float* turn) const {
    if (!p_.residual || !packs()) return;
    sync_group();  // what was there has been read
    const int thread = threadIdx.x % kGroup, chunk = thread % 8, col = across_ + chunk * 8;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    const uint32_t base = shared_address(turn + group_ * Of::kTurn);
    int64_t x_row = first_x_row(grid_, tile, Of::kRows) + along_ + thread / 8;
#pragma unroll
    for (int row = thread / 8, i = 0; i < Of::kColumns / 16; ++i, row += 16, x_row += 16) {
      const T* from = static_cast<const T*>(p_.residual) + x_row * p_.residual_stride + w_row + col;
      copy_async_16(turned_place(base, row, chunk), from, has_col && x_row < p_.rows);
    }
    commit_copies();
  }

  // Stores a tile whose outputs are packed before they are transposed: each word holds two rows of
  // x, and each instruction stores four 8x8 matrices.
  __device__ __forceinline__ void store_packed(Sums total, int tile, float* turn) {
    int thread = threadIdx.x % kGroup;
    asm volatile("" : "+r"(thread));  // recomputes values here instead of keeping registers
    const int log = params_.silu_mul ? 2 : 3, chunk = thread & ((1 << log) - 1);
    const int col = across_ + (chunk << (6 - log)), warp = thread / kWarpSize;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    const int x_row = first_x_row(grid_, tile, Of::kRows) + along_;
    const int rows = min(static_cast<int>(p_.rows) - x_row, Of::kColumns);
    T* out = static_cast<T*>(p_.out) + x_row * p_.out_stride + out_col(w_row + across_) + chunk * 8;
    const uint32_t base = shared_address(turn + group_ * Of::kTurn);
    const float2 bias = load_bias(w_row + across_, thread);
    const auto word = [&](int j, int half, uint32_t residual = 0) {
      return packed(total[j], half, bias, residual);
    };
    const auto place = [&](int row, int at) { return turned_place(base, row, at); };
    const int matrix = thread % kWarpSize / 8, matrix_row = thread % 8;
    if (p_.residual) wait_copies<0>();
    sync_group();  // what was there has been read; the residual is complete
    if (params_.silu_mul) {
#pragma unroll
      for (int j = 0; j < Of::kColumns / 8; j += 2) {
        store_matrices_transposed(place((j + matrix % 2) * 8 + matrix_row, warp),
                                  silu_mul_word<T>(word(j, 0), word(j, 1)),
                                  silu_mul_word<T>(word(j + 1, 0), word(j + 1, 1)));
      }
    } else {
#pragma unroll
      for (int j = 0; j < Of::kColumns / 8; j += 2) {
        const uint32_t at = place((j + matrix / 2) * 8 + matrix_row, warp * 2 + matrix % 2);
        uint32_t more[4] = {};  // the residual, at the same address
        if (p_.residual) load_matrices_transposed(more, at);
        store_matrices_transposed(at, word(j, 0, more[0]), word(j, 1, more[1]),
                                  word(j + 1, 0, more[2]), word(j + 1, 1, more[3]));
      }
    }
    sync_group();
    if (has_col) {
#pragma unroll 4
      for (int row = thread >> log; row < rows; row += kGroup >> log) {
        *reinterpret_cast<uint4*>(out + row * p_.out_stride) = load_shared(place(row, chunk));
      }
    }
    __syncwarp();
  }

  // Stores a tile's sums, transposed through shared memory kTurnRows rows at a time.
  __device__ __forceinline__ void store_tile(Sums total, int tile, float* turn) {
    int thread = threadIdx.x % kGroup;
    asm volatile("" : "+r"(thread));  // recomputes values here instead of keeping registers
    const int log = params_.silu_mul ? 2 : 3, columns = 1 << log;  // threads of a row
    const int turn_col = (thread & (columns - 1)) << (6 - log), col = across_ + turn_col;
    const int64_t w_row = first_w_row(grid_, tile);
    const bool has_col = col < grid_.tile_rows && w_row + col < p_.out_dim;
    turn += group_ * Of::kTurn;
    const int first = first_place<64>(thread);
    int x_row = first_x_row(grid_, tile, Of::kRows) + along_;
#pragma unroll 1
    for (int part = 0; part < Of::kColumns / Of::kTurnRows; ++part, x_row += Of::kTurnRows) {
      if (x_row >= p_.rows) break;
      const int end = min(x_row + Of::kTurnRows, static_cast<int>(p_.rows));
      sync_group();  // the previous rows have been read
#pragma unroll
      for (int i = 0; i < Of::kColumns / Of::kTurnRows; ++i) {
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

  // Adds the sums of all blocks of a cluster for its share of the rows.
  template <typename Cluster>
  __device__ __forceinline__ void store_share(const Cluster& cluster) {
    float* sums = reinterpret_cast<float*>(ring_);
    const int rank = work_.begin / work_.each;
    const int width = params_.silu_mul ? 16 : 8, columns = Of::kWeightRows / width;
    const int pass = Of::kGroups * kGroup / columns;
    const int thread = threadIdx.x, col = thread % columns * width;
    const int64_t w_row = first_w_row(grid_, work_.tile);
    const int x_row = first_x_row(grid_, work_.tile, Of::kRows);
    const int end = min(x_row + Of::kRows, static_cast<int>(p_.rows));
    if (col >= grid_.tile_rows || w_row + col >= p_.out_dim) return;
    const auto add_blocks = [&](int row, int at, float (&sum)[8]) {
      float* mine = sums + sum_index<Of::kWeightRows>(row - x_row, at);
      float theirs[kParts][8];
#pragma unroll
      for (int b = 0; b < kParts; ++b) {
        if (b < grid_.split) load_8<T>(cluster.map_shared_rank(mine, b), 0, true, theirs[b]);
      }
#pragma unroll
      for (int apart = 1; apart < kParts; apart *= 2) {
        if (apart >= grid_.split) break;
#pragma unroll
        for (int b = 0; b < kParts; b += 2 * apart) {
#pragma unroll
          for (int c = 0; c < 8; ++c) theirs[b][c] += theirs[b + apart][c];
        }
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = theirs[0][c];
    };
    const int first = x_row + rank + thread / columns * grid_.split;
    store_columns<T>(params_, out_col(w_row + col), first, end, pass * grid_.split,
                     [&](int row, float (&sum)[8]) {
                       add_blocks(row, col, sum);
                       if (params_.silu_mul) {
                         float up[8];
                         add_blocks(row, col + 8, up);
                         activate_8<T>(sum, up);
                       }
                     });
  }

 private:
  // A transposed row of packed outputs has 128 bytes, its chunks in the order chunk ^ row.
  static __device__ __forceinline__ uint32_t turned_place(uint32_t base, int row, int chunk) {
    return base + row * 128 + (chunk ^ (row & 7)) * 16;
  }

  // Bias of the two weight rows, from `w_row` on, of a thread's sums.
  __device__ __forceinline__ float2 load_bias(int64_t w_row, int thread) const {
    const int64_t at = w_row + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    const T* bias = static_cast<const T*>(p_.bias);
    return make_float2(bias && at < p_.out_dim ? as_float32(bias[at]) : 0.0f,
                       bias && at + 8 < p_.out_dim ? as_float32(bias[at + 8]) : 0.0f);
  }

  // Sums 2 half and 2 half + 1 of one weight row and two rows of x, as outputs.
  __device__ __forceinline__ uint32_t packed(const float (&sum)[4], int half, float2 bias,
                                             uint32_t residual) const {
    float low = sum[2 * half], high = sum[2 * half + 1];
    if (p_.bias) {
      low += half == 0 ? bias.x : bias.y;
      high += half == 0 ? bias.x : bias.y;
    }
    if (p_.residual) {
      const float2 more = unpack<T>(residual);
      low += more.x;
      high += more.y;
    }
    return pack_pair<T>(low, high);
  }

  __device__ __forceinline__ int64_t out_col(int64_t w_row) const {
    return params_.silu_mul ? w_row / 2 : w_row;  // of the gate
  }

  // Index of sum (j, c) of this lane among kCols columns: sum_index of row 8 j + 2 t + c % 2 and
  // column 16 warp + g + 8 (c / 2), as one of two registers plus a constant.
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

  __device__ __forceinline__ void add(Sums sum, Sums other) const {
    for_each_sum<Of::kColumns>([&](int j, int c) { sum[j][c] += other[j][c]; });
  }

  __device__ __forceinline__ void clear(Sums sum) const {  // -0 + x is x
    for_each_sum<Of::kColumns>([&](int j, int c) { sum[j][c] = -0.0f; });
  }

  // Sums parts [first, end), at most four, of the next tile in acc[0], as a binary tree. Two parts
  // are multiplied side by side, so that memory is read in pieces of 256 bytes.
  __device__ __forceinline__ void sum_parts(float (&acc)[3][Of::kColumns / 8][4], int first,
                                            int end) {
    clear(acc[0]);
#pragma unroll 1
    for (; first < end; first += 2) {
      int block = first + work_.parts;
      multiply<false, true>(acc[1]);
      if (first + 1 < end) {
        multiply<false, true>(acc[2]);
        multiply_pair(acc[1], acc[2], block);
        group_wait_for_all_but<0>();
        allow_reads(acc[1]);
        allow_reads(acc[2]);
        add(acc[1], acc[2]);
      } else {
#pragma unroll 1
        for (; block < work_.num_blocks; block += work_.parts) multiply(acc[1]);
        group_wait_for_all_but<0>();
        allow_reads(acc[1]);
      }
      release();
      add(acc[0], acc[1]);
    }
  }

  // Sums the four or eight parts of the next tile in acc[0], the first four of eight where `save`
  // keeps them, as the same tree in the same order of K. Most additions run beside the products of
  // the next part. The products stop after four parts: the next one takes the sums of the fourth.
  __device__ __forceinline__ void sum_all_parts(float (&acc)[3][Of::kColumns / 8][4], Sums total,
                                                float* turn) {
    // Once a tile: no registers are left for other sums of a part while these are in use.
#pragma unroll
    for (auto& sums : acc) declare(sums);
    multiply<false>(acc[2]);
#pragma unroll 1
    for (int first = 0;; first += 4) {
      multiply<false>(acc[1]);
      multiply_pair(acc[2], acc[1], first + work_.parts);
      multiply<false>(acc[0]);
      allow_reads(acc[1]);
      allow_reads(acc[2]);
      add(acc[1], acc[2]);
      multiply<false>(acc[2]);
      multiply_pair(acc[0], acc[2], first + 2 + work_.parts);
      group_wait_for_all_but<0>();
      allow_reads(acc[0]);
      allow_reads(acc[2]);
      release();
      add(acc[0], acc[2]);
      if (first + 4 >= work_.parts) break;
      multiply<false>(acc[2]);
      add(acc[0], acc[1]);
      save(acc[0], total, turn);
    }
    add(acc[0], acc[1]);
  }

  // Multiplies the blocks of two parts, from block `block` of the first one on.
  __device__ __forceinline__ void multiply_pair(Sums even, Sums odd, int block) {
#pragma unroll 1
    for (; block + 1 < work_.num_blocks; block += work_.parts) {
      multiply(even);
      multiply(odd);
    }
    if (block < work_.num_blocks) multiply(even);
  }

  // Keeps the sum of the first four parts: in `total`, or, where registers hold only three sums of
  // a part, in the memory where a tile is transposed later.
  __device__ __forceinline__ void save(Sums sum, Sums total, float* turn) const {
    if constexpr (!Of::kSaves) return add(total, sum);
    sync_group();  // the previous tile has been read
    float4* to = saved(turn);
#pragma unroll
    for (int j = 0; j < Of::kColumns / 8; ++j) {
      to[j * kGroup] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
    }
  }

  __device__ __forceinline__ void add_saved(Sums total, Sums sum, float* turn) const {
    if constexpr (!Of::kSaves) return add(total, sum);
    const float4* from = saved(turn);
    const bool has_saved = work_.parts > 4;
#pragma unroll
    for (int j = 0; j < Of::kColumns / 8; ++j) {
      const float4 v = has_saved ? from[j * kGroup] : make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
      total[j][0] = v.x + sum[j][0];
      total[j][1] = v.y + sum[j][1];
      total[j][2] = v.z + sum[j][2];
      total[j][3] = v.w + sum[j][3];
    }
  }

  __device__ __forceinline__ float4* saved(float* turn) const {
    return reinterpret_cast<float4*>(turn + group_ * Of::kTurn) + threadIdx.x % kGroup;
  }

  // Completed sums may be read from here on.
  __device__ __forceinline__ void allow_reads(float (&acc)[Of::kColumns / 8][4]) {
    for_each_sum<Of::kColumns>([&](int j, int c) { asm volatile("" : "+f"(acc[j][c])::"memory"); });
  }

  // The values in the registers do not matter from here on.
  __device__ __forceinline__ void declare(Sums acc) const {
    for_each_sum<Of::kColumns>([&](int j, int c) { asm volatile("" : "=f"(acc[j][c])); });
  }

  // Multiplies the next block of K; without kAdd it starts new sums, with kNew in any registers.
  template <bool kAdd = true, bool kNew = false>
  __device__ __forceinline__ void multiply(float (&acc)[Of::kColumns / 8][4]) {
    wait_barrier(full_ + at_.stage * 8, at_.parity);
    if constexpr (kNew) declare(acc);
    group_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k) {
      kAdd || k > 0 ? multiply_64<T>(acc, w_.at(k * 32), x_.at(k * 32))
                    : multiply_64<T, false>(acc, w_.at(k * 32), x_.at(k * 32));
    }
    group_commit();
    const int stage = at_.stage;
    at_.advance(grid_.stages);
    describe();
    group_wait_for_all_but<1>();
    release();
    last_ = stage;
  }

  // Sets the descriptors of the next block's operands, in all lanes, while products are in flight.
  __device__ __forceinline__ void describe() {
    const uint32_t stage = stages_ + at_.stage * grid_.stage_bytes;
    w_ = SharedMatrix(stage + across_ * kLineBytes);
    const uint32_t x = (grid_.tile_rows + along_) * kLineBytes;
    x_ = Of::kGroups == 1 ? w_.after(x) : SharedMatrix(stage + x);
  }

  // Releases the previous stage, which has been read.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have seen the stage full: its barrier may enter the next phase
    if (last_ >= 0 && lane_ == 0) arrive(empty_ + last_ * 8);
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
  const int lane_, group_;
  const int across_, along_;  // first weight row, and row of x, of the warpgroup's share of a tile
  uint32_t stages_, full_, empty_;
  SharedMatrix w_, x_;
  RingPosition at_;
  int last_ = -1;  // the stage of the products in flight
};

}  // namespace tlt
