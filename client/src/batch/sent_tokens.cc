#include "client/src/batch/sent_tokens.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "client/src/batch/token_returns.h"

namespace lossd::internal {

SentTokens SentTokens::All(int64_t tokens) {
  SentTokens sent;
  sent.count_ = tokens;
  if (tokens > 0) sent.begins_.push_back({});
  return sent;
}

SentTokens SentTokens::Labelled(std::span<const int64_t> labels, int64_t ignore_index) {
  SentTokens sent;
  bool in_run = false;
  for (size_t i = 0; i < labels.size(); ++i) {
    const bool labelled = labels[i] != ignore_index;
    if (labelled && !in_run) sent.begins_.push_back({sent.count_, static_cast<int64_t>(i)});
    in_run = labelled;
    sent.count_ += static_cast<int64_t>(labelled);
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

void FillIgnored(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs) {
  const auto row_bytes = static_cast<size_t>(head.hidden_size * SizeOf(outputs.dx_type));
  for (size_t i = 0; i < batch.labels.size(); ++i) {
    if (batch.labels[i] != batch.ignore_index) continue;
    if (!outputs.losses.empty()) outputs.losses[i] = 0;
    // Zero has no bits in any type.
    if (outputs.dx != nullptr) std::memset(static_cast<std::byte*>(outputs.dx) + i * row_bytes, 0, row_bytes);
    FillIgnoredReturns(outputs.returns, static_cast<int64_t>(i));
  }
}

}  // namespace lossd::internal
