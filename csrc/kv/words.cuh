// Copies of rows in the widest word that their addresses and sizes allow.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "common/cuda.h"

namespace tlt {

// Calls f with a null pointer of the widest word that divides every address and size given.
template <typename F>
void dispatch_word(std::initializer_list<int64_t> bytes, F&& f) {
  bool wide = true;
  for (const int64_t b : bytes) wide &= b % int64_t{sizeof(uint4)} == 0;
  if (wide) return f(static_cast<uint4*>(nullptr));
  return f(static_cast<uint16_t*>(nullptr));
}

inline int64_t address(const void* p) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p));
}

}  // namespace tlt
