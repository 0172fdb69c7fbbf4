// Threads of the CPU kernels: one small pool a process, made on first use.
#pragma once

#include <cstdint>
#include <functional>

namespace tlt {

int num_threads();  // the caller's included; fewer than set if the system refused to start more
void set_num_threads(int count);  // up to 1024; 0 = every core this process may run on

// Calls body(begin, end) on disjoint ranges that cover [0, count). work_per_item is a rough number
// of scalar operations; too little work runs on the calling thread. A body must write only the
// outputs of its items, so results never depend on how the range was cut.
void parallel_for(int64_t count, int64_t work_per_item,
                  const std::function<void(int64_t, int64_t)>& body);

}  // namespace tlt
