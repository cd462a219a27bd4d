// TLS for the gRPC port: which files, whether they can work, and what to do when they change.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_TLS_H_
#define LOSSD_SERVER_RPC_TRANSPORT_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/transport/file_watch.h"
#include "server/rpc/transport/tls_files.h"

namespace lossd::rpc {

struct TlsCheck {
  absl::Time not_after;                    // when the certificate expires
  std::vector<std::string> warnings = {};  // what is unwise, though it works
  // SHA-256 of the files, in the order certificate, key, client_ca; empty of what there is none of.
  std::array<std::string, 3> digests = {};
};

// Names of the files that differ: "certificate", "key", "client_ca".
std::vector<std::string> DifferencesOf(const TlsCheck& one, const TlsCheck& other);

// Reads the files. INVALID_ARGUMENT naming the flag, the file and what to do: a file that is missing or
// unreadable, not PEM, a key that is not the certificate's, a certificate that has expired.
absl::StatusOr<TlsCheck> CheckTls(const TlsFiles& files);

// The same, but that a certificate may have expired.
absl::StatusOr<TlsCheck> ReadTls(const TlsFiles& files);

// For files that CheckTls accepts. They are looked at every second, and new connections get what they hold
// then; while they do not fit each other, new connections fail.
std::shared_ptr<grpc::ServerCredentials> MakeServerCredentials(const TlsFiles& files);

// OpenSSL will not clean up when the process ends, as it does by itself: gRPC's threads may still be in it
// then. At the beginning of main, before the first use of gRPC.
void KeepOpenSslToTheEnd();

// Tells when the files have changed, so that it can be logged. Not thread-safe.
class TlsWatch {
 public:
  explicit TlsWatch(TlsFiles files);
  // What the files are now, if they have changed since the last call. Each call reads bad files again, but
  // returns their error only once as long as the reason is the same. With kAnyway the files are read, and
  // the result returned, in any case.
  std::optional<absl::StatusOr<TlsCheck>> Poll(Look look = Look::kIfChanged);

 private:
  const TlsFiles files_;
  FileWatch watch_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_TLS_H_
