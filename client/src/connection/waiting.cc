#include "client/src/connection/waiting.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/cord.h"
#include "grpcpp/completion_queue.h"

namespace lossd::internal {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at a channel that connects.
constexpr std::chrono::milliseconds kLook(5);

constexpr char kInterruptedUrl[] = "type.lossd/Interrupted";

thread_local const Question* instead = nullptr;
thread_local Clock::time_point last_asked;

}  // namespace

absl::Status Asked(const ClientOptions& options) {
  if (instead == nullptr && options.interrupted == nullptr) return absl::OkStatus();
  // Half a slice, so that whoever wakes up every slice always asks.
  if (Clock::now() - last_asked < kWaitSlice / 2) return absl::OkStatus();
  return AskedNow(options);
}

absl::Status AskedNow(const ClientOptions& options) {
  if (instead == nullptr && options.interrupted == nullptr) return absl::OkStatus();
  last_asked = Clock::now();
  if (instead != nullptr) return (*instead)();
  absl::Status status = options.interrupted();
  if (!status.ok()) status.SetPayload(kInterruptedUrl, absl::Cord());
  return status;
}

bool WasInterrupted(const absl::Status& status) { return status.GetPayload(kInterruptedUrl).has_value(); }

AskInstead::AskInstead(const Question* question) : outer_(std::exchange(instead, question)) {}
AskInstead::~AskInstead() { instead = outer_; }

absl::Status SleepFor(const ClientOptions& options, std::chrono::milliseconds time) {
  const Clock::time_point end = Clock::now() + time;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left <= std::chrono::milliseconds(0)) return absl::OkStatus();
    std::this_thread::sleep_for(std::min(left, kWaitSlice));
    if (absl::Status asked = Asked(options); !asked.ok()) return asked;
  }
}

bool AwaitConnected(grpc::Channel& channel, Clock::time_point until) {
  grpc::CompletionQueue none;  // whoever waits for one reads and writes gRPC's sockets meanwhile
  for (bool connect = true; channel.GetState(connect) != GRPC_CHANNEL_READY; connect = false) {
    const Clock::duration left = until - Clock::now();
    if (left <= Clock::duration(0)) return false;
    void* tag = nullptr;
    bool ok = false;
    none.AsyncNext(&tag, &ok, std::chrono::system_clock::now() + std::min<Clock::duration>(left, kLook));
  }
  return true;
}

}  // namespace lossd::internal
