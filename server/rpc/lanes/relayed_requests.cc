#include "server/rpc/lanes/relayed_requests.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::rpc {

absl::Status RelayedRequests::Parse(grpc::ByteBuffer* bytes, wire::ReceivedRequest* request) {
  RelayedRequest relayed;
  if (absl::Status parsed = ParseRelayed(bytes, &relayed); !parsed.ok()) return parsed;
  if (absl::Status taken = TakeHello(relayed.hello); !taken.ok()) return taken;
  *request = std::move(relayed.request);
  held_ = relayed.held;
  held_.rank = key_->rank;
  return absl::OkStatus();
}

absl::Status RelayedRequests::TakeHello(const std::optional<RelayId>& hello) {
  if (hello.has_value() == key_.has_value()) {
    return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "message",
                             "the first message of a relay, and no other, says hello");
  }
  if (!hello.has_value()) return absl::OkStatus();
  if (hello->epoch != group_.epoch || hello->rank < 1 || hello->rank >= group_.count) {
    return absl::FailedPreconditionError(absl::StrCat("the relay is of rank ", hello->rank, " in epoch ",
                                                      hello->epoch, "; this is epoch ", group_.epoch,
                                                      ", with ranks from 1 to ", group_.count - 1));
  }
  const RelayKey key{hello->rank, hello->relay};
  if (absl::Status begun = records_->Begin(key); !begun.ok()) return begun;
  key_ = key;
  peer_ = hello->peer;
  return absl::OkStatus();
}

absl::Status RelayedRequests::CheckSession(bool deterministic) const {
  if (!deterministic) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "lanes of deterministic sessions are opened where the session was (the leader, rank 0), not at another "
      "rank");
}

void RelayedRequests::Place(engine::Chunk* chunk) {
  if (held_.number == 0) return;
  if (absl::Status noted = records_->Note(*key_, held_.number); !noted.ok()) {
    chunk->decode_status = std::move(noted);
    return;
  }
  PlaceAtRank(held_, engine::HoldAtRank(group_.ranks, held_.rank, held_.number), chunk);
}

void RelayedRequests::End() {
  if (key_.has_value()) records_->End(*key_);
}

}  // namespace lossd::rpc
