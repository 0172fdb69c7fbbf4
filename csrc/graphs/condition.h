#pragma once

#include "common/cuda.h"

namespace tlt {

// Appends the kernel that sets the condition to a WHILE body, after its last node. The condition
// holds while control[kControlGo] is set and the body has run less often than passes were armed.
cudaError_t add_condition(cudaGraph_t body, cudaGraphNode_t after,
                          cudaGraphConditionalHandle handle, int32_t* control);

}  // namespace tlt
