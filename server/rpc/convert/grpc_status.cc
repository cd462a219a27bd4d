#include "server/rpc/convert/grpc_status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "lossd/v1/types.pb.h"
#include "server/engine/common/errors.h"

namespace lossd::rpc {
namespace {

// HTTP/2 trailers have little room (8 KiB in gRPC by default, percent-encoded).
constexpr size_t kMaxMessage = 1024;

// Cut between characters: half of one would make the whole message invalid UTF-8.
std::string Shorten(absl::string_view message) {
  if (message.size() <= kMaxMessage) return std::string(message);
  size_t end = kMaxMessage;
  while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
  return absl::StrCat(message.substr(0, end), "...");
}

std::string Details(const absl::Status& status, const std::string& message) {
  const auto position = engine::PositionOf(status);
  const auto delay = engine::RetryDelayOf(status);
  v1::RichStatus rich;
  rich.set_code(static_cast<int>(status.code()));
  rich.set_message(message);
  if (position.has_value()) {
    v1::PositionInfo info;
    info.set_incarnation(position->incarnation);
    info.set_generation(position->generation);
    for (const engine::LaneReplay& lane : position->replay) {
      v1::LaneReplay* replay = info.add_replay();
      replay->set_lane(lane.lane);
      replay->set_next_sequence(lane.next_sequence);
    }
    if (position->restores.has_value()) info.set_restores(*position->restores);
    info.set_hidden_states_gone(position->hidden_states_gone);
    rich.add_details()->PackFrom(info);
  }
  if (delay.has_value()) {
    v1::RetryInfo info;
    const int64_t milliseconds = absl::ToInt64Milliseconds(*delay);
    info.mutable_retry_delay()->set_seconds(milliseconds / 1000);
    info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(milliseconds % 1000 * 1'000'000));
    rich.add_details()->PackFrom(info);
  }
  return rich.SerializeAsString();
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status, engine::Counters& counters) {
  if (status.ok()) return grpc::Status::OK;
  counters.Reject(engine::ReasonOf(status));
  const std::string message = Shorten(status.message());
  const std::string details = Details(status, message);
  return {static_cast<grpc::StatusCode>(status.code()), message, details};
}

}  // namespace lossd::rpc
