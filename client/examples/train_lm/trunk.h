// The part of the language model that stays in the trainer: it turns the tokens before a position into the
// hidden state from which the head predicts the next token.
//
//   features = [ embeddings of the last `context` tokens | decaying sum of those of the last `history` tokens
//   ] hidden   = relu(features · W1 + b1) + features · W2 + b2,   last component always 1
//
// with dropout on the features and behind the relu while training. The constant component makes the head's
// last column a bias.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRUNK_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRUNK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/examples/train_lm/adam.h"
#include "client/examples/train_lm/thread_pool.h"

namespace lossd::train_lm {

struct TrunkConfig {
  int64_t vocabulary = 0;
  int64_t hidden = 256;
  int64_t embedding = 96;
  int64_t context = 6;   // tokens that have a place of their own
  int64_t history = 32;  // tokens in the decaying sum; at least context
  double feature_dropout = 0.2;
  double hidden_dropout = 0.2;
  uint64_t seed = 1;
};

// Between two steps.
struct TrunkState {
  std::vector<float> parameters;
  AdamState adam;
  uint64_t forwards = 0;
};

enum class TrunkMode { kTraining, kEvaluation };

// Not thread-safe; computes on the pool's threads.
class Trunk {
 public:
  Trunk(const TrunkConfig& config, const AdamOptions& adam, ThreadPool* pool);

  // Hidden states [positions, hidden] of the given positions of `text`, each of which has at least
  // config.history tokens before it. In training mode what Backward needs is kept.
  void Forward(TrunkMode mode, std::span<const int32_t> text, std::span<const int64_t> positions,
               std::span<float> hidden);
  // Adds the gradients that follow from d_hidden [positions, hidden] of the last Forward, which was in
  // training mode; `text` is the same text.
  void Backward(std::span<const int32_t> text, std::span<const float> d_hidden);
  // One step of the optimizer on the gradients added since the last one.
  void Step(double learning_rate);

  const TrunkConfig& config() const { return config_; }
  // All parameters, and the gradients added since the last Step: embeddings, weights and biases one behind
  // the other.
  std::span<float> parameters() { return parameters_; }
  std::span<const float> gradients() const { return gradients_; }

  TrunkState state() const { return {parameters_, adam_.state(), forwards_}; }
  // `state` is that of a trunk with as many parameters.
  void Restore(const TrunkState& state);

 private:
  int64_t FeatureCount() const { return (config_.context + 1) * config_.embedding; }
  void Gather(std::span<const int32_t> text, std::span<const int64_t> positions);
  void Scatter(std::span<const int32_t> text);
  void DropFeatures(std::span<float> features) const;
  void Activate(TrunkMode mode, std::span<float> hidden);

  const TrunkConfig config_;
  ThreadPool* const pool_;
  std::vector<float> history_weights_;  // [history], the last token's first

  // All parameters in one array, and their gradients in another: embeddings [vocabulary, embedding], W = [W1
  // | W2] [features, 2 hidden], b = [b1 | b2] [2 hidden].
  std::vector<float> parameters_;
  std::vector<float> gradients_;
  std::span<float> embeddings_, weight_, bias_;
  std::span<float> d_embeddings_, d_weight_, d_bias_;
  Adam adam_;

  uint64_t forwards_ = 0;  // in training mode: every one draws its own dropout
  std::vector<int64_t> positions_;
  std::vector<float> features_;  // [positions, features]
  std::vector<float> sums_;      // [positions, 2 hidden]: before the relu; in Backward its gradient
  std::vector<float> gate_;      // [positions, hidden]: derivative of the relu times its dropout
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRUNK_H_
