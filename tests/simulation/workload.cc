#include "tests/simulation/workload.h"

#include <algorithm>
#include <utility>

namespace lossd::simulation {
namespace {

constexpr int64_t kIgnored = -100;
// That of item 0 in a chunk; those of others are below.
constexpr int64_t kFirstIgnored = -1000;

std::string Bytes(const auto& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])};
}

}  // namespace

void Values::Add(const Values& other, float factor) {
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] += factor * other.matrix[i];
  for (size_t i = 0; i < bias.size(); ++i) bias[i] += factor * other.bias[i];
  tokens += other.tokens;
}

void Item::AddTo(Values* gradient) const {
  if (kind != ItemKind::kGood) return;
  for (size_t token = 0; token < labels.size(); ++token) {
    if (labels[token] == kIgnored) continue;
    const auto label = static_cast<size_t>(labels[token]);
    ++gradient->tokens;
    gradient->bias[label] += scale;
    for (size_t h = 0; h < kHidden; ++h) {
      gradient->matrix[label * kHidden + h] += scale * hidden_states[token * kHidden + h];
    }
  }
}

std::vector<float> Item::Losses(const Values& weights) const {
  std::vector<float> losses(labels.size());
  for (size_t token = 0; token < labels.size(); ++token) {
    if (labels[token] == kIgnored) continue;
    const auto label = static_cast<size_t>(labels[token]);
    losses[token] = weights.bias[label];
    for (size_t h = 0; h < kHidden; ++h) {
      losses[token] += weights.matrix[label * kHidden + h] * hidden_states[token * kHidden + h];
    }
  }
  return losses;
}

std::vector<float> Item::InputGradients(const Values& weights) const {
  if (kind == ItemKind::kLossOnly || !dx) return {};
  std::vector<float> gradients(hidden_states.size());
  for (size_t token = 0; token < labels.size(); ++token) {
    if (labels[token] == kIgnored) continue;
    const auto label = static_cast<size_t>(labels[token]);
    for (size_t h = 0; h < kHidden; ++h) {
      gradients[token * kHidden + h] = scale * weights.matrix[label * kHidden + h];
    }
  }
  return gradients;
}

Item MakeItem(uint64_t number, Random* random) {
  Item item;
  item.number = number;
  const int kind = random->Below(16);
  if (kind == 0) item.kind = ItemKind::kRefused;
  if (kind == 1) item.kind = ItemKind::kLossOnly;
  item.scale = static_cast<float>(1 + random->Below(3));
  item.dx = !random->OneIn(4);
  const int tokens = 1 + random->Below(3);
  for (int token = 0; token < tokens; ++token) {
    item.labels.push_back(random->OneIn(10) ? kIgnored : random->Below(kVocab));
    for (int64_t h = 0; h < kHidden; ++h) {
      item.hidden_states.push_back(static_cast<float>(random->Below(15) - 7));
    }
  }
  if (item.kind == ItemKind::kRefused) item.labels.back() = kVocab;
  return item;
}

Item LossOnly(Item item) {
  if (item.kind == ItemKind::kRefused) item.labels.back() = 0;
  item.kind = ItemKind::kLossOnly;
  return item;
}

Item Corrected(Item item) {
  item.kind = ItemKind::kGood;
  item.labels.back() = 0;
  return item;
}

std::optional<uint64_t> ItemOf(int64_t ignored_label) {
  if (ignored_label > kFirstIgnored) return std::nullopt;
  return static_cast<uint64_t>(kFirstIgnored - ignored_label);
}

engine::Chunk ToChunk(const Item& item, uint64_t sequence, uint64_t generation) {
  engine::Chunk chunk;
  chunk.sequence = sequence;
  chunk.generation = generation;
  chunk.first_token = static_cast<int64_t>(item.number);
  chunk.tokens = item.tokens();
  chunk.gradient_scale = item.scale;
  chunk.ignore_index = kFirstIgnored - static_cast<int64_t>(item.number);
  std::vector<int64_t> labels = item.labels;
  std::replace(labels.begin(), labels.end(), kIgnored, chunk.ignore_index);
  if (!item.dx) chunk.mode = engine::ComputeMode::kLossAndWeightGradient;
  if (item.kind == ItemKind::kLossOnly) chunk.mode = engine::ComputeMode::kLossOnly;
  chunk.labels = Bytes(labels);
  chunk.hidden_states = engine::Payload::Of(Bytes(item.hidden_states));
  return chunk;
}

}  // namespace lossd::simulation
