// Attention of new tokens over the pages of a KV pool, read where they lie.
#pragma once

#include "vectors.h"

namespace jrl {
namespace {

constexpr int kQueries = 4;  // attended with side by side

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
                  ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> lens, ffi::Buffer<ffi::PRED> busy,
                  ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::F32> pool_k, ffi::Buffer<ffi::F32> pool_v, int32_t num_pages,
                  ffi::ResultBuffer<ffi::F32> out, ffi::ResultBuffer<ffi::F32> new_k, ffi::ResultBuffer<ffi::F32> new_v) {
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

}  // namespace
}  // namespace jrl
