#include "client/src/connection/grpc_status.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "lossd/client.h"

namespace lossd {
namespace {
constexpr char kWindowLostUrl[] = "type.lossd/WindowLost";
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

// gRPC's HTTP/2 transport begins its message so, and ends it with the code of HTTP, if a proxy answered.
constexpr char kHttpAnswer[] = "Received http2 header with status: ";
constexpr char kHttpStatusUrl[] = "type.lossd/HttpStatus";

// Whether the transport or a proxy made the status, which has no details of lossd's.
bool IsMadeOnTheWay(const grpc::Status& status) {
  const std::string& message = status.error_message();
  switch (status.error_code()) {
    // This library reads no status of a call that it has cancelled.
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return true;
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return message != "Deadline Exceeded";  // as gRPC says it of the call's own
    default:
      return absl::StartsWith(message, kHttpAnswer) || absl::StartsWith(message, "Received RST_STREAM");
  }
}

// For a status that was made on the way.
absl::Status BrokenConnection(const std::string& message) {
  absl::string_view http = message;
  if (!absl::ConsumePrefix(&http, kHttpAnswer)) {
    return absl::UnavailableError(absl::StrCat(
        "the call was cut on its way, and not by lossd: ", message.empty() ? "no reason was given" : message,
        "; a proxy between has a limit on time or on the size of bodies if that happens again and again"));
  }
  const absl::string_view code = http.substr(0, 3);
  if (code == "413") {
    return absl::ResourceExhaustedError(
        "a proxy on the way to lossd has a limit on bodies (HTTP 413): lift it there, as "
        "client_max_body_size 0 does for nginx");
  }
  absl::Status status = absl::UnavailableError(
      absl::StrCat("a proxy or another server answered in lossd's place (HTTP ", code,
                   "): look at its log, at where it sends /lossd.v1.* and at whom it lets in"));
  status.SetPayload(kHttpStatusUrl, absl::Cord(code));
  return status;
}

}  // namespace

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  v1::RichStatus rich;
  const bool of_server = !status.error_details().empty() && rich.ParseFromString(status.error_details());
  if (status.error_code() == grpc::StatusCode::CANCELLED || (!of_server && IsMadeOnTheWay(status))) {
    return BrokenConnection(status.error_message());
  }
  absl::Status result(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  for (const auto& detail : rich.details()) {
    result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

std::optional<int> HttpStatusOf(const absl::Status& status) {
  const auto text = status.GetPayload(kHttpStatusUrl);
  int code = 0;
  if (!text.has_value() || !absl::SimpleAtoi(std::string(*text), &code)) return std::nullopt;
  return code;
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
