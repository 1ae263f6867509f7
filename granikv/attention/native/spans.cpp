// Attention of stacked query rows over spans of K and V, fp32, on the CPU: a shared prefix for all
// its rows at once, and each row's own scattered slots without a gather.
//
// A lane of a vector is a row: products need no packing of K and V, which are read where they
// lie, and the softmax no reduction across lanes. GCC and Clang vector types; no intrinsics.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kNarrowBlock = 8, kWideBlock = 8;  // rows in registers, for one vector and for more
#else
constexpr int kLanes = 8;
constexpr int kNarrowBlock = 8, kWideBlock = 4;
#endif
constexpr int kMaxVectors = 3;  // 48 or 24 stacked rows at a time
constexpr int kKeys = 32;       // of one softmax block; 16 to 64 are level, 128 and more slower
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

// K or V of one KV head: neighbours in the arena, or a list of slots.
template <bool kSlots>
struct Tokens {
  const float* base;  // of the head; in a run, of its first token
  int64_t stride;     // between slots
  const int32_t* slots;

  const float* operator[](int64_t i) const { return base + (kSlots ? slots[i] : i) * stride; }
  Tokens head(int64_t h, int dim) const { return {base + h * dim, stride, slots}; }
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

// State of one KV head's stacked rows, scores in units of log2; o is not yet divided by total.
template <int NV>
struct State {
  Vector* q;  // [dim][NV]
  Vector* o;  // [dim][NV]
  Vector peak[NV], total[NV];
};

// Adds tokens [0, n) to the state; `next` are the tokens of the coming block.
template <int NV, bool kSlots>
static void add(const Tokens<kSlots>& keys, const Tokens<kSlots>& values, int n,
                const Tokens<kSlots>& next, int num_next, int dim, State<NV>& state) {
  constexpr int R = NV == 1 ? kNarrowBlock : kWideBlock;
  Vector s[kKeys * NV];
  int i = 0;
  for (int b = 0; i + R <= n; ++b, i += R) {
    fetch(values, share(n, n / R, b), share(n, n / R, b + 1), dim);
    score<R, NV>(keys.from(i), state.q, dim, s + i * NV);
  }
  for (; i < n; ++i) score<1, NV>(keys.from(i), state.q, dim, s + i * NV);
  for (int m = 0; m < NV; ++m) {
    Vector top = state.peak[m];
    for (int j = 0; j < n; ++j) {
      const Vector x = s[j * NV + m];
      top = x > top ? x : top;
    }
    const Vector shrink = exp2_of(state.peak[m] - top);
    Vector sum = state.total[m] * shrink;
    for (int j = 0; j < n; ++j) {
      const Vector e = exp2_of(s[j * NV + m] - top);
      s[j * NV + m] = e;
      sum += e;
    }
    state.peak[m] = top;
    state.total[m] = sum;
    for (int d = 0; d < dim; ++d) state.o[d * NV + m] *= shrink;
  }
  int d = 0;
  for (int b = 0; d + R <= dim; ++b, d += R) {
    fetch(next, share(num_next, dim / R, b), share(num_next, dim / R, b + 1), dim);
    weigh<R, NV>(values, d, s, n, state.o + d * NV);
  }
  for (; d < dim; ++d) weigh<1, NV>(values, d, s, n, state.o + d * NV);
}

struct Heads {
  int32_t num_kv_heads, group_size, dim;
  float sm_scale;
};

// Some KV heads of one span for all its rows; row i gives part first_part + i. The heads of a token
// lie side by side: taken together, what the processor fetches ahead is of use.
struct Task {
  int64_t start, length;
  const int64_t* rows;
  int64_t num_rows, first_head, num_heads, first_part;
  const int32_t* slots;  // null: the run from slot `start` on
};

template <int NV, bool kSlots>
static void run(const Task& task, const Heads& heads, int64_t first, int count, const float* q,
                const float* k, const float* v, float* o, float* lse) {
  const int dim = heads.dim, group = heads.group_size;
  const int64_t num_heads = int64_t(heads.num_kv_heads) * group;
  const int64_t stride = int64_t(heads.num_kv_heads) * dim;
  const float scale = heads.sm_scale * 1.44269504088896340736f;  // log2(e)
  thread_local std::vector<Vector> memory;
  thread_local std::vector<State<NV>> states;
  memory.assign(2 * task.num_heads * dim * NV, Vector{});
  states.resize(task.num_heads);
  for (int64_t h = 0; h < task.num_heads; ++h) {
    State<NV>& state = states[h];
    state.q = memory.data() + 2 * h * dim * NV;
    state.o = state.q + dim * NV;
    for (int m = 0; m < NV; ++m) state.peak[m] = splat(-INFINITY), state.total[m] = Vector{};
    float* lanes = reinterpret_cast<float*>(state.q);
    for (int i = 0; i < count; ++i) {
      const int64_t row = (first + i) / group;
      const int64_t head = (task.first_head + h) * group + (first + i) % group;
      const float* from = q + (task.rows[row] * num_heads + head) * dim;
      for (int d = 0; d < dim; ++d) lanes[d * NV * kLanes + i] = from[d] * scale;
    }
  }
  const int64_t offset = task.first_head * dim + (kSlots ? 0 : task.start * stride);
  const Tokens<kSlots> keys{k + offset, stride, task.slots}, values{v + offset, stride, task.slots};
  for (int64_t at = 0; at < task.length; at += kKeys) {
    const int64_t left = task.length - at;
    const int n = left < kKeys ? left : kKeys;
    const int num_next = left - n < kKeys ? left - n : kKeys;
    for (int64_t h = 0; h < task.num_heads; ++h)
      add<NV>(keys.head(h, dim).from(at), values.head(h, dim).from(at), n,
              keys.head(h, dim).from(at + n), num_next, dim, states[h]);
  }
  for (int64_t h = 0; h < task.num_heads; ++h) {
    const State<NV>& state = states[h];
    const float* lanes = reinterpret_cast<const float*>(state.o);
    for (int i = 0; i < count; ++i) {
      const int64_t row = (first + i) / group;
      const int64_t head = (task.first_head + h) * group + (first + i) % group;
      const int64_t part = (task.first_part + row) * num_heads + head;
      const float sum = reinterpret_cast<const float*>(state.total)[i], inverse = 1.0f / sum;
      for (int d = 0; d < dim; ++d) o[part * dim + d] = lanes[d * NV * kLanes + i] * inverse;
      const float peak = reinterpret_cast<const float*>(state.peak)[i];
      lse[part] = (peak + std::log2(sum)) * 0.69314718056f;
    }
  }
}

template <int NV>
static void run(const Task& task, const Heads& heads, int64_t first, int count, const float* q,
                const float* k, const float* v, float* o, float* lse) {
  if (task.slots)
    run<NV, true>(task, heads, first, count, q, k, v, o, lse);
  else
    run<NV, false>(task, heads, first, count, q, k, v, o, lse);
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
