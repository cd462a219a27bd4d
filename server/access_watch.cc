#include "server/access_watch.h"

#include <string>

#include "absl/time/time.h"
#include "server/telemetry/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

void TakeTokens(const rpc::AccessControl::Loaded& loaded, const char* event) {
  Log(LogLevel::kInfo, event, {{"count", loaded.tokens}});
  for (const std::string& warning : loaded.warnings) Log(LogLevel::kWarning, warning);
}

}  // namespace

AccessWatch::AccessWatch(const rpc::ServerOptions& options, telemetry::ServiceCounters* counters)
    : options_(options), counters_(counters->access), tls_(options.tls) {}

void AccessWatch::LogStart() {
  if (options_.tls.enabled()) {
    if (const auto check = rpc::CheckTls(options_.tls); check.ok()) TakeTls(*check, "TLS is on");
  }
  if (options_.access != nullptr) TakeTokens(options_.access->loaded(), "tokens are asked for");
}

void AccessWatch::Poll(rpc::Server& server) {
  PollTls();
  if (options_.access != nullptr) PollTokens(server);
}

void AccessWatch::PollTls() {
  const auto changed = tls_.Poll();
  if (!changed.has_value()) return;
  ++(changed->ok() ? counters_.tls_reloads : counters_.tls_reloads_failed);
  counters_.tls_unusable = changed->ok() ? 0 : 1;
  if (changed->ok()) return TakeTls(**changed, "reloaded the TLS certificate");
  // An expired one is shown to clients all the same.
  if (const auto read = rpc::ReadTls(options_.tls); read.ok()) {
    counters_.tls_not_after_seconds = absl::ToUnixSeconds(read->not_after);
  }
  Log(LogLevel::kError, "the TLS files have changed and cannot be used: new connections fail until they can",
      {{"reason", std::string(changed->status().message())}});
}

void AccessWatch::PollTokens(rpc::Server& server) {
  const auto changed = options_.access->Poll();
  if (!changed.has_value()) return;
  ++(changed->ok() ? counters_.token_reloads : counters_.token_reloads_failed);
  counters_.tokens_unusable = changed->ok() ? 0 : 1;
  if (!changed->ok()) {
    Log(LogLevel::kError, "the file of tokens has changed and cannot be used: those from before go on",
        {{"reason", std::string(changed->status().message())}});
    return;
  }
  TakeTokens(**changed, "reloaded the tokens");
  server.EndRevokedStreams();
}

void AccessWatch::TakeTls(const rpc::TlsCheck& check, const char* event) {
  counters_.tls_not_after_seconds = absl::ToUnixSeconds(check.not_after);
  Log(LogLevel::kInfo, event, {{"expires", absl::FormatTime(check.not_after, absl::UTCTimeZone())}});
  for (const std::string& warning : check.warnings) Log(LogLevel::kWarning, warning);
}

}  // namespace lossd
