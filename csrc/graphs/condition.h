#pragma once

#include "common/cuda.h"

namespace tlt {

// Appends to a WHILE body, after its last node, the kernel that sets the condition to *go.
cudaError_t add_condition(cudaGraph_t body, cudaGraphNode_t after,
                          cudaGraphConditionalHandle handle, const int32_t* go);

}  // namespace tlt
