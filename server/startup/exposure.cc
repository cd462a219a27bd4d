#include "server/startup/exposure.h"

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/transport/listen_address.h"

namespace lossd {
namespace {

// Those that are not `inside`.
std::vector<std::string> Outside(const Exposure& exposure, bool (*inside)(const std::string&)) {
  std::vector<std::string> outside;
  const absl::StatusOr<std::vector<std::string>> addresses = rpc::ParseListen(exposure.listen);
  if (!addresses.ok()) return outside;
  for (const std::string& address : *addresses) {
    if (!inside(address)) outside.push_back(address);
  }
  return outside;
}

std::vector<std::string> BeyondLoopback(const Exposure& exposure) {
  return Outside(exposure, rpc::IsLoopback);
}

// Tokens over plain text: gRPC's credentials for it end connections on other addresses of loopback.
absl::Status CheckLocalTokens(const Exposure& exposure) {
  if (!exposure.tokens) return absl::OkStatus();
  const std::vector<std::string> outside = Outside(exposure, rpc::IsPlainLoopback);
  if (outside.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--listen names '", outside.front(),
      "' and --tokens is given, without encryption, which works on 127.0.0.1, [::1], localhost and unix:PATH "
      "alone; listen on one of those, or give --tls_certificate and --tls_key"));
}

}  // namespace

absl::Status CheckExposure(const Exposure& exposure) {
  const std::vector<std::string> beyond = BeyondLoopback(exposure);
  if (exposure.tls.enabled()) return absl::OkStatus();
  if (beyond.empty()) return CheckLocalTokens(exposure);
  if (exposure.plain_text == PlainText::kLoopbackOnly) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--listen names '", beyond.front(),
        "', which other machines can reach, without encryption; give --tls_certificate and --tls_key, listen "
        "on "
        "127.0.0.1 or unix:PATH, or say --insecure if the network is trusted as the machine is"));
  }
  if (exposure.tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--listen names '", beyond.front(),
        "' and --tokens is given, without encryption: everybody on the way could read the tokens; give "
        "--tls_certificate and --tls_key, or listen on 127.0.0.1 or unix:PATH; --insecure does not allow "
        "it"));
  }
  return absl::OkStatus();
}

std::vector<ExposureWarning> WarningsOf(const Exposure& exposure) {
  std::vector<ExposureWarning> warnings;
  for (const std::string& address : BeyondLoopback(exposure)) {
    if (!exposure.tls.enabled()) {
      warnings.push_back({.event = "listening beyond loopback without encryption or authentication",
                          .listen = address,
                          .remedy = "--tls_certificate and --tls_key with --tls_client_ca or --tokens"});
    } else if (exposure.tls.client_ca.empty() && !exposure.tokens) {
      warnings.push_back({.event = "listening beyond loopback without authentication: every client is served",
                          .listen = address,
                          .remedy = "--tls_client_ca or --tokens"});
    }
  }
  return warnings;
}

}  // namespace lossd
