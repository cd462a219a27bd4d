#include "tests/simulation/sim_batch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels/collectives/communicator.h"
#include "server/engine/device/rank_status.h"

namespace lossd::simulation {

using engine::ChunkRows;
using engine::ComputeMode;

namespace {

// Where they are: of a chunk that another rank answers there are none.
void CopyHiddenStates(const engine::HiddenRows& rows, size_t count, float* out) {
  if (rows.data != nullptr) {
    std::memcpy(out, rows.data, count * sizeof(float));
  } else if (!rows.parts.empty()) {
    engine::Gather(rows.parts, reinterpret_cast<std::byte*>(out));
  }
}

}  // namespace

void SimGradient::Clear() {
  std::fill(dw.begin(), dw.end(), 0.0f);
  std::fill(db.begin(), db.end(), 0.0f);
}

std::optional<size_t> SimWeights::RowOf(int64_t label) const {
  const int64_t row = label - shard.layout.first(shard.rank);
  if (row < 0 || row >= static_cast<int64_t>(rows)) return std::nullopt;
  return static_cast<size_t>(row);
}

SimBatch::SimBatch(const engine::BatchKey& kind, std::span<const ChunkRows> chunks,
                   engine::BatchCallbacks callbacks, const SimWeights* weights, SimGradient* gradient)
    : kind_(kind),
      chunks_(chunks.begin(), chunks.end()),
      callbacks_(std::move(callbacks)),
      weights_(weights),
      gradient_(gradient) {}

absl::Status SimBatch::Compute() {
  computed_ = true;
  first_tokens_ = {0};
  for (const ChunkRows& chunk : chunks_) {
    first_tokens_.push_back(first_tokens_.back() + static_cast<size_t>(chunk.tokens));
  }
  hidden_states_.resize(first_tokens_.back() * weights_->hidden);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const size_t count = static_cast<size_t>(chunks_[i].tokens) * weights_->hidden;
    CopyHiddenStates(chunks_[i].hidden_states, count,
                     hidden_states_.data() + first_tokens_[i] * weights_->hidden);
  }
  if (absl::Status spread = SpreadHiddenStates(); !spread.ok()) return spread;
  if (kind_.mode == ComputeMode::kWeightGradientOnly) return absl::OkStatus();
  ComputeOwn();
  return CollectResults();
}

absl::Status SimBatch::SpreadHiddenStates() {
  const engine::HeadShard& shard = weights_->shard;
  if (shard.communicator == nullptr) return absl::OkStatus();
  const auto bytes = static_cast<int64_t>(hidden_states_.size() * sizeof(float));
  const std::array<int64_t, 2> sent = {0, answers() ? bytes : 0};
  const std::array<int64_t, 2> received = {answers() ? 0 : bytes, 0};
  return engine::ToStatus(
      shard.communicator->AllToAllV(hidden_states_.data(), sent, hidden_states_.data(), received, nullptr));
}

void SimBatch::ComputeOwn() {
  const size_t hidden = weights_->hidden;
  results_.assign(first_tokens_.back() * ResultSize(), 0.0f);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    for (size_t token = 0; token < static_cast<size_t>(chunks_[i].tokens); ++token) {
      const int64_t label = chunks_[i].labels[token];
      const std::optional<size_t> row = weights_->RowOf(label);
      if (label == chunks_[i].ignore_index || !row.has_value()) continue;
      const size_t place = first_tokens_[i] + token;
      float* const result = results_.data() + place * ResultSize();
      result[0] = weights_->bias[*row];
      for (size_t h = 0; h < hidden; ++h) {
        const float weight = weights_->matrix[*row * hidden + h];
        result[0] += weight * hidden_states_[place * hidden + h];
        result[1 + h] = weight * chunks_[i].gradient_scale;
      }
    }
  }
}

// All ranks but the one that has a token's label have zeros for its results.
absl::Status SimBatch::CollectResults() {
  const engine::HeadShard& shard = weights_->shard;
  if (shard.communicator == nullptr) return absl::OkStatus();
  const auto bytes = static_cast<int64_t>(results_.size() * sizeof(float));
  const std::array<int64_t, 2> sent = {answers() ? 0 : bytes, 0};
  const std::array<int64_t, 2> received = {0, answers() ? bytes : 0};
  std::vector<float> others(results_.size());
  absl::Status status = engine::ToStatus(
      shard.communicator->AllToAllV(results_.data(), sent, others.data(), received, nullptr));
  std::transform(results_.begin(), results_.end(), others.begin(), results_.begin(), std::plus<>());
  return status;
}

void SimBatch::AnswerNext() {
  const size_t number = answered_++;
  const ChunkRows& rows = chunks_[number];
  if (kind_.mode != ComputeMode::kWeightGradientOnly && answers()) {
    auto* dx = static_cast<float*>(rows.dx);
    for (size_t token = 0; token < static_cast<size_t>(rows.tokens); ++token) {
      const float* const result = results_.data() + (first_tokens_[number] + token) * ResultSize();
      rows.losses[token] = result[0];
      if (dx != nullptr) std::copy_n(result + 1, weights_->hidden, dx + token * weights_->hidden);
    }
  }
  callbacks_.on_input_gradients(number);
}

void SimBatch::Add(size_t chunk) {
  const ChunkRows& rows = chunks_[chunk];
  const size_t hidden = weights_->hidden;
  const float* const x = hidden_states_.data() + first_tokens_[chunk] * hidden;
  for (size_t token = 0; token < static_cast<size_t>(rows.tokens); ++token) {
    const std::optional<size_t> row = weights_->RowOf(rows.labels[token]);
    if (rows.labels[token] == rows.ignore_index || !row.has_value()) continue;
    gradient_->db[*row] += rows.gradient_scale;
    for (size_t h = 0; h < hidden; ++h) {
      gradient_->dw[*row * hidden + h] += rows.gradient_scale * x[token * hidden + h];
    }
  }
}

}  // namespace lossd::simulation
