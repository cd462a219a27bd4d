// Who is let in: every call of a server with --tokens passes here before a service, or the code of a method,
// sees it.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_ACCESS_H_
#define LOSSD_SERVER_RPC_TRANSPORT_ACCESS_H_

#include <grpcpp/grpcpp.h>
#include <grpcpp/security/auth_metadata_processor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/transport/file_watch.h"
#include "server/rpc/transport/tokens.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::rpc {

// As in "authorization: Bearer TOKEN". Thread-safe but for Poll.
class AccessControl final : public grpc::AuthMetadataProcessor {
 public:
  struct Loaded {
    size_t tokens = 0;
    TokensChange change = {};  // from those before
    std::vector<std::string> warnings = {};
  };

  // ReadTokens' errors. `counters` may be null, and outlives this.
  static absl::StatusOr<std::shared_ptr<AccessControl>> Create(const std::string& path,
                                                               telemetry::ServiceCounters* counters);

  // gRPC's, for every call: UNAUTHENTICATED, PERMISSION_DENIED, or UNIMPLEMENTED of a method that no table
  // knows. Short, so that it needs no thread of its own.
  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata* consumed,
                       OutputMetadata* response) override;

  // The token of a call that was let in; none if it needed no token.
  static std::optional<TokenHash> TokenOf(const CallMetadata& metadata);
  // What the log calls it: its name, or empty if it is none of the server's.
  std::string NameOf(const CallMetadata& metadata) const;
  // Whether that token is still let in.
  grpc::Status Check(const TokenHash& token, std::string_view method) const;

  // What was read at the start.
  const Loaded& loaded() const { return loaded_; }
  // Reads the file again if it has changed since the last call. A bad file changes nothing. Each call reads
  // it again, but returns its error only once as long as the reason is the same. With kAnyway the file is
  // read, and the result returned, in any case.
  std::optional<absl::StatusOr<Loaded>> Poll(Look look = Look::kIfChanged);

 private:
  AccessControl(std::string path, FileWatch watch, TokensRead read, telemetry::ServiceCounters* counters);
  grpc::Status Judge(const CallMetadata& metadata, std::string_view method) const;
  std::shared_ptr<const Tokens> Current() const;
  void Report(const grpc::Status& refusal, const CallMetadata& metadata);

  const std::string path_;
  telemetry::ServiceCounters* const counters_;
  const std::unique_ptr<CallReports> reports_;  // null without counters
  FileWatch watch_;
  const Loaded loaded_;
  mutable engine::Mutex mutex_;
  std::shared_ptr<const Tokens> tokens_ ABSL_GUARDED_BY(mutex_);  // replaced as a whole
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_ACCESS_H_
