// linear_rows and linear_silu_mul, with or without a preceding norm, for any float16 or bfloat16
// rows, bit-identical to the decode kernel (order of the sum: linear.cuh): the parts of K are
// summed one after the other. The only kernel for unaligned rows, and for fewer than eight parts on
// cards without wgmma.
//
// A block owns 64 weight rows x 64 rows of x, a warp 32 x 32 outputs. Both operands pass through a
// ring in shared memory; a thread applies the norm to the chunks that it copied, one step before
// their use. For silu_mul, 8 rows of gate and 8 of up alternate in a tile. Row tiles are neighbours
// in the grid, so the weights are read from memory once and from L2 after that.
#include "layers/linear.cuh"

namespace tlt {
namespace {

constexpr int kTile = 64;  // rows of x, and weight rows
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kStages = 4;
constexpr int kRowChunks = kBlockK / 8;
constexpr int kTileChunks = kTile * kRowChunks, kStageChunks = 2 * kTileChunks;
constexpr int kCopies = kTileChunks / kThreads;   // chunks of one tile that a thread copies
constexpr int kCopyRows = kThreads / kRowChunks;  // rows between the chunks of a thread
static_assert(kCopyRows % 4 == 0, "a thread's chunks have one position in the swizzle");
constexpr int kPitch = kTile + 4;  // row pitch of the sums in shared memory: no bank conflicts
static_assert(kTile * kPitch * 4 <= kStages * kStageChunks * 16, "sums reuse the ring");

// Four rows that are read together, 32 bytes of each, are in different banks.
__device__ __forceinline__ int chunk_index(int row, int chunk) {
  return row * kRowChunks + (chunk ^ (row % 4) * 2);
}

// The elements of load_split at half h of the 64 elements of a row.
__device__ __forceinline__ uint4 read_split(const uint4* tile, int row, int h, int t) {
  const auto half = [&](int e) {
    const uint4* chunk = tile + chunk_index(row, h * 4 + e * 2 + t / 2);
    return reinterpret_cast<const uint2*>(chunk)[t % 2];
  };
  return join(half(0), half(1));
}

// A thread copies chunks of rows `row`, row + apart, ... of an array, below `end`.
template <typename T>
struct Operand {
  const T* from;
  int64_t step;   // to its next row
  int rows_left;  // copies of rows from its first one on
  __device__ Operand(const void* base, int64_t stride, int64_t row, int64_t end, int apart)
      : from(static_cast<const T*>(base) + row * stride),
        step(apart * stride),
        rows_left(
            static_cast<int>(min((end - row + apart - 1) / apart, static_cast<int64_t>(kCopies)))) {
  }
};

// The blocks of K, part by part.
struct Cursor {
  int num_blocks, parts, part = 0, block = 0;
  __device__ Cursor(int num_blocks, int parts) : num_blocks(num_blocks), parts(parts) {
    skip_finished_parts();
  }
  __device__ bool done() const { return part >= parts; }
  __device__ void skip_finished_parts() {
    while (block >= num_blocks && !done()) block = ++part;
  }
  __device__ void next() {
    block += parts;
    skip_finished_parts();
  }
};

// The four sums of an MMA among the 32 of a lane.
__device__ __forceinline__ float (&sums_of(float (&acc)[32], int m, int i))[4] {
  return *reinterpret_cast<float (*)[4]>(acc + (m * 4 + i) * 4);
}

// f(m, i, c) for each sum that a lane holds: weight rows m * 16 + ..., rows of x i * 8 + ...
template <typename F>
__device__ __forceinline__ void for_each_sum(F&& f) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) f(m, i, c);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    tiles_kernel(const __grid_constant__ LinearKernelParams params) {
  launch_dependents();
  wait_for_prior_grid();
  extern __shared__ uint4 ring[];
  __shared__ float row_scale[kTile];  // of the norm
  const LinearParams& p = params.linear;
  const bool norms = p.norm_weight != nullptr, silu_mul = params.silu_mul;
  const int in_dim = static_cast<int>(p.in_dim);
  const unsigned row_tiles = static_cast<unsigned>((p.rows + kTile - 1) / kTile);
  const int64_t row_begin = static_cast<int64_t>(blockIdx.x % row_tiles) * kTile;
  const int64_t col_begin = static_cast<int64_t>(blockIdx.x / row_tiles) * kTile;
  const int num_blocks = num_blocks_of(p);

  const int copy_row = threadIdx.x / kRowChunks, copy_k = threadIdx.x % kRowChunks * 8;
  static_assert(kCopyRows == 16, "a thread copies rows of gate, or rows of up, 8 apart");
  const int64_t half = p.out_dim / 2, begin = copy_row / 8 * half;
  const Operand<T> weight =
      silu_mul ? Operand<T>(p.weight, p.weight_stride, begin + col_begin / 2 + copy_row % 8,
                            begin + half, 8)
               : Operand<T>(p.weight, p.weight_stride, col_begin + copy_row, p.out_dim, kCopyRows);
  const Operand<T> x_in(p.x, p.x_stride, row_begin + copy_row, p.rows, kCopyRows);
  const auto copy_tile = [&](uint4* to, const Operand<T>& operand, int k, bool aligned) {
    const T* from = operand.from;
    uint4* slot = to + chunk_index(copy_row, copy_k / 8);
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool valid = i < operand.rows_left && k < in_dim;
        copy_async_16(shared_address(slot + i * kThreads), from + k, valid);
        from += operand.step;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const int dim = i < operand.rows_left ? in_dim : 0;
        slot[i * kThreads] = load_pieces(from, k, dim).raw;
        from += operand.step;
      }
    }
  };
  Cursor load_at(num_blocks, p.parts);
  const auto load_stage = [&](int stage) {
    if (!load_at.done()) {
      uint4* to = ring + stage * kStageChunks;
      const int k = load_at.block * kBlockK + copy_k;
      copy_tile(to, weight, k, params.w_aligned);
      copy_tile(to + kTileChunks, x_in, k, params.x_aligned);
      load_at.next();
    }
    commit_copies();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) load_stage(stage);

  if (norms) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kTile), p.rows - row_begin));
#pragma unroll 2
    for (int row = threadIdx.x / kWarpSize; row < kTile; row += kWarps) {
      const T* x = static_cast<const T*>(p.x) + (row_begin + row) * p.x_stride;
      const float squares = warp_squares(x, row < rows ? in_dim : 0, params.x_aligned);
      if (threadIdx.x % kWarpSize == 0) row_scale[row] = norm_scale<T>(squares, in_dim, p.eps);
    }
    __syncthreads();
  }
  const auto apply_norm = [&](int stage, int block) {
    uint4* x = ring + stage * kStageChunks + kTileChunks;
    const Chunk<T> norm_weight = load_chunk(static_cast<const T*>(p.norm_weight),
                                            block * kBlockK + copy_k, in_dim, params.x_aligned);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      uint4& slot = x[chunk_index(copy_row, copy_k / 8) + i * kThreads];
      Chunk<T> value;
      value.raw = slot;
      norm_chunk(value, row_scale[copy_row + i * kCopyRows], norm_weight);
      slot = value.raw;
    }
  };

  const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  const int w_row = warp % 2 * 32, x_row = warp / 2 * 32;  // of the warp
  const bool has_rows = row_begin + x_row < p.rows;
  float acc[32];
  const auto multiply = [&](int stage) {
    const uint4* w = ring + stage * kStageChunks;
    const uint4* x = w + kTileChunks;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint4 low[2], high[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        low[m] = read_split(w, w_row + m * 16 + g, h, t);
        high[m] = read_split(w, w_row + m * 16 + 8 + g, h, t);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x_rows = read_split(x, x_row + i * 8 + g, h, t);
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_k32<T>(sums_of(acc, m, i), low[m], high[m], x_rows);
      }
    }
  };

  Cursor at(num_blocks, p.parts);
  int stage = 0;
  const auto following = [](int s) { return s + 1 == kStages ? 0 : s + 1; };
  if (norms && !at.done()) {
    wait_copies<kStages - 2>();
    apply_norm(0, at.block);
  }
  PartTree<32> tree;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part) {
    for_each_sum([&](int m, int i, int c) { sums_of(acc, m, i)[c] = 0.0f; });
    while (at.part == part) {
      at.next();
      wait_copies<kStages - 3>();  // this step's copies and the next's
      if (norms && !at.done()) apply_norm(following(stage), at.block);
      __syncthreads();  // this step's chunks are visible to the block; the last stage is free
      load_stage(stage == 0 ? kStages - 1 : stage - 1);
      if (has_rows) multiply(stage);
      stage = following(stage);
    }
    tree.add(part, acc);
  }

  // Lanes hold columns; rows are written through shared memory.
  float* sums = reinterpret_cast<float*>(ring);
  wait_copies<0>();
  __syncthreads();  // the ring is read
  for_each_sum([&](int m, int i, int c) {
    const int row = x_row + i * 8 + t * 2 + c % 2, col = w_row + m * 16 + c / 2 * 8 + g;
    sums[row * kPitch + col] = sums_of(acc, m, i)[c];
  });
  __syncthreads();
  if (silu_mul) {
    for (int i = threadIdx.x; i < kTile * kTile / 2; i += kThreads) {
      const int row = i / (kTile / 2), pair = i % (kTile / 2), col = pair / 8 * 16 + pair % 8;
      const int64_t x_at = row_begin + row, out_at = col_begin / 2 + pair;
      if (x_at >= p.rows || out_at >= half) continue;
      const float* sum = sums + row * kPitch + col;
      static_cast<T*>(p.out)[x_at * p.out_stride + out_at] = silu_mul_sums<T>(sum[0], sum[8]);
    }
    return;
  }
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int row = i / kTile, col = i % kTile;
    if (row_begin + row >= p.rows || col_begin + col >= p.out_dim) continue;
    store_out<T>(p, row_begin + row, col_begin + col, sums[row * kPitch + col]);
  }
}

template <typename T>
void launch(const LinearKernelParams& p, cudaStream_t stream) {
  const auto kernel = tiles_kernel<T>;
  prefer_shared("linear", kernel);
  const int shared_bytes = kStages * kStageChunks * 16;
  const auto tiles_of = [](int64_t extent) { return (extent + kTile - 1) / kTile; };
  const int64_t tiles = tiles_of(p.linear.rows) * tiles_of(p.linear.out_dim);
  launch_kernel("linear", kernel, {tiles, kThreads, shared_bytes}, stream, true, p);
}

}  // namespace

void launch_tiles(const LinearKernelParams& p, cudaStream_t stream) {
  p.linear.dtype == DType::kFloat16 ? launch<__half>(p, stream) : launch<__nv_bfloat16>(p, stream);
}

}  // namespace tlt
