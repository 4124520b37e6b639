// One token of each row of logits: temperature, one uniform, inverse CDF.
#pragma once

#include "vectors.h"

namespace jrl {
namespace {

constexpr int64_t kBlock = 256;  // tokens whose probabilities are added up first

struct Sampled {
  int32_t token;
  float logprob;
};

// As `jrl.rollout.sampler.sample`, of one row of logits [vocab]; `sums` has room for a sum of each block of kBlock tokens.
Sampled sample_row(const float* logits, int64_t vocab, float temperature, float uniform, std::vector<float>& sums) {
  const bool greedy = temperature == 0;
  const float scale = greedy ? 1.0f : temperature;
  const float top = largest(logits, vocab) / scale;

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
}  // namespace jrl
