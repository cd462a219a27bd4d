#include "server/engine/chunk/token_lists.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

constexpr char kProbabilitiesField[] = "token_inputs.target_lists.probabilities";
// Above 1 by what rounding to bf16 may add to a softmax.
constexpr double kMostProbability = 1 + 0x1p-6;
constexpr auto kOffsetBytes = static_cast<int64_t>(sizeof(int64_t));
constexpr auto kIdBytes = static_cast<int64_t>(sizeof(int32_t));

int64_t SizeOf(const std::string& bytes) { return static_cast<int64_t>(bytes.size()); }

bool HasTargets(const Chunk& chunk) { return chunk.lists.use == ChunkLists::Use::kTargets; }

// The parts of a field.
std::string OffsetsField(const Chunk& chunk) {
  return absl::StrCat(FieldOf(chunk.lists), HasTargets(chunk) ? ".lists" : "", ".offsets");
}
std::string IdsField(const Chunk& chunk) {
  return absl::StrCat(FieldOf(chunk.lists), HasTargets(chunk) ? ".lists" : "", ".ids");
}

kernels::TokenLists ListsOf(const Chunk& chunk) {
  return {reinterpret_cast<const int64_t*>(chunk.lists.offsets.data()),
          reinterpret_cast<const int32_t*>(chunk.lists.tokens.data())};
}

absl::Status ValidateCompany(const Chunk& chunk) {
  const auto refuse = [&chunk](absl::string_view field, absl::string_view what) {
    return Invalid(
        RejectReason::kOption, field,
        absl::StrCat(field, " is ", what, "; it must be unset together with ", FieldOf(chunk.lists)));
  };
  if (chunk.options.distillation.has_value()) return refuse("options.distillation", "set");
  if (chunk.options.loss.label_smoothing != 0) {
    return refuse("options.label_smoothing", absl::StrCat(chunk.options.loss.label_smoothing));
  }
  if (!HasTargets(chunk) && chunk.options.returns.top_k != 0) {
    return refuse("options.returns.top_k", absl::StrCat(chunk.options.returns.top_k));
  }
  return absl::OkStatus();
}

absl::Status ValidateOffsets(const Chunk& chunk) {
  const std::string offsets_field = OffsetsField(chunk);
  const std::string ids_field = IdsField(chunk);
  const int64_t bytes = (chunk.tokens + 1) * kOffsetBytes;
  if (SizeOf(chunk.lists.offsets) != bytes) {
    return Invalid(RejectReason::kLength, offsets_field,
                   absl::StrCat(offsets_field, " holds ", chunk.lists.offsets.size(), " bytes; ",
                                chunk.tokens + 1, " int64 offsets of ", chunk.tokens, " tokens are ", bytes));
  }
  if (SizeOf(chunk.lists.tokens) % kIdBytes != 0) {
    return Invalid(RejectReason::kLength, ids_field,
                   absl::StrCat(ids_field, " holds ", chunk.lists.tokens.size(),
                                " bytes; int32 ids are a multiple of ", kIdBytes));
  }
  const int64_t ids = SizeOf(chunk.lists.tokens) / kIdBytes;
  if (ids > kMostListedTokens) {
    return Invalid(
        RejectReason::kChunkTooLarge, ids_field,
        absl::StrCat(ids_field, " holds ", ids, " ids; the limit of a chunk is ", kMostListedTokens));
  }
  const int64_t* offsets = ListsOf(chunk).offsets;
  if (offsets[0] != 0) {
    return Invalid(RejectReason::kOption, offsets_field,
                   absl::StrCat(offsets_field, "[0] is ", offsets[0], "; it must be 0"));
  }
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (offsets[row + 1] >= offsets[row]) continue;
    return Invalid(RejectReason::kOption, offsets_field,
                   absl::StrCat(offsets_field, "[", row + 1, "] is ", offsets[row + 1],
                                "; it must be at least ", offsets[row], ", that of the token before"));
  }
  if (offsets[chunk.tokens] == ids) return absl::OkStatus();
  return Invalid(RejectReason::kLength, ids_field,
                 absl::StrCat(ids_field, " holds ", ids, " ids, but ", offsets_field, "[", chunk.tokens,
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

absl::Status ValidateList(const Chunk& chunk, int64_t row, int64_t vocab, Seen& seen) {
  const kernels::TokenLists lists = ListsOf(chunk);
  for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) {
    const int32_t token = lists.tokens[i];
    if (token < 0 || token >= vocab) {
      return Invalid(
          RejectReason::kLabel, IdsField(chunk),
          absl::StrCat(IdsField(chunk), "[", i, "] is ", token, "; it must be in [0, ", vocab, ")"));
    }
    if (seen.Add(token)) {
      return Invalid(RejectReason::kLabel, IdsField(chunk),
                     absl::StrCat(IdsField(chunk), "[", i, "] is ", token, ", which the list of token ", row,
                                  " has already; no id may be in a list twice"));
    }
  }
  for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) seen.Remove(lists.tokens[i]);
  return absl::OkStatus();
}

absl::Status ValidateNotEmpty(const Chunk& chunk, int64_t row) {
  const kernels::TokenLists lists = ListsOf(chunk);
  if (lists.size(row) > 0) return absl::OkStatus();
  const std::string field = OffsetsField(chunk);
  return Invalid(RejectReason::kLabel, field,
                 absl::StrCat(field, "[", row, "] and [", row + 1, "] are ", lists.offsets[row],
                              ": the list of token ", row, " is empty, and only an ignored token's may be"));
}

absl::Status ValidateLabel(const Chunk& chunk, int64_t row, int64_t label) {
  const kernels::TokenLists lists = ListsOf(chunk);
  const int32_t* const begin = lists.tokens + lists.offsets[row];
  const int32_t* const end = lists.tokens + lists.offsets[row + 1];
  if (std::find(begin, end, label) != end) return absl::OkStatus();
  return Invalid(RejectReason::kLabel, kKeptTokensField,
                 absl::StrCat("labels[", row, "] is ", label, ", which is not one of the ", end - begin,
                              " ids of the token's list in ", kKeptTokensField));
}

absl::Status ValidateTargetWeights(const ChunkLists& lists) {
  for (const auto& [name, value] :
       {std::pair("weight", lists.weight), std::pair("label_weight", lists.label_weight)}) {
    if (std::isfinite(value) && value >= 0) continue;
    const std::string field = absl::StrCat(kTargetListsField, ".", name);
    return Invalid(RejectReason::kOption, field,
                   absl::StrCat(field, " is ", value, "; it must be finite and at least 0"));
  }
  return absl::OkStatus();
}

absl::Status ValidateProbabilities(const Chunk& chunk, int64_t row) {
  const kernels::TargetLists targets = TargetListsOf(chunk);
  double sum = 0;
  for (int64_t i = targets.lists.offsets[row]; i < targets.lists.offsets[row + 1]; ++i) {
    const float probability = targets.probabilities[i];
    if (!(probability >= 0 && std::isfinite(probability))) {
      return Invalid(RejectReason::kOption, kProbabilitiesField,
                     absl::StrCat(kProbabilitiesField, "[", i, "] is ", probability,
                                  "; it must be finite and at least 0"));
    }
    sum += probability;
  }
  if (sum <= kMostProbability) return absl::OkStatus();
  return Invalid(
      RejectReason::kOption, kProbabilitiesField,
      absl::StrCat(kProbabilitiesField, " of token ", row, " add up to ", sum,
                   "; they must add up to 1 at most (more than ", kMostProbability, " is no rounding)"));
}

absl::Status ValidateProbabilityBytes(const Chunk& chunk) {
  if (chunk.lists.probabilities.size() == chunk.lists.tokens.size()) return absl::OkStatus();
  return Invalid(RejectReason::kLength, kProbabilitiesField,
                 absl::StrCat(kProbabilitiesField, " holds ", chunk.lists.probabilities.size(),
                              " bytes; fp32 for each of ", SizeOf(chunk.lists.tokens) / kIdBytes, " ids are ",
                              chunk.lists.tokens.size()));
}

// What a token that counts must have beyond a list.
absl::Status ValidateUse(const Chunk& chunk, int64_t row, int64_t label) {
  if (absl::Status status = ValidateNotEmpty(chunk, row); !status.ok()) return status;
  return HasTargets(chunk) ? ValidateProbabilities(chunk, row) : ValidateLabel(chunk, row, label);
}

}  // namespace

const char* FieldOf(const ChunkLists& lists) {
  return lists.use == ChunkLists::Use::kTargets ? kTargetListsField : kKeptTokensField;
}

absl::Status ValidateLists(const Chunk& chunk, const HeadConfig& head) {
  if (chunk.lists.use == ChunkLists::Use::kNone) return absl::OkStatus();
  if (absl::Status status = ValidateCompany(chunk); !status.ok()) return status;
  if (absl::Status status = ValidateOffsets(chunk); !status.ok()) return status;
  if (HasTargets(chunk)) {
    if (absl::Status status = ValidateTargetWeights(chunk.lists); !status.ok()) return status;
    if (absl::Status status = ValidateProbabilityBytes(chunk); !status.ok()) return status;
  }
  Seen seen(head.vocab_size);
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (absl::Status status = ValidateList(chunk, row, head.vocab_size, seen); !status.ok()) return status;
    int64_t label = 0;
    std::memcpy(&label, chunk.labels.data() + row * 8, sizeof(label));
    if (label == chunk.ignore_index) continue;
    if (absl::Status status = ValidateUse(chunk, row, label); !status.ok()) return status;
  }
  return absl::OkStatus();
}

kernels::TokenLists KeptTokensOf(const Chunk& chunk) {
  return chunk.lists.use == ChunkLists::Use::kKept ? ListsOf(chunk) : kernels::TokenLists();
}

kernels::TargetLists TargetListsOf(const Chunk& chunk) {
  if (!HasTargets(chunk)) return {};
  return {ListsOf(chunk), reinterpret_cast<const float*>(chunk.lists.probabilities.data())};
}

void SortTargets(Chunk& chunk) {
  if (!HasTargets(chunk)) return;
  const kernels::TokenLists lists = ListsOf(chunk);
  auto* const tokens = reinterpret_cast<int32_t*>(chunk.lists.tokens.data());
  auto* const probabilities = reinterpret_cast<float*>(chunk.lists.probabilities.data());
  std::vector<std::pair<int32_t, float>> list;
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    int32_t* const begin = tokens + lists.offsets[row];
    int32_t* const end = tokens + lists.offsets[row + 1];
    if (std::is_sorted(begin, end)) continue;
    list.clear();
    for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) {
      list.emplace_back(tokens[i], probabilities[i]);
    }
    std::sort(list.begin(), list.end());
    for (int64_t i = lists.offsets[row]; i < lists.offsets[row + 1]; ++i) {
      std::tie(tokens[i], probabilities[i]) = list[static_cast<size_t>(i - lists.offsets[row])];
    }
  }
}

void DropIgnoredLists(Chunk& chunk) {
  ChunkLists& lists = chunk.lists;
  if (lists.use == ChunkLists::Use::kNone) return;
  const auto* const labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  auto* const offsets = reinterpret_cast<int64_t*>(lists.offsets.data());
  // Moves the list [begin, end) of an array of 4-byte elements to where `to` says.
  const auto move = [](std::string& array, int64_t begin, int64_t end, int64_t to) {
    if (array.empty() || begin == to) return;
    std::memmove(array.data() + to * kIdBytes, array.data() + begin * kIdBytes,
                 static_cast<size_t>((end - begin) * kIdBytes));
  };
  int64_t begin = 0;  // of the row's list, where it is yet
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    const int64_t end = offsets[row + 1];
    const int64_t to = offsets[row];
    const bool dropped = labels[row] == chunk.ignore_index;
    if (!dropped) {
      move(lists.tokens, begin, end, to);
      move(lists.probabilities, begin, end, to);
    }
    offsets[row + 1] = dropped ? to : to + (end - begin);
    begin = end;
  }
  const auto bytes = static_cast<size_t>(offsets[chunk.tokens] * kIdBytes);
  lists.tokens.resize(bytes);
  if (HasTargets(chunk)) lists.probabilities.resize(bytes);
}

ChunkLists SliceLists(const ChunkLists& lists, int64_t first, int64_t rows) {
  ChunkLists slice{.use = lists.use, .weight = lists.weight, .label_weight = lists.label_weight};
  if (lists.use == ChunkLists::Use::kNone) return slice;
  const auto* const offsets = reinterpret_cast<const int64_t*>(lists.offsets.data()) + first;
  slice.offsets.resize(static_cast<size_t>((rows + 1) * kOffsetBytes));
  auto* const to = reinterpret_cast<int64_t*>(slice.offsets.data());
  for (int64_t row = 0; row <= rows; ++row) to[row] = offsets[row] - offsets[0];
  const auto begin = static_cast<size_t>(offsets[0] * kIdBytes);
  const auto bytes = static_cast<size_t>(to[rows] * kIdBytes);
  slice.tokens = lists.tokens.substr(begin, bytes);
  if (lists.use == ChunkLists::Use::kTargets) slice.probabilities = lists.probabilities.substr(begin, bytes);
  return slice;
}

void ReserveLists(int64_t tokens, ChunkLists::Use use, ChunkLists* lists) {
  const auto bytes = static_cast<size_t>(tokens * kIdBytes);
  if (use != ChunkLists::Use::kNone) lists->tokens.reserve(bytes);
  if (use == ChunkLists::Use::kTargets) lists->probabilities.reserve(bytes);
}

void AppendLists(const ChunkLists& more, ChunkLists* lists) {
  if (more.use == ChunkLists::Use::kNone) return;
  lists->use = more.use;
  lists->weight = more.weight;
  lists->label_weight = more.label_weight;
  const int64_t before = ListedTokens(*lists);
  const auto* const offsets = reinterpret_cast<const int64_t*>(more.offsets.data());
  const int64_t count = SizeOf(more.offsets) / kOffsetBytes;
  for (int64_t i = lists->offsets.empty() ? 0 : 1; i < count; ++i) {
    const int64_t offset = before + offsets[i];
    lists->offsets.append(reinterpret_cast<const char*>(&offset), sizeof(offset));
  }
  lists->tokens += more.tokens;
  lists->probabilities += more.probabilities;
}

int64_t ListedTokens(const ChunkLists& lists) { return SizeOf(lists.tokens) / kIdBytes; }

int64_t RowsWithin(const ChunkLists& lists, int64_t rows, int64_t most) {
  if (lists.use == ChunkLists::Use::kNone) return rows;
  const auto* const offsets = reinterpret_cast<const int64_t*>(lists.offsets.data());
  return std::upper_bound(offsets + 1, offsets + rows + 1, most) - (offsets + 1);
}

int64_t LongestList(const Chunk& chunk) {
  int64_t longest = 0;
  if (chunk.lists.use == ChunkLists::Use::kNone) return longest;
  const kernels::TokenLists lists = ListsOf(chunk);
  for (int64_t row = 0; row < chunk.tokens; ++row) longest = std::max(longest, lists.size(row));
  return longest;
}

std::vector<double> ListSizes(const Chunk& chunk) {
  std::vector<double> sizes;
  if (chunk.lists.use == ChunkLists::Use::kNone) return sizes;
  const kernels::TokenLists lists = ListsOf(chunk);
  const auto* labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  sizes.reserve(static_cast<size_t>(chunk.tokens));
  for (int64_t row = 0; row < chunk.tokens; ++row) {
    if (labels[row] != chunk.ignore_index) sizes.push_back(static_cast<double>(lists.size(row)));
  }
  return sizes;
}

ListKind ListKindOf(const Chunk& chunk) {
  ListKind kind{.use = chunk.lists.use};
  if (kind.use == ChunkLists::Use::kNone) return kind;
  const int64_t ids = ListedTokens(chunk.lists);
  const int64_t mean = (ids + chunk.tokens - 1) / chunk.tokens;
  kind.size_class = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(mean, 1))));
  if (HasTargets(chunk)) {
    kind.targets.weight = chunk.lists.weight;
    kind.targets.label_weight = chunk.lists.label_weight;
  }
  return kind;
}

}  // namespace lossd::engine
