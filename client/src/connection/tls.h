// Channel credentials from TlsOptions.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_TLS_H_
#define LOSSD_CLIENT_SRC_CONNECTION_TLS_H_

#include <array>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "grpcpp/security/credentials.h"
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

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_TLS_H_
