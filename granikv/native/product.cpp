// Products of few rows with a weight matrix, fp32, on the CPU: what a decode step multiplies.
//
// A lane of a vector is a row of x. The weight is read once, where it lies, each number for all the
// rows; the coming block of it is asked for meanwhile. A product that packs its weight reads it
// twice, and one that keeps it packed needs it twice in memory.

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

// Rows of the weight at once: with one vector of x, 8 sums leave the processor waiting for them.
template <int NV>
constexpr int kRows = kLanes == 16 && NV == 1 ? 12 : kBlock<NV>;
constexpr int64_t kTurned = 64;  // columns of x at a time: their lines stay in the nearest cache

// sums[i] = w[i] . x for R rows of the weight and the rows of x in NV vectors.
template <int R, int NV>
static inline void multiply(const float* w, int64_t width, const Vector* x, Vector (*sums)[NV]) {
  Vector sum[R][NV] = {};
  const auto add_column = [&](int64_t d) {
    Vector at[NV];
    for (int v = 0; v < NV; ++v) at[v] = x[d * NV + v];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float weight = w[i * width + d];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[i][v] += weight * at[v];
    }
  };
  int64_t d = 0;
  for (; d + kCacheLine <= width; d += kCacheLine) {
    for (int i = 0; i < R; ++i) __builtin_prefetch(w + (R + i) * width + d, 0, 2);
#pragma GCC unroll 16
    for (int i = 0; i < kCacheLine; ++i) add_column(d + i);
  }
  for (; d < width; ++d) add_column(d);
  std::memcpy(sums, sum, sizeof sum);
}

struct ProductShape {
  int64_t num_rows, width, num_outputs, x_stride;  // strides and widths in floats
};

template <int R, int NV>
static void block(const ProductShape& shape, const Vector* x, const float* w, const float* bias,
                  int64_t first, float* y) {
  Vector sum[R][NV];
  multiply<R, NV>(w + first * shape.width, shape.width, x, sum);
  for (int64_t row = 0; row < shape.num_rows; ++row)
    for (int i = 0; i < R; ++i)
      y[row * shape.num_outputs + first + i] =
          reinterpret_cast<const float*>(sum[i])[row] + (bias ? bias[first + i] : 0.0f);
}

template <int NV>
static void product(const ProductShape& shape, const float* x, const float* w, const float* bias,
                    float* y, int num_threads) {
  constexpr int R = kRows<NV>;
  thread_local std::vector<Vector> memory;
  memory.assign(shape.width * NV, Vector{});
  const Vector* turned = memory.data();
  float* lanes = reinterpret_cast<float*>(memory.data());
  for (int64_t first = 0; first < shape.width; first += kTurned) {
    const int64_t end = shape.width - first < kTurned ? shape.width : first + kTurned;
    for (int64_t row = 0; row < shape.num_rows; ++row)
      for (int64_t d = first; d < end; ++d)
        lanes[d * NV * kLanes + row] = x[row * shape.x_stride + d];
  }
  const int64_t num_blocks = shape.num_outputs / R;
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t i = 0; i < num_blocks; ++i) block<R, NV>(shape, turned, w, bias, i * R, y);
  for (int64_t i = num_blocks * R; i < shape.num_outputs; ++i)
    block<1, NV>(shape, turned, w, bias, i, y);
}

extern "C" int64_t granikv_max_product_rows() { return kMaxVectors * kLanes; }

// y [T, M] = x [T, N] w^T + bias; w [M, N], bias [M] or null; rows of x may be apart.
extern "C" void granikv_product(const ProductShape* shape, const float* x, const float* w,
                                const float* bias, float* y, int num_threads) {
  if (shape->num_rows <= kLanes)
    product<1>(*shape, x, w, bias, y, num_threads);
  else if (shape->num_rows <= 2 * kLanes)
    product<2>(*shape, x, w, bias, y, num_threads);
  else
    product<3>(*shape, x, w, bias, y, num_threads);
}
