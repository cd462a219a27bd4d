// One training loop for both heads: the trunk learns from the dX that the head returns, the head from the dW
// that it keeps.
#ifndef LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRAINER_H_
#define LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRAINER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/examples/train_lm/adam.h"
#include "client/examples/train_lm/head.h"
#include "client/examples/train_lm/text/text_data.h"
#include "client/examples/train_lm/thread_pool.h"
#include "client/examples/train_lm/trunk.h"

namespace lossd::train_lm {

struct TrainerOptions {
  int64_t steps = 0;
  int64_t batch = 8192;          // tokens sent to the head at once
  int64_t accumulate = 1;        // batches of one step
  double learning_rate = 0.012;  // reached after the warm-up, then falling in a line to 0
  double warm_up = 0.1;          // share of the steps
  double weight_decay = 0.1;
  uint64_t seed = 1;
  TrunkConfig trunk;  // vocabulary and seed are filled in by the trainer

  // The options of both, the trunk and the head.
  AdamOptions adam() const { return {.weight_decay = weight_decay}; }
};

// Draws training positions: every one once an epoch, in a new order each time.
class Sampler {
 public:
  Sampler(std::vector<int64_t> positions, uint64_t seed);
  void Draw(std::span<int64_t> positions);

  uint64_t epoch() const { return epoch_; }
  uint64_t next() const { return next_; }
  // Takes a new sampler to that place.
  void SkipTo(uint64_t epoch, uint64_t next);

 private:
  void BeginEpoch();

  const uint64_t seed_;
  std::vector<int64_t> positions_;
  size_t next_;
  uint64_t epoch_ = 0;
};

// Between two steps: all that a run is beside its head.
struct TrainerState {
  int64_t steps = 0;
  uint64_t epoch = 0;
  uint64_t next_position = 0;
  TrunkState trunk;
};

// `data`, `head` and `pool` must outlive it. Not thread-safe.
class Trainer {
 public:
  Trainer(const TrainerOptions& options, const TextData& data, LossHead* head, ThreadPool* pool);

  // Sends the initial weights: small random ones, and unigram log-probabilities in the column that acts as a
  // bias.
  absl::Status Start();
  // One optimizer step on batch x accumulate tokens. Returns the mean loss (nats a token).
  absl::StatusOr<double> Step();
  // Perplexity on the held-out text.
  absl::StatusOr<double> HeldOutPerplexity();

  TrainerState state() const { return {steps_, sampler_.epoch(), sampler_.next(), trunk_.state()}; }
  // A new trainer is resumed instead of started; the head is to be what it was then. INVALID_ARGUMENT if the
  // trunk has another size.
  absl::Status Resume(const TrainerState& state);

  int64_t trunk_parameters() { return static_cast<int64_t>(trunk_.parameters().size()); }
  int64_t head_parameters() const { return data_.vocabulary * options_.trunk.hidden; }

 private:
  double LearningRate() const;
  absl::StatusOr<double> AddBatch();
  void ReadLabels(const TokenText& text, std::span<const int64_t> positions);

  const TrainerOptions options_;
  const TextData& data_;
  LossHead* const head_;
  Sampler sampler_;
  Trunk trunk_;
  int64_t steps_ = 0;

  std::vector<int64_t> positions_;
  std::vector<int64_t> labels_;
  std::vector<float> hidden_;    // [batch, H]
  std::vector<float> d_hidden_;  // [batch, H]
};

}  // namespace lossd::train_lm

#endif  // LOSSD_CLIENT_EXAMPLES_TRAIN_LM_TRAINER_H_
