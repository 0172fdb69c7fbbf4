// The last node of a loop's body: decides whether the body runs again. Every iteration should end a
// pass; a body that does not is stopped by the count of iterations.
//
// A separate file makes a separate module. Drivers without conditional nodes cannot load it, and
// never need it.
#include "graphs/condition.h"
#include "graphs/params.h"

namespace tlt {
namespace {

__global__ void condition_kernel(cudaGraphConditionalHandle handle, int32_t* control) {
  const bool again = ++control[kControlLoops] < control[kControlLimit];
  cudaGraphSetConditional(handle, again && control[kControlGo] != 0);
}

}  // namespace

cudaError_t add_condition(cudaGraph_t body, cudaGraphNode_t after,
                          cudaGraphConditionalHandle handle, int32_t* control) {
  void* arguments[] = {&handle, &control};
  cudaKernelNodeParams params{};
  params.func = reinterpret_cast<void*>(&condition_kernel);
  params.gridDim = dim3(1);
  params.blockDim = dim3(1);
  params.kernelParams = arguments;
  cudaGraphNode_t node;
  return cudaGraphAddKernelNode(&node, body, &after, 1, &params);
}

}  // namespace tlt
