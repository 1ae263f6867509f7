// What a decoder layer does between its matrix products: the residual sum with RMSNorm, and the
// gate of its feed-forward part. A few microseconds of work for a decode step's rows.

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

constexpr int64_t kParallelFloats = 16384;  // less than this is done sooner by one thread
constexpr int kChains = 4;                  // of sums that do not wait for each other

static inline Vector load(const float* from, int64_t count = kLanes) {
  Vector x = {};
  std::memcpy(&x, from, 4 * count);
  return x;
}

static inline void store(float* to, Vector x, int64_t count = kLanes) {
  std::memcpy(to, &x, 4 * count);
}

static inline float sum_of(Vector x) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; ++i) sum += reinterpret_cast<const float*>(&x)[i];
  return sum;
}

// delta, x [T, N], weight [N] -> total = x + delta and normed = total / rms(total) * weight, both
// [T, N]. x null: the total is delta, and is not written.
extern "C" void granikv_add_rms_norm(int64_t num_rows, int64_t width, const float* delta,
                                     const float* x, const float* weight, float eps, float* normed,
                                     float* total, int num_threads) {
  const int64_t whole = width / kLanes * kLanes, rest = width - whole;
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* from = delta + row * width;
    Vector squares[kChains] = {};
    if (x) {
      const float* other = x + row * width;
      float* to = total + row * width;
      const auto add = [&](int64_t d, int64_t count) {
        const Vector sum = load(from + d, count) + load(other + d, count);
        store(to + d, sum, count);
        squares[d / kLanes % kChains] += sum * sum;
      };
      for (int64_t d = 0; d < whole; d += kLanes) add(d, kLanes);
      if (rest) add(whole, rest);
      from = to;
    } else {
      const auto add = [&](int64_t d, int64_t count) {
        const Vector sum = load(from + d, count);
        squares[d / kLanes % kChains] += sum * sum;
      };
      for (int64_t d = 0; d < whole; d += kLanes) add(d, kLanes);
      if (rest) add(whole, rest);
    }
    const float square = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1.0f / std::sqrt(square / float(width) + eps);
    float* to = normed + row * width;
    for (int64_t d = 0; d < whole; d += kLanes)
      store(to + d, load(from + d) * scale * load(weight + d));
    if (rest)
      store(to + whole, load(from + whole, rest) * scale * load(weight + whole, rest), rest);
  }
}

// gate / (1 + e^-gate) * up
static inline Vector gate_of(Vector gate, Vector up) {
  const Vector e = exp2_of(-1.44269504088896340736f * (gate > 0.0f ? gate : -gate));
  return gate * (gate > 0.0f ? splat(1.0f) : e) / (1.0f + e) * up;
}

// gate_up [T, 2 F], gate first -> silu(gate) * up [T, F]
extern "C" void granikv_silu_mul(int64_t num_rows, int64_t width, const float* gate_up, float* out,
                                 int num_threads) {
  const int64_t whole = width / kLanes * kLanes, rest = width - whole;
#pragma omp parallel for num_threads(num_threads) if (num_rows * width >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const float *gate = gate_up + 2 * row * width, *up = gate + width;
    float* to = out + row * width;
    for (int64_t d = 0; d < whole; d += kLanes)
      store(to + d, gate_of(load(gate + d), load(up + d)));
    if (rest) store(to + whole, gate_of(load(gate + whole, rest), load(up + whole, rest)), rest);
  }
}
