// Reports one call to CallReports, from its begin to its end. Thread-safe: a call's events may come at the
// same time.
#ifndef LOSSD_SERVER_RPC_CALLS_CALL_RECORD_H_
#define LOSSD_SERVER_RPC_CALLS_CALL_RECORD_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/audit.h"
#include "server/rpc/calls/call_reports.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {

// The id of the trace that a call belongs to; empty if its client sent none, or one that is malformed.
std::string TraceIdOf(const CallMetadata& metadata);

// In the metadata of a call that another replica has passed on: who has called that one. Nobody but this
// process makes calls that have no address of their own.
inline constexpr char kPassedPeerKey[] = "lossd-passed-peer";
// Who has called, as logs name it.
std::string PeerOf(const grpc::ServerContextBase& context);

// A line at debug about what a call has brought about, with the trace that it belongs to, if any.
void LogEvent(const char* event, const std::string& trace_id, std::vector<telemetry::LogField> fields);

// Begins when it is made, and is reported when it is destroyed.
class CallRecord {
 public:
  // Null if there is no `reports`, or the path is none of lossd's methods.
  static std::unique_ptr<CallRecord> Begin(CallReports* reports, std::string_view path,
                                           const grpc::ServerContextBase& context);

  // Both outlive it.
  CallRecord(CallReports* reports, telemetry::RpcMethod* method, const grpc::ServerContextBase& context);
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  // Messages of a call that is audited, as gRPC's interceptors have them; null: there is none. Of other calls
  // they are not looked at.
  void NoteRequest(const void* message);
  void NoteResponse(const void* message);
  // The server's last word, which a client that has gone no longer hears.
  void NoteStatus(const grpc::Status& status);
  // The server is about to cancel the call.
  void NoteCancelledHere();
  // The call was cancelled before its status was sent: by either side, by its deadline, or because its
  // connection broke.
  void NoteCancelled();

 private:
  using Clock = std::chrono::steady_clock;

  void NotePeerLocked(int code) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  EndedCall HowItEndedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CallReports* const reports_;
  telemetry::RpcMethod* const method_;
  const grpc::ServerContextBase& context_;
  const AuditedMethod* const audited_;  // null: it is not
  const std::string trace_id_;
  const std::string token_;  // its name, of a call that is audited
  const Clock::time_point begun_ = Clock::now();
  // Until the client's deadline: by a clock that nobody sets.
  const std::chrono::system_clock::duration patience_;

  engine::Mutex mutex_;
  std::string peer_ ABSL_GUARDED_BY(mutex_);
  std::vector<telemetry::LogField> facts_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);
  std::optional<Clock::time_point> cancelled_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_here_ ABSL_GUARDED_BY(mutex_) = false;
  bool late_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALLS_CALL_RECORD_H_
