// The linears of few rows of a small model's layer, with all weights in registers: K a multiple of
// 64 up to 1,536 (1,024 with an activation, or with a norm and no append), at most two blocks a
// multiprocessor (order of the sum: linear.cuh).
//
// A launch of a small model is so short that the latency from its input x to its result decides. So
// a block does all work that needs no x first: each lane loads all of its weights and computes the
// addresses of its outputs. When x exists, each of 8 warps loads x for its part of K, all of it at
// once, and multiplies; the parts are added in shared memory. Blocks are small, so that blocks of
// the next launches fit on the same multiprocessor and load their weights in time.
//
// A block owns up to 8 weight rows, or up to 8 pairs of them, 16 with an activation (pairs.cuh; to
// append, of one head): low and high rows of a fragment. Bytes: the weights.
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
  // Fragments of weight rows; with an activation a second one costs little.
  static constexpr int kTiles = std::is_same_v<After, SiluMul> ? 2 : 1;
  static constexpr int kHalves = kPairs<After> ? 2 : 1;  // of a fragment, low and high rows
  static constexpr int kUnit = 8 * kTiles;               // weight rows of a block, or pairs
  static constexpr int kRows = 8 * kRowTiles, kCols = kUnit * kHalves;
  static constexpr int kPerSm = kAppends<After> && kRowTiles * kSteps > 2 ? 1 : 2;  // blocks
};

// Weight rows, or pairs of them, in the first axis of the grid. Its second axis is the heads to
// append, so that a block finds its weights without a division.
template <typename After>
__host__ __device__ __forceinline__ int units_of(const LinearParams& p, const After& after) {
  if constexpr (kAppends<After>) {
    return static_cast<int>(after.head_dim / 2);
  } else {
    return static_cast<int>(p.out_dim) / (kPairs<After> ? 2 : 1);
  }
}

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

// Divides by a number; what does not depend on the dividend is computed in advance.
class Divisor {
 public:
  __device__ explicit Divisor(uint32_t by) : by_(by), inverse_(UINT32_MAX / by) { keep(inverse_); }
  __device__ __forceinline__ uint32_t divide(uint32_t v, uint32_t* rest) const {
    uint32_t quotient = __umulhi(v, inverse_);  // or one less
    *rest = v - quotient * by_;
    if (*rest >= by_) {
      ++quotient;
      *rest -= by_;
    }
    return quotient;
  }

 private:
  uint32_t by_, inverse_;
};

// Called by a warp whose lane i has `count` rows of request i, from `begin` on. Returns the request
// of `row`, or -1, and the slot. S::kUnit neighbouring lanes pass the same row, and the next
// ones the next row. Nothing passes through shared memory, which would take longer.
template <typename S>
__device__ __forceinline__ int find_request(int row, uint32_t begin, uint32_t count,
                                            int64_t first_slot, int64_t* slot) {
  const int group = threadIdx.x % kWarpSize / S::kUnit;
  unsigned owners = 0;  // lanes whose request has the row: one, unless row_start is bad
#pragma unroll
  for (int g = 0; g < kWarpSize / S::kUnit; ++g) {
    const uint32_t nth = static_cast<uint32_t>(row - group + g) - begin;
    const unsigned lanes = __ballot_sync(kFullWarp, nth < count);
    if (g == group) owners = lanes;
  }
  const int request = 31 - __clz(owners);
  *slot = __shfl_sync(kFullWarp, first_slot - begin, request) + row;
  return request;
}

// An entry of a table. The compiler neither moves this load nor branches around it.
__device__ __forceinline__ int32_t load_entry(const int32_t* from, bool exists, int32_t otherwise) {
  int32_t v;
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.b32 exists, %2, 0;\nmov.b32 %0, %3;\n"
      "@exists ld.global.b32 %0, [%1];\n}"
      : "=&r"(v)
      : "l"(from), "r"(static_cast<int>(exists)), "r"(otherwise));
  return v;
}

// The epilogue of the appending form, in separate warps: they look up the destinations of the sums,
// then store them. A block that starts late waits for these lookups, so at most two of their loads
// depend on each other: positions and the fields of requests are loaded first, then pages and
// angles.
template <typename T, typename S>
__device__ __forceinline__ void append_sums(const LinearParams& p, const AppendKvParams& after,
                                            const float* sums, int rows, int begin, int count) {
  const int thread = threadIdx.x - kMultipliers, lane = threadIdx.x % kWarpSize;
  const int half = static_cast<int>(after.head_dim / 2);
  constexpr int kTurns = S::kRows * S::kUnit / kFinishers;
  const Sequences& s = after.sequences;
  if (!p.pdl_tables) wait_for_prior_grid();
  const bool exists = lane < s.num_requests;  // request `lane`
  const int first_row = load_entry(s.row_start + lane, exists, 0);
  const int end_row = load_entry(s.row_start + lane + 1, exists, 0);
  const int context = load_entry(s.context_len + lane, exists, 0);
  const int base = load_entry(s.slot_base + lane, exists && s.slot_base != nullptr, 0);
  int position[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = finished_row<S>(i);
    position[i] = load_entry(after.position + row, row < rows, -1);
  }
  const int pair = thread % S::kUnit, head = blockIdx.y;
  const HeadPair at = {head, begin + min(pair, count - 1)};
  T bias[2] = {};
  if (p.bias) {
    const T* from = static_cast<const T*>(p.bias) + low_row(after, at);
    bias[0] = from[0];
    bias[1] = from[half];
  }
  const Divisor page_size(static_cast<uint32_t>(s.page_size));
  const int64_t num_slots = s.max_pages * s.page_size;

  // The checks of rows_of, first_slot and locate.
  const bool valid = 0 <= first_row && first_row <= end_row && end_row <= rows;
  const uint32_t num_rows = valid ? end_row - first_row : 0;
  const int64_t first = context < 0 || base < 0 ? INT64_MIN / 2 : int64_t{context} + base;
  int request[kTurns], page[kTurns];
  uint32_t offset[kTurns];
  bool has_page[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    int64_t slot;
    request[i] = find_request<S>(finished_row<S>(i), first_row, num_rows, first, &slot);
    has_page[i] = request[i] >= 0 && 0 <= slot && slot < num_slots;
    const uint32_t nth = page_size.divide(static_cast<uint32_t>(slot), &offset[i]);
    page[i] = load_entry(s.block_table + request[i] * s.table_stride + nth, has_page[i], 0);
  }
  float2 angle[kTurns] = {};
  find_angles(after, position, at.i, angle);
  // While these are in flight: where the pair begins. A row of q is like a page.
  const int kv_head = head - static_cast<int>(after.num_heads);
  const int v_head = kv_head - static_cast<int>(after.num_kv_heads);
  const bool of_q = kv_head < 0, turns = v_head < 0;
  const PagedCache q{after.q_out, after.q_row_stride, 0, after.q_head_stride};
  const PagedCache to = of_q ? q : turns ? after.k : after.v;
  T* low = slot_of<T>(to, {0, 0}, of_q ? head : turns ? kv_head : v_head) + at.i;
  const bool reports = blockIdx.x + blockIdx.y == 0;
  if (reports && !valid) report_on_device(s, lane, kStatusBadLength);
  PairOut<T> out[kTurns];
  uint32_t low_at[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = finished_row<S>(i);
    low_at[i] = sum_address<S>(sums, row, low_col(pair));
    if (request[i] < 0 || pair >= count) continue;
    int32_t status = kStatusOk;
    if (!has_page[i]) {
      status = kStatusBadLength;
    } else if (page[i] < 0 || page[i] >= s.num_pages) {
      status = kStatusBadPage;
    }
    if (position[i] < 0 || position[i] >= after.max_position) status |= kStatusBadLength;
    if (reports) report_on_device(s, request[i], status);
    if (!of_q && status) continue;
    const Place place = {of_q ? row : page[i], offset[i]};
    out[i] = {slot_of<T>({low, to.page_stride, to.slot_stride, 0}, place, 0), status != 0, turns};
  }
  sync_sums<AppendKvParams>();  // the prior grids have ended too
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (out[i].low == nullptr) continue;
    float low_sum = sum_at<S>(low_at[i]), high_sum = sum_at<S>(low_at[i] ^ kHighColumn);
    if (p.bias) {
      low_sum += as_float32(bias[0]);
      high_sum += as_float32(bias[1]);
    }
    store_pair(out[i], half, low_sum, high_sum, angle[i]);
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
  const int begin = blockIdx.x * unit, count = min(unit, units_of(p, after) - begin);
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
      if constexpr (kAppends<After>) row += blockIdx.y * after.head_dim;
      if constexpr (kPairs<After>) row += half * rows_apart(p, after);
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
  const bool stores = !kAppends<After> && out_row < rows && out_col < count;
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
    if (stores && p.bias) added.bias = static_cast<const uint16_t*>(p.bias)[begin + out_col];
    if (stores && p.residual) prefetch_line(residual_of(p, residual_at));
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
    if (stores && p.residual) added.residual = load_residual(p, residual_at);
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
  if (!stores) return;
  if constexpr (std::is_same_v<After, SiluMul>) {
    *reinterpret_cast<T*>(out_to) =
        silu_mul_sums<T>(sum_at<S>(out_sum), sum_at<S>(out_sum ^ kHighColumn));
  } else if constexpr (!kAppends<After>) {
    store_added<T>(p, out_to, sum_at<S>(out_sum), added);
  }
}

// Returns false if there are too many weights, requests or slots.
template <typename T, typename S, bool kNorms, typename After>
bool launch(const LinearKernelParams& p, const After& after, const Card& card,
            cudaStream_t stream) {
  const int64_t units = units_of(p.linear, after), sms = card.num_sms;
  int64_t heads = 1;
  if constexpr (kAppends<After>) {
    heads = after.num_heads + 2 * after.num_kv_heads;
    const Sequences& s = after.sequences;
    if (s.num_requests > kWarpSize || s.max_pages > INT32_MAX / s.page_size) return false;
  }
  // Few blocks with full fragments leave the most room for other launches.
  const int64_t even = (units * heads + sms - 1) / sms;
  const int64_t unit = std::clamp<int64_t>(even, 8, S::kUnit);
  const int64_t blocks = (units + unit - 1) / unit;
  if (blocks * heads > S::kPerSm * sms) return false;
  const auto kernel = small_kernel<T, S, kNorms, After>;
  prefer_shared("linear", kernel);
  const KernelShape shape{blocks, kBlockThreads<After>, 0, 1, static_cast<unsigned>(heads)};
  launch_kernel("linear", kernel, shape, stream, p.linear.pdl, p, after, static_cast<int>(unit));
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
  return p.linear.norm_weight ? launch_form<2, true>(p, Nothing{}, card, stream)
                              : launch_form<3, false>(p, Nothing{}, card, stream);
}

bool launch_small_append(const LinearKernelParams& p, const AppendKvParams& append,
                         const Card& card, cudaStream_t stream) {
  return launch_form<3, true>(p, append, card, stream);
}

}  // namespace tlt
