// Attention of new tokens over the pages of a KV pool, read where they lie.
#pragma once

#include "vectors.h"

namespace jrl {
namespace {

constexpr int kQueries = 4;  // attended with side by side

// Weights of `tokens` scores, in their place, and their sum.
float softmax(float* scores, int64_t tokens) {
  const float top = largest(scores, tokens);
  Vector sums{};
  int64_t i = 0;
  for (; i + kLanes <= tokens; i += kLanes) {
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

// One head's query or key: divided by its root mean square and multiplied with `norm`, if there; then channel i turned with
// channel i + size / 2 by the angle whose cosine and sine are given.
void turn(const float* x, const float* cosine, const float* sine, const float* norm, float eps, int64_t size, float* out) {
  const int64_t half = size / 2;
  float scale = 1.0f;
  if (norm) {
    float squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
    scale = 1.0f / std::sqrt(squares / size + eps);
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = norm ? norm[i] * (x[i] * scale) : x[i], b = norm ? norm[i + half] * (x[i + half] * scale) : x[i + half];
    out[i] = a * cosine[i] - b * sine[i];
    out[i + half] = b * cosine[i] + a * sine[i];
  }
}

// Of qkv [B T, (H + 2 J) K], the products for the new tokens: turns queries and keys, by cosines and sines [B T, K / 2]; writes
// keys and values of busy slots to their pages, of pages [B, W], in block `layer` of the pool [.., J, S, K]; makes out
// [B T, H K], each query over what is cached and the new tokens up to its own. Norms [L, K] may be empty. A token beyond its
// slot's pages is not written. Of idle slots out is 0.
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> cosines, ffi::Buffer<ffi::F32> sines,
                  ffi::Buffer<ffi::F32> q_norm, ffi::Buffer<ffi::F32> k_norm, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::PRED> busy, ffi::Buffer<ffi::S32> pages,
                  ffi::Buffer<ffi::F32> pool_k, ffi::Buffer<ffi::F32> pool_v, int32_t num_pages, float eps,
                  ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_k, ffi::ResultBuffer<ffi::F32> new_v) {
  (void)pool_k, (void)pool_v;  // the results' own memory
  const auto shape = new_k->dimensions();
  const int64_t axes = shape.size(), columns = qkv.dimensions()[1], at_layer = layer.typed_data()[0];
  const int64_t slots = lens.element_count(), tokens = qkv.dimensions()[0] / slots, width = pages.dimensions()[1];
  const Sizes s{columns / shape[axes - 1] - 2 * shape[axes - 3], shape[axes - 3], shape[axes - 1], shape[axes - 2]};
  const int64_t group = s.heads / s.kv_heads, page_floats = s.page_size * s.size;
  const float* q_scale = q_norm.element_count() ? q_norm.typed_data() + at_layer * s.size : nullptr;
  const float* k_scale = k_norm.element_count() ? k_norm.typed_data() + at_layer * s.size : nullptr;
  const auto place = [&](int64_t slot, int64_t i, int64_t head) {
    const int64_t page = pages.typed_data()[slot * width + std::min(i, width - 1)];
    return ((at_layer * num_pages + page) * s.kv_heads + head) * page_floats;
  };
  parallel(pool, slots * s.kv_heads, [&](int64_t task) {
    static thread_local std::vector<float> scores, queries;
    static thread_local std::vector<const float*> keys, values;
    const int64_t b = task / s.kv_heads, j = task % s.kv_heads, before = lens.typed_data()[b];
    const auto result = [&](int64_t t) { return out->typed_data() + ((b * tokens + t) * s.heads + j * group) * s.size; };
    if (!busy.typed_data()[b]) {
      for (int64_t t = 0; t < tokens; ++t) std::memset(result(t), 0, group * s.size * sizeof(float));
      return;
    }
    queries.resize(tokens * group * s.size);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = b * tokens + t, position = before + t, i = position / s.page_size;
      const float* x = qkv.typed_data() + row * columns;
      const float *cosine = cosines.typed_data() + row * s.size / 2, *sine = sines.typed_data() + row * s.size / 2;
      for (int64_t g = 0; g < group; ++g)
        turn(x + (j * group + g) * s.size, cosine, sine, q_scale, eps, s.size, queries.data() + (t * group + g) * s.size);
      if (i >= width || !pages.typed_data()[b * width + i]) continue;
      const int64_t at = place(b, i, j) + position % s.page_size * s.size;
      turn(x + (s.heads + j) * s.size, cosine, sine, k_scale, eps, s.size, new_k->typed_data() + at);
      std::memcpy(new_v->typed_data() + at, x + (s.heads + s.kv_heads + j) * s.size, s.size * sizeof(float));
    }
    keys.clear(), values.clear();
    for (int64_t i = 0; i * s.page_size < before + tokens; ++i) {
      keys.push_back(new_k->typed_data() + place(b, i, j)), values.push_back(new_v->typed_data() + place(b, i, j));
    }
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t g = 0; g < group; g += kQueries)
        attend_group(std::min<int64_t>(kQueries, group - g), queries.data() + (t * group + g) * s.size, keys, values,
                     before + t + 1, s, scores, result(t) + g * s.size);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jrl
