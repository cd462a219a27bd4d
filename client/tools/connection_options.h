// The options of every tool that say how to connect to a server: TLS and tokens.
#ifndef LOSSD_CLIENT_TOOLS_CONNECTION_OPTIONS_H_
#define LOSSD_CLIENT_TOOLS_CONNECTION_OPTIONS_H_

#include <optional>
#include <string>

#include "CLI/App.hpp"
#include "lossd/client.h"

namespace lossd::tools {

// ClientOptions' fields of the same names.
struct ConnectionOptions {
  std::optional<TlsOptions> tls = {};
  std::string token_file = {};
  bool token_over_plain_text = false;

  void SetIn(ClientOptions& options) const {
    options.tls = tls;
    options.token_file = token_file;
    options.token_over_plain_text = token_over_plain_text;
  }
};

// The status of a connection with these options, where its message names fields of TlsOptions: flags instead.
absl::Status NameFlags(const absl::Status& status);

// --tls_ca, --tls_certificate, --tls_key and --tls_server_name, with any of which there is TLS; --token_file
// and --token_over_plain_text. `connection` outlives the parsing.
void AddConnectionOptions(CLI::App& app, ConnectionOptions& connection, const std::string& group);

// At the beginning of main, before the first use of gRPC:
// - Its log is silent, unless GRPC_VERBOSITY is set: the errors of the client library say the same, and a
//   tool's standard error is the tool's own.
// - OpenSSL does not clean up when the process ends: gRPC's threads may still be in it.
void PrepareGrpc();

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_CONNECTION_OPTIONS_H_
