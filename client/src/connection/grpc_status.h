// The border between grpc::Status and absl::Status. Rich details (lossd.v1.RichStatus) survive as payloads of
// the absl::Status. Thread-safe.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_GRPC_STATUS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_GRPC_STATUS_H_

#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "grpcpp/support/status.h"
#include "lossd/v1/types.pb.h"

namespace lossd::internal {

// A status that the transport or a proxy made in lossd's place is UNAVAILABLE, whatever its code was: the
// connection broke. A proxy's limit on bodies alone is RESOURCE_EXHAUSTED, since no repetition helps. A call
// that somebody else cancelled is UNAVAILABLE, too: to a caller CANCELLED means that it ended the call
// itself.
absl::Status FromGrpcStatus(const grpc::Status& status);

// The HTTP status of a proxy or another server that answered in lossd's place, if one did.
std::optional<int> HttpStatusOf(const absl::Status& status);

// Where the server says it stands, if it said so.
std::optional<v1::PositionInfo> PositionOf(const absl::Status& status);
// How long the server wants to be left alone, if it said so.
std::optional<std::chrono::milliseconds> RetryDelayOf(const absl::Status& status);

// The status with `prefix` and a colon in front of its message; code and payloads stay.
absl::Status Annotate(const absl::Status& status, absl::string_view prefix);

// The error that lossd::IsWindowLost recognises.
absl::Status WindowLostError(absl::string_view head, uint64_t generation, absl::string_view reason);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_GRPC_STATUS_H_
