// What it costs to hand data from one multiprocessor to another, for `bench hops`: a program of its
// own that prints one JSON object. Times are microseconds of one hop, the median of kRounds runs.
//
// A flag travels in the data: a word of 16 bytes holds three floats and an epoch, and the reader
// polls it. A hop of `flag` and `remote` is all to all: each block hands one word to every block of
// its group and waits for the word of each. Polls are limited; a probe that exceeds the limit
// reports a negative time instead of hanging.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cg = cooperative_groups;

constexpr int kRounds = 9, kHops = 512, kThreads = 256;
constexpr int kPolls = 1 << 20;

#define CHECK(call)                                                  \
  do {                                                               \
    const cudaError_t error = (call);                                \
    if (error != cudaSuccess) {                                      \
      fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      exit(1);                                                       \
    }                                                                \
  } while (false)

struct Status {
  int timed_out, torn;  // polls that exceeded the limit; words whose parts are of two epochs
};

__device__ uint4 load_word(const uint4* from) {
  uint4 word;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from)
               : "memory");
  return word;
}

__device__ void store_word(uint4* to, uint4 word) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word.x),
               "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// ---- launch boundaries --------------------------------------------------------------------------

__global__ void boundary_kernel(float* x) {
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
  if (threadIdx.x == 0) x[blockIdx.x] += 1.0f;
}

// ---- flags in L2 --------------------------------------------------------------------------------

__global__ void flag_kernel(uint4* words, int hops, Status* status) {
  const int blocks = gridDim.x, block = blockIdx.x;
  for (uint32_t epoch = 1; epoch <= static_cast<uint32_t>(hops); ++epoch) {
    uint4* slots = words + (epoch & 1) * blocks;
    if (threadIdx.x == 0) store_word(slots + block, {epoch, epoch, epoch, epoch});
    bool timed_out = false;
    for (int i = threadIdx.x; i < blocks; i += kThreads) {
      uint4 word = load_word(slots + i);
      for (int polls = 0; word.w != epoch && !timed_out; word = load_word(slots + i)) {
        timed_out = ++polls == kPolls;
      }
      if (word.x != epoch || word.y != epoch || word.z != epoch) status->torn = 1;
    }
    if (__syncthreads_or(timed_out)) {
      status->timed_out = 1;
      return;
    }
  }
}

__global__ void barrier_kernel(int hops) {
  for (int i = 0; i < hops; ++i) cg::this_grid().sync();
}

// ---- distributed shared memory ------------------------------------------------------------------

__device__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ uint32_t remote_address(uint32_t at, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank));
  return remote;
}

__device__ bool try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__global__ void remote_kernel(int hops, Status* status) {
  __shared__ uint4 words[2][16];
  __shared__ uint64_t barriers[2];
  const auto cluster = cg::this_cluster();
  const int size = cluster.num_blocks(), rank = cluster.block_rank();
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : barriers) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster.sync();
  for (int hop = 0; hop < hops; ++hop) {
    const int turn = hop & 1;
    const uint32_t own = shared_address(&barriers[turn]);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own),
                   "r"(size * 16)
                   : "memory");
    }
    __syncthreads();
    if (threadIdx.x < size) {
      const uint32_t to = remote_address(shared_address(&words[turn][rank]), threadIdx.x);
      const uint32_t barrier = remote_address(own, threadIdx.x);
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %1, %1, %1}, "
          "[%2];" ::"r"(to),
          "r"(hop), "r"(barrier)
          : "memory");
    }
    for (int polls = 0; !try_wait(own, hop >> 1 & 1);) {
      if (++polls == kPolls) {
        status->timed_out = 1;
        break;
      }
    }
    if (words[turn][threadIdx.x % size].x != hop) status->torn = 1;
  }
  cluster.sync();
}

__global__ void cluster_barrier_kernel(int hops) {
  for (int i = 0; i < hops; ++i) cg::this_cluster().sync();
}

// ---- reads of L2 --------------------------------------------------------------------------------

// Every block reads the same `chunks` words of 16 bytes, again and again, past the L1. The next
// address depends on what was read.
__global__ void read_kernel(const uint4* from, int chunks, int hops, float* out) {
  uint32_t sum = 0;
  for (int hop = 0; hop < hops; ++hop) {
    uint4 held[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int chunk = threadIdx.x + i * kThreads;
      if (chunk < chunks) held[i] = load_word(from + chunk + (sum & 1));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (threadIdx.x + i * kThreads < chunks) sum |= held[i].x;
    }
    sum = __syncthreads_or(sum);
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// ---- the host -----------------------------------------------------------------------------------

template <typename Run>
double median_us(const Run& run, int hops) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < kRounds + 2; ++round) {
    CHECK(cudaEventRecord(begin));
    run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (round >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[kRounds / 2] * 1e3 / hops;
}

struct Shape {
  int blocks, cluster = 1, shared_bytes = 0;
  bool cooperative = false, pdl = false;
};

template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const Shape& shape, cudaStream_t stream, Args... args) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[3];
  config.gridDim = shape.blocks;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  if (shape.cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (shape.pdl) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  CHECK(cudaLaunchKernelEx(&config, kernel, args...));
}

double boundary_us(bool pdl, int blocks) {
  float* x;
  CHECK(cudaMalloc(&x, blocks * sizeof(float)));
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kHops; ++i) {
    launch(boundary_kernel, {.blocks = blocks, .pdl = pdl}, stream, x);
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  const double us = median_us([&] { CHECK(cudaGraphLaunch(exec, nullptr)); }, kHops);
  CHECK(cudaFree(x));
  return us;
}

// The time of a probe with `status` cleared before, or a negative one if it timed out or tore.
template <typename Run>
double checked_us(Status* status, const Run& run) {
  const double us = median_us(
      [&] {
        CHECK(cudaMemsetAsync(status, 0, sizeof(Status)));
        run();
      },
      kHops);
  Status host;
  CHECK(cudaMemcpy(&host, status, sizeof(host), cudaMemcpyDeviceToHost));
  return host.timed_out ? -1.0 : host.torn ? -2.0 : us;
}

int resident_clusters(int cluster, int shared_bytes) {
  CHECK(cudaFuncSetAttribute(remote_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  CHECK(cudaFuncSetAttribute(remote_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared_bytes));
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  config.gridDim = cluster;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  CHECK(cudaOccupancyMaxActiveClusters(&count, remote_kernel, &config));
  return count;
}

int main() {
  Status* status;
  uint4* words;
  float* out;
  constexpr int kMaxBlocks = 256, kWordBytes = 1 << 20;
  CHECK(cudaMalloc(&status, sizeof(Status)));
  CHECK(cudaMalloc(&words, kWordBytes));
  CHECK(cudaMalloc(&out, kMaxBlocks * sizeof(float)));
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  printf("{");
  for (const int blocks : {1, sms}) {
    printf("\"boundary b%d\": %.4f, ", blocks, boundary_us(false, blocks));
    printf("\"boundary pdl b%d\": %.4f, ", blocks, boundary_us(true, blocks));
  }
  for (const int blocks : {8, 64, sms}) {
    printf("\"flag b%d\": %.4f, ", blocks, checked_us(status, [&] {
             CHECK(cudaMemsetAsync(words, 0, kWordBytes));
             launch(flag_kernel, {.blocks = blocks, .cooperative = true}, nullptr, words, kHops,
                    status);
           }));
    printf("\"grid barrier b%d\": %.4f, ", blocks,
           median_us(
               [&] {
                 launch(barrier_kernel, {.blocks = blocks, .cooperative = true}, nullptr, kHops);
               },
               kHops));
  }
  for (const int cluster : {8, 16}) {
    printf("\"remote c%d\": %.4f, ", cluster, checked_us(status, [&] {
             launch(remote_kernel, {.blocks = cluster, .cluster = cluster}, nullptr, kHops, status);
           }));
    printf("\"remote c%d all\": %.4f, ", cluster, checked_us(status, [&] {
             const int count = resident_clusters(cluster, 0);
             launch(remote_kernel,
                    {.blocks = cluster * std::min(count, sms / cluster), .cluster = cluster},
                    nullptr, kHops, status);
           }));
    printf("\"cluster barrier c%d\": %.4f, ", cluster,
           median_us(
               [&] {
                 launch(cluster_barrier_kernel, {.blocks = cluster, .cluster = cluster}, nullptr,
                        kHops);
               },
               kHops));
  }
  CHECK(cudaMemset(words, 0, kWordBytes));
  for (const int bytes : {2 << 10, 8 << 10, 18 << 10}) {
    printf("\"read %dKB b1\": %.4f, ", bytes >> 10,
           median_us(
               [&] { launch(read_kernel, {.blocks = 1}, nullptr, words, bytes / 16, kHops, out); },
               kHops));
    printf(
        "\"read %dKB b%d\": %.4f, ", bytes >> 10, sms,
        median_us(
            [&] { launch(read_kernel, {.blocks = sms}, nullptr, words, bytes / 16, kHops, out); },
            kHops));
  }
  for (const int kilobytes : {0, 96, 200}) {
    for (const int cluster : {8, 16}) {
      printf("\"resident clusters c%d %dKB\": %d, ", cluster, kilobytes,
             resident_clusters(cluster, kilobytes << 10));
    }
  }
  CHECK(cudaDeviceSynchronize());
  printf("\"sms\": %d}\n", sms);
  return 0;
}
