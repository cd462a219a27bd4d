#include "server/engine/common/errors.h"

#include <array>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace lossd::engine {
namespace {

constexpr absl::string_view kReasonUrl = "lossd/reason";
constexpr absl::string_view kFieldUrl = "lossd/field";
constexpr absl::string_view kPositionUrl = "lossd/position";
constexpr absl::string_view kRetryUrl = "lossd/retry";
// In a position:
constexpr absl::string_view kRestores = "restores=";
constexpr absl::string_view kHiddenStatesGone = "hidden_states_gone";

constexpr std::array<const char*, kRejectReasonCount> kNames = {"malformed",
                                                                "shape",
                                                                "dtype",
                                                                "length",
                                                                "label",
                                                                "no_tokens",
                                                                "chunk_too_large",
                                                                "non_finite",
                                                                "option",
                                                                "unknown_head",
                                                                "unknown_session",
                                                                "unknown_flush",
                                                                "unknown_write",
                                                                "unknown_region",
                                                                "unknown_hold",
                                                                "unknown_field",
                                                                "gap",
                                                                "generation",
                                                                "incarnation",
                                                                "fenced",
                                                                "marks",
                                                                "flush_arguments",
                                                                "no_weights",
                                                                "weight_write",
                                                                "weight_version",
                                                                "conflict",
                                                                "region",
                                                                "out_of_memory",
                                                                "overload",
                                                                "draining",
                                                                "checkpoint",
                                                                "internal"};

std::optional<std::string> PayloadText(const absl::Status& status, absl::string_view url) {
  const auto payload = status.GetPayload(url);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

const char* Name(RejectReason reason) { return kNames[static_cast<size_t>(reason)]; }

absl::Status MakeError(absl::StatusCode code, RejectReason reason, absl::string_view field,
                       absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kReasonUrl, absl::Cord(absl::StrCat(static_cast<int>(reason))));
  if (!field.empty()) status.SetPayload(kFieldUrl, absl::Cord(field));
  return status;
}

absl::Status Invalid(RejectReason reason, absl::string_view field, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, field, message);
}

void AttachPosition(absl::Status* status, const Position& position) {
  std::string text = absl::StrCat(position.incarnation, " ", position.generation);
  for (const LaneReplay& replay : position.replay) {
    absl::StrAppend(&text, " ", replay.lane, ":", replay.next_sequence);
  }
  if (position.restores.has_value()) absl::StrAppend(&text, " ", kRestores, *position.restores);
  if (position.hidden_states_gone) absl::StrAppend(&text, " ", kHiddenStatesGone);
  status->SetPayload(kPositionUrl, absl::Cord(text));
}

void AttachRetryDelay(absl::Status* status, absl::Duration delay) {
  status->SetPayload(kRetryUrl, absl::Cord(absl::StrCat(absl::ToInt64Milliseconds(delay))));
}

RejectReason ReasonOf(const absl::Status& status) {
  int value = 0;
  const std::optional<std::string> text = PayloadText(status, kReasonUrl);
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) return RejectReason::kInternal;
  return static_cast<RejectReason>(value);
}

std::string FieldOf(const absl::Status& status) { return PayloadText(status, kFieldUrl).value_or(""); }

std::optional<Position> PositionOf(const absl::Status& status) {
  const std::optional<std::string> text = PayloadText(status, kPositionUrl);
  if (!text.has_value()) return std::nullopt;
  const std::vector<std::string> words = absl::StrSplit(*text, ' ');
  Position position;
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &position.generation)) return std::nullopt;
  position.incarnation = words[0];
  for (size_t i = 2; i < words.size(); ++i) {
    if (words[i] == kHiddenStatesGone) {
      position.hidden_states_gone = true;
      continue;
    }
    if (absl::string_view number = words[i]; absl::ConsumePrefix(&number, kRestores)) {
      if (!absl::SimpleAtoi(number, &position.restores.emplace())) return std::nullopt;
      continue;
    }
    const std::pair<std::string, std::string> parts = absl::StrSplit(words[i], ':');
    LaneReplay replay;
    if (!absl::SimpleAtoi(parts.first, &replay.lane) ||
        !absl::SimpleAtoi(parts.second, &replay.next_sequence)) {
      return std::nullopt;
    }
    position.replay.push_back(replay);
  }
  return position;
}

std::optional<absl::Duration> RetryDelayOf(const absl::Status& status) {
  int64_t milliseconds = 0;
  const std::optional<std::string> text = PayloadText(status, kRetryUrl);
  if (!text.has_value() || !absl::SimpleAtoi(*text, &milliseconds)) return std::nullopt;
  return absl::Milliseconds(milliseconds);
}

}  // namespace lossd::engine
