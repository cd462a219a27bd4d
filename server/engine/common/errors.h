// The engine's errors: absl::Status plus machine-readable facts, carried as status payloads so that they pass
// through every layer unchanged. server/rpc translates them at its border.
#ifndef LOSSD_SERVER_ENGINE_COMMON_ERRORS_H_
#define LOSSD_SERVER_ENGINE_COMMON_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::engine {

// Why something was refused: the label of the rejection metrics.
enum class RejectReason {
  kMalformed,
  kShape,
  kDtype,
  kLength,
  kLabel,
  kNoTokens,
  kChunkTooLarge,
  kNonFinite,
  kOption,
  kUnknownHead,
  kUnknownSession,
  kUnknownFlush,
  kUnknownWrite,
  kUnknownRegion,
  kUnknownHold,
  kUnknownField,
  kGap,
  kGeneration,
  kIncarnation,
  kFenced,
  kMarks,
  kFlushArguments,
  kNoWeights,
  kWeightWrite,
  kWeightVersion,
  kConflict,
  kRegion,
  kOutOfMemory,
  kOverload,
  kDraining,
  kCheckpoint,
  kInternal,
};
inline constexpr int kRejectReasonCount = static_cast<int>(RejectReason::kInternal) + 1;

// Lower-case name, e.g. "non_finite".
const char* Name(RejectReason reason);

// Where the server stands: what a client needs to find its place again.
struct LaneReplay {
  int32_t lane = 0;
  uint64_t next_sequence = 0;
};
struct Position {
  std::string incarnation;
  uint64_t generation = 0;
  std::vector<LaneReplay> replay;
  // How often the head has been restored, for a caller whose marks are of another past.
  std::optional<uint64_t> restores = {};
  bool hidden_states_gone = false;  // that a chunk should take
};

// `field` names the request field at fault, or is empty.
absl::Status MakeError(absl::StatusCode code, RejectReason reason, absl::string_view field,
                       absl::string_view message);
// The same with INVALID_ARGUMENT.
absl::Status Invalid(RejectReason reason, absl::string_view field, absl::string_view message);
void AttachPosition(absl::Status* status, const Position& position);
void AttachRetryDelay(absl::Status* status, absl::Duration delay);

// kInternal if the status carries no reason.
RejectReason ReasonOf(const absl::Status& status);
std::string FieldOf(const absl::Status& status);
std::optional<Position> PositionOf(const absl::Status& status);
std::optional<absl::Duration> RetryDelayOf(const absl::Status& status);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_COMMON_ERRORS_H_
