#include "client/src/connection/grpc_status.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lossd/client.h"

namespace lossd {
namespace {
constexpr char kWindowLostUrl[] = "type.lossd/WindowLost";

// What gRPC says, with UNKNOWN for a code, of a call whose connection broke in a way that it has no status
// for: bytes that TLS or HTTP/2 cannot read, for instance. No server says it.
constexpr char kConnectionBroke[] = "Stream removed";
}  // namespace

bool IsWindowLost(const absl::Status& status) { return status.GetPayload(kWindowLostUrl).has_value(); }

namespace internal {
namespace {

// The message named `full_name` among the payloads, whatever the prefix of its type URL is.
template <class Message>
std::optional<Message> FindDetail(const absl::Status& status) {
  std::optional<Message> found;
  const std::string suffix = absl::StrCat("/", Message::descriptor()->full_name());
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& value) {
    Message message;
    const std::string bytes(value);
    if (!found && absl::EndsWith(url, suffix) && message.ParseFromString(bytes)) found = message;
  });
  return found;
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  if (status.error_code() == grpc::StatusCode::UNKNOWN && status.error_message() == kConnectionBroke) {
    return absl::UnavailableError("the connection broke");
  }
  // The codes of both are the canonical ones. Nobody waits for the status of a call that this library has
  // cancelled: one that comes was cancelled at the server, or on its way.
  absl::Status result =
      status.error_code() == grpc::StatusCode::CANCELLED
          ? absl::UnavailableError(absl::StrCat("the call was cut: ", status.error_message()))
          : absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  v1::RichStatus rich;
  if (!status.error_details().empty() && rich.ParseFromString(status.error_details())) {
    for (const auto& detail : rich.details()) {
      result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
    }
  }
  return result;
}

std::optional<v1::PositionInfo> PositionOf(const absl::Status& status) {
  return FindDetail<v1::PositionInfo>(status);
}

std::optional<std::chrono::milliseconds> RetryDelayOf(const absl::Status& status) {
  const auto info = FindDetail<v1::RetryInfo>(status);
  if (!info) return std::nullopt;
  const auto delay = std::chrono::seconds(info->retry_delay().seconds()) +
                     std::chrono::nanoseconds(info->retry_delay().nanos());
  return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(delay), std::chrono::milliseconds(0));
}

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  absl::Status result(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& value) { result.SetPayload(url, value); });
  return result;
}

absl::Status WindowLostError(absl::string_view head, uint64_t generation, absl::string_view reason) {
  absl::Status status = absl::AbortedError(absl::StrCat("window lost: replay since generation ", generation,
                                                        " of head '", head, "' (", reason, ")"));
  status.SetPayload(kWindowLostUrl, absl::Cord(absl::StrCat(generation)));
  return status;
}

}  // namespace internal
}  // namespace lossd
