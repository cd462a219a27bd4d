#include "client/src/connection/diagnosis.h"

#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/src/connection/channel_arguments.h"
#include "client/src/connection/grpc_status.h"

namespace lossd::internal {
namespace {

// What gRPC says of an answer to CONNECT, with the code of HTTP behind it.
constexpr absl::string_view kProxyAnswer = "HTTP proxy returned response code ";

bool Says(const absl::Status& status, absl::string_view text) {
  return absl::StrContains(status.message(), text);
}

// 408, 425, 429 and 5xx tell of a server that is away or busy. The others tell of one that is not lossd, or
// does not let this client in.
ConnectFailure FailureOf(int http_status) {
  const bool passes = http_status >= 500 || http_status == 408 || http_status == 425 || http_status == 429;
  return passes ? ConnectFailure::kPassing : ConnectFailure::kCertain;
}

std::optional<int> ProxyStatusOf(const absl::Status& status) {
  const size_t found = status.message().find(kProxyAnswer);
  int code = 0;
  if (found == absl::string_view::npos ||
      !absl::SimpleAtoi(status.message().substr(found + kProxyAnswer.size(), 3), &code)) {
    return std::nullopt;
  }
  return code;
}

std::string NotLossd(const std::string& target, absl::string_view answers, const ClientOptions& options) {
  return absl::StrCat(
      target, " ", answers,
      " and is not lossd: name the address of lossd's --listen, or of a proxy that passes gRPC on to it",
      options.tls.has_value() ? "" : "; if it wants TLS, give ClientOptions::tls (--tls_ca of the tools)");
}

Diagnosis OfOtherServer(const absl::Status& status, const std::string& target, const ClientOptions& options) {
  if (Says(status, "Trying to connect an http1.x server")) {
    // gRPC makes UNAVAILABLE of 429, 502, 503 and 504, and does not say which.
    const bool passes = Says(status, "last error: UNAVAILABLE");
    return {.failure = passes ? ConnectFailure::kPassing : ConnectFailure::kCertain,
            .advice = NotLossd(target, "answers in HTTP/1", options)};
  }
  if (Says(status, "no application protocol") || Says(status, "missing selected ALPN")) {
    return {.failure = ConnectFailure::kCertain,
            .advice = NotLossd(target, "speaks TLS without HTTP/2", options)};
  }
  if (Says(status, "Failed parsing HTTP/2") || Says(status, "Bad GRPC frame type")) {
    return {.failure = ConnectFailure::kProbable,
            .advice = NotLossd(target, "does not answer in gRPC", options)};
  }
  return {};
}

std::string Authorities(const TlsOptions& options) {
  return options.ca_certificates.empty() ? "the system's authorities"
                                         : absl::StrCat("'", options.ca_certificates, "'");
}

Diagnosis OfPlainText(const absl::Status& status, const std::string& target) {
  if (!Says(status, "failed to connect") || !Says(status, "Socket closed")) return {};
  return {.failure = ConnectFailure::kProbable,
          .advice = absl::StrCat(target,
                                 " closes connections that begin without TLS: if it wants TLS, give "
                                 "ClientOptions::tls (--tls_ca of the tools)")};
}

Diagnosis OfTls(const absl::Status& status, const std::string& target, const TlsOptions& files) {
  if (Says(status, "wrong version number") || Says(status, "packet length too long") ||
      Says(status, "record layer failure")) {
    return {.failure = ConnectFailure::kCertain,
            .advice = absl::StrCat(
                target,
                " does not speak TLS: start lossd with --tls_certificate and --tls_key, or connect "
                "without TLS")};
  }
  if (Says(status, "certificate verify failed")) {
    return {.failure = ConnectFailure::kCertain,
            .advice = absl::StrCat("the certificate of ", target, " is not signed by ", Authorities(files),
                                   ", or has expired: name the file of the authority that signed it in "
                                   "TlsOptions::ca_certificates (--tls_ca)")};
  }
  if (Says(status, "Hostname Verification Check failed") || Says(status, "is not in peer certificate")) {
    return {.failure = ConnectFailure::kCertain,
            .advice = absl::StrCat(
                "the certificate of ", target, " is not for the name ",
                files.server_name.empty() ? "of that address" : absl::StrCat("'", files.server_name, "'"),
                ": connect by a name that it has, or give one of its names as TlsOptions::server_name "
                "(--tls_server_name)")};
  }
  if (Says(status, "failed to connect") && Says(status, "Socket closed")) {
    return {
        .failure = ConnectFailure::kProbable,
        .advice =
            files.certificate.empty()
                ? absl::StrCat(target,
                               " closes the connection after the handshake: if it wants to see a client "
                               "certificate, give TlsOptions::certificate and key (--tls_certificate, "
                               "--tls_key)")
                : absl::StrCat(target, " closes the connection after the handshake: the client certificate '",
                               files.certificate,
                               "' is probably not signed by an authority of lossd's --tls_client_ca, or has "
                               "expired")};
  }
  return {};
}

// Whether no connection came about: only then does a proxy on the way matter.
bool WasNotMade(const absl::Status& status) {
  return Says(status, "failed to connect") || Says(status, "DNS resolution failed");
}

}  // namespace

// By the texts of gRPC and OpenSSL: neither gives codes to those above.
Diagnosis Diagnose(const absl::Status& status, const std::string& target, const ClientOptions& options) {
  if (!absl::IsUnavailable(status)) return {};
  if (const auto http = HttpStatusOf(status)) return {.failure = FailureOf(*http)};
  Diagnosis found = OfOtherServer(status, target, options);
  if (found.advice.empty()) {
    found = options.tls.has_value() ? OfTls(status, target, *options.tls) : OfPlainText(status, target);
  }
  if (const auto refused = ProxyStatusOf(status)) found.failure = FailureOf(*refused);
  const std::string proxy = WasNotMade(status) ? ProxyAdvice(target, options) : "";
  absl::StrAppend(&found.advice, found.advice.empty() || proxy.empty() ? "" : "; ", proxy);
  return found;
}

absl::Status Explain(const absl::Status& status, const std::string& target, const ClientOptions& options) {
  const std::string advice = Diagnose(status, target, options).advice;
  return advice.empty() ? status : Annotate(status, advice);
}

}  // namespace lossd::internal
