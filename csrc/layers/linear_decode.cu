// The linears of few aligned float16 or bfloat16 rows, with or without a preceding norm. The
// weights are read from memory once, which determines the time (order of the sum: linear.cuh). Up
// to 8 rows have a separate form. More than 16 rows are cut into pieces, the grid's second axis.
// All pieces run at once, and all but the first read the weights from L2.
//
// A block owns tiles of up to 32 weight rows; each of its 8 warps owns one part of K. A warp copies
// the weight chunks of its own MMA fragments into its own ring slots, so the ring needs no barrier
// of the block and stays full across tiles: up to 96 KB in flight a block. With programmatic
// dependent launch it is filled while the prior kernels still run. x (weights are MMA operand A, x
// rows operand B) is loaded from L2 a few steps ahead into registers, where the norm is applied. At
// a tile's end the warps' sums are added in shared memory. Bytes: the weights, plus rows / 32 of
// that from L2.
//
// If the epilogue takes pairs of sums (pairs.cuh), their weight rows are the low and the high rows
// of a fragment. The appending form has two more warps: one looks up the destinations of the rows,
// the other the pairs and their rotation angles.
#include <algorithm>
#include <type_traits>

#include "layers/decode.cuh"
#include "layers/pairs.cuh"

namespace tlt {
namespace {

constexpr int kWarps = kParts;  // one part each

// ---- the kernel ---------------------------------------------------------------------------------

// Sums the squares of one part of rows, by one warp: every eighth block of K from `begin` to `end`,
// which are the same in all lanes. Lanes 4 g to 4 g + 3 pass row g of fragment r as row[r]; a
// lane's elements start at offset `at` in a block. Lane 4 g + g / 2 gets the sums of row g.
template <int kRows, typename T>
__device__ __forceinline__ void sum_squares(const T* const (&row)[kRows], const int (&dim)[kRows],
                                            int begin, int end, int at, float (&squares)[kRows]) {
  float sum[kRows][2][4] = {};
  constexpr int kStep = kParts * kBlockK, kAhead = 4 / kRows;  // steps in flight at once
#pragma unroll 1
  for (int k = begin; k < end; k += kAhead * kStep) {
    Chunk<T> x[kAhead][kRows][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (k + i * kStep >= end) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          x[i][r][h] = load_split(row[r], k + at + i * kStep + h * 32, dim[r]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (k + i * kStep >= end) break;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) add_squares(sum[r][h], x[i][r][h]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) squares[r] = squares_of(sum[r]);
}

template <typename After>
constexpr int kThreads = (kWarps + 2 * kAppends<After>)*kWarpSize;

template <typename T, typename D, bool kNorms, typename After>
__global__ void __launch_bounds__(kThreads<After>, kBlocksPerSm)
    decode_kernel(const __grid_constant__ LinearKernelParams params,
                  const __grid_constant__ After after, const Shares shares) {
  extern __shared__ uint4 shared[];
  float* sums = reinterpret_cast<float*>(shared);
  uint4* ring = shared + D::kSums / 4;
  __shared__ float squares[kNorms ? kWarps : 1][D::kRows];
  launch_dependents();
  const LinearParams& p = params.linear;
  const int in_dim = static_cast<int>(p.in_dim), first_row = blockIdx.y * D::kRows;
  const int rows = min(static_cast<int>(p.rows) - first_row, D::kRows);
  // One appending form serves rows with and without a norm; the branch also avoids spills.
  const bool norms = kNorms && p.norm_weight != nullptr;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int g = lane / 4, t = lane % 4;
  const Share share(shares, kPairs<After> ? D::kCols / 2 : D::kCols);
  const bool multiplies = !kAppends<After> || warp < kWarps;
  const int steps = multiplies ? part_steps(num_blocks_of(p), warp) : 0;
  const int first_k = warp * kBlockK, step_k = kParts * kBlockK;

  // Weights are evicted first, so that data which the next kernels share stays in L2. Chunks 0 and
  // 1 of a row are swapped with 2 and 3 in every other pair of rows, so that 8-byte reads hit all
  // banks.
  uint4* my_ring = ring + warp * D::kChunks * kWarpSize;
  uint4* my_slot = my_ring + g * 4 + (t ^ (g & 2));
  const uint64_t policy = evict_first_policy();
  int load_tile = 0, load_step = 0, left = 0;  // left: rows of the tile from this lane's row on
  const T* load_from[kPairs<After> ? D::kTiles : 1];
  const int64_t tile_step = 16 * p.weight_stride;
  int64_t high_step = 8 * p.weight_stride;
  if constexpr (kPairs<After>) high_step = rows_apart(p, after) * p.weight_stride;
  const auto load_stage = [&](int stage) {
    if (load_tile < share.tiles && load_step < steps) {
      if (load_step == 0) {
        const int first = share.first(load_tile);
        left = share.first(load_tile + 1) - first - g;
        const T* weight = static_cast<const T*>(p.weight) + warp * kBlockK + t * 8;
        if constexpr (kPairs<After>) {
#pragma unroll
          for (int m = 0; m < D::kTiles; ++m) {
            load_from[m] =
                weight + low_row(after, share.begin + first + m * 8 + g) * p.weight_stride;
          }
        } else {
          load_from[0] = weight + (share.begin + first + g) * p.weight_stride;
        }
      }
      uint4* to = my_slot + stage * D::kStage;
      const int k = load_step * step_k;  // offset from load_from
      const int dim = in_dim - first_k - t * 8;
      const auto row = [&](int i) {  // rows g, g + 8, ... of the tile, or pairs of them
        if constexpr (kPairs<After>) return load_from[i / 2] + i % 2 * high_step;
        return load_from[0] + i / 2 * tile_step + i % 2 * high_step;
      };
      const auto inside = [&](int i) { return (kPairs<After> ? i / 2 : i) * 8 < left; };
#pragma unroll
      for (int i = 0; i < 2 * D::kTiles; ++i) {
        const T* from = row(i) + k;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          copy_async_once(to + (i * 2 + h) * kWarpSize, from + h * 32,
                          inside(i) && k + h * 32 < dim, policy);
        }
      }
      if (++load_step == steps) {
        load_step = 0;
        ++load_tile;
      }
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < D::kStages; ++stage) load_stage(stage);
  __shared__ std::conditional_t<kAppends<After>, RowPlaces<D::kRows>, char> places;
  constexpr int kTilePairs = D::kCols / 2;
  __shared__ float2 angles[kAppends<After> ? D::kRows : 1][kTilePairs];  // of a tile's pairs
  __shared__ HeadPair pairs[kAppends<After> ? kTilePairs : 1];
  const auto find_pairs = [&](int tile) {  // called by a warp
    if constexpr (kAppends<After>) {
      const int first = share.first(tile), count = share.first(tile + 1) - first;
      const int pair = lane % kTilePairs;
      if (pair >= count) return;
      const HeadPair at = head_pair(after, share.begin + first + pair);
      pairs[pair] = at;
      for (int row = lane / kTilePairs; row < rows; row += kWarpSize / kTilePairs) {
        const int64_t position = after.position[first_row + row];
        if (position < 0 || position >= after.max_position) continue;  // the row is not stored
        angles[row][pair] = angle_of(after, position, at.i);
      }
    }
  };
  if constexpr (kAppends<After>) {
    if (!multiplies) {
      if (!p.pdl_tables) wait_for_prior_grid();
      if (warp == kWarps) {
        find_places(after, first_row, rows, blockIdx.x == 0, &places);
      } else {
        find_pairs(0);
      }
    }
  }
  if (norms) {
    const char* line = static_cast<const char*>(p.norm_weight);
    for (int i = threadIdx.x * 128; i < in_dim * 2; i += kThreads<After> * 128) {
      prefetch_line(line + i);
    }
  }

  // With fewer than 8 rows, the lanes of absent rows load later steps of the present rows, so that
  // a load and a norm serve up to 8 steps; shuffles move the chunks to the lanes that need them.
  int spread = 0;  // log2 of the steps in a batch
  if constexpr (D::kRowTiles == 1) spread = rows == 1 ? 3 : rows == 2 ? 2 : rows <= 4 ? 1 : 0;
  const int batch_steps = 1 << spread;
  const int x_g = g & ((8 >> spread) - 1), x_slot = g >> (3 - spread);
  const int x_k = first_k + t * 4 + x_slot * step_k;  // the first element that this lane loads
  const int64_t x_at = (first_row + x_g) * p.x_stride;
  // The lane that holds this lane's operand of the tensor cores, at step 0 of a batch.
  const int source = x_g * 4 + t, source_step = 4 * (8 >> spread);
  // Offset in a slot of this lane's elements of the first 16 of 32; of the others: that ^ 32.
  const int my_read = g * 64 + ((t / 2) ^ (g & 2)) * 16 + t % 2 * 8;
  const auto x_row = [&](int i) { return static_cast<const T*>(p.x) + x_at + i * 8 * p.x_stride; };
  const auto x_dim = [&](int i) { return i * 8 + x_g < rows ? in_dim : 0; };
  using X = Rows<T, D::kRowTiles>;
  const auto load_norm_weight = [&](X& to, int step) {
    const T* norm_weight = static_cast<const T*>(p.norm_weight);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      to.norm_weight[h] = load_split(norm_weight, x_k + step * step_k + h * 32, in_dim);
    }
  };
  const auto load_x = [&](X& to, int step) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < D::kRowTiles; ++i) {
        to.x[i][h] = load_split(x_row(i), x_k + step * step_k + h * 32, x_dim(i));
      }
    }
  };
  X now, next;
  if (norms && steps > 0) load_norm_weight(next, 0);
  wait_for_prior_grid();

  if (norms && multiplies) {
    const T* row[D::kRowTiles];
    int dim[D::kRowTiles];
    float of_part[D::kRowTiles];
#pragma unroll
    for (int i = 0; i < D::kRowTiles; ++i) {
      row[i] = x_row(i);  // lanes of absent rows use another row
      dim[i] = i * 8 + g < rows ? in_dim : 0;
    }
    sum_squares(row, dim, first_k, in_dim, t * 4, of_part);
#pragma unroll
    for (int i = 0; i < D::kRowTiles; ++i) {
      if (t == g / 2) squares[warp][i * 8 + g] = of_part[i];
    }
  }
  if (steps > 0) load_x(next, 0);  // from L1 if squares were summed

  // A thread's outputs of a tile, and their addends.
  constexpr int kOutputs = D::kRows * D::kCols / (kWarps * kWarpSize);
  struct Output {
    int row, col;
  };
  static_assert(D::kCols == kWarpSize, "a warp has all sums of a row");
  const auto output = [&](int i) { return Output{warp + i * kWarps, lane}; };
  Added ahead[kOutputs];
  const auto load_ahead = [&](int tile) {
    const int first = share.first(tile), count = share.first(tile + 1) - first;
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const Output to = output(i);
      if (tile < share.tiles && to.row < rows && to.col < count) {
        ahead[i] = load_added(p, first_row + to.row, share.begin + first + to.col);
      }
    }
  };
  if constexpr (!kPairs<After>) load_ahead(0);

  float scale[D::kRowTiles] = {};
  if (norms) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D::kRowTiles; ++i) {
      const int row = i * 8 + x_g;
      float part[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) part[w] = squares[w][row];
      scale[i] = row < rows ? norm_scale<T>(sum_of_parts(part), in_dim, p.eps) : 0.0f;
    }
  }
  const auto apply_norm = [&](X& at) {
#pragma unroll
    for (int i = 0; i < D::kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) norm_chunk(at.x[i][h], scale[i], at.norm_weight[h]);
    }
  };

  const auto read_weight = [&](int stage, int i, int h) {
    const char* from =
        reinterpret_cast<const char*>(my_ring + stage * D::kStage + (i * 2 + h) * kWarpSize);
    return join(*reinterpret_cast<const uint2*>(from + my_read),
                *reinterpret_cast<const uint2*>(from + (my_read ^ 32)));
  };
  int stage = 0;
  for (int tile = 0; tile < share.tiles; ++tile) {
    const int first = share.first(tile), count = share.first(tile + 1) - first;
    float acc[D::kTiles][D::kRowTiles][4] = {};
    for (int step = 0; step < steps; ++step) {
      const int in_batch = step & (batch_steps - 1);
      if (in_batch == 0) {
        now = next;
        if (norms) apply_norm(now);
        if (step + batch_steps < steps || tile + 1 < share.tiles) {
          const int following = step + batch_steps < steps ? step + batch_steps : 0;
          load_x(next, following);  // of the next tile if this one has no more
          if (norms) load_norm_weight(next, following);
        }
      }
      uint4 x[D::kRowTiles][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < D::kRowTiles; ++i) {
          x[i][h] = now.x[i][h].raw;
          if constexpr (D::kRowTiles == 1) {
            if (spread > 0) x[i][h] = shuffle(x[i][h], source + in_batch * source_step);
          }
        }
      }
      wait_copies<D::kStages - 1>();
      __syncwarp();  // the step's chunks are visible to the whole warp
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int m = 0; m < D::kTiles; ++m) {
          const uint4 low = read_weight(stage, m * 2, h), high = read_weight(stage, m * 2 + 1, h);
#pragma unroll
          for (int i = 0; i < D::kRowTiles; ++i) mma_k32<T>(acc[m][i], low, high, x[i][h]);
        }
      }
      __syncwarp();  // all lanes have read the slots
      load_stage(stage);
      stage = stage + 1 == D::kStages ? 0 : stage + 1;
    }
    if (multiplies) {
      float* mine = sums + warp * D::kRows * D::kCols;
      const int at = t * 2 * D::kCols + (g ^ t * 8);  // sum_index of row 2 t and column g
#pragma unroll
      for (int m = 0; m < D::kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < D::kRowTiles; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            mine[(at ^ (m * 16 + c / 2 * 8)) + (i * 8 + c % 2) * D::kCols] = acc[m][i][c];
          }
        }
      }
    }
    if constexpr (kAppends<After>) {
      if (warp > kWarps && tile > 0) find_pairs(tile);
      __syncthreads();
      for (int i = threadIdx.x; i < rows * kTilePairs; i += kThreads<After>) {
        const int row = i / kTilePairs, pair = i % kTilePairs, col = pair / 8 * 16 + pair % 8;
        if (pair >= count || places.request[row] < 0) continue;
        float low = tile_sum<D>(sums, row, col), high = tile_sum<D>(sums, row, col + 8);
        const HeadPair at = pairs[pair];
        if (p.bias) {
          const T* bias = static_cast<const T*>(p.bias) + low_row(after, at);
          low += as_float32(bias[0]);
          high += as_float32(bias[after.head_dim / 2]);
        }
        store_pair(pair_out<T>(after, first_row + row, at, places.at[row]),
                   static_cast<int>(after.head_dim / 2), low, high, angles[row][pair]);
      }
    } else if constexpr (kPairs<After>) {
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < kOutputs; ++i) {
        const Output to = output(i);
        if (to.row >= rows) break;
        const float sum = tile_sum<D>(sums, to.row, to.col);
        const float up = __shfl_down_sync(kFullWarp, sum, 8);  // the up of this lane's gate
        const int pair = to.col / 16 * 8 + to.col % 8;
        if (pair >= count || to.col % 16 >= 8) continue;
        static_cast<T*>(p.out)[(first_row + to.row) * p.out_stride + share.begin + first + pair] =
            silu_mul_sums<T>(sum, up);
      }
    } else {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        const Output to = output(i);
        if (to.row >= rows || to.col >= count) continue;
        const int64_t at = (first_row + to.row) * p.out_stride + share.begin + first + to.col;
        store_added<T>(p, out_of(p, at), tile_sum<D>(sums, to.row, to.col), ahead[i]);
      }
      load_ahead(tile + 1);
    }
    if (tile + 1 < share.tiles) __syncthreads();  // before the next tile's sums are written
  }
}

template <typename T, typename D, bool kNorms, typename After>
void launch(const LinearKernelParams& p, const After& after, const Card& card,
            cudaStream_t stream) {
  const auto kernel = decode_kernel<T, D, kNorms, After>;
  prefer_shared("linear", kernel);
  // Two blocks a multiprocessor if each gets 16 weight rows, else one, so that all read the same
  // amount. If that gives too few blocks, they have 16 rows, then 8.
  const int64_t out_dim = p.linear.out_dim, pieces = (p.linear.rows + D::kRows - 1) / D::kRows;
  const int64_t sms = std::max<int64_t>(1, card.num_sms / pieces);
  const int64_t narrow = (out_dim + 15) / 16;
  const int64_t grid = narrow > kBlocksPerSm * sms ? kBlocksPerSm * sms
                       : narrow > sms              ? sms
                       : narrow * 2 > sms          ? narrow
                                                   : (out_dim + 7) / 8;
  const int64_t count = out_dim / (kPairs<After> ? 2 : 1), each = (count + grid - 1) / grid;
  const Shares shares = {static_cast<int>(count / grid), static_cast<int>(count % grid)};
  // Small weights need only a part of the ring, which leaves room for the next kernels.
  const int64_t max_tile = D::kCols / (kPairs<After> ? 2 : 1);
  const int64_t steps = (p.linear.in_dim + kParts * kBlockK - 1) / (kParts * kBlockK) *
                        ((each + max_tile - 1) / max_tile);
  const int64_t stages = std::min<int64_t>(D::kStages, steps);
  const int shared_bytes = static_cast<int>(D::kSums * 4 + stages * D::kStage * 16);
  launch_kernel("linear", kernel,
                {grid, kThreads<After>, shared_bytes, 1, static_cast<unsigned>(pieces)}, stream,
                p.linear.pdl, p, after, shares);
}

template <typename T, typename D>
void launch_rows(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  if (p.silu_mul) return launch<T, D, true>(p, SiluMul{}, card, stream);
  p.linear.norm_weight ? launch<T, D, true>(p, Nothing{}, card, stream)
                       : launch<T, D, false>(p, Nothing{}, card, stream);
}

// f(pointer to the type of an element, whether the rows are few)
template <typename F>
void dispatch_rows(const LinearParams& p, F&& f) {
  const std::bool_constant<true> few;
  const std::bool_constant<false> many;
  if (p.dtype == DType::kFloat16) {
    const __half* tag = nullptr;
    p.rows <= Few::kRows ? f(tag, few) : f(tag, many);
  } else {
    const __nv_bfloat16* tag = nullptr;
    p.rows <= Few::kRows ? f(tag, few) : f(tag, many);
  }
}

}  // namespace

void launch_decode(const LinearKernelParams& p, const Card& card, cudaStream_t stream) {
  dispatch_rows(p.linear, [&](auto* tag, auto few) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    launch_rows<T, std::conditional_t<few, Few, Many>>(p, card, stream);
  });
}

void launch_decode_append(const LinearKernelParams& p, const AppendKvParams& append,
                          const Card& card, cudaStream_t stream) {
  dispatch_rows(p.linear, [&](auto* tag, auto few) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    launch<T, std::conditional_t<few, Few, ManyAppending>, true>(p, append, card, stream);
  });
}

}  // namespace tlt
