// A small head, and batches for it whose results can be foretold.
#ifndef LOSSD_TESTS_SUPPORT_SESSION_DATA_H_
#define LOSSD_TESTS_SUPPORT_SESSION_DATA_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lossd/client.h"

namespace lossd::testing {

inline constexpr int64_t kVocab = 11;
inline constexpr int64_t kHidden = 3;
inline constexpr char kHeadName[] = "lm_head";
inline constexpr int64_t kTokensPerChunk = 2;

// A batch of whole numbers, and where its results go.
struct Data {
  explicit Data(int64_t tokens, int64_t seed = 0) {
    for (int64_t i = 0; i < tokens; ++i) {
      labels.push_back((i * 7 + seed) % kVocab);
      for (int64_t j = 0; j < kHidden; ++j) hidden.push_back(static_cast<float>((i * 5 + j * 3 + seed) % 17));
    }
    losses.assign(labels.size(), -1.0F);
    dx.assign(hidden.size(), -1.0F);
  }

  Batch batch() const { return {.labels = labels, .hidden_states = hidden.data()}; }
  BatchOutputs outputs() { return {.losses = losses, .dx = dx.data()}; }

  // What the server must have made of tokens [begin, end), added to `window`.
  void AddTo(std::vector<float>* window, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = 0; j < kHidden; ++j) {
        (*window)[static_cast<size_t>(labels[i]) * kHidden + j] += hidden[i * kHidden + j];
      }
    }
  }
  std::vector<float> Window() const {
    std::vector<float> window(kVocab * kHidden, 0.0F);
    AddTo(&window, 0, labels.size());
    return window;
  }

  void ExpectOutputs(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      EXPECT_EQ(losses[i], static_cast<float>(labels[i]) + hidden[i * kHidden]) << "token " << i;
      for (size_t j = 0; j < kHidden; ++j) {
        EXPECT_EQ(dx[i * kHidden + j], 2 * hidden[i * kHidden + j]) << "token " << i;
      }
    }
  }
  void ExpectOutputs() const { ExpectOutputs(0, labels.size()); }

  std::vector<int64_t> labels;
  std::vector<float> hidden;
  std::vector<float> losses;
  std::vector<float> dx;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_SESSION_DATA_H_
