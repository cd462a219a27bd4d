// One live Compute call, as the session sees it: messages go out, messages come in, both at once.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_COMPUTE_STREAM_H_
#define LOSSD_CLIENT_SRC_CONNECTION_COMPUTE_STREAM_H_

#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "grpcpp/support/byte_buffer.h"

namespace lossd::internal {

// Used by one thread at a time, but for Cancel. What arrives is taken off the wire whether or not anybody
// reads, up to a fixed number of messages, so that a writer and the server never wait for each other.
class ComputeStream {
 public:
  // Ends the call if it still runs, and waits for that.
  virtual ~ComputeStream() = default;

  // Hands over one message; waits until the one before it has left. False when the call is over; what arrived
  // before its end is still there to be read.
  virtual bool Write(grpc::ByteBuffer message) = 0;

  enum class ReadResult { kMessage, kTimeout, kEnded };
  // The next message. Without a timeout it waits as long as the call lives; with zero it only looks.
  virtual ReadResult Read(grpc::ByteBuffer* message, std::optional<std::chrono::milliseconds> timeout) = 0;

  // By the system clock: when the message that was last written began to leave, and when the one that was
  // last read had arrived.
  virtual std::chrono::system_clock::time_point WriteTime() const = 0;
  virtual std::chrono::system_clock::time_point ReadTime() const = 0;

  // The call is over, whether or not everything that arrived was read.
  virtual bool Ended() = 0;
  // Why the call ended. Only once it has.
  virtual absl::Status EndStatus() = 0;

  // Ends the call soon: whoever waits in Write or Read goes on. From any thread, while the stream lives.
  virtual void Cancel() = 0;

  // Says that nothing more will be written and waits for the server to end the call, but no longer than
  // `timeout`.
  virtual void Close(std::chrono::milliseconds timeout) = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_COMPUTE_STREAM_H_
