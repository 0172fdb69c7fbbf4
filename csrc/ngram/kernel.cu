// ngram_propose on the GPU: the same trees as cpu.cpp, bit for bit.
//
// One cluster for each request (8 blocks on sm_90, else 1), four steps:
//   scan   The cluster's warps divide the group's tokens into chunks of 128, latest first. A lane
//          reads four tokens; for one that equals the root it counts how far back the texts agree.
//          A warp holds its best kMaxMatches matches as sorted keys, one in each lane. Better keys
//          wait in a queue; every 32 of them are sorted and merged.
//   merge  The warps' lists are merged in log2 rounds, then the blocks' lists in the first block.
//          Keys are totally ordered, so the result does not depend on the split or the order.
//   levels Builds the trie before pruning, all levels at once, one warp for each level and one lane
//          for each match: lanes with the same tokens so far are one node, and its count is a
//          weighted population count of their mask. Computes noise, ranks and log shares.
//   grow   One warp goes down the levels: it adds up scores, keeps top_k nodes and writes them.
// Moves 4 bytes per token of the group, once, normally from L2.
#include "common/status.h"
#include "ngram/trie.cuh"

namespace tlt {
namespace {

using namespace ngram;

constexpr int kClusterThreads = 256;  // of a block in a cluster of several
constexpr int kAloneThreads = 1024;   // of a cluster of one block

// Reads the request and its group. Invalid slots and lengths set the status and are skipped.
template <int kThreads>
__device__ void set_up(const NgramProposeParams& p, int64_t b, bool reports, Shared<kThreads>& s) {
  const int t = threadIdx.x;
  const int32_t own = p.slot[b], root = p.context_len[b];
  const int32_t slot = t < p.group_size ? p.group_slots[b * p.group_size + t] : -1;
  const bool valid = own >= 0 && own < p.num_slots && root >= 0 && root < p.max_len;
  bool bad = t == 0 && !valid && own != -1;
  if (t == 0) s.root = valid ? root : -1;
  if (valid && t < kMaxNgram) {
    s.suffix[t] = root >= t ? __ldg(p.tokens + own * p.max_len + root - t) : -1;
  }
  if (valid && t < p.group_size) {
    const bool in_range = slot >= 0 && slot < p.num_slots;
    int32_t length = in_range ? p.length[slot] : 0;
    if (slot == own) length = root + 1;
    const bool fits = length >= 0 && length <= p.max_len;
    bad |= !fits || !(in_range || slot == -1);
    if (!fits) length = 0;
    s.slot[t] = slot;
    s.length[t] = length;
    s.chunks[t] = (max(length, 1) - 1 + kChunk - 1) / kChunk;
  }
  if (bad && reports) atomicOr(&p.status[b], kStatusBadLength);
  __syncthreads();
  if (valid && t <= p.group_size) {
    int32_t sum = 0;
#pragma unroll 8
    for (int g = 0; g < t; ++g) sum += s.chunks[g];
    s.first_chunk[t] = sum;
  }
  __syncthreads();
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) propose_kernel(const NgramProposeParams p) {
  __shared__ Shared<kThreads> s;
  Cluster<kThreads> cluster;
  const int64_t b = cluster.item();
  set_up(p, b, cluster.rank() == 0, s);
  if (s.root < 0) {  // the same for the whole cluster
    if (cluster.thread() == 0 && !p.keep_unmatched) p.nodes.count[b] = 0;
    return;
  }
  const uint32_t key = merge_cluster(cluster, Scanner<kThreads>(p, s).run(cluster), s);
  if (cluster.rank() > 0) return;
  // Lane 0 of every warp has the best key, so the branch is the same for the whole block.
  if (p.keep_unmatched && __shfl_sync(kFullWarp, key, 0) == 0) return;
  Levels<kThreads>(p, b, s, key).run();
  if (threadIdx.x >= kWarpSize) return;
  const int32_t count = Trie<kThreads>(p, b, s).run(static_cast<int>(p.depth));
  if (threadIdx.x == 0) p.nodes.count[b] = count;
}

}  // namespace

void ngram_propose_cuda(const NgramProposeParams& p, int device, uintptr_t stream) {
  constexpr const char* op = "ngram_propose";
  const DeviceGuard guard(device);
  const auto kernel = propose_kernel<kClusterThreads>;
  if (has_hopper_code(op, kernel)) {
    return launch_cluster_per_item(op, kernel,
                                   {p.num_requests, kClusterThreads, 0, kPortableCluster, false},
                                   as_stream(stream), p);
  }
  propose_kernel<kAloneThreads>
      <<<static_cast<unsigned>(p.num_requests), kAloneThreads, 0, as_stream(stream)>>>(p);
  check_cuda(cudaGetLastError(), op);
}

}  // namespace tlt
