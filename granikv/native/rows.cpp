// What a step's rows need around attention: rope and append before it, the merge of their parts
// after it. Each is a few microseconds of work, for which ten tensor operators take fifty.

#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int64_t kParallelFloats = 65536;  // less than this is done sooner by one thread

struct RowShape {
  int32_t num_qo_heads, num_kv_heads, dim;
};

// Rotates half-split pairs; without angles, copies.
static inline void rotate(const float* from, const float* cos, const float* sin, int dim,
                          float* to) {
  if (!cos) {
    std::memcpy(to, from, dim * sizeof(float));
    return;
  }
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = from[i], b = from[half + i];
    to[i] = a * cos[i] - b * sin[i];
    to[half + i] = b * cos[i] + a * sin[i];
  }
}

// q [T, Hq, D], k and v [T, Hkv, D], each with its own row stride in floats and heads side by side;
// cos, sin [T, D / 2] or null; slots [T] -> q_out [T, Hq, D], k_layer and v_layer [capacity, Hkv, D].
extern "C" void granikv_append(const RowShape* shape, int64_t num_rows, const float* q,
                               int64_t q_stride, const float* k, int64_t k_stride, const float* v,
                               int64_t v_stride, const float* cos, const float* sin,
                               const int32_t* slots, float* q_out, float* k_layer, float* v_layer,
                               int num_threads) {
  const int dim = shape->dim, half = dim / 2;
  const int64_t q_width = int64_t(shape->num_qo_heads) * dim;
  const int64_t kv_width = int64_t(shape->num_kv_heads) * dim;
#pragma omp parallel for num_threads(num_threads) if (num_rows * q_width >= kParallelFloats)
  for (int64_t t = 0; t < num_rows; ++t) {
    const float* c = cos ? cos + t * half : nullptr;
    const float* s = cos ? sin + t * half : nullptr;
    for (int64_t at = 0; at < q_width; at += dim)
      rotate(q + t * q_stride + at, c, s, dim, q_out + t * q_width + at);
    float* key = k_layer + slots[t] * kv_width;
    for (int64_t at = 0; at < kv_width; at += dim)
      rotate(k + t * k_stride + at, c, s, dim, key + at);
    std::memcpy(v_layer + slots[t] * kv_width, v + t * v_stride, kv_width * sizeof(float));
  }
}

// Rows out [R, Hq, D] from parts o [P, Hq, D], natural lse [P, Hq]; index [R, most] names the parts
// of each row. A part with lse -inf is the identity; at least one of a row's is not.
extern "C" void granikv_merge(const RowShape* shape, int64_t num_rows, int64_t most,
                              const int64_t* index, const float* o, const float* lse, float* out,
                              int num_threads) {
  const int dim = shape->dim;
  const int64_t heads = shape->num_qo_heads;
#pragma omp parallel for num_threads(num_threads) if (num_rows * most * heads * dim >= kParallelFloats)
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t* parts = index + row * most;
    for (int64_t h = 0; h < heads; ++h) {
      float peak = -INFINITY, total = 0.0f;
      for (int64_t i = 0; i < most; ++i) peak = std::fmax(peak, lse[parts[i] * heads + h]);
      for (int64_t i = 0; i < most; ++i) total += std::exp(lse[parts[i] * heads + h] - peak);
      float* to = out + (row * heads + h) * dim;
      std::memset(to, 0, dim * sizeof(float));
      for (int64_t i = 0; i < most; ++i) {
        const float weight = std::exp(lse[parts[i] * heads + h] - peak) / total;
        const float* from = o + (parts[i] * heads + h) * dim;
        if (!(weight == 0.0f))  // NaN is not hidden
          for (int d = 0; d < dim; ++d) to[d] += weight * from[d];
      }
    }
  }
}
