// Products of a few rows with packed weights, and what stands around them.
//
// Weights [K, N] are packed in panels of kPanel columns, [N / kPanel, K, kPanel], so that a product reads them from the first
// byte to the last, once, while it multiplies: rows of a few kilobytes each, as they lie otherwise, share cache sets and pages,
// and waiting for memory then adds to the time of multiplying instead of hiding behind it.
#pragma once

#include "vectors.h"

namespace jrl {
namespace {

// Of sums that are held in registers, with the weights and the factor that they grow by: AVX has 16, the others 32.
constexpr int kVectors = 3, kRows = kLanes == 8 ? 4 : 8;
constexpr int kPanel = kLanes * kVectors;
constexpr int64_t kDepth = 64;     // of a block of weights: it and the rows' part stay in the L1 cache that two threads may share
constexpr int64_t kLine = 64 / 4;  // floats of a cache line

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

// Rows of x [.., k] in blocks [m, kDepth] (the last one narrower), each of which lies together: as they were, every few rows
// would share a cache set. With `norm` a row is divided by its root mean square and multiplied with it.
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

}  // namespace
}  // namespace jrl
