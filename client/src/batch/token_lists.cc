#include "client/src/batch/token_lists.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::internal {
namespace {

constexpr absl::string_view kKeptField = "kept_tokens";
constexpr absl::string_view kTargetField = "target_lists.lists";
constexpr int64_t kIdBytes = sizeof(int32_t);
constexpr int64_t kProbabilityBytes = sizeof(float);

using Runs = std::span<const SentTokens::Run>;

absl::Status ValidateLists(const TokenLists& lists, size_t tokens, absl::string_view field) {
  if (!lists.given()) {
    if (lists.tokens.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".tokens has ", lists.tokens.size(), " values but there are no offsets"));
  }
  if (lists.offsets.size() != tokens + 1) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".offsets has ", lists.offsets.size(),
                                                   " values; labels has ", tokens, ", so there must be ",
                                                   tokens + 1));
  }
  if (lists.offsets.front() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".offsets[0] is ", lists.offsets.front(), "; it must be 0"));
  }
  for (size_t i = 0; i < tokens; ++i) {
    if (lists.offsets[i + 1] >= lists.offsets[i]) continue;
    return absl::InvalidArgumentError(absl::StrCat(field, ".offsets[", i + 1, "] is ", lists.offsets[i + 1],
                                                   "; it must be at least ", lists.offsets[i],
                                                   ", that of the token before"));
  }
  if (lists.offsets.back() == static_cast<int64_t>(lists.tokens.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ".tokens has ", lists.tokens.size(), " values, but ",
                                                 field, ".offsets[", tokens, "] is ", lists.offsets.back(),
                                                 "; they must be equal"));
}

absl::Status ValidateWeight(float weight, absl::string_view field) {
  if (std::isfinite(weight) && weight >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", weight, "; it must be finite and at least 0"));
}

absl::Status ValidateTargets(const TargetLists& targets, size_t tokens) {
  if (absl::Status status = ValidateLists(targets.lists, tokens, kTargetField); !status.ok()) return status;
  if (targets.probabilities.size() != targets.lists.tokens.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("target_lists.probabilities has ", targets.probabilities.size(), " values, but ",
                     kTargetField, ".tokens has ", targets.lists.tokens.size(), "; they must be equal"));
  }
  absl::Status status = ValidateWeight(targets.weight, "target_lists.weight");
  status.Update(ValidateWeight(targets.label_weight, "target_lists.label_weight"));
  return status;
}

// What the tokens of these runs have of a value for each listed token.
template <typename Value>
void AssignListed(std::span<const int64_t> offsets, std::span<const Value> values, Runs runs,
                  std::string* bytes) {
  for (const SentTokens::Run& run : runs) {
    const int64_t first = offsets[static_cast<size_t>(run.first)];
    const int64_t end = offsets[static_cast<size_t>(run.first + run.tokens)];
    const auto part = values.subspan(static_cast<size_t>(first), static_cast<size_t>(end - first));
    bytes->append(reinterpret_cast<const char*>(part.data()), part.size_bytes());
  }
}

}  // namespace

absl::Status ValidateTokenLists(const Batch& batch) {
  const size_t tokens = batch.labels.size();
  if (absl::Status status = ValidateLists(batch.kept_tokens, tokens, kKeptField); !status.ok()) return status;
  if (absl::Status status = ValidateTargets(batch.target_lists, tokens); !status.ok()) return status;
  if (!batch.kept_tokens.given() || !batch.target_lists.given()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "kept_tokens and target_lists are given; a batch has one of them at most");
}

const TokenLists& ListsOf(const Batch& batch) {
  return batch.target_lists.given() ? batch.target_lists.lists : batch.kept_tokens;
}

absl::string_view ListsField(const Batch& batch) {
  return batch.target_lists.given() ? kTargetField : kKeptField;
}

int64_t ListedTokenBytes(const Batch& batch) {
  return batch.target_lists.given() ? kIdBytes + kProbabilityBytes : kIdBytes;
}

std::vector<int64_t> ListEnds(const Batch& batch, const SentTokens& sent) {
  const std::span<const int64_t> offsets = ListsOf(batch).offsets;
  std::vector<int64_t> ends;
  if (offsets.empty()) return ends;
  ends.reserve(static_cast<size_t>(sent.count()) + 1);
  ends.push_back(0);
  for (const SentTokens::Run& run : sent.Runs(0, sent.count())) {
    const auto first = static_cast<size_t>(run.first);
    const int64_t shift = ends.back() - offsets[first];
    for (int64_t i = 1; i <= run.tokens; ++i) ends.push_back(offsets[first + static_cast<size_t>(i)] + shift);
  }
  return ends;
}

void SetLists(const TokenLists& lists, Runs runs, v1::TokenLists* proto) {
  std::vector<int64_t> offsets = {0};
  for (const SentTokens::Run& run : runs) {
    const auto first = static_cast<size_t>(run.first);
    const auto end = static_cast<size_t>(run.first + run.tokens);
    const int64_t shift = offsets.back() - lists.offsets[first];
    for (size_t i = first + 1; i <= end; ++i) offsets.push_back(lists.offsets[i] + shift);
  }
  proto->set_offsets(offsets.data(), offsets.size() * sizeof(int64_t));
  AssignListed(lists.offsets, lists.tokens, runs, proto->mutable_ids());
}

void SetTargetLists(const TargetLists& targets, Runs runs, v1::TargetLists* proto) {
  SetLists(targets.lists, runs, proto->mutable_lists());
  AssignListed(targets.lists.offsets, targets.probabilities, runs, proto->mutable_probabilities());
  proto->set_weight(targets.weight);
  proto->set_label_weight(targets.label_weight);
}

}  // namespace lossd::internal
