// Vector types of GCC and Clang, as wide as the processor's; no intrinsics.

#pragma once

#include <cstdint>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
constexpr int kCacheLine = 16;  // floats

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

// Numbers multiplied by up to three vectors at once while their sums stay in registers.
template <int NV>
constexpr int kBlock = kLanes == 16 || NV == 1 ? 8 : 4;
constexpr int kMaxVectors = 3;  // 48 or 24 rows at a time
