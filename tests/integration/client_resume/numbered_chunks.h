// The data of a run whose i-th chunk is the same whoever makes it, so that a restarted process can go on
// where the server stands: chunk i travels with sequence i + 1.
#ifndef LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_NUMBERED_CHUNKS_H_
#define LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_NUMBERED_CHUNKS_H_

#include <cstdint>
#include <random>
#include <vector>

#include "lossd/client.h"

namespace lossd::testing {

inline constexpr int64_t kNumberedVocab = 257;
inline constexpr int64_t kNumberedHidden = 48;
inline constexpr int64_t kTokensPerChunk = 24;
inline constexpr int64_t kChunks = 60;
inline constexpr int64_t kChunkBytes =
    kTokensPerChunk * kNumberedHidden * static_cast<int64_t>(sizeof(float));

inline HeadConfig NumberedHead() {
  return {.name = "numbered",
          .vocab_size = kNumberedVocab,
          .hidden_size = kNumberedHidden,
          .weight_type = DataType::kFloat32};
}

inline std::vector<float> NumberedWeights() {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> uniform(-0.2F, 0.2F);
  std::vector<float> weights(kNumberedVocab * kNumberedHidden);
  for (float& weight : weights) weight = uniform(random);
  return weights;
}

// Chunks [first, kChunks) as one batch that is cut exactly at their borders.
struct NumberedBatch {
  explicit NumberedBatch(int64_t first) {
    for (int64_t chunk = first; chunk < kChunks; ++chunk) {
      std::mt19937 random(static_cast<uint32_t>(1000 + chunk));
      std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
      for (int64_t i = 0; i < kTokensPerChunk; ++i) {
        labels.push_back(static_cast<int64_t>(random() % kNumberedVocab));
      }
      for (int64_t i = 0; i < kTokensPerChunk * kNumberedHidden; ++i) hidden.push_back(uniform(random));
    }
    losses.resize(labels.size());
    dx.resize(hidden.size());
  }

  Batch batch() const {
    return {.labels = labels,
            .hidden_states = hidden.data(),
            .gradient_scale = 1.0F / (kChunks * kTokensPerChunk)};
  }
  BatchOutputs outputs() { return {.losses = losses, .dx = dx.data()}; }

  std::vector<int64_t> labels;
  std::vector<float> hidden;
  std::vector<float> losses;
  std::vector<float> dx;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_INTEGRATION_CLIENT_RESUME_NUMBERED_CHUNKS_H_
