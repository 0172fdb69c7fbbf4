// The last node of a loop's body: says whether the body runs again.
//
// In a file of its own, hence in a module of its own: drivers that know no conditional nodes cannot
// load it, and never have to.
#include "graphs/condition.h"

namespace tlt {
namespace {

__global__ void condition_kernel(cudaGraphConditionalHandle handle, const int32_t* go) {
  cudaGraphSetConditional(handle, *go != 0);
}

}  // namespace

cudaError_t add_condition(cudaGraph_t body, cudaGraphNode_t after,
                          cudaGraphConditionalHandle handle, const int32_t* go) {
  void* arguments[] = {&handle, &go};
  cudaKernelNodeParams params{};
  params.func = reinterpret_cast<void*>(&condition_kernel);
  params.gridDim = dim3(1);
  params.blockDim = dim3(1);
  params.kernelParams = arguments;
  cudaGraphNode_t node;
  return cudaGraphAddKernelNode(&node, body, &after, 1, &params);
}

}  // namespace tlt
