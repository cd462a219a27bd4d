// What every call carries beside its message: the token, and the trace that it belongs to.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_CALL_METADATA_H_
#define LOSSD_CLIENT_SRC_CONNECTION_CALL_METADATA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/client_context.h"
#include "lossd/client.h"

namespace lossd::internal {

// Thread-safe.
class CallMetadata {
 public:
  // INVALID_ARGUMENT if options.token_file cannot be read or holds no token, or if the token would travel in
  // plain text to `target` and nobody said that it may.
  static absl::StatusOr<std::shared_ptr<CallMetadata>> Create(const std::string& target,
                                                              const ClientOptions& options);

  // Before the call is started. Reads the file again if it has changed; one that is no good changes nothing.
  // Returns what Judge wants to know.
  uint64_t AddTo(grpc::ClientContext* context);

  // What the call ended with; UNAVAILABLE instead of UNAUTHENTICATED and PERMISSION_DENIED if the file holds
  // another token by now: trying again may help.
  absl::Status Judge(const absl::Status& status, uint64_t added);

 private:
  explicit CallMetadata(const ClientOptions& options) : trace_(options.trace), path_(options.token_file) {}
  absl::Status ReadLocked();
  void RefreshLocked();

  const std::function<TraceContext()> trace_;
  const std::string path_;  // empty: no token
  std::mutex mutex_;
  std::string look_;           // of the file when it was read
  std::string authorization_;  // "Bearer ..."
  uint64_t generation_ = 0;    // of the token
};

// Whether the token may be shown at `place`, where the server at `target` says that lanes may be opened: over
// TLS, whose certificates tell who is there, or to a socket file of the same owner. In plain text nothing
// else tells the server's own process from who listens at that port of a tunnel's near end.
// FAILED_PRECONDITION if not.
absl::Status CheckTokenMayGo(const std::string& place, const std::string& target,
                             const ClientOptions& options);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_CALL_METADATA_H_
