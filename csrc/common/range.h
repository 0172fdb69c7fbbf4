// NVTX ranges of the launchers, `tlt/<part>/<step>`: about 0.1 us each if no tool is attached. The
// headers come with the CUDA toolkit; a build without them has no ranges.
#pragma once

#if defined(TLT_WITH_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)
#define TLT_NVTX 1
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#endif

namespace tlt {

class Range {
 public:
#if defined(TLT_NVTX)
  Range(const char* part, const char* step) {
    char name[64];
    std::snprintf(name, sizeof(name), "tlt/%s/%s", part, step);
    nvtxRangePushA(name);
  }
  ~Range() { nvtxRangePop(); }
#else
  Range(const char*, const char*) {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace tlt
