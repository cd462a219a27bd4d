#include "server/engine/chunk/kept_tokens.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr char kOffsetsField[] = "token_inputs.kept_tokens.offsets";
constexpr char kIdsField[] = "token_inputs.kept_tokens.ids";
constexpr auto kOffsetBytes = static_cast<int64_t>(sizeof(int64_t));
constexpr auto kIdBytes = static_cast<int64_t>(sizeof(int32_t));

int64_t SizeOf(const std::string& bytes) { return static_cast<int64_t>(bytes.size()); }

absl::Status ValidateCompany(const Chunk& chunk) {
  const auto refuse = [](absl::string_view field, absl::string_view what) {
    return Invalid(RejectReason::kOption, field,
                   absl::StrCat(field, " is ", what, "; it must be unset together with ", kKeptTokensField));
  };
  if (chunk.options.distillation.has_value()) return refuse("options.distillation", "set");
  if (chunk.options.loss.label_smoothing != 0) {
    return refuse("options.label_smoothing", absl::StrCat(chunk.options.loss.label_smoothing));
  }
  if (chunk.options.returns.top_k != 0) {
    return refuse("options.returns.top_k", absl::StrCat(chunk.options.returns.top_k));
  }
  return absl::OkStatus();
}

absl::Status ValidateOffsets(const Chunk& chunk) {
  const int64_t bytes = (chunk.tokens + 1) * kOffsetBytes;
  if (SizeOf(chunk.kept_offsets) != bytes) {
    return Invalid(RejectReason::kLength, kOffsetsField,
                   absl::StrCat(kOffsetsField, " holds ", chunk.kept_offsets.size(), " bytes; ",
                                chunk.tokens + 1, " int64 offsets of ", chunk.tokens, " tokens are ", bytes));
  }
  if (SizeOf(chunk.kept_tokens) % kIdBytes != 0) {
    return Invalid(RejectReason::kLength, kIdsField,
                   absl::StrCat(kIdsField, " holds ", chunk.kept_tokens.size(),
                                " bytes; int32 ids are a multiple of ", kIdBytes));
  }
  const int64_t ids = SizeOf(chunk.kept_tokens) / kIdBytes;
  if (ids > kMostKeptTokens) {
    return Invalid(
        RejectReason::kChunkTooLarge, kIdsField,
        absl::StrCat(kIdsField, " holds ", ids, " ids; the limit of a chunk is ", kMostKeptTokens));
  }
  const int64_t* offsets = KeptTokensOf(chunk).offsets;
  if (offsets[0] != 0) {
    return Invalid(RejectReason::kOption, kOffsetsField,
                   absl::StrCat(kOffsetsField, "[0] is ", offsets[0], "; it must be 0"));
  }
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (offsets[row + 1] >= offsets[row]) continue;
    return Invalid(RejectReason::kOption, kOffsetsField,
                   absl::StrCat(kOffsetsField, "[", row + 1, "] is ", offsets[row + 1],
                                "; it must be at least ", offsets[row], ", that of the token before"));
  }
  if (offsets[chunk.tokens] == ids) return absl::OkStatus();
  return Invalid(RejectReason::kLength, kIdsField,
                 absl::StrCat(kIdsField, " holds ", ids, " ids, but ", kOffsetsField, "[", chunk.tokens,
                              "] is ", offsets[chunk.tokens], "; they must be equal"));
}

// Which entries of the vocabulary a list has.
class Seen {
 public:
  explicit Seen(int64_t vocab) : words_(static_cast<size_t>(vocab + 63) / 64) {}

  // Whether it was there already.
  bool Add(int32_t token) {
    uint64_t& word = words_[static_cast<size_t>(token) / 64];
    const uint64_t bit = uint64_t{1} << (token % 64);
    const bool there = (word & bit) != 0;
    word |= bit;
    return there;
  }
  void Remove(int32_t token) { words_[static_cast<size_t>(token) / 64] = 0; }

 private:
  std::vector<uint64_t> words_;
};

absl::Status ValidateList(const kernels::TokenLists& lists, int64_t row, int64_t vocab, Seen& seen) {
  for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) {
    const int32_t token = lists.tokens[i];
    if (token < 0 || token >= vocab) {
      return Invalid(RejectReason::kLabel, kIdsField,
                     absl::StrCat(kIdsField, "[", i, "] is ", token, "; it must be in [0, ", vocab, ")"));
    }
    if (seen.Add(token)) {
      return Invalid(RejectReason::kLabel, kIdsField,
                     absl::StrCat(kIdsField, "[", i, "] is ", token, ", which the list of token ", row,
                                  " has already; no id may be in a list twice"));
    }
  }
  for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) seen.Remove(lists.tokens[i]);
  return absl::OkStatus();
}

absl::Status ValidateLabel(const kernels::TokenLists& lists, int64_t row, int64_t label) {
  const int32_t* const begin = lists.tokens + lists.offsets[row];
  const int32_t* const end = lists.tokens + lists.offsets[row + 1];
  if (begin == end) {
    return Invalid(
        RejectReason::kLabel, kOffsetsField,
        absl::StrCat(kOffsetsField, "[", row, "] and [", row + 1, "] are ", lists.offsets[row],
                     ": the list of token ", row, " is empty, and only an ignored token's may be"));
  }
  if (std::find(begin, end, label) != end) return absl::OkStatus();
  return Invalid(RejectReason::kLabel, kKeptTokensField,
                 absl::StrCat("labels[", row, "] is ", label, ", which is not one of the ", end - begin,
                              " ids of the token's list in ", kKeptTokensField));
}

}  // namespace

absl::Status ValidateKeptTokens(const Chunk& chunk, const HeadConfig& head) {
  if (!chunk.has_kept_tokens) return absl::OkStatus();
  if (absl::Status status = ValidateCompany(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateOffsets(chunk); !status.ok()) return status;
  const kernels::TokenLists lists = KeptTokensOf(chunk);
  Seen seen(head.vocab_size);
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (absl::Status status = ValidateList(lists, row, head.vocab_size, seen); !status.ok()) return status;
    int64_t label = 0;
    std::memcpy(&label, chunk.labels.data() + row * 8, sizeof(label));
    if (label == chunk.ignore_index) continue;
    if (absl::Status status = ValidateLabel(lists, row, label); !status.ok()) return status;
  }
  return absl::OkStatus();
}

kernels::TokenLists KeptTokensOf(const Chunk& chunk) {
  if (!chunk.has_kept_tokens) return {};
  return {reinterpret_cast<const int64_t*>(chunk.kept_offsets.data()),
          reinterpret_cast<const int32_t*>(chunk.kept_tokens.data())};
}

int64_t LongestList(const Chunk& chunk) {
  int64_t longest = 0;
  if (!chunk.has_kept_tokens) return longest;
  const int64_t* offsets = KeptTokensOf(chunk).offsets;
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    longest = std::max(longest, offsets[row + 1] - offsets[row]);
  }
  return longest;
}

std::vector<double> ListSizes(const Chunk& chunk) {
  std::vector<double> sizes;
  if (!chunk.has_kept_tokens) return sizes;
  const kernels::TokenLists lists = KeptTokensOf(chunk);
  const auto* labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  sizes.reserve(static_cast<size_t>(chunk.tokens));
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (labels[row] != chunk.ignore_index) sizes.push_back(static_cast<double>(lists.size(row)));
  }
  return sizes;
}

int64_t KeptTokensClass(const Chunk& chunk) {
  if (!chunk.has_kept_tokens) return 0;
  const int64_t ids = SizeOf(chunk.kept_tokens) / kIdBytes;
  const int64_t mean = (ids + chunk.tokens - 1) / chunk.tokens;
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(mean, 1))));
}

}  // namespace lossd::engine
