// Attention of stacked query rows over spans of K and V, fp32, on the CPU: a shared prefix for all
// its rows at once, and each row's own scattered slots without a gather.
//
// A lane of a vector is a row: products need no packing of K and V, which are read where they
// lie, and the softmax no reduction across lanes. GCC and Clang vector types; no intrinsics.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kNarrowBlock = 8, kWideBlock = 8;  // rows in registers, for one vector and for more
#else
constexpr int kLanes = 8;
constexpr int kNarrowBlock = 8, kWideBlock = 4;
#endif
constexpr int kMaxVectors = 3;  // 48 or 24 stacked rows at a time
constexpr int kKeys = 32;       // of one softmax block; 16 to 64 are level, 128 and more slower
constexpr int kMaxDim = 256;
constexpr int kCacheLine = 16;  // floats

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

static inline Vector splat(float x) { return Vector{} + x; }

// 2^x for x <= 0, within 3e-7; 2^-126 below -126.
static inline Vector exp2_of(Vector x) {
  x = x < -126.0f ? splat(-126.0f) : x;
  const Vector whole = (x + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const Vector f = x - whole;
  Vector p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const Integers bits = (__builtin_convertvector(whole, Integers) + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// Tokens of one KV head: neighbours in the arena, or a list of slots.
template <bool kSlots>
struct Tokens {
  const float* base;  // of the head; in a run, of its first token
  int64_t stride;     // between slots
  const int32_t* slots;

  const float* operator[](int64_t i) const { return base + (kSlots ? slots[i] : i) * stride; }
  Tokens from(int64_t i) const {
    return kSlots ? Tokens{base, stride, slots + i} : Tokens{base + i * stride, stride, nullptr};
  }
};

// Tokens that the next product reads, asked for a few at a time between blocks of this one.
template <bool kSlots>
static inline void fetch(const Tokens<kSlots>& tokens, int first, int last, int dim) {
  for (int i = first; i < last; ++i)
    for (int d = 0; d < dim; d += kCacheLine) __builtin_prefetch(tokens[i] + d, 0, 2);
}

// First item of share i when `total` items are dealt to `parts`.
static inline int share(int total, int parts, int i) {
  const int each = (total + parts - 1) / parts;
  return i * each < total ? i * each : total;
}

// s[i] = k[i] . q_t for R tokens in registers.
template <int R, int NV, bool kSlots>
static inline void score(const Tokens<kSlots>& k, const Vector* q_t, int dim, Vector* s) {
  const float* token[R];
  for (int i = 0; i < R; ++i) token[i] = k[i];
  Vector sum[R][NV] = {};
  for (int d = 0; d < dim; ++d) {
    Vector q[NV];
    for (int v = 0; v < NV; ++v) q[v] = q_t[d * NV + v];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float x = token[i][d];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[i][v] += x * q[v];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int v = 0; v < NV; ++v) s[i * NV + v] = sum[i][v];
}

// o_t[i] += sum over tokens of v[token][column + i] * p[token], for R columns in registers.
template <int R, int NV, bool kSlots>
static inline void weigh(const Tokens<kSlots>& v, int column, const Vector* p, int num_tokens,
                         Vector* o_t) {
  Vector sum[R][NV];
  for (int i = 0; i < R; ++i)
    for (int n = 0; n < NV; ++n) sum[i][n] = o_t[i * NV + n];
  for (int t = 0; t < num_tokens; ++t) {
    const float* token = v[t] + column;
    Vector weight[NV];
    for (int n = 0; n < NV; ++n) weight[n] = p[t * NV + n];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float x = token[i];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) sum[i][n] += x * weight[n];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int n = 0; n < NV; ++n) o_t[i * NV + n] = sum[i][n];
}

// q_t, o_t: [dim][NV]; scores in units of log2. o_t is not yet divided by total.
template <int NV, bool kSlots>
static void attend(const Tokens<kSlots>& k, const Tokens<kSlots>& v, int64_t num_tokens, int dim,
                   const Vector* q_t, Vector* o_t, Vector* peak, Vector* total) {
  constexpr int R = NV == 1 ? kNarrowBlock : kWideBlock;
  Vector s[kKeys * NV];
  for (int i = 0; i < NV; ++i) peak[i] = splat(-INFINITY), total[i] = Vector{};
  for (int i = 0; i < dim * NV; ++i) o_t[i] = Vector{};
  for (int64_t at = 0; at < num_tokens; at += kKeys) {
    const int64_t left = num_tokens - at;
    const int n = left < kKeys ? left : kKeys;
    const int next = left - n < kKeys ? left - n : kKeys;
    const auto keys = k.from(at), values = v.from(at), next_keys = k.from(at + n);
    int i = 0;
    for (int b = 0; i + R <= n; ++b, i += R) {
      fetch(values, share(n, n / R, b), share(n, n / R, b + 1), dim);
      score<R, NV>(keys.from(i), q_t, dim, s + i * NV);
    }
    for (; i < n; ++i) score<1, NV>(keys.from(i), q_t, dim, s + i * NV);
    for (int m = 0; m < NV; ++m) {
      Vector top = peak[m];
      for (int j = 0; j < n; ++j) {
        const Vector x = s[j * NV + m];
        top = x > top ? x : top;
      }
      const Vector shrink = exp2_of(peak[m] - top);
      Vector sum = total[m] * shrink;
      for (int j = 0; j < n; ++j) {
        const Vector e = exp2_of(s[j * NV + m] - top);
        s[j * NV + m] = e;
        sum += e;
      }
      peak[m] = top;
      total[m] = sum;
      for (int d = 0; d < dim; ++d) o_t[d * NV + m] *= shrink;
    }
    int d = 0;
    for (int b = 0; d + R <= dim; ++b, d += R) {
      fetch(next_keys, share(next, dim / R, b), share(next, dim / R, b + 1), dim);
      weigh<R, NV>(values, d, s, n, o_t + d * NV);
    }
    for (; d < dim; ++d) weigh<1, NV>(values, d, s, n, o_t + d * NV);
  }
}

struct Heads {
  int32_t num_kv_heads, group_size, dim;
  float sm_scale;
};

// One KV head of one span for all its rows; row i gives part first_part + i.
struct Task {
  int64_t start, length;
  const int64_t* rows;
  int64_t num_rows, head, first_part;
  const int32_t* slots;  // null: the run from slot `start` on
};

template <int NV>
static void run(const Task& task, const Heads& heads, int64_t first, int count, const float* q,
                const float* k, const float* v, float* o, float* lse) {
  Vector q_t[kMaxDim * NV], o_t[kMaxDim * NV], peak[NV], total[NV];
  const int dim = heads.dim, group = heads.group_size;
  const int64_t num_heads = int64_t(heads.num_kv_heads) * group;
  const int64_t stride = int64_t(heads.num_kv_heads) * dim;
  const float scale = heads.sm_scale * 1.44269504088896340736f;  // log2(e)
  std::memset(static_cast<void*>(q_t), 0, sizeof(Vector) * dim * NV);
  float* q_lanes = reinterpret_cast<float*>(q_t);
  for (int i = 0; i < count; ++i) {
    const int64_t row = (first + i) / group, head = task.head * group + (first + i) % group;
    const float* from = q + (task.rows[row] * num_heads + head) * dim;
    for (int d = 0; d < dim; ++d) q_lanes[d * NV * kLanes + i] = from[d] * scale;
  }
  k += task.head * dim;
  v += task.head * dim;
  if (task.slots)
    attend<NV, true>({k, stride, task.slots}, {v, stride, task.slots}, task.length, dim, q_t, o_t,
                     peak, total);
  else
    attend<NV, false>({k + task.start * stride, stride, nullptr},
                      {v + task.start * stride, stride, nullptr}, task.length, dim, q_t, o_t, peak,
                      total);
  const float* o_lanes = reinterpret_cast<const float*>(o_t);
  for (int i = 0; i < count; ++i) {
    const int64_t row = (first + i) / group, head = task.head * group + (first + i) % group;
    const int64_t part = (task.first_part + row) * num_heads + head;
    const float sum = reinterpret_cast<const float*>(total)[i], inverse = 1.0f / sum;
    for (int d = 0; d < dim; ++d) o[part * dim + d] = o_lanes[d * NV * kLanes + i] * inverse;
    lse[part] = (reinterpret_cast<const float*>(peak)[i] + std::log2(sum)) * 0.69314718056f;
  }
}

// q [T, Hq, D]; k, v [capacity, Hkv, D]; o [parts, Hq, D], lse [parts, Hq] natural.
extern "C" void granikv_spans(const Task* tasks, int64_t num_tasks, const Heads* heads,
                              const float* q, const float* k, const float* v, float* o,
                              float* lse, int num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
  for (int64_t i = 0; i < num_tasks; ++i) {
    const int64_t stacked = tasks[i].num_rows * heads->group_size;
    for (int64_t first = 0; first < stacked; first += kMaxVectors * kLanes) {
      const int64_t left = stacked - first;
      const int count = left < kMaxVectors * kLanes ? left : kMaxVectors * kLanes;
      if (count <= kLanes)
        run<1>(tasks[i], *heads, first, count, q, k, v, o, lse);
      else if (count <= 2 * kLanes)
        run<2>(tasks[i], *heads, first, count, q, k, v, o, lse);
      else
        run<3>(tasks[i], *heads, first, count, q, k, v, o, lse);
    }
  }
}
