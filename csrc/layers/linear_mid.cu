// The linears of a small model's layer for 9 rows or more (17 if they append) and a K that is a
// multiple of 64. There are too few rows for tiles of wgmma to fill the card, and too many to read
// x again for every 8 weight rows, as linear_small.cu does (order of the sum: linear.cuh).
//
// A block owns up to 64 weight rows (of pairs, the low and the high rows, as fragments hold them:
// pairs.cuh) and a piece of 16 or 32 rows of x; pieces are the grid's second axis. Each of its 8
// warps copies its part of K of both into shared memory: the weights before the prior kernels end,
// then x, all of it at once. It applies the norm as it reads x, multiplies, and writes its sums
// over its first block of K. So warps synchronise once, with a norm twice. Bytes: the weights once
// for each piece, x once for each block; all but the first reads come from L2.
#include <algorithm>
#include <type_traits>

#include "layers/decode.cuh"
#include "layers/finishers.cuh"

namespace tlt {
namespace {

constexpr int kRowChunks = kBlockK / 8;

template <int kRowTiles_, int kTiles_, typename After>
struct Mid {
  static constexpr int kRowTiles = kRowTiles_;  // tiles of 8 rows of x
  static constexpr int kTiles = kTiles_;        // fragments of 16 weight rows
  static constexpr int kRows = 8 * kRowTiles, kCols = 16 * kTiles;
  static constexpr int kUnit = kPairs<After> ? kCols / 2 : kCols;  // outputs of a row
  // A block of K in shared memory: weight rows, rows of x, and the norm's weight.
  static constexpr int kNormRow = kCols + kRows;
  static constexpr int kSlot = (kNormRow + 1) * kRowChunks;  // chunks
  static_assert(kRows * kCols * 4 <= kSlot * 16, "sums of a part reuse the first of its slots");
};

// A row's chunks are in the order chunk ^ row, so that 8 rows of a matrix are in different banks.
__device__ __forceinline__ int chunk_of(int row, int chunk) {
  return row * kRowChunks + (chunk ^ row % 8);
}

template <typename T, typename S, bool kNorms, typename After>
__global__ void __launch_bounds__(kBlockThreads<After>, 2)
    mid_kernel(const __grid_constant__ LinearKernelParams params,
               const __grid_constant__ After after) {
  extern __shared__ uint4 shared[];
  __shared__ float4 squares[kNorms ? S::kRows : 1][kParts / 4];
  __shared__ PairDestination destinations[kAppends<After> ? S::kRows * S::kUnit : 1];
  launch_dependents();
  const LinearParams& p = params.linear;
  const int first_row = blockIdx.y * S::kRows;
  const int rows = min(static_cast<int>(p.rows) - first_row, S::kRows);
  const int units = static_cast<int>(p.out_dim) / (kPairs<After> ? 2 : 1);
  const int begin = blockIdx.x * S::kUnit, count = min(S::kUnit, units - begin);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  constexpr int kSlotSums = S::kSlot * 4;  // floats from a part's sums to the next one's
  const float* sums = reinterpret_cast<const float*>(shared);

  if (!kAppends<After> || warp < kParts) {
    const int steps = part_steps(num_blocks_of(p), warp);
    uint4* const my_slot = shared + warp * S::kSlot;  // of block `warp`; the next is 8 slots later
    // A lane copies one chunk of every fourth row.
    const int copy_row = lane / kRowChunks, first_k = warp * kBlockK + lane % kRowChunks * 8;
    const uint32_t slot_address = shared_address(my_slot);
    const int copy_to[2] = {chunk_of(copy_row, lane % kRowChunks),
                            chunk_of(copy_row + 4, lane % kRowChunks) - 4 * kRowChunks};
    const auto copy = [&](int row, int step, const T* from, bool valid) {
      const int to = copy_to[row / 4 % 2] + step * kParts * S::kSlot + row * kRowChunks;
      copy_async_16(slot_address + to * 16, from, valid);
    };
    constexpr int kStepK = kParts * kBlockK;
    const T* weight[S::kCols / 4];
    bool has_weight[S::kCols / 4];
    const T* first_weight = static_cast<const T*>(p.weight) + first_k;
#pragma unroll
    for (int i = 0; i < S::kCols / 4; ++i) {
      const int unit = kPairs<After> ? i / 4 * 8 + i % 2 * 4 : i * 4;  // low rows, then high ones
      has_weight[i] = unit + copy_row < count;
      int64_t row = begin + unit + copy_row;
      if constexpr (kAppends<After>) row = low_row(after, begin + min(unit + copy_row, count - 1));
      if constexpr (kPairs<After>) row += i / 2 % 2 * rows_apart(p, after);
      weight[i] = first_weight + row * p.weight_stride;
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < S::kCols / 4; ++i) {
        copy(i * 4, step, weight[i] + step * kStepK, has_weight[i]);
      }
    }
    const bool norms = kNorms && p.norm_weight != nullptr;
    if (norms && lane < kRowChunks) {
      const T* from = static_cast<const T*>(p.norm_weight) + first_k;
      for (int step = 0; step < steps; ++step) copy(S::kNormRow, step, from + step * kStepK, true);
    }
    // Prefetching a line of the output computes and translates its address before the store.
    const T* x = static_cast<const T*>(p.x) + (first_row + copy_row) * p.x_stride + first_k;
    const int64_t row_step = 4 * p.x_stride;
    if (copy_row < rows && steps > 0) prefetch_line(x);
    // Addresses of a lane's row of a matrix: a fragment of weights, 16 rows x 16 elements, or 8
    // rows of x x 32. The address of the next elements differs in bits of the chunk.
    const int matrix = lane / 8;
    const int fragment_at = chunk_of(matrix % 2 * 8 + lane % 8, matrix / 2) * 16;
    const int x_at = chunk_of(lane % 8, matrix) * 16;
    // Four neighbouring outputs of a thread, and their addends.
    const int out_row = threadIdx.x / (S::kUnit / 4), out_col = threadIdx.x % (S::kUnit / 4) * 4;
    static_assert(kAppends<After> || S::kRows * S::kUnit <= 4 * kMultipliers);
    const bool stores = !kAppends<After> && out_row < rows && out_col < count;
    const bool wide = p.out_dtype == DType::kFloat32;
    uint4 bias = {}, residual = {};
    if constexpr (!kPairs<After>) {
      if (stores && p.bias) bias = load_four<T>(p.bias, begin + out_col, false);
    }
    wait_for_prior_grid();

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const T* from = x + step * kStepK;
#pragma unroll
      for (int i = 0; i < S::kRows / 4; ++i) {
        copy(S::kCols + i * 4, step, from, i * 4 + copy_row < rows);
        from += row_step;
      }
      commit_copies();  // the first group includes the weights
    }
    if constexpr (!kPairs<After>) {
      if (stores && p.residual) {
        residual = load_four<T>(p.residual,
                                (first_row + out_row) * p.residual_stride + begin + out_col, wide);
      }
    }
    const auto wait_for_step = [&](int step) {  // while the later steps are in flight
      const int left = steps - 1 - step;
      left >= 2 ? wait_copies<2>() : left == 1 ? wait_copies<1>() : wait_copies<0>();
      __syncwarp();  // a warp's copies are visible to all its lanes
    };

    // Loads half h of the 64 elements of 8 rows: words 0 and 1 are of the first 16 elements, 2 and
    // 3 of the next.
    const auto load_x = [&](int step, int i, int h, Chunk<T>* to) {
      const uint32_t slot = slot_address + step * kParts * S::kSlot * 16;
      load_matrices(to->word, slot + (S::kCols + i * 8) * 128 + (x_at ^ h * 64));
    };

    float scale[S::kRowTiles] = {};
    if (norms) {
      // Like add_squares, for two times 8 rows: a fragment of both, times each. One after the
      // other, because both at once need too many registers for two blocks a multiprocessor.
#pragma unroll 1
      for (int i = 0; i < S::kRowTiles; i += 2) {
        float sum[2][2][4] = {};
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          wait_for_step(step);
          const uint32_t rows_at = slot_address + (step * kParts * S::kSlot + S::kCols * 8) * 16;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            Chunk<T> v[2];
            load_x(step, i, h, &v[0]);
            load_x(step, i + 1, h, &v[1]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              uint32_t both[4];
              load_matrices(both, rows_at + i * 8 * 128 + (fragment_at ^ (h * 2 + half) * 32));
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const uint32_t* word = v[j].word + half * 2;
                mma_16816<T>(sum[j][h], both, word[0], word[1]);
              }
            }
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // squares_of for the low and the high 8 rows
          const float of_part = g % 2 == 1 ? sum[j][0][j * 2 + 1] + sum[j][1][j * 2 + 1]
                                           : sum[j][0][j * 2] + sum[j][1][j * 2];
          if (t == g / 2) reinterpret_cast<float*>(squares[(i + j) * 8 + g])[warp] = of_part;
        }
      }
      sync_threads<kMultipliersBarrier, kMultipliers>();
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
        const float4 low = squares[i * 8 + g][0], high = squares[i * 8 + g][1];
        const float part[kParts] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        scale[i] = norm_scale<T>(sum_of_parts(part), static_cast<int>(p.in_dim), p.eps);
      }
    }

    float acc[S::kTiles][S::kRowTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const uint32_t slot = slot_address + step * kParts * S::kSlot * 16;
      if (!norms) wait_for_step(step);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Chunk<T> v[S::kRowTiles], norm_weight;
        if (norms) load_matrices(norm_weight.word, slot + S::kNormRow * 128 + h * 64 + matrix * 16);
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i) {
          load_x(step, i, h, &v[i]);
          if (norms) norm_chunk(v[i], scale[i], norm_weight);
        }
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t weight[4];
            load_matrices(weight, slot + m * 16 * 128 + (fragment_at ^ (h * 2 + half) * 32));
#pragma unroll
            for (int i = 0; i < S::kRowTiles; ++i) {
              mma_16816<T>(acc[m][i], weight, v[i].word[half * 2], v[i].word[half * 2 + 1]);
            }
          }
        }
      }
    }
    __syncwarp();  // the warp's slots have been read
    // sum_index of row 8 i + 2 t + c % 2 and column 16 m + g + 8 (c / 2), in few registers.
    float* mine = reinterpret_cast<float*>(my_slot);
    const int sum_at = t * 2 * S::kCols + (g ^ t * 8);
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int more = (i * 8 + c % 2) * S::kCols + m * 16 + c / 2 * 8;
          mine[(sum_at ^ (more & 24)) + (more & ~24)] = acc[m][i][c];
        }
      }
    }
    sync_sums<After>();
    if constexpr (!kAppends<After>) {
      if (!stores) return;
      const auto four_sums = [&](int col, float (&sum)[4]) {
        const float* from = sums + sum_index<S::kCols>(out_row, col);
        float part[4][kParts];
#pragma unroll
        for (int w = 0; w < kParts; ++w) {
          const float4 v = *reinterpret_cast<const float4*>(from + w * kSlotSums);
          part[0][w] = v.x, part[1][w] = v.y, part[2][w] = v.z, part[3][w] = v.w;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] = sum_of_parts(part[c]);
      };
      const int64_t at = (first_row + out_row) * p.out_stride + begin + out_col;
      float sum[4];
      if constexpr (std::is_same_v<After, SiluMul>) {
        const int col = out_col / 8 * 16 + out_col % 8;
        float up[4];
        four_sums(col, sum);
        four_sums(col + 8, up);
        const auto word = [&](int i) {
          return silu_mul_word<T>(pack<T>(make_float2(sum[i], sum[i + 1])),
                                  pack<T>(make_float2(up[i], up[i + 1])));
        };
        *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at) = make_uint2(word(0), word(2));
      } else {
        four_sums(out_col, sum);
        if (p.bias) add_four<T>(sum, bias, false);
        if (p.residual) add_four<T>(sum, residual, wide);
        if (wide) {
          *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) =
              make_float4(sum[0], sum[1], sum[2], sum[3]);
        } else {
          *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + at) = make_uint2(
              pack<T>(make_float2(sum[0], sum[1])), pack<T>(make_float2(sum[2], sum[3])));
        }
      }
    }
  } else if constexpr (kAppends<After>) {
    find_destinations<T, S>(p, after, first_row, rows, begin, count, destinations);
    sync_sums<After>();  // the prior grids have ended too
  }
  if constexpr (kAppends<After>) {
    for (int i = threadIdx.x; i < rows * S::kUnit; i += kBlockThreads<After>) {
      const PairDestination& to = destinations[i];
      if (to.low == nullptr) continue;
      const int row = i / S::kUnit, pair = i % S::kUnit, col = pair / 8 * 16 + pair % 8;
      float part[2][kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) {
        part[0][w] = sums[w * kSlotSums + sum_index<S::kCols>(row, col)];
        part[1][w] = sums[w * kSlotSums + sum_index<S::kCols>(row, col + 8)];
      }
      float low = sum_of_parts(part[0]), high = sum_of_parts(part[1]);
      if (p.bias) {
        low += to.bias.x;
        high += to.bias.y;
      }
      PairOut<T> out;
      out.low = static_cast<T*>(to.low);
      out.zero = to.zero;
      out.turns = to.turns;
      store_pair(out, static_cast<int>(after.head_dim / 2), low, high, to.angle);
    }
  }
}

// ---- the grid -----------------------------------------------------------------------------------

template <typename After>
struct Choice {
  int64_t max_waves;  // waves of resident blocks
  int64_t cycles = INT64_MAX;
  void (*launch)(const LinearKernelParams& p, const After& after, cudaStream_t stream) = nullptr;
};

template <typename S, typename After>
KernelShape shape_of(const LinearParams& p) {
  const int64_t units = p.out_dim / (kPairs<After> ? 2 : 1);
  const int64_t pieces = ceil_div(p.rows, S::kRows);
  const int64_t slots = std::max<int64_t>(p.in_dim / kBlockK, kParts);  // sums have one each
  return {ceil_div(units, S::kUnit), kBlockThreads<After>, static_cast<int>(slots * S::kSlot * 16),
          1, static_cast<unsigned>(pieces)};
}

template <typename T, typename S, bool kNorms, typename After>
void launch(const LinearKernelParams& p, const After& after, cudaStream_t stream) {
  const auto kernel = mid_kernel<T, S, kNorms, After>;
  prefer_shared("linear", kernel);
  launch_kernel("linear", kernel, shape_of<S, After>(p.linear), stream, p.linear.pdl, p, after);
}

// Takes a tile if its estimate beats the best so far. Without pairs, the estimate is the number of
// blocks of one multiprocessor, times the bytes of x from L2 and the products of each. Blocks with
// a norm and pairs mostly wait for their own results, so two resident blocks cost little more than
// one, but each further wave costs as much again. All constants are measured.
template <typename T, typename S, bool kNorms, typename After>
void consider(const LinearParams& p, const Card& card, Choice<After>* best) {
  constexpr int kStatic = 20 << 10;  // upper bound of static shared memory, in bytes
  const KernelShape shape = shape_of<S, After>(p);
  if (shape.shared_bytes + kStatic > card.max_shared || shape.rows > kGridAxis) return;
  // A block's shared memory besides the dynamic part. A multiprocessor has room for the system's
  // part of one more block.
  constexpr int kSystem = 1024, kSquares = S::kRows * kParts * 4;
  constexpr int kLookup =
      kAppends<After> ? S::kRows * S::kUnit * sizeof(PairDestination) + sizeof(RowPlaces<S::kRows>)
                      : 0;
  const bool two =
      2 * (shape.shared_bytes + kSystem + kSquares + kLookup) <= card.max_shared + kSystem;
  const int64_t blocks = shape.blocks * shape.rows, rounds = ceil_div(blocks, card.num_sms);
  const int64_t waves = two ? ceil_div(rounds, 2) : rounds;
  const int64_t products = p.in_dim * S::kRows * S::kCols;
  int64_t cycles;
  if constexpr (kPairs<After>) {
    constexpr int kProducts = 137, kSecondBlockCycles = 2200;  // kProducts: per cycle
    constexpr int kBlockCycles = kAppends<After> ? 5400 : 2500;
    cycles = waves *
             (products / kProducts + kBlockCycles + (two && rounds > 1 ? kSecondBlockCycles : 0));
  } else {
    constexpr int kL2Bytes = 53, kProducts = 1270, kBlockCycles = 400;  // per cycle; per block
    cycles = rounds * (p.in_dim * S::kRows * 2 / kL2Bytes + products / kProducts + kBlockCycles);
  }
  if (waves > best->max_waves || cycles >= best->cycles) return;
  best->cycles = cycles;
  best->launch = launch<T, S, kNorms, After>;
}

template <typename T, typename After>
bool launch_best(const LinearKernelParams& params, const After& after, const Card& card,
                 cudaStream_t stream) {
  const LinearParams& p = params.linear;
  constexpr int64_t kPlainRows = 320;  // with more rows or waves wgmma is faster
  const bool plain = p.norm_weight == nullptr && !kAppends<After>;
  if (plain && p.rows > kPlainRows) return false;
  const int64_t plain_waves = has_hopper_kernel() ? 1 : 2;
  Choice<After> best{plain ? plain_waves : p.rows <= kPieceRows ? 1 : INT64_MAX};
  if constexpr (std::is_same_v<After, Nothing>) {
    consider<T, Mid<2, 1, After>, false>(p, card, &best);
    consider<T, Mid<2, 2, After>, false>(p, card, &best);
    consider<T, Mid<4, 1, After>, false>(p, card, &best);
    consider<T, Mid<4, 2, After>, false>(p, card, &best);
  } else {
    constexpr int kWide = kAppends<After> ? 1 : 4;  // appended pairs need shared memory too
    consider<T, Mid<2, kWide, After>, true>(p, card, &best);
    consider<T, Mid<4, kWide, After>, true>(p, card, &best);
    consider<T, Mid<4, 2, After>, true>(p, card, &best);
    if constexpr (!kAppends<After>) consider<T, Mid<2, 2, After>, true>(p, card, &best);
  }
  if (best.launch == nullptr) return false;
  best.launch(params, after, stream);
  return true;
}

template <typename After>
bool launch_type(const LinearKernelParams& p, const After& after, const Card& card,
                 cudaStream_t stream) {
  const LinearParams& linear = p.linear;
  const bool whole = linear.in_dim > 0 && linear.in_dim % kBlockK == 0;
  if (linear.rows <= (kAppends<After> ? kPieceRows : kSmallRows) || !whole) return false;
  return linear.dtype == DType::kFloat16 ? launch_best<__half>(p, after, card, stream)
                                         : launch_best<__nv_bfloat16>(p, after, card, stream);
}

}  // namespace

bool launch_mid(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  const int64_t width = p.linear.out_dim / (p.silu_mul ? 2 : 1);  // stored four at once
  if (!p.out_aligned || width % 8 != 0) return false;
  if (p.silu_mul) return launch_type(p, SiluMul{}, card, stream);
  return p.linear.norm_weight == nullptr && launch_type(p, Nothing{}, card, stream);
}

bool launch_mid_append(const LinearKernelParams& p, const AppendKvParams& append, const Card& card,
                       cudaStream_t stream) {
  return launch_type(p, append, card, stream);
}

}  // namespace tlt
