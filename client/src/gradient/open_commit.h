// The commit of a flush that may have been done although no answer came: no other window of the head is ended
// before it is known what became of it.
#ifndef LOSSD_CLIENT_SRC_GRADIENT_OPEN_COMMIT_H_
#define LOSSD_CLIENT_SRC_GRADIENT_OPEN_COMMIT_H_

#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/common/head_context.h"
#include "lossd/client.h"

namespace lossd::internal {

// Equal for marks that name the same chunks.
std::string KeyOf(std::span<const SessionMarks> marks);

// Whether an error of CommitFlush says what became of the flush: then it is of no use to repeat the call.
bool SaysWhatBecameOfIt(const absl::Status& commit);

// Repeats the commit that is open, if there is one, and returns it if it is done now. An error: there is
// still no answer, or there is none to be had any more.
absl::StatusOr<std::optional<OpenCommit>> SettleCommit(HeadContext& head);

// ALREADY_EXISTS: the error of a call that settled this commit and did nothing else.
absl::Status SettledError(const OpenCommit& commit);

// Adds `flush` to the error: FlushOf returns it.
absl::Status WithFlush(absl::Status status, const FlushResult& flush);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_GRADIENT_OPEN_COMMIT_H_
