// Where the server's sessions are opened, if its heads are over replicas.
#ifndef LOSSD_SERVER_RPC_SERVICES_SESSION_PLACER_H_
#define LOSSD_SERVER_RPC_SERVICES_SESSION_PLACER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::rpc {

// Thread-safe.
class SessionPlacer {
 public:
  virtual ~SessionPlacer() = default;

  // Calls of clients, who are told by any thread. The session is opened at the replica that has the client's,
  // or that has the fewest lanes, and closed where it is. UNAVAILABLE if not all replicas are there.
  using Opened = std::function<void(const grpc::Status&, v1::OpenSessionResponse)>;
  virtual void OpenSession(const grpc::CallbackServerContext& context, const v1::OpenSessionRequest& request,
                           Opened done) = 0;
  using Closed = std::function<void(const grpc::Status&)>;
  virtual void CloseSession(const grpc::CallbackServerContext& context,
                            const v1::CloseSessionRequest& request, Closed done) = 0;

  // Adds to `head`, this server's at the coordinator, what the others have of its window and of sessions. Its
  // thread waits for them. UNAVAILABLE if not all are there, ABORTED if they are in different windows, since
  // one is just ending: replicas come to the next one after the other.
  virtual absl::Status AddOthers(v1::Head* head) = 0;

  // Which of them this server is, and the history of their windows (OpenSessionResponse).
  virtual int32_t replica() const = 0;
  virtual uint64_t history() const = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_SESSION_PLACER_H_
