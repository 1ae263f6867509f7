// Vector types of GCC and Clang, as wide as the processor's; no intrinsics.

#pragma once

#include <cstdint>
#include <cstring>

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

static inline Vector splat(float x) { return x - Vector{}; }

// 2^x for x <= 0, within 2e-7 of itself; 2^-126 below -126.
static inline Vector exp2_of(Vector x) {
  x = x < -126.0f ? splat(-126.0f) : x;
  const Vector rounded = x + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const Vector f = x - (rounded - 12582912.0f);
  Vector p = splat(1.326472406e-3f);  // of the least relative error for |f| <= 1/2
  p = p * f + 9.671512865e-3f;
  p = p * f + 5.550733754e-2f;
  p = p * f + 2.402224208e-1f;
  p = p * f + 6.931469776e-1f;
  p = p * f + 1.0f;
  Integers bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  bits = (bits << 23) + (127 << 23);
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}
