// How calls wait: in slices, between which the caller is asked whether it still wants to.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_WAITING_H_
#define LOSSD_CLIENT_SRC_CONNECTION_WAITING_H_

#include <chrono>
#include <functional>

#include "absl/status/status.h"
#include "grpcpp/channel.h"
#include "lossd/client.h"

namespace lossd::internal {

inline constexpr std::chrono::milliseconds kWaitSlice(100);

// What ClientOptions::interrupted says, if it was not asked in this thread just before. Anything but OK ends
// the wait, and the call, with it.
absl::Status Asked(const ClientOptions& options);
// The same, however short ago it was asked.
absl::Status AskedNow(const ClientOptions& options);

// Whether a call ended with `status` because it was interrupted.
bool WasInterrupted(const absl::Status& status);

// In the threads of a call that are not its caller's, and in those that others may cut short.
using Question = std::function<absl::Status()>;
class AskInstead {
 public:
  // `question` must outlive it.
  explicit AskInstead(const Question* question);
  ~AskInstead();
  AskInstead(const AskInstead&) = delete;
  AskInstead& operator=(const AskInstead&) = delete;

 private:
  const Question* const outer_;
};

absl::Status SleepFor(const ClientOptions& options, std::chrono::milliseconds time);

// Whether the channel, which is told to connect once, has a connection by then. Returns sooner if it has, and
// does not ask the caller. Channel::WaitForConnected may never return:
// https://github.com/grpc/grpc/issues/16128.
bool AwaitConnected(grpc::Channel& channel, std::chrono::steady_clock::time_point until);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_WAITING_H_
