// The options of every tool that say how to connect to a server: TLS and tokens.
#ifndef LOSSD_CLIENT_TOOLS_TLS_OPTIONS_H_
#define LOSSD_CLIENT_TOOLS_TLS_OPTIONS_H_

#include <optional>
#include <string>

#include "CLI/App.hpp"
#include "lossd/client.h"

namespace lossd::tools {

// --tls_ca, --tls_certificate, --tls_key and --tls_server_name; with any of them there is TLS. `tls` outlives
// the parsing.
void AddTlsOptions(CLI::App& app, std::optional<TlsOptions>& tls, const std::string& group);

// ClientOptions' fields of the same names.
struct TokenOptions {
  std::string file = {};
  bool over_plain_text = false;

  void SetIn(ClientOptions& options) const {
    options.token_file = file;
    options.token_over_plain_text = over_plain_text;
  }
};

// --token_file and --token_over_plain_text. `token` outlives the parsing.
void AddTokenOptions(CLI::App& app, TokenOptions& token, const std::string& group);

// Before the first use of gRPC: the errors of the client library say what its log says, and a tool's standard
// error is the tool's own. GRPC_VERBOSITY, if set, decides.
void SilenceGrpcLog();

}  // namespace lossd::tools

#endif  // LOSSD_CLIENT_TOOLS_TLS_OPTIONS_H_
