#include "client/src/batch/batch_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "client/src/batch/batch_loss.h"
#include "client/src/batch/token_lists.h"
#include "client/src/batch/token_returns.h"

namespace lossd::internal {
namespace {

constexpr int64_t kDefaultChunkBytes = int64_t{4} << 20;
constexpr int64_t kMostChunkBytes = int64_t{1} << 30;  // a protobuf message ends below 2 GiB
// For batches below these sizes, smaller chunks at the ends would gain nothing.
constexpr int64_t kLeastTaperedBytes = int64_t{1} << 20;
constexpr int64_t kLeastTaperedTokens = 4;
constexpr int64_t kLabelBytes = sizeof(int64_t);
constexpr int64_t kLossBytes = sizeof(float);
constexpr int64_t kWeightBytes = sizeof(float);  // also of an upstream gradient
constexpr int64_t kOffsetBytes = sizeof(int64_t);

// Bytes of a token on the wire, in both directions, beside hidden states, dX and the tokens of its list.
int64_t TokenBytes(const Batch& batch, const BatchOutputs& outputs) {
  int64_t bytes = kLabelBytes + kLossBytes + BytesOnWire(outputs.returns);
  if (!batch.token_weights.empty()) bytes += kWeightBytes;
  if (!batch.lse_gradients.empty()) bytes += kWeightBytes;
  if (!batch.entropy_gradients.empty()) bytes += kWeightBytes;
  if (ListsOf(batch).given()) bytes += kOffsetBytes;
  return bytes;
}

int64_t DefaultChunkBytes(const v1::SessionLimits& limits) {
  return limits.preferred_chunk_bytes() > 0 ? limits.preferred_chunk_bytes() : kDefaultChunkBytes;
}

// Sizes of the fewest possible chunks.
std::vector<int64_t> EqualSizes(int64_t tokens, int64_t most) {
  const int64_t chunks = (tokens + most - 1) / most;
  std::vector<int64_t> sizes;
  sizes.reserve(static_cast<size_t>(chunks));
  for (int64_t i = 0; i < chunks; ++i) {
    // The first tokens % chunks ones are one token longer.
    sizes.push_back(tokens / chunks + static_cast<int64_t>(i < tokens % chunks));
  }
  return sizes;
}

// Sizes of chunks that get smaller towards both ends.
std::vector<int64_t> TaperedSizes(int64_t tokens, int64_t most) {
  const int64_t half = most / 2;
  if (tokens <= half) return {tokens};
  std::vector<int64_t> ends = {std::max<int64_t>(1, std::min(most / 4, tokens / 4))};
  if (tokens >= 2 * (most / 4 + half) + most) ends.push_back(half);
  int64_t middle = tokens;
  for (const int64_t end : ends) middle -= 2 * end;
  std::vector<int64_t> sizes = ends;
  for (const int64_t size : EqualSizes(middle, most)) sizes.push_back(size);
  sizes.insert(sizes.end(), ends.rbegin(), ends.rend());
  return sizes;
}

// The most tokens of a chunk.
absl::StatusOr<int64_t> MostTokens(int64_t hidden_bytes, int64_t payload_bytes, int64_t chunk_bytes,
                                   const v1::SessionLimits& limits) {
  int64_t most_bytes = kMostChunkBytes;
  if (limits.max_chunk_bytes() > 0) most_bytes = std::min(most_bytes, limits.max_chunk_bytes());
  if (hidden_bytes > most_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("one token of hidden_states has ", hidden_bytes,
                                                     " bytes; the server takes chunks of at most ",
                                                     most_bytes));
  }
  int64_t most_tokens = std::max<int64_t>(1, std::min(most_bytes, chunk_bytes) / hidden_bytes);
  if (limits.max_chunk_tokens() > 0) most_tokens = std::min(most_tokens, limits.max_chunk_tokens());
  if (limits.byte_credit() > 0) {
    most_tokens = std::min(most_tokens, std::max<int64_t>(1, limits.byte_credit() / 2 / payload_bytes));
  }
  return most_tokens;
}

// What the lists of a batch take of its chunks: none, without lists.
class ListCosts {
 public:
  ListCosts(const Batch& batch, const SentTokens& sent, const v1::SessionLimits& limits)
      : ends_(ListEnds(batch, sent)), field_(ListsField(batch)), token_bytes_(ListedTokenBytes(batch)) {
    // Messages have half of the chunk limit for them.
    if (limits.max_chunk_bytes() > 0) {
      most_listed_ = std::min(most_listed_, limits.max_chunk_bytes() / 2 / token_bytes_);
    }
    if (limits.byte_credit() > 0) most_bytes_ = limits.byte_credit() / 2;
  }

  bool given() const { return !ends_.empty(); }
  // Tokens in a list, on average.
  int64_t Mean() const {
    if (ends_.size() < 2) return 0;
    const auto tokens = static_cast<int64_t>(ends_.size()) - 1;
    return (ends_.back() + tokens - 1) / tokens;
  }
  int64_t MeanBytes() const { return Mean() * token_bytes_; }
  // As many as have room for lists of that length.
  int64_t MostTokens() const { return std::max<int64_t>(1, most_listed_ / std::max<int64_t>(1, Mean())); }
  // What the lists of a chunk take of its payload.
  int64_t Bytes(const ChunkRange& chunk) const {
    return given() ? kOffsetBytes + Listed(chunk) * token_bytes_ : 0;
  }

  // The most tokens, whole steps unless it is all of them, with which the beginning of a chunk may be one:
  // `payload_bytes` of each are not the lists'. At least one step; an error if the lists of that are too
  // long.
  absl::StatusOr<int64_t> Fit(const ChunkRange& chunk, int64_t payload_bytes, int64_t step) const {
    if (!given()) return chunk.tokens;
    ChunkRange part = chunk;
    for (part.tokens = 0; part.tokens < chunk.tokens;) {
      ChunkRange longer = part;
      longer.tokens = std::min(chunk.tokens, part.tokens + step);
      const bool is_first = part.tokens == 0;
      if (Listed(longer) > most_listed_) {
        if (is_first) return TooLong(longer);
        break;
      }
      if (!is_first && longer.tokens * payload_bytes + Bytes(longer) > most_bytes_) break;
      part = longer;
    }
    return part.tokens;
  }

 private:
  int64_t Listed(const ChunkRange& chunk) const {
    return ends_[static_cast<size_t>(chunk.first + chunk.tokens)] - ends_[static_cast<size_t>(chunk.first)];
  }
  absl::Status TooLong(const ChunkRange& chunk) const {
    if (chunk.tokens == 1) {
      return absl::InvalidArgumentError(absl::StrCat(field_, " has a list of ", Listed(chunk),
                                                     " tokens; the server takes lists of at most ",
                                                     most_listed_));
    }
    return absl::InvalidArgumentError(
        absl::StrCat(field_, " has lists of ", Listed(chunk), " tokens for ", chunk.tokens,
                     " rows, which in a region are one chunk at least; the server takes lists of at most ",
                     most_listed_, ": use no region"));
  }

  const std::vector<int64_t> ends_;
  const absl::string_view field_;
  const int64_t token_bytes_;
  int64_t most_listed_ = kMostListedTokens;  // of a chunk
  int64_t most_bytes_ = std::numeric_limits<int64_t>::max();
};

enum class Taper { kYes, kNo };

// Steps in each chunk of a batch that is cut into chunks of at most `most_tokens` and whole steps of tokens.
std::vector<int64_t> SizesInSteps(int64_t tokens, int64_t most_tokens, int64_t step, Taper taper) {
  if (tokens <= most_tokens && step > most_tokens) return {1};
  const int64_t steps = (tokens + step - 1) / step;
  const int64_t most = most_tokens / step;
  return taper == Taper::kYes && most >= kLeastTaperedTokens ? TaperedSizes(steps, most)
                                                             : EqualSizes(steps, most);
}

}  // namespace

absl::Status ValidateBatch(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs) {
  const auto tokens = static_cast<int64_t>(batch.labels.size());
  if (!outputs.losses.empty() && outputs.losses.size() != batch.labels.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("losses has room for ", outputs.losses.size(), " tokens but labels has ", tokens));
  }
  if (tokens > 0 && batch.hidden_states == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_states is null but labels has ", tokens, " tokens"));
  }
  if (batch.mode == ComputeMode::kLossOnly && outputs.dx != nullptr) {
    return absl::InvalidArgumentError("dx is not null but mode is kLossOnly, which computes no dX");
  }
  if (!std::isfinite(batch.gradient_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient_scale is ", batch.gradient_scale, "; it must be finite"));
  }
  if (absl::Status status = ValidateLoss(head, batch); !status.ok()) return status;
  if (absl::Status status = ValidateReturns(head, outputs.returns, tokens); !status.ok()) return status;
  if (!outputs.returns.divergences.empty() && !batch.distillation && !batch.target_lists.given()) {
    return absl::InvalidArgumentError(
        absl::StrCat("divergences has room for ", outputs.returns.divergences.size(),
                     " tokens but there is no distillation and no target_lists"));
  }
  if (batch.first_token < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_token is ", batch.first_token, "; it must be at least 0"));
  }
  constexpr int64_t kMostPlace = std::numeric_limits<int64_t>::max() / 2;  // the server's
  if (const int64_t place = batch.window_token.value_or(0); place < 0 || place > kMostPlace) {
    return absl::InvalidArgumentError(
        absl::StrCat("window_token is ", place, "; it must be in [0, ", kMostPlace, "]"));
  }
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t label = batch.labels[static_cast<size_t>(i)];
    if ((label < 0 || label >= head.vocab_size) && label != batch.ignore_index) {
      return absl::InvalidArgumentError(absl::StrCat("labels[", i, "] is ", label, "; it must be in [0, ",
                                                     head.vocab_size, ") or ignore_index ",
                                                     batch.ignore_index));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<BatchPlan> PlanBatch(const HeadConfig& head, const Batch& batch, const BatchOutputs& outputs,
                                    const BatchPlaces& places, const SentTokens& sent, int64_t chunk_bytes,
                                    const v1::SessionLimits& limits, int32_t lanes) {
  const int64_t tokens = sent.count();
  const ListCosts lists(batch, sent, limits);
  const int64_t own_bytes = head.hidden_size * SizeOf(batch.hidden_type);
  const int64_t teacher_bytes = TeacherRowBytes(batch);
  const int64_t hidden_bytes = own_bytes + teacher_bytes;
  const int64_t dx_bytes = places.DxIsSent(outputs) ? head.hidden_size * SizeOf(outputs.dx_type) : 0;
  const int64_t payload_bytes = TokenBytes(batch, outputs) + (places.hidden_states ? 0 : own_bytes) +
                                (places.teacher_hidden ? 0 : teacher_bytes) + dx_bytes;
  const bool all_in_regions = places.All(batch, outputs);

  if (chunk_bytes <= 0) chunk_bytes = all_in_regions ? kMostChunkBytes : DefaultChunkBytes(limits);
  const auto most = MostTokens(hidden_bytes, payload_bytes + lists.MeanBytes(), chunk_bytes, limits);
  if (!most.ok()) return most.status();
  const int64_t most_tokens = lists.given() ? std::min(*most, lists.MostTokens()) : *most;

  const int64_t step = places.TokenStep(head, batch, outputs);
  if (tokens > most_tokens && step > most_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunks may have ", most_tokens, " tokens here, but in a region only every ", step,
                     "th begins at a multiple of 16 bytes: raise chunk_bytes, or use no region"));
  }
  BatchPlan plan;
  plan.lanes = all_in_regions ? 1 : static_cast<int32_t>(std::clamp<int64_t>(tokens / most_tokens, 1, lanes));
  const bool worth_it = !all_in_regions && most_tokens * hidden_bytes >= kLeastTaperedBytes;
  for (const int64_t steps : SizesInSteps(tokens, most_tokens, step, worth_it ? Taper::kYes : Taper::kNo)) {
    const int64_t first = plan.chunks.empty() ? 0 : plan.chunks.back().first + plan.chunks.back().tokens;
    ChunkRange left{.first = first,
                    .tokens = std::min(tokens - first, steps * step)};  // the last may be short
    while (left.tokens > 0) {
      const absl::StatusOr<int64_t> fits = lists.Fit(left, payload_bytes, step);
      if (!fits.ok()) return fits.status();
      ChunkRange& chunk = plan.chunks.emplace_back(ChunkRange{.first = left.first, .tokens = *fits});
      chunk.payload_bytes = chunk.tokens * payload_bytes + lists.Bytes(chunk);
      left.first += *fits;
      left.tokens -= *fits;
    }
  }
  return plan;
}

}  // namespace lossd::internal
