// Vectors of this processor's width, e^x, and work shared out among XLA's threads.
#pragma once

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

namespace jrl {
namespace {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr float kMinusInfinity = -3e38f;
constexpr int64_t kThreads = 64;  // of a call, at the most

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

float largest(const float* x, int64_t count) {
  Vector tops = Vector{} + kMinusInfinity;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector next = load(x + i);
    tops = next > tops ? next : tops;
  }
  float top = reduce(tops, [](auto a, auto b) { return a > b ? a : b; });
  for (; i < count; ++i) top = std::max(top, x[i]);
  return top;
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

}  // namespace
}  // namespace jrl
