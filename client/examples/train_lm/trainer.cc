#include "client/examples/train_lm/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/examples/train_lm/random.h"

namespace lossd::train_lm {
namespace {

constexpr uint64_t kShuffling = 16;
constexpr uint64_t kHeadValues = 17;
constexpr double kHeadDeviation = 0.02;

TrunkConfig Complete(TrunkConfig trunk, const TrainerOptions& options, const TextData& data) {
  trunk.vocabulary = data.vocabulary;
  trunk.seed = options.seed;
  return trunk;
}

}  // namespace

Sampler::Sampler(std::vector<int64_t> positions, uint64_t seed)
    : seed_(seed), positions_(std::move(positions)), next_(positions_.size()) {}

void Sampler::BeginEpoch() {
  Random random(seed_, kShuffling, epoch_++);
  Shuffle(&positions_, &random);
  next_ = 0;
}

void Sampler::SkipTo(uint64_t epoch, uint64_t next) {
  while (epoch_ < epoch) BeginEpoch();
  next_ = std::min<size_t>(next, positions_.size());
}

void Sampler::Draw(std::span<int64_t> positions) {
  for (int64_t& position : positions) {
    if (next_ == positions_.size()) BeginEpoch();
    position = positions_[next_++];
  }
}

Trainer::Trainer(const TrainerOptions& options, const TextData& data, LossHead* head, ThreadPool* pool)
    : options_(options),
      data_(data),
      head_(head),
      sampler_(data.training.positions, options.seed),
      trunk_(Complete(options.trunk, options, data), options.adam(), pool) {}

absl::Status Trainer::Start() {
  Random random(options_.seed, kHeadValues);
  std::vector<float> weights(static_cast<size_t>(head_parameters()));
  for (float& weight : weights) weight = static_cast<float>(kHeadDeviation * random.Normal());
  const auto width = static_cast<size_t>(options_.trunk.hidden);
  for (size_t token = 0; token < data_.unigram.size(); ++token) {
    weights[token * width + width - 1] = data_.unigram[token];
  }
  return head_->WriteWeights(weights);
}

absl::Status Trainer::Resume(const TrainerState& state) {
  const size_t parameters = trunk_.parameters().size();
  if (state.trunk.parameters.size() != parameters || state.trunk.adam.first.size() != parameters ||
      state.trunk.adam.second.size() != parameters) {
    return absl::InvalidArgumentError("the saved trunk has another size than this one");
  }
  sampler_.SkipTo(state.epoch, state.next_position);
  trunk_.Restore(state.trunk);
  steps_ = state.steps;
  return absl::OkStatus();
}

double Trainer::LearningRate() const {
  const auto steps = static_cast<double>(options_.steps);
  const double warm_up = std::max(1.0, options_.warm_up * steps);
  const auto now = static_cast<double>(steps_);
  const double rising = (now + 1) / warm_up;
  const double falling = (steps - now) / std::max(1.0, steps - warm_up);
  return options_.learning_rate * std::max(0.0, std::min({1.0, rising, falling}));
}

void Trainer::ReadLabels(const TokenText& text, std::span<const int64_t> positions) {
  labels_.clear();
  for (const int64_t position : positions) labels_.push_back(text.tokens[static_cast<size_t>(position)]);
  hidden_.resize(positions.size() * static_cast<size_t>(options_.trunk.hidden));
}

absl::StatusOr<double> Trainer::AddBatch() {
  const std::span<const int32_t> text = data_.training.tokens;
  positions_.resize(static_cast<size_t>(options_.batch));
  sampler_.Draw(positions_);
  ReadLabels(data_.training, positions_);
  trunk_.Forward(TrunkMode::kTraining, text, positions_, hidden_);
  d_hidden_.resize(hidden_.size());
  const float mean = 1.0f / static_cast<float>(options_.batch * options_.accumulate);
  absl::StatusOr<double> loss = head_->LossAndGradients(labels_, hidden_, mean, d_hidden_);
  if (!loss.ok()) return loss.status();
  trunk_.Backward(text, d_hidden_);
  return *loss * static_cast<double>(mean);
}

absl::StatusOr<double> Trainer::Step() {
  double mean_loss = 0;
  for (int64_t i = 0; i < options_.accumulate; ++i) {
    absl::StatusOr<double> loss = AddBatch();
    if (!loss.ok()) return loss.status();
    mean_loss += *loss;
  }
  const double learning_rate = LearningRate();
  trunk_.Step(learning_rate);
  if (absl::Status stepped = head_->Step(learning_rate); !stepped.ok()) return stepped;
  ++steps_;
  return mean_loss;
}

absl::StatusOr<double> Trainer::HeldOutPerplexity() {
  double sum = 0;
  const std::span<const int64_t> all = data_.held_out.positions;
  const auto batch = static_cast<size_t>(options_.batch);
  for (size_t first = 0; first < all.size(); first += batch) {
    const std::span<const int64_t> positions = all.subspan(first, std::min(batch, all.size() - first));
    ReadLabels(data_.held_out, positions);
    trunk_.Forward(TrunkMode::kEvaluation, data_.held_out.tokens, positions, hidden_);
    absl::StatusOr<double> loss = head_->Loss(labels_, hidden_);
    if (!loss.ok()) return loss.status();
    sum += *loss;
  }
  return std::exp(sum / static_cast<double>(all.size()));
}

}  // namespace lossd::train_lm
