#include "client/tools/connection_options.h"

#include <openssl/crypto.h>

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>

#include "CLI/Option.hpp"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::tools {
namespace {

constexpr char kSystem[] = "system";

void AddTlsOption(CLI::App& app, std::optional<TlsOptions>& tls, const std::string& name,
                  const std::string& type, std::string TlsOptions::*field, const std::string& group,
                  const std::string& help) {
  app.add_option_function<std::string>(
         name,
         [&tls, field](const std::string& value) {
           if (!tls.has_value()) tls.emplace();
           *tls.*field = value;
         },
         help)
      ->type_name(type)
      ->group(group);
}

void AddTlsOptions(CLI::App& app, std::optional<TlsOptions>& tls, const std::string& group) {
  app.add_option_function<std::string>(
         "--tls_ca",
         [&tls](const std::string& value) {
           if (!tls.has_value()) tls.emplace();
           tls->ca_certificates = value == kSystem ? "" : value;
         },
         "Connect over TLS to a server whose certificate is signed by an authority of this PEM file, or, "
         "with the "
         "word system, by one that this machine knows")
      ->type_name("FILE")
      ->group(group);
  AddTlsOption(
      app, tls, "--tls_certificate", "FILE", &TlsOptions::certificate, group,
      "PEM file with the certificate to show to a server that lets in known clients only; needs --tls_key");
  AddTlsOption(app, tls, "--tls_key", "FILE", &TlsOptions::key, group,
               "PEM file with the key of --tls_certificate");
  AddTlsOption(app, tls, "--tls_server_name", "NAME", &TlsOptions::server_name, group,
               "Name that the server's certificate must be for, instead of that of its address");
}

}  // namespace

void AddConnectionOptions(CLI::App& app, ConnectionOptions& connection, const std::string& group) {
  AddTlsOptions(app, connection.tls, group);
  app.add_option(
         "--token_file", connection.token_file,
         "File with the token to show to a server that asks for one (lossd --tokens), and nothing else; "
         "read again when it changes")
      ->type_name("FILE")
      ->group(group);
  app.add_flag("--token_over_plain_text", connection.token_over_plain_text,
               "Send the token to another machine without TLS: something else encrypts it on the way")
      ->group(group);
}

absl::Status NameFlags(const absl::Status& status) {
  // At the beginning alone: a file may be called tls.key.
  absl::string_view rest = status.message();
  std::string beginning;
  for (const auto& [field, flag] : std::initializer_list<std::pair<absl::string_view, absl::string_view>>{
           {"tls.ca_certificates:", "--tls_ca:"},
           {"tls.certificate:", "--tls_certificate:"},
           {"tls.key:", "--tls_key:"},
           {"tls.certificate and tls.key ", "--tls_certificate and --tls_key "}}) {
    if (absl::ConsumePrefix(&rest, field)) beginning = std::string(flag);
  }
  const std::string message = absl::StrReplaceAll(
      absl::StrCat(beginning, rest), {{"ClientOptions::tls (--tls_ca of the tools)", "--tls_ca"},
                                      {"TlsOptions::ca_certificates (--tls_ca)", "--tls_ca"},
                                      {"TlsOptions::server_name (--tls_server_name)", "--tls_server_name"},
                                      {"TlsOptions::certificate and key (--tls_certificate, --tls_key)",
                                       "--tls_certificate and --tls_key"}});
  absl::Status named(status.code(), message);
  status.ForEachPayload(
      [&named](absl::string_view type, const absl::Cord& payload) { named.SetPayload(type, payload); });
  return named;
}

void PrepareGrpc() {
  (void)setenv("GRPC_VERBOSITY", "NONE", /*replace=*/0);
  (void)OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
}

}  // namespace lossd::tools
