#include "client/src/batch/sent_tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "client/src/batch/batch_loss.h"
#include "client/src/batch/token_returns.h"

namespace lossd::internal {

NeededTokens::NeededTokens(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs)
    : batch_(batch),
      // The server alone knows the class weights, whose sum is over all valid tokens.
      may_be_idle_(!batch.token_weights.empty() && !AnyUnweighted(outputs.returns) &&
                   !ClassWeightsCount(head, batch)) {
  if (!may_be_idle_ || batch.hold == 0) return;
  // What is held is found by places among the tokens of phase one, so they go all or not at all.
  for (size_t i = 0; i < batch.labels.size() && may_be_idle_; ++i) {
    may_be_idle_ = batch.labels[i] == batch.ignore_index || IsIdle(i);
  }
}

bool NeededTokens::IsIdle(size_t token) const {
  const auto is_zero = [token](std::span<const float> values) {
    return values.empty() || values[token] == 0;
  };
  if (!is_zero(batch_.token_weights)) return false;
  return batch_.mode == ComputeMode::kLossOnly ||
         (is_zero(batch_.lse_gradients) && is_zero(batch_.entropy_gradients));
}

SentTokens SentTokens::All(int64_t tokens) {
  SentTokens sent;
  sent.count_ = tokens;
  if (tokens > 0) sent.begins_.push_back({});
  return sent;
}

SentTokens SentTokens::Of(const NeededTokens& needed) {
  SentTokens sent;
  bool in_run = false;
  for (size_t i = 0; i < needed.size(); ++i) {
    const bool is_needed = needed.Has(i);
    if (is_needed && !in_run) sent.begins_.push_back({sent.count_, static_cast<int64_t>(i)});
    in_run = is_needed;
    sent.count_ += static_cast<int64_t>(is_needed);
  }
  return sent;
}

size_t SentTokens::IndexOf(int64_t sent) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), sent,
                                      [](int64_t value, const Begin& begin) { return value < begin.sent; });
  return static_cast<size_t>(after - begins_.begin()) - 1;
}

int64_t SentTokens::PlaceOf(int64_t sent) const {
  const Begin& begin = begins_[IndexOf(sent)];
  return begin.place + (sent - begin.sent);
}

std::vector<SentTokens::Run> SentTokens::Runs(int64_t first, int64_t tokens) const {
  std::vector<Run> runs;
  const int64_t end = first + tokens;
  for (size_t i = tokens > 0 ? IndexOf(first) : begins_.size(); first < end; ++i) {
    const int64_t run_end = i + 1 < begins_.size() ? begins_[i + 1].sent : count_;
    const int64_t size = std::min(run_end, end) - first;
    runs.push_back({begins_[i].place + (first - begins_[i].sent), size});
    first += size;
  }
  return runs;
}

void FillUnneeded(const NeededTokens& needed, const HeadConfig& head, const BatchOutputs& outputs) {
  const auto row_bytes = static_cast<size_t>(head.hidden_size * SizeOf(outputs.dx_type));
  for (size_t i = 0; i < needed.size(); ++i) {
    if (needed.Has(i)) continue;
    if (!outputs.losses.empty()) outputs.losses[i] = 0;
    // Zero has no bits in any type.
    if (outputs.dx != nullptr) std::memset(static_cast<std::byte*>(outputs.dx) + i * row_bytes, 0, row_bytes);
    FillIgnoredReturns(outputs.returns, static_cast<int64_t>(i));
  }
}

}  // namespace lossd::internal
