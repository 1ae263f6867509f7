// Attention of stacked query rows over spans of K and V, fp32, on the CPU: a shared prefix for all
// its rows at once, and each row's own scattered slots without a gather.
//
// K and V are read where they lie, without packing. For the scores a lane of a vector is a row, so
// that the softmax needs no reduction across lanes; for the output a column of V, so that no lane
// idles and few rows cost little.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

constexpr int kColumns = kLanes == 16 ? 4 : 2;  // vectors of them weighed at once
constexpr int kRows = 6;                        // weighed at once
constexpr int kKeys = 32;   // of one softmax block; 16 to 64 are level, 128 and more slower
constexpr int kChains = 4;  // of maxima and sums that do not wait for each other

static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

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

// The coming block of all heads, asked for in the order in which it lies, a few heads of a token
// at a time between the products of this block.
template <bool kSlots>
struct Feed {
  Tokens<kSlots> keys, values;
  int num_heads, dim, each, left;
  int token = 0, head = 0;

  void step() {
    for (int i = 0; i < each && left > 0; ++i, --left) {
      const float* k = keys[token] + head * dim;
      const float* v = values[token] + head * dim;
      for (int d = 0; d < dim; d += kCacheLine) __builtin_prefetch(k + d, 0, 2);
      for (int d = 0; d < dim; d += kCacheLine) __builtin_prefetch(v + d, 0, 2);
      if (++head == num_heads) head = 0, ++token;
    }
  }
};

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

// o[i] = shrink[i] * o[i] + sum over tokens of p[token][i] * v[token], for R rows and C vectors of
// columns in registers, `columns` floats of each. A token's row of p has `stride` floats.
template <int R, int C, bool kSlots>
static inline void weigh(const Tokens<kSlots>& v, int num_tokens, const float* p, int stride,
                         const float* shrink, int dim, int columns, float* o) {
  const int bytes = C > 1 ? sizeof(Vector) : 4 * columns;
  Vector sum[R][C] = {};
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) {
      std::memcpy(&sum[i][c], o + i * dim + c * kLanes, bytes);
      sum[i][c] *= shrink[i];
    }
  for (int t = 0; t < num_tokens; ++t) {
    Vector x[C] = {};
    for (int c = 0; c < C; ++c) std::memcpy(&x[c], v[t] + c * kLanes, bytes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const float weight = p[t * stride + i];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[i][c] += weight * x[c];
    }
  }
  for (int i = 0; i < R; ++i)
    for (int c = 0; c < C; ++c) std::memcpy(o + i * dim + c * kLanes, &sum[i][c], bytes);
}

// The same for all columns of `rows` rows, R at a time.
template <int R, bool kSlots>
static void weigh_rows(const Tokens<kSlots>& v, int num_tokens, const float* p, int stride,
                       const float* shrink, int dim, int rows, float* o, Feed<kSlots>& feed) {
  int i = 0;
  for (; i + R <= rows; i += R) {
    int d = 0;
    for (; d + kColumns * kLanes <= dim; d += kColumns * kLanes) {
      feed.step();
      weigh<R, kColumns>(v.head(1, d), num_tokens, p + i, stride, shrink + i, dim, kLanes,
                         o + i * dim + d);
    }
    for (; d + kLanes <= dim; d += kLanes)
      weigh<R, 1>(v.head(1, d), num_tokens, p + i, stride, shrink + i, dim, kLanes,
                  o + i * dim + d);
    if (d < dim)
      weigh<R, 1>(v.head(1, d), num_tokens, p + i, stride, shrink + i, dim, dim - d,
                  o + i * dim + d);
  }
  if constexpr (R > 1)
    if (i < rows)
      weigh_rows<R / 2>(v, num_tokens, p + i, stride, shrink + i, dim, rows - i, o + i * dim, feed);
}

// State of one KV head's stacked rows, scores in units of log2; o is not yet divided by total.
template <int NV>
struct State {
  Vector* q;  // [dim][NV]
  float* o;   // [rows][dim]
  Vector peak[NV], total[NV];
};

// s[token] becomes 2^(s[token] - peak) for the new peak. Returns by what the old sums shrink.
template <int NV>
static inline Vector soften(Vector* s, int num_tokens, Vector& peak, Vector& total) {
  Vector tops[kChains], sums[kChains] = {};
  for (int c = 0; c < kChains; ++c) tops[c] = peak;
  int t = 0;
  for (; t + kChains <= num_tokens; t += kChains)
    for (int c = 0; c < kChains; ++c) tops[c] = larger(s[(t + c) * NV], tops[c]);
  for (; t < num_tokens; ++t) tops[0] = larger(s[t * NV], tops[0]);
  Vector top = tops[0];
  for (int c = 1; c < kChains; ++c) top = larger(tops[c], top);
  for (t = 0; t + kChains <= num_tokens; t += kChains)
    for (int c = 0; c < kChains; ++c) sums[c] += s[(t + c) * NV] = exp2_of(s[(t + c) * NV] - top);
  for (; t < num_tokens; ++t) sums[0] += s[t * NV] = exp2_of(s[t * NV] - top);
  const Vector shrink = exp2_of(peak - top);
  peak = top;
  total = total * shrink + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return shrink;
}

// Adds tokens [0, n) to the state of `rows` rows.
template <int NV, bool kSlots>
static void add(const Tokens<kSlots>& keys, const Tokens<kSlots>& values, int n, int dim, int rows,
                State<NV>& state, Feed<kSlots>& feed) {
  constexpr int R = kBlock<NV>;
  Vector s[kKeys * NV], shrink[NV];
  int i = 0;
  for (; i + R <= n; i += R) {
    feed.step();
    score<R, NV>(keys.from(i), state.q, dim, s + i * NV);
  }
  for (; i < n; ++i) score<1, NV>(keys.from(i), state.q, dim, s + i * NV);
  for (int m = 0; m < NV; ++m) shrink[m] = soften<NV>(s + m, n, state.peak[m], state.total[m]);
  weigh_rows<kRows>(values, n, reinterpret_cast<const float*>(s), NV * kLanes,
                    reinterpret_cast<const float*>(shrink), dim, rows, state.o, feed);
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
  thread_local std::vector<Vector> queries;
  thread_local std::vector<float> sums;
  thread_local std::vector<State<NV>> states;
  queries.assign(task.num_heads * dim * NV, Vector{});
  sums.assign(task.num_heads * count * dim, 0.0f);
  states.resize(task.num_heads);
  for (int64_t h = 0; h < task.num_heads; ++h) {
    State<NV>& state = states[h];
    state.q = queries.data() + h * dim * NV;
    state.o = sums.data() + h * count * dim;
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
  const int num_steps = kKeys / kBlock<NV> + (count + kRows - 1) / kRows;  // of a head, about
  for (int64_t at = 0; at < task.length; at += kKeys) {
    const int64_t left = task.length - at;
    const int n = left < kKeys ? left : kKeys;
    const int num_next = left - n < kKeys ? left - n : kKeys;
    Feed<kSlots> feed{keys.from(at + n),
                      values.from(at + n),
                      int(task.num_heads),
                      dim,
                      (num_next + num_steps - 1) / num_steps,
                      num_next * int(task.num_heads)};
    for (int64_t h = 0; h < task.num_heads; ++h)
      add<NV>(keys.head(h, dim).from(at), values.head(h, dim).from(at), n, dim, count, states[h],
              feed);
  }
  for (int64_t h = 0; h < task.num_heads; ++h) {
    const State<NV>& state = states[h];
    for (int i = 0; i < count; ++i) {
      const int64_t row = (first + i) / group;
      const int64_t head = (task.first_head + h) * group + (first + i) % group;
      const int64_t part = (task.first_part + row) * num_heads + head;
      const float sum = reinterpret_cast<const float*>(state.total)[i], inverse = 1.0f / sum;
      for (int d = 0; d < dim; ++d) o[part * dim + d] = state.o[i * dim + d] * inverse;
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
                              const float* q, const float* k, const float* v, float* o, float* lse,
                              int num_threads) {
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
