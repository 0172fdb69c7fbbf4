// A function marked TLT_SIMD is compiled for three x86 levels, and the best one for the machine is
// chosen when the module loads. Functions that it calls in loops must be always_inline.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TLT_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TLT_SIMD
#endif
