// Times every grid of the wgmma linear (csrc/layers/linear_hopper.cu) on a card: the data behind
// the estimate of `consider_grid`. A call is one among many in one graph, each on its own weights.
//
//   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
//     -DTLT_WITH_CUDA=1 -Icsrc profiling/kernels/grids.cu -o grids && ./grids > grids.txt
//
// A line has rows of x, out_dim, in_dim, the tile (warpgroups across weight rows and along rows of
// x, rows of x of each), the blocks of a cluster, the weight rows of a tile, and microseconds.
#include <cstdio>
#include <cstring>

#include "layers/linear_hopper.cu"

namespace tlt {
namespace {

constexpr size_t kPoolBytes = size_t{3} << 30, kOutBegin = size_t{64} << 20;
constexpr size_t kWeightsBegin = size_t{256} << 20;
constexpr int kRounds = 6, kWarmUps = 2;

char* pool;  // x, out, then weights
Card card;
cudaStream_t stream;

// Values between .5 and 1 of either sign: zeros would draw less power.
__global__ void fill(uint16_t* out, size_t count) {
  for (size_t i = blockIdx.x * 256ull + threadIdx.x; i < count; i += gridDim.x * 256ull) {
    uint32_t hash = static_cast<uint32_t>(i) * 2654435761u;
    hash = (hash ^ hash >> 15) * 2246822519u;
    out[i] = ((hash ^ hash >> 13) & 0x807f) | 0x3f00;
  }
}

LinearKernelParams params(int64_t rows, int64_t out_dim, int64_t in_dim, int call) {
  LinearKernelParams p;
  memset(&p, 0, sizeof(p));
  const size_t bytes = out_dim * in_dim * 2;
  const size_t copies = std::max<size_t>((kPoolBytes - kWeightsBegin) / bytes, 1);
  LinearParams& linear = p.linear;
  linear.x = pool;
  linear.out = pool + kOutBegin;
  linear.weight = pool + kWeightsBegin + call % copies * bytes;
  linear.rows = rows;
  linear.in_dim = linear.x_stride = linear.weight_stride = in_dim;
  linear.out_dim = linear.out_stride = linear.residual_stride = out_dim;
  linear.parts = kParts;
  linear.dtype = linear.out_dtype = DType::kBFloat16;
  linear.pdl = p.x_aligned = p.w_aligned = p.out_aligned = true;
  return p;
}

template <typename Call>
float best_us(const Call& call, int calls) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < calls; ++i) call(i);
  check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  float best = 1e9f;
  for (int round = 0; round < kRounds; ++round) {
    float ms;
    check_cuda(cudaEventRecord(begin, stream), "event");
    check_cuda(cudaGraphLaunch(exec, stream), "launch");
    check_cuda(cudaEventRecord(end, stream), "event");
    check_cuda(cudaEventSynchronize(end), "run");
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "event");
    if (round >= kWarmUps) best = std::min(best, ms);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best * 1e3f / calls;
}

template <typename Of>
void time_tile(int64_t rows, int64_t out_dim, int64_t in_dim, int calls) {
  const int64_t shares = std::max<int64_t>(card.num_sms / ceil_div(rows, Of::kRows), 1);
  const int64_t equal = ceil_div(ceil_div(out_dim, shares), 8) * 8;
  constexpr int64_t kWhole = Of::kWeightRows;
  for (const int split : {1, 2, 4, 8}) {
    for (const int64_t tile_rows : {kWhole, kWhole * 3 / 4, kWhole / 2, equal}) {
      if (tile_rows > kWhole || (tile_rows == equal && split > 1)) continue;
      const auto grid =
          make_grid<Of>(params(rows, out_dim, in_dim, 0).linear, card, split, tile_rows);
      if (!grid) continue;
      const float us = best_us(
          [&](int i) {
            launch<__nv_bfloat16, Of>(params(rows, out_dim, in_dim, i), *grid, stream);
          },
          calls);
      printf("%ld %ld %ld %d,%d,%d %d %ld %.2f\n", rows, out_dim, in_dim, Of::kAcross, Of::kAlong,
             Of::kColumns, split, tile_rows, us);
    }
  }
}

void time_all() {
  constexpr int64_t kShapes[][2] = {{3072, 576},   {576, 1536},  {9728, 896},   {896, 4864},
                                    {2048, 1536},  {1536, 1536}, {17920, 1536}, {1536, 8960},
                                    {4608, 3584},  {3584, 3584}, {37888, 3584}, {3584, 18944},
                                    {152064, 3584}};
  for (const auto& [out_dim, in_dim] : kShapes) {
    for (const int64_t rows : {8, 16, 32, 64, 96, 128, 160, 256, 320, 512, 1056}) {
      if (out_dim > 100000 && rows > 128) continue;
      const int calls = std::clamp<int64_t>((int64_t{1} << 30) / (out_dim * in_dim * 2), 6, 64);
      time_tile<Small>(rows, out_dim, in_dim, calls);
      if (rows <= Small::kRows) continue;
      time_tile<Long>(rows, out_dim, in_dim, calls);
      time_tile<Medium>(rows, out_dim, in_dim, calls);
      time_tile<Large>(rows, out_dim, in_dim, calls);
    }
  }
}

}  // namespace
}  // namespace tlt

int main() {
  using namespace tlt;
  check_cuda(cudaDeviceGetAttribute(&card.num_sms, cudaDevAttrMultiProcessorCount, 0), "device");
  check_cuda(cudaMalloc(&pool, kPoolBytes), "pool");
  fill<<<1024, 256>>>(reinterpret_cast<uint16_t*>(pool), kPoolBytes / 2);
  check_cuda(cudaDeviceSynchronize(), "fill");
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  time_all();
  return 0;
}
