#include "client/src/connection/watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/trace.h"
#include "lossd/v1/status.grpc.pb.h"

namespace lossd::internal {
namespace {

// Who is told that nobody listens there is told sooner than that.
constexpr std::chrono::milliseconds kRefusal(1000);

constexpr char kSilentUrl[] = "type.lossd/Silent";

// Whether a connection was given up because nothing came over it: the other ends are told by somebody. What
// gRPC calls that in a later version is tried again like them.
bool IsSilence(const absl::Status& ended) {
  return absl::IsUnavailable(ended) &&
         (absl::StrContains(ended.message(), "keepalive") || absl::StrContains(ended.message(), "timed out"));
}

}  // namespace

absl::Status NoAnswer(const WatchedServer& server, std::chrono::milliseconds time) {
  const std::string text = absl::StrCat(
      "no answer within ", time == server.options.call_timeout ? "call_timeout" : "the time of such a call",
      " (", std::chrono::duration<double>(time).count(), " s) from ", server.target,
      ": the server is stopped, overloaded or cut off. Look at it and at the way to it; if it only "
      "needs longer, give it a larger call_timeout");
  if (server.others == WatchedServer::Others::kNone) return absl::DeadlineExceededError(text);
  absl::Status status = absl::UnavailableError(text);
  status.SetPayload(kSilentUrl, absl::Cord());
  return status;
}

bool WasSilent(const absl::Status& status) { return status.GetPayload(kSilentUrl).has_value(); }

// GetStatus over the connection that is there and over a new one: whatever is answered shows that the server
// lives.
class Watch::Ping : public std::enable_shared_from_this<Ping> {
 public:
  void Send(const WatchedServer& server, Clock::time_point deadline) {
    sent_ = Clock::now();
    // It belongs to no call of the caller's, whose source of traces must not be asked in just any thread.
    const TraceContext none;
    const TraceScope untraced(&none);
    const std::array channels = {server.connect(), server.channel};
    for (size_t i = 0; i < calls_.size(); ++i) {
      Call& call = calls_[i];
      call.stub = v1::StatusService::NewStub(channels[i]);
      call.context.set_deadline(std::chrono::system_clock::now() + (deadline - sent_));
      (void)server.metadata->AddTo(&call.context);
      call.stub->async()->GetStatus(
          &call.context, &request_, &call.response,
          [self = shared_from_this(), &call](const grpc::Status& status) { self->Note(status, &call); });
    }
  }
  void Cancel() {
    for (Call& call : calls_) call.context.TryCancel();
  }

  bool answered() const { return answered_; }
  // The new connection was refused at once.
  bool refused() const { return calls_[0].ended && calls_[0].refused && !answered_; }
  bool over() const { return calls_[0].ended && calls_[1].ended; }

 private:
  struct Call {
    std::unique_ptr<v1::StatusService::Stub> stub;
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    bool refused = false;
    std::atomic<bool> ended = false;
  };

  void Note(const grpc::Status& status, Call* call) {
    const absl::Status said = FromGrpcStatus(status);
    if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
      call->refused = Clock::now() - sent_ < kRefusal;
    } else if (!absl::IsUnavailable(said) && !absl::IsDeadlineExceeded(said)) {
      answered_ = true;
    }
    call->ended = true;
  }

  Clock::time_point sent_;
  const v1::GetStatusRequest request_;
  std::atomic<bool> answered_ = false;
  std::array<Call, 2> calls_;
};

Watch::~Watch() { StopPing(); }

void Watch::StopPing() {
  if (ping_ != nullptr) ping_->Cancel();
  ping_.reset();
}

std::chrono::milliseconds Watch::slice() const {
  return std::clamp(server_.options.call_timeout / 8, std::chrono::milliseconds(1), kWaitSlice);
}

absl::Status Watch::Look() {
  if (absl::Status asked = Asked(server_.options); !asked.ok()) return asked;
  if (deadline_ && Clock::now() - heard_ > *deadline_ + kCancelPatience) return NoAnswer(server_, *deadline_);
  return silence_ == Silence::kIsEnough ? absl::OkStatus() : AskServer(server_.options.call_timeout / 2);
}

absl::Status Watch::AskServer(std::chrono::milliseconds wait_before) {
  const Clock::time_point now = Clock::now();
  if (ping_ != nullptr && (ping_->answered() || ping_->refused())) {
    heard_ = now;  // where there is no server, the connection to it ends, and the call with it
    StopPing();
    return absl::OkStatus();
  }
  if (ping_ != nullptr && ping_->over()) StopPing();
  const Clock::time_point end = heard_ + server_.options.call_timeout;
  if (now >= end) return NoAnswer(server_, server_.options.call_timeout);
  if (ping_ == nullptr && now - heard_ >= wait_before) {
    ping_ = std::make_shared<Ping>();
    ping_->Send(server_, end);
  }
  return absl::OkStatus();
}

absl::Status Watch::Judge(const absl::Status& ended) {
  if (!IsSilence(ended)) return ended;
  // There is time for one ping at least.
  heard_ = std::max(heard_, Clock::now() + kRefusal - server_.options.call_timeout);
  for (const Clock::time_point begun = heard_; heard_ == begun;) {
    if (absl::Status silent = AskServer(std::chrono::milliseconds(0)); !silent.ok()) return silent;
    if (absl::Status asked = Asked(server_.options); !asked.ok()) return asked;
    std::this_thread::sleep_for(std::min(slice(), kWaitSlice / 10));
  }
  return ended;
}

absl::Status Await(grpc::CompletionQueue* queue, grpc::ClientContext* context, Watch* watch, bool* ok) {
  void* tag = nullptr;
  for (;;) {
    const auto until = std::chrono::system_clock::now() + watch->slice();
    if (queue->AsyncNext(&tag, ok, until) == grpc::CompletionQueue::GOT_EVENT) return absl::OkStatus();
    if (absl::Status looked = watch->Look(); !looked.ok()) {
      context->TryCancel();
      const auto patience = std::chrono::system_clock::now() + kCancelPatience;
      if (queue->AsyncNext(&tag, ok, patience) == grpc::CompletionQueue::GOT_EVENT) return looked;
      watch->Break();
      queue->Next(&tag, ok);
      return looked;
    }
  }
}

}  // namespace lossd::internal
