// Decoding on a CPU: products of a few rows with packed weights, and attention over the pages of a KV pool.
//
// Weights [K, N] are packed in panels of kPanel columns, [N / kPanel, K, kPanel], so that a product reads them from the first
// byte to the last, once, while it multiplies: rows of a few kilobytes each, as they lie otherwise, share cache sets and pages,
// and waiting for memory then adds to the time of multiplying instead of hiding behind it.
//
// A sum runs over its terms in their order, whatever rows stand beside and however many threads there are, so what is computed
// for a sequence does not depend on its company.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 8;  // 8 x 3 sums, 3 weights and a factor in 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 4;  // 4 x 3 + 3 + 1 in 16
#else
constexpr int kLanes = 4, kRows = 8;  // NEON has 32
#endif
constexpr int kVectors = 3;
constexpr int kPanel = kLanes * kVectors;
constexpr int64_t kDepth = 64;    // of a block of weights: 12 KiB, so that it and the rows' part stay in an L1 cache of two threads
constexpr int64_t kLine = 64 / 4;  // floats of a cache line
constexpr int kQueries = 4;        // attended with side by side
constexpr int64_t kBlock = 256;    // tokens whose probabilities are added up first
constexpr int64_t kThreads = 64;   // at the most
constexpr float kMinusInfinity = -3e38f;

typedef float Vector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// Halves are combined until one number is left.
template <int lanes = kLanes, typename V = Vector, typename Combine>
float reduce(V v, Combine combine) {
  if constexpr (lanes == 1) {
    return v[0];
  } else {
    typedef float Half __attribute__((vector_size(lanes / 2 * 4), aligned(4), may_alias));
    Half halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return reduce<lanes / 2>(combine(halves[0], halves[1]), combine);
  }
}

float sum(Vector v) {
  return reduce(v, [](auto a, auto b) { return a + b; });
}

// e^x, relative error below 2e-7: 2^n times a polynomial in what is left of x / ln 2 after rounding. 0 below -87, and beyond 88
// no more than there.
Vector exponential(Vector x) {
  const auto vanishes = x < -87.0f;
  x = x < -87.0f ? Vector{} - 87.0f : x;
  x = x > 88.0f ? Vector{} + 88.0f : x;
  const Vector shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: what is added is rounded to an integer
  const Vector n = shifted - 12582912.0f;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers exponent = __builtin_convertvector(n, Integers) << 23;
  return vanishes ? Vector{} : (Vector)((Integers)p + exponent);
}

// ---------------------------------------------------------------------------------------------------------------- threads

// Runs task(0) to task(count - 1) on XLA's threads, this one among them. Each has a range of its own, as what follows is often
// at hand, and when it is done helps with the others'.
template <typename Task>
void parallel(ffi::ThreadPool& pool, int64_t count, const Task& task) {
  const int64_t threads = std::min({pool.num_threads(), count, kThreads});
  if (threads < 2) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next[kThreads], joined{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // a helper may come when all is done, and this call has returned
  for (int64_t t = 0; t < threads; ++t) progress->next[t] = t * count / threads;
  const std::function<void()> work = [progress, count, threads, &task] {
    const int64_t own = progress->joined.fetch_add(1);
    for (int64_t t = own; t < own + threads; ++t) {
      std::atomic<int64_t>& next = progress->next[t % threads];
      const int64_t end = (t % threads + 1) * count / threads;
      for (int64_t i; next.load() < end && (i = next.fetch_add(1)) < end; progress->done.fetch_add(1)) task(i);
    }
  };
  for (int64_t t = 1; t < threads; ++t) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; progress->done.load() < count; ++spins) {
    if (spins > 4096) std::this_thread::yield();
  }
}

// --------------------------------------------------------------------------------------------------------------- products

// sums[rows, kPanel] += x[rows, depth] w[depth, kPanel]; fetches `depth` cache lines from `next` on meanwhile, if there.
template <int rows>
void tile(const float* x, int64_t stride, const float* w, float* sums, int64_t depth, const float* next) {
  Vector total[rows][kVectors];
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kVectors; ++v) total[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    Vector weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load(w + k * kPanel + v * kLanes);
    if (next) __builtin_prefetch(next + k * kLine);
    for (int r = 0; r < rows; ++r) {
      const float factor = x[r * stride + k];
      for (int v = 0; v < kVectors; ++v) total[r][v] += factor * weights[v];
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v < kVectors; ++v) store(sums + r * kPanel + v * kLanes, total[r][v]);
}

template <int rows = kRows - 1>
void last_tile(int64_t count, const float* x, int64_t stride, const float* w, float* sums, int64_t depth, const float* next) {
  if (count == rows) return tile<rows>(x, stride, w, sums, depth, next);
  if constexpr (rows > 1) last_tile<rows - 1>(count, x, stride, w, sums, depth, next);
}

// sums[m, kPanel] = x[m, k] panel[k, kPanel], x as `in_blocks` made it.
void multiply(const float* x, int64_t m, int64_t k, const float* panel, float* sums) {
  std::fill(sums, sums + m * kPanel, 0.0f);
  for (int64_t at = 0; at < k; at += kDepth) {
    const int64_t depth = std::min(kDepth, k - at);
    const float* block = x + at * m;
    const float* w = panel + at * kPanel;
    const float* following = w + depth * kPanel;  // of the next panel after the last block
    for (int64_t r = 0; r < m; r += kRows) {
      const int64_t line = r / kRows * depth;  // each group of rows fetches a part of the following block
      const float* next = line * kLine < depth * kPanel ? following + line * kLine : nullptr;
      if (m - r >= kRows) {
        tile<kRows>(block + r * depth, depth, w, sums + r * kPanel, depth, next);
      } else {
        last_tile(m - r, block + r * depth, depth, w, sums + r * kPanel, depth, next);
      }
    }
  }
}

// Rows of x [.., k] in blocks [m, kDepth] (the last one narrower), each of which lies together: as they were, every few rows would
// share a cache set. With `norm` a row is divided by its root mean square and multiplied with it.
const float* in_blocks(const float* x, const std::vector<int64_t>& rows, int64_t k, const float* norm, float eps,
                       std::vector<float>& room) {
  const int64_t m = rows.size();
  room.resize(m * k);
  for (int64_t r = 0; r < m; ++r) {
    const float* from = x + rows[r] * k;
    float scale = 1.0f;
    if (norm) {
      Vector squares{};
      int64_t c = 0;
      for (; c + kLanes <= k; c += kLanes) squares += load(from + c) * load(from + c);
      float total = sum(squares);
      for (; c < k; ++c) total += from[c] * from[c];
      scale = 1.0f / std::sqrt(total / k + eps);
    }
    for (int64_t at = 0; at < k; at += kDepth) {
      const int64_t depth = std::min(kDepth, k - at);
      float* to = room.data() + at * m + r * depth;
      if (norm) {
        for (int64_t c = 0; c < depth; ++c) to[c] = norm[at + c] * (from[at + c] * scale);
      } else {
        std::memcpy(to, from + at, depth * sizeof(float));
      }
    }
  }
  return room.data();
}

std::vector<int64_t> busy_rows(const bool* busy, int64_t m) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; r < m; ++r)
    if (busy[r]) rows.push_back(r);
  return rows;
}

// y[m, n] = norm(x)[m, k] W[k, n] + bias[n] + residual[m, n]; or silu(norm(x) W) * (norm(x) W') where `gated`, W and W' taking
// turns in the panels. Rows that are not busy are 0. Of `layer`, an index into the leading axis of w, norm and bias; the latter
// and residual may be empty.
ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> layer,
                   ffi::Buffer<ffi::PRED> busy, ffi::Buffer<ffi::F32> norm, ffi::Buffer<ffi::F32> bias,
                   ffi::Buffer<ffi::F32> residual, float eps, bool gated, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t m = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1], panels = w.dimensions()[1];
  const int64_t at = layer.typed_data()[0];
  const float* weights = w.typed_data() + at * panels * k * kPanel;
  const float* scale = norm.element_count() ? norm.typed_data() + at * k : nullptr;
  const float* added = bias.element_count() ? bias.typed_data() + at * n : nullptr;
  const float* before = residual.element_count() ? residual.typed_data() : nullptr;
  float* out = y->typed_data();

  const std::vector<int64_t> rows = busy_rows(busy.typed_data(), m);
  const int64_t count = rows.size();
  if (count < m) std::memset(out, 0, m * n * sizeof(float));
  static thread_local std::vector<float> room;
  const float* in = in_blocks(x.typed_data(), rows, k, scale, eps, room);

  parallel(pool, gated ? panels / 2 : panels, [&](int64_t panel) {
    static thread_local std::vector<float> sums, ups;
    sums.resize(count * kPanel);
    const float* first = weights + (gated ? 2 * panel : panel) * k * kPanel;
    multiply(in, count, k, first, sums.data());
    if (gated) {
      ups.resize(count * kPanel);
      multiply(in, count, k, first + k * kPanel, ups.data());
      for (int64_t i = 0; i < count * kPanel; i += kLanes) {
        const Vector g = load(sums.data() + i);
        store(sums.data() + i, g / (1.0f + exponential(-g)) * load(ups.data() + i));
      }
    }
    const int64_t column = panel * kPanel, columns = std::min<int64_t>(kPanel, n - column);
    for (int64_t r = 0; r < count; ++r) {
      float* row = sums.data() + r * kPanel;
      const int64_t to = rows[r] * n + column;
      for (int64_t c = 0; added && c < columns; ++c) row[c] += added[column + c];
      for (int64_t c = 0; before && c < columns; ++c) row[c] += before[to + c];
      std::memcpy(out + to, row, columns * sizeof(float));
    }
  });
  return ffi::Error::Success();
}

// Puts weights [layers, k, n], or [layers, n, k] where `transposed`, into packed ones [layers, panels, k, kPanel], from column
// `offset` on. With `step` 2 they have every other panel, from number `first` on, as `gated` products want it.
ffi::Error Pack(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::F32> before, bool transposed, int32_t offset,
                int32_t first, int32_t step, ffi::ResultBuffer<ffi::F32> packed) {
  (void)before;  // the result's own memory, which has the other columns
  const int64_t layers = w.dimensions()[0], k = packed->dimensions()[2], n = w.dimensions()[transposed ? 1 : 2];
  const int64_t begin = offset / kPanel, end = (offset + n + kPanel - 1) / kPanel, all = packed->dimensions()[1];
  const float* from = w.typed_data();
  float* to = packed->typed_data();
  parallel(pool, layers * (end - begin), [=](int64_t i) {
    const int64_t layer = i / (end - begin), panel = begin + i % (end - begin);
    const int64_t low = std::max<int64_t>(panel * kPanel, offset), high = std::min<int64_t>((panel + 1) * kPanel, offset + n);
    float* out = to + (layer * all + panel * step + first) * k * kPanel + low % kPanel;
    const float* in = from + layer * k * n;
    for (int64_t r = 0; r < k; ++r) {
      if (!transposed) {
        std::memcpy(out + r * kPanel, in + r * n + low - offset, (high - low) * sizeof(float));
        continue;
      }
      for (int64_t c = low; c < high; ++c) out[r * kPanel + c - low] = in[(c - offset) * k + r];
    }
  });
  return ffi::Error::Success();
}

// -------------------------------------------------------------------------------------------------------------- attention

// Weights of `tokens` scores, in their place, and their sum.
float softmax(float* scores, int64_t tokens) {
  Vector tops = Vector{} + kMinusInfinity, sums{};
  int64_t i = 0;
  for (; i + kLanes <= tokens; i += kLanes) {
    const Vector x = load(scores + i);
    tops = x > tops ? x : tops;
  }
  float top = reduce(tops, [](auto a, auto b) { return a > b ? a : b; });
  for (; i < tokens; ++i) top = std::max(top, scores[i]);
  for (i = 0; i + kLanes <= tokens; i += kLanes) {
    const Vector weights = exponential(load(scores + i) - top);
    store(scores + i, weights);
    sums += weights;
  }
  float total = sum(sums);
  for (; i < tokens; ++i) total += scores[i] = std::exp(scores[i] - top);
  return total;
}

struct Sizes {
  int64_t heads, kv_heads, size, page_size;
};

// Calls use(t, row of token t) for the first `tokens` tokens of the pages.
template <typename Use>
void each_token(const std::vector<const float*>& pages, int64_t tokens, const Sizes& s, const Use& use) {
  for (int64_t first = 0, page = 0; first < tokens; first += s.page_size, ++page) {
    const int64_t end = std::min(first + s.page_size, tokens);
    const float* row = pages[page];
    for (int64_t t = first; t < end; ++t, row += s.size) use(t, row);
  }
}

// out[count, size] of queries q[count, size] of one KV head over the first `tokens` tokens of the pages.
template <int count>
void attend_together(const float* q, const std::vector<const float*>& keys, const std::vector<const float*>& values,
                     int64_t tokens, const Sizes& s, std::vector<float>& room, float* out) {
  room.resize(count * tokens);
  float* scores = room.data();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.size));
  const int64_t whole = s.size / kLanes * kLanes;
  each_token(keys, tokens, s, [&](int64_t t, const float* key) {
    Vector products[count]{};
    for (int64_t c = 0; c < whole; c += kLanes) {
      const Vector part = load(key + c);
      for (int g = 0; g < count; ++g) products[g] += load(q + g * s.size + c) * part;
    }
    for (int g = 0; g < count; ++g) {
      float score = sum(products[g]);
      for (int64_t c = whole; c < s.size; ++c) score += q[g * s.size + c] * key[c];
      scores[g * tokens + t] = score * scale;
    }
  });
  float totals[count];
  for (int g = 0; g < count; ++g) totals[g] = softmax(scores + g * tokens, tokens);
  constexpr int together = 2;  // vectors of each query's output
  for (int64_t c = 0; c < s.size; c += together * kLanes) {
    const int64_t vectors = std::min<int64_t>(together, (s.size - c) / kLanes);
    if (vectors == together) {
      Vector sums[count][together]{};
      each_token(values, tokens, s, [&](int64_t t, const float* value) {
        for (int v = 0; v < together; ++v) {
          const Vector part = load(value + c + v * kLanes);
          for (int g = 0; g < count; ++g) sums[g][v] += scores[g * tokens + t] * part;
        }
      });
      for (int g = 0; g < count; ++g)
        for (int v = 0; v < together; ++v) store(out + g * s.size + c + v * kLanes, sums[g][v] / totals[g]);
      continue;
    }
    for (int64_t i = c; i < s.size; ++i) {
      float sums[count]{};
      each_token(values, tokens, s, [&](int64_t t, const float* value) {
        for (int g = 0; g < count; ++g) sums[g] += scores[g * tokens + t] * value[i];
      });
      for (int g = 0; g < count; ++g) out[g * s.size + i] = sums[g] / totals[g];
    }
  }
}

template <int most = kQueries, typename... Rest>
void attend_group(int64_t count, Rest&&... rest) {
  if (count == most) return attend_together<most>(rest...);
  if constexpr (most > 1) attend_group<most - 1>(count, rest...);
}

// Writes k, v [B T, J, K] of the new tokens of busy slots to their pages, of pages [B, W], in block `layer` of the pool
// [.., J, S, K]; then makes out [B T, H, K] of q, each query over what is cached and the new tokens up to its own. A token beyond
// its slot's pages is not written. Of idle slots out is 0.
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                  ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::PRED> busy, ffi::Buffer<ffi::S32> pages,
                  ffi::Buffer<ffi::F32> pool_k, ffi::Buffer<ffi::F32> pool_v, int32_t num_pages, ffi::ResultBuffer<ffi::F32> out,
                  ffi::ResultBuffer<ffi::F32> new_k, ffi::ResultBuffer<ffi::F32> new_v) {
  (void)pool_k, (void)pool_v;  // the results' own memory
  const int64_t slots = lens.element_count(), tokens = q.dimensions()[0] / slots, width = pages.dimensions()[1];
  const auto shape = new_k->dimensions();
  const Sizes s{q.dimensions()[1], k.dimensions()[1], q.dimensions()[2], shape[shape.size() - 2]};
  const int64_t group = s.heads / s.kv_heads, page_floats = s.page_size * s.size;
  const int64_t first_page = static_cast<int64_t>(layer.typed_data()[0]) * num_pages;
  const auto place = [&](int64_t slot, int64_t i, int64_t head) {
    return ((first_page + pages.typed_data()[slot * width + std::min(i, width - 1)]) * s.kv_heads + head) * page_floats;
  };
  parallel(pool, slots, [&](int64_t b) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<const float*> keys, values;
    float* to = out->typed_data() + b * tokens * s.heads * s.size;
    if (!busy.typed_data()[b]) {
      std::memset(to, 0, tokens * s.heads * s.size * sizeof(float));
      return;
    }
    const int64_t before = lens.typed_data()[b], count = (before + tokens + s.page_size - 1) / s.page_size;
    for (int64_t j = 0; j < s.kv_heads; ++j) {
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t position = before + t, i = position / s.page_size;
        if (i >= width || !pages.typed_data()[b * width + i]) break;
        const int64_t at = place(b, i, j) + position % s.page_size * s.size, from = ((b * tokens + t) * s.kv_heads + j) * s.size;
        std::memcpy(new_k->typed_data() + at, k.typed_data() + from, s.size * sizeof(float));
        std::memcpy(new_v->typed_data() + at, v.typed_data() + from, s.size * sizeof(float));
      }
      keys.clear(), values.clear();
      for (int64_t i = 0; i < count; ++i) {
        keys.push_back(new_k->typed_data() + place(b, i, j)), values.push_back(new_v->typed_data() + place(b, i, j));
      }
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t g = 0; g < group; g += kQueries) {
          const int64_t at = (t * s.heads + j * group + g) * s.size;
          attend_group(std::min<int64_t>(kQueries, group - g), q.typed_data() + b * tokens * s.heads * s.size + at, keys, values,
                       before + t + 1, s, scores, to + at);
        }
      }
    }
  });
  return ffi::Error::Success();
}

// --------------------------------------------------------------------------------------------------------------- sampling

struct Sampled {
  int32_t token;
  float logprob;
};

// As `jrl.rollout.sampler.sample`, of one row of logits [vocab]; `sums` has room for a sum of each block of kBlock tokens.
Sampled sample_row(const float* logits, int64_t vocab, float temperature, float uniform, std::vector<float>& sums) {
  const bool greedy = temperature == 0;
  const float scale = greedy ? 1.0f : temperature;
  Vector tops = Vector{} + kMinusInfinity;
  int64_t i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    const Vector x = load(logits + i);
    tops = x > tops ? x : tops;
  }
  float top = reduce(tops, [](auto a, auto b) { return a > b ? a : b; });
  for (; i < vocab; ++i) top = std::max(top, logits[i]);
  top /= scale;

  // exp(logits / temperature - top) of a block's tokens, and their sum; 0 beyond the vocabulary.
  float weights[kBlock];
  const auto weigh = [&](int64_t first) {
    const int64_t count = std::min(kBlock, vocab - first), whole = count / kLanes * kLanes;
    Vector total{};
    for (int64_t c = 0; c < whole; c += kLanes) {
      const Vector w = exponential(load(logits + first + c) / scale - top);
      store(weights + c, w);
      total += w;
    }
    float rest = 0;
    for (int64_t c = whole; c < count; ++c) rest += weights[c] = std::exp(logits[first + c] / scale - top);
    std::fill(weights + count, weights + kBlock, 0.0f);
    return sum(total) + rest;
  };
  const int64_t blocks = (vocab + kBlock - 1) / kBlock;
  sums.resize(blocks);
  float total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += sums[b] = weigh(b * kBlock);

  int64_t token = 0;
  if (greedy) {
    while (token < vocab - 1 && logits[token] != top) ++token;
  } else {
    // The first of positive weight at which the running sum exceeds the goal, or else the last one.
    const float goal = uniform * total;
    float before = 0, running = 0;
    int64_t block = 0;
    for (int64_t b = 0; b < blocks && !(running > goal); ++b) {
      if (sums[b] > 0) block = b, before = running;
      running += sums[b];
    }
    weigh(block * kBlock);
    running = before;
    for (int64_t c = 0; c < kBlock && !(running > goal); ++c) {
      if (weights[c] > 0) token = block * kBlock + c;
      running += weights[c];
    }
  }
  return {static_cast<int32_t>(token), logits[token] / scale - top - std::log(total)};
}

// Tokens [M] and their logprobs [M] of logits [M, V]; 0 of rows that are not busy.
ffi::Error Sample(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> temperature,
                  ffi::Buffer<ffi::F32> uniform, ffi::Buffer<ffi::PRED> busy, ffi::ResultBuffer<ffi::S32> tokens,
                  ffi::ResultBuffer<ffi::F32> logprobs) {
  const int64_t vocab = logits.dimensions()[1];
  parallel(pool, logits.dimensions()[0], [&](int64_t r) {
    static thread_local std::vector<float> sums;
    Sampled made{0, 0.0f};
    if (busy.typed_data()[r]) {
      made = sample_row(logits.typed_data() + r * vocab, vocab, temperature.typed_data()[r], uniform.typed_data()[r], sums);
    }
    tokens->typed_data()[r] = made.token;
    logprobs->typed_data()[r] = made.logprob;
  });
  return ffi::Error::Success();
}

}  // namespace

extern "C" int32_t jrl_panel() { return kPanel; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jrl_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("gated")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jrl_pack, Pack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("transposed")
                                  .Attr<int32_t>("offset")
                                  .Attr<int32_t>("first")
                                  .Attr<int32_t>("step")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jrl_attend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("num_pages")
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jrl_sample, Sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
