#include "client/src/batch/kept_tokens.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lossd::internal {

absl::Status ValidateKeptTokens(const TokenLists& lists, size_t tokens) {
  if (!lists.given()) {
    if (lists.tokens.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("kept_tokens.tokens has ", lists.tokens.size(), " values but there are no offsets"));
  }
  if (lists.offsets.size() != tokens + 1) {
    return absl::InvalidArgumentError(absl::StrCat("kept_tokens.offsets has ", lists.offsets.size(),
                                                   " values; labels has ", tokens, ", so there must be ",
                                                   tokens + 1));
  }
  if (lists.offsets.front() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("kept_tokens.offsets[0] is ", lists.offsets.front(), "; it must be 0"));
  }
  for (size_t i = 0; i < tokens; ++i) {
    if (lists.offsets[i + 1] >= lists.offsets[i]) continue;
    return absl::InvalidArgumentError(absl::StrCat("kept_tokens.offsets[", i + 1, "] is ",
                                                   lists.offsets[i + 1], "; it must be at least ",
                                                   lists.offsets[i], ", that of the token before"));
  }
  if (lists.offsets.back() == static_cast<int64_t>(lists.tokens.size())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("kept_tokens.tokens has ", lists.tokens.size(),
                                                 " values, but kept_tokens.offsets[", tokens, "] is ",
                                                 lists.offsets.back(), "; they must be equal"));
}

int64_t LongestList(const Batch& batch, Ignored ignored) {
  const std::span<const int64_t> offsets = batch.kept_tokens.offsets;
  int64_t longest = 0;
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (ignored == Ignored::kLeftOut && batch.labels[i - 1] == batch.ignore_index) continue;
    longest = std::max(longest, offsets[i] - offsets[i - 1]);
  }
  return longest;
}

void SetLists(const TokenLists& lists, std::span<const SentTokens::Run> runs, v1::TokenLists* proto) {
  std::vector<int64_t> offsets = {0};
  std::string& ids = *proto->mutable_ids();
  for (const SentTokens::Run& run : runs) {
    const auto first = static_cast<size_t>(run.first);
    const auto end = static_cast<size_t>(run.first + run.tokens);
    const int64_t shift = offsets.back() - lists.offsets[first];
    for (size_t i = first + 1; i <= end; ++i) offsets.push_back(lists.offsets[i] + shift);
    const auto part = lists.tokens.subspan(static_cast<size_t>(lists.offsets[first]),
                                           static_cast<size_t>(lists.offsets[end] - lists.offsets[first]));
    ids.append(reinterpret_cast<const char*>(part.data()), part.size_bytes());
  }
  proto->set_offsets(offsets.data(), offsets.size() * sizeof(int64_t));
}

}  // namespace lossd::internal
