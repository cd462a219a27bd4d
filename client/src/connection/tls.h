// Channel credentials from TlsOptions, and what a failed connection means.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_TLS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_TLS_H_

#include <array>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "lossd/client.h"

namespace lossd::internal {

// Plain text if options.tls is not there. One for all channels of a connection: it looks at the files every
// second, so that a channel made later shows what they hold then. INVALID_ARGUMENT naming a file that cannot
// be what it is said to be.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(
    const ClientOptions& options);

// What the files of options.tls hold now, to be compared with what they held before: SHA-256 of each, empty
// of one that is not there.
using TlsDigests = std::array<std::string, 3>;
TlsDigests DigestsOf(const ClientOptions& options);

// What TLS needs beside its credentials.
void AddTlsArguments(const ClientOptions& options, grpc::ChannelArguments* arguments);

// Why a connection does not come about, as far as TLS or its absence is the reason.
enum class HandshakeFailure {
  kNone,      // something else
  kCertain,   // trying again cannot help as long as nobody changes anything
  kProbable,  // the server closed the connection, which servers that go away do as well
};
struct HandshakeDiagnosis {
  HandshakeFailure failure = HandshakeFailure::kNone;
  std::string advice = {};  // cause and remedy, one sentence
};
// `status` is that of a call to `target`.
HandshakeDiagnosis Diagnose(const absl::Status& status, const std::string& target,
                            const ClientOptions& options);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_TLS_H_
