// The linears of few rows of a small model's layer, with all weights in registers: K up to 1,536,
// at most two blocks a multiprocessor (order of the sum: linear.cuh).
//
// A launch of a small model is so short that the latency from its input x to its result decides. So
// a block does all work that needs no x first: each lane loads all of its weights and computes the
// addresses of its outputs. When x exists, each of 8 warps loads x for its part of K, all of it at
// once, and multiplies; the parts are added in shared memory. Blocks are small, so that blocks of
// the next launches fit on the same multiprocessor and load their weights in time.
//
// A block owns up to 8 weight rows, or 8 or 16 pairs of them (pairs.cuh): low and high rows of a
// fragment. Bytes: the weights.
#include <algorithm>
#include <type_traits>

#include "layers/decode.cuh"
#include "layers/finishers.cuh"

namespace tlt {
namespace {

constexpr int kStepK = kParts * kBlockK;

template <int kRowTiles_, int kSteps_, typename After>
struct Small {
  static constexpr int kRowTiles = kRowTiles_;  // tiles of 8 rows of x
  static constexpr int kSteps = kSteps_;        // at most so many blocks of K in a part
  // Fragments of weight rows; with a norm and an activation, one row's products cost little more.
  static constexpr int kTiles = std::is_same_v<After, SiluMul> ? 2 : 1;
  static constexpr int kHalves = kPairs<After> ? 2 : 1;  // of a fragment, low and high rows
  static constexpr int kUnit = 8 * kTiles;               // weight rows of a block, or pairs
  static constexpr int kRows = 8 * kRowTiles, kCols = kUnit * kHalves;
  static constexpr int kPerSm = kAppends<After> && kRowTiles * kSteps > 2 ? 1 : 2;  // blocks
};

// The low column of a block's pair; the high column is 8 further.
__device__ __forceinline__ int low_col(int pair) { return pair / 8 * 16 + pair % 8; }

// 8 bytes that are read once, or zeros.
template <typename T>
__device__ __forceinline__ uint2 load_once(const T* from, bool valid, uint64_t policy) {
  uint2 v;
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@valid ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v2.b32 {%0, %1}, [%2], %4;\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(from), "r"(static_cast<int>(valid)), "l"(policy));
  return v;
}

// A lane's share of 32 elements, as load_split gives it.
template <typename T>
__device__ __forceinline__ void load_inside(Chunk<T>& to, const T* from, bool inside) {
  if (!inside) return;
  const uint2 low = *reinterpret_cast<const uint2*>(from);
  const uint2 high = *reinterpret_cast<const uint2*>(from + 16);
  to.raw = join(low, high);
}

// Keeps an address in a register; otherwise the compiler computes it again after the wait.
template <typename P>
__device__ __forceinline__ void keep(P*& global) {
  asm volatile("" : "+l"(global));
  __builtin_assume(__isGlobal(global));
}

__device__ __forceinline__ void keep(uint32_t& shared) { asm volatile("" : "+r"(shared)); }

// The address of a sum in shared memory. From a column below 8 in 16, or an even row, ^ leads to
// the column 8 further, or to the next row: `sums` is aligned, so these bits of the address are
// zero.
constexpr uint32_t kHighColumn = 8 * sizeof(float);
template <typename S>
constexpr uint32_t kNextRow = S::kCols * sizeof(float);
template <typename S>
__device__ __forceinline__ uint32_t sum_address(const float* sums, int row, int col) {
  uint32_t at = shared_address(sums + sum_index<S::kCols>(row, col));
  keep(at);
  return at;
}

// The sum of the parts, like tile_sum.
template <typename S>
__device__ __forceinline__ float sum_at(uint32_t address) {
  float part[kParts];
#pragma unroll
  for (int w = 0; w < kParts; ++w) {
    part[w] = load_shared_float(address + w * S::kRows * kNextRow<S>);
  }
  return sum_of_parts(part);
}

// The epilogue of the appending form, in separate warps: they look up the destinations of the sums,
// then store them.
template <typename T, typename S>
__device__ __forceinline__ void append_sums(const LinearParams& p, const AppendKvParams& after,
                                            const float* sums, int rows, int begin, int count) {
  __shared__ RowPlaces<S::kRows> places;
  const int thread = threadIdx.x - kMultipliers, half = static_cast<int>(after.head_dim / 2);
  constexpr int kTurns = S::kRows * S::kUnit / kFinishers;
  const int pair = thread % S::kUnit;
  const bool has_pair = pair < count;
  const HeadPair at = head_pair(after, begin + (has_pair ? pair : 0));
  if (!p.pdl_tables) wait_for_prior_grid();
  // Positions are loaded together with the destinations, and angles before the barrier.
  int64_t position[kTurns];
  find_positions<S>(after, 0, rows, position);
  float bias[2] = {};
  if (p.bias) {
    const T* from = static_cast<const T*>(p.bias) + low_row(after, at);
    bias[0] = as_float32(from[0]);
    bias[1] = as_float32(from[half]);
  }
  if (thread < kWarpSize) find_places(after, 0, rows, blockIdx.x == 0, &places);
  float2 angle[kTurns] = {};
  find_angles(after, position, at.i, angle);
  sync_threads<kFinishersBarrier, kFinishers>();
  PairOut<T> out[kTurns];
  uint32_t low_at[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = finished_row<S>(i);
    low_at[i] = sum_address<S>(sums, row, low_col(pair));
    if (!has_pair || row >= rows || places.request[row] < 0) continue;
    out[i] = pair_out<T>(after, row, at, places.at[row]);
  }
  sync_sums<AppendKvParams>();  // the prior grids have ended too
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (out[i].low == nullptr) continue;
    float low = sum_at<S>(low_at[i]), high = sum_at<S>(low_at[i] ^ kHighColumn);
    if (p.bias) {
      low += bias[0];
      high += bias[1];
    }
    store_pair(out[i], half, low, high, angle[i]);
  }
}

template <typename T, typename S, bool kNorms, typename After>
__global__ void __launch_bounds__(kBlockThreads<After>, S::kPerSm)
    small_kernel(const __grid_constant__ LinearKernelParams params,
                 const __grid_constant__ After after, const int unit) {
  __shared__ __align__(256) float sums[kParts * S::kRows * S::kCols];
  __shared__ float squares[kNorms ? kParts : 1][S::kRows];
  launch_dependents();
  const LinearParams& p = params.linear;
  const int rows = static_cast<int>(p.rows);
  const int units = static_cast<int>(p.out_dim) / (kPairs<After> ? 2 : 1);
  const int begin = blockIdx.x * unit, count = min(unit, units - begin);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  if constexpr (kAppends<After>) {
    if (warp >= kParts) {
      return append_sums<T, S>(p, after, sums, rows, begin, count);
    }
  }
  const int steps = part_steps(num_blocks_of(p), warp), first_k = warp * kBlockK + t * 4;

  uint2 weight[S::kSteps][S::kTiles][S::kHalves]
              [4];  // of row g of each half: 4 of 16 elements each
  const uint64_t policy = evict_first_policy();
#pragma unroll
  for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      int64_t row = begin + tile * 8 + g;
      if constexpr (kPairs<After>) row = low_row(after, row) + half * rows_apart(p, after);
      const T* from = static_cast<const T*>(p.weight) + row * p.weight_stride + first_k;
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[step][tile][half][i] = load_once(from + step * kStepK + i * 16,
                                                  step < steps && tile * 8 + g < count, policy);
        }
      }
    }
  }
  const bool norms = kNorms && p.norm_weight != nullptr;
  Chunk<T> norm_weight[kNorms ? S::kSteps : 1][2];
  if constexpr (kNorms) {
    const T* from = static_cast<const T*>(p.norm_weight) + first_k;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_inside(norm_weight[step][h], from + step * kStepK + h * 32, norms && step < steps);
      }
    }
  }
  // Prefetching lines of the output computes and translates their addresses before the store.
  const T* x_from[S::kRowTiles];
#pragma unroll
  for (int i = 0; i < S::kRowTiles; ++i) {
    x_from[i] = static_cast<const T*>(p.x) + (i * 8 + g) * p.x_stride + first_k;
    if (i * 8 + g < rows && steps > 0) prefetch_line(x_from[i]);
    keep(x_from[i]);
  }
  // The output of a thread, if it has one.
  const int out_row = threadIdx.x / S::kUnit, out_col = threadIdx.x % S::kUnit;
  const bool ends = !kAppends<After> && out_row < rows && out_col < count;
  char* out_to = nullptr;
  if constexpr (!kAppends<After>) {
    out_to = out_of(p, out_row * p.out_stride + begin + out_col);
    keep(out_to);
  }
  const int64_t residual_at = out_row * p.residual_stride + begin + out_col;
  Added added = {};
  const uint32_t acc_at = sum_address<S>(sums + warp * S::kRows * S::kCols, t * 2, g);
  const uint32_t out_sum =
      sum_address<S>(sums, out_row, kPairs<After> ? low_col(out_col) : out_col);
  if constexpr (!kPairs<After>) {
    if (ends && p.bias) added.bias = static_cast<const uint16_t*>(p.bias)[begin + out_col];
    if (ends && p.residual) prefetch_line(residual_of(p, residual_at));
  }
  wait_for_prior_grid();

  Chunk<T> x[S::kSteps][S::kRowTiles][2];
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    if (step >= steps) break;
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_inside(x[step][i][h], x_from[i] + step * kStepK + h * 32, i * 8 + g < rows);
      }
    }
  }
  if constexpr (!kPairs<After>) {
    if (ends && p.residual) added.residual = load_residual(p, residual_at);
  }
  if (norms) {
    float sum[S::kRowTiles][2][4] = {};
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      if (step >= steps) break;
#pragma unroll
      for (int i = 0; i < S::kRowTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) add_squares(sum[i][h], x[step][i][h]);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
      const float of_part = squares_of(sum[i]);
      if (t == g / 2) squares[warp][i * 8 + g] = of_part;
    }
    sync_threads<kMultipliersBarrier, kMultipliers>();
#pragma unroll
    for (int i = 0; i < S::kRowTiles; ++i) {
      float part[kParts];
#pragma unroll
      for (int w = 0; w < kParts; ++w) part[w] = squares[w][i * 8 + g];
      const float scale = norm_scale<T>(sum_of_parts(part), static_cast<int>(p.in_dim), p.eps);
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        if (step >= steps) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) norm_chunk(x[step][i][h], scale, norm_weight[step][h]);
      }
    }
  }

  float acc[S::kTiles][S::kRowTiles][4] = {};
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    if (step >= steps) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int tile = 0; tile < S::kTiles; ++tile) {
        const auto chunk = [&](int half) {
          return join(weight[step][tile][half][2 * h], weight[step][tile][half][2 * h + 1]);
        };
        const uint4 low = chunk(0), high = S::kHalves == 2 ? chunk(S::kHalves - 1) : uint4{};
#pragma unroll
        for (int i = 0; i < S::kRowTiles; ++i)
          mma_k32<T>(acc[tile][i], low, high, x[step][i][h].raw);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < S::kRowTiles; ++i) {
    if (i * 8 + t * 2 >= rows) continue;
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
#pragma unroll
      for (int c = 0; c < 2 * S::kHalves; ++c) {
        const uint32_t further = (2 * tile + c / 2) * kHighColumn + c % 2 * kNextRow<S>;
        store_shared((acc_at ^ further) + i * 8 * kNextRow<S>, acc[tile][i][c]);
      }
    }
  }
  sync_sums<After>();
  if (!ends) return;
  if constexpr (std::is_same_v<After, SiluMul>) {
    *reinterpret_cast<T*>(out_to) =
        silu_mul_sums<T>(sum_at<S>(out_sum), sum_at<S>(out_sum ^ kHighColumn));
  } else if constexpr (!kAppends<After>) {
    store_added<T>(p, out_to, sum_at<S>(out_sum), added);
  }
}

// Returns false if there are too many weights.
template <typename T, typename S, bool kNorms, typename After>
bool launch(const LinearKernelParams& p, const After& after, const Card& card,
            cudaStream_t stream) {
  const int64_t units = p.linear.out_dim / (kPairs<After> ? 2 : 1);
  const int64_t sms = card.num_sms;
  // Few blocks with full fragments leave the most room for other launches.
  const int64_t even = (units + sms - 1) / sms;
  const int64_t unit = std::clamp<int64_t>(even, 8, S::kUnit);
  const int64_t blocks = (units + unit - 1) / unit;
  if (blocks > S::kPerSm * sms) return false;
  const auto kernel = small_kernel<T, S, kNorms, After>;
  prefer_shared("linear", kernel);
  launch_kernel("linear", kernel, {blocks, kBlockThreads<After>}, stream, p.linear.pdl, p, after,
                static_cast<int>(unit));
  return true;
}

// Launches the form for these rows, length of parts and type; returns false if there is none.
template <int kMaxSteps, bool kNorms, typename After>
bool launch_form(const LinearKernelParams& p, const After& after, const Card& card,
                 cudaStream_t stream) {
  const LinearParams& linear = p.linear;
  const int64_t k = linear.in_dim;
  constexpr int kMostRows = kAppends<After> ? kPieceRows : kSmallRows;
  if (linear.rows > kMostRows || k <= 0 || k % kBlockK != 0 || k > kMaxSteps * kStepK) return false;
  const auto of_rows = [&](auto* tag, auto row_tiles) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kRowTiles = decltype(row_tiles)::value;
    return k <= 2 * kStepK
               ? launch<T, Small<kRowTiles, 2, After>, kNorms>(p, after, card, stream)
               : launch<T, Small<kRowTiles, kMaxSteps, After>, kNorms>(p, after, card, stream);
  };
  const auto of_type = [&](auto* tag) {
    if constexpr (kAppends<After>) {
      if (linear.rows > 8) return of_rows(tag, std::integral_constant<int, 2>{});
    }
    return of_rows(tag, std::integral_constant<int, 1>{});
  };
  return linear.dtype == DType::kFloat16 ? of_type(static_cast<__half*>(nullptr))
                                         : of_type(static_cast<__nv_bfloat16*>(nullptr));
}

}  // namespace

bool launch_small(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  if (p.silu_mul) return launch_form<2, true>(p, SiluMul{}, card, stream);
  return p.linear.norm_weight == nullptr && launch_form<3, false>(p, Nothing{}, card, stream);
}

bool launch_small_append(const LinearKernelParams& p, const AppendKvParams& append,
                         const Card& card, cudaStream_t stream) {
  return launch_form<3, true>(p, append, card, stream);
}

}  // namespace tlt
