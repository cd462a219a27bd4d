#include "server/startup/access_watch.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

void Warn(const std::vector<std::string>& warnings) {
  for (const std::string& warning : warnings) Log(LogLevel::kWarning, warning);
}

std::string OrNothing(const std::vector<std::string>& names) {
  return names.empty() ? "nothing" : absl::StrJoin(names, ",");
}

}  // namespace

AccessWatch::AccessWatch(const rpc::ServerOptions& options, telemetry::ServiceCounters* counters)
    : options_(options), counters_(counters->access), tls_(options.tls) {}

void AccessWatch::LogStart() {
  if (options_.tls.enabled()) {
    if (auto check = rpc::CheckTls(options_.tls); check.ok()) TakeTls(*std::move(check), "TLS is on");
  }
  if (options_.access == nullptr) return;
  Log(LogLevel::kInfo, "tokens are asked for", {{"count", options_.access->loaded().tokens}});
  Warn(options_.access->loaded().warnings);
}

void AccessWatch::Poll(rpc::Server& server) {
  PollTls(rpc::Look::kIfChanged);
  if (options_.access != nullptr) PollTokens(rpc::Look::kIfChanged, server);
}

void AccessWatch::Reload(rpc::Server& server) {
  Log(LogLevel::kInfo, "told to read files again",
      {{"tls", options_.tls.enabled()}, {"tokens", options_.access != nullptr}});
  PollTls(rpc::Look::kAnyway);
  if (options_.access != nullptr) PollTokens(rpc::Look::kAnyway, server);
}

void AccessWatch::PollTls(rpc::Look look) {
  auto changed = tls_.Poll(look);
  if (!changed.has_value()) return;
  ++(changed->ok() ? counters_.tls_reloads : counters_.tls_reloads_failed);
  counters_.tls_unusable = changed->ok() ? 0 : 1;
  if (changed->ok()) return TakeTls(**std::move(changed), "reloaded the TLS certificate");
  // An expired one is shown to clients all the same.
  if (const auto read = rpc::ReadTls(options_.tls); read.ok()) {
    counters_.tls_not_after_seconds = absl::ToUnixSeconds(read->not_after);
  }
  Log(LogLevel::kError, "the TLS files have changed and cannot be used: new connections fail until they can",
      {{"reason", std::string(changed->status().message())}});
}

void AccessWatch::PollTokens(rpc::Look look, rpc::Server& server) {
  const auto changed = options_.access->Poll(look);
  if (!changed.has_value()) return;
  ++(changed->ok() ? counters_.token_reloads : counters_.token_reloads_failed);
  counters_.tokens_unusable = changed->ok() ? 0 : 1;
  if (!changed->ok()) {
    Log(LogLevel::kError, "the file of tokens has changed and cannot be used: those from before go on",
        {{"reason", std::string(changed->status().message())}});
    return;
  }
  const rpc::AccessControl::Loaded& loaded = **changed;
  Log(LogLevel::kInfo, "reloaded the tokens",
      {{"count", loaded.tokens},
       {"added", loaded.change.added},
       {"removed", loaded.change.removed},
       {"other_role", loaded.change.other_role}});
  Warn(loaded.warnings);
  server.EndRevokedStreams();
}

void AccessWatch::TakeTls(rpc::TlsCheck check, const char* event) {
  counters_.tls_not_after_seconds = absl::ToUnixSeconds(check.not_after);
  std::vector<telemetry::LogField> fields = {
      {"expires", absl::FormatTime(check.not_after, absl::UTCTimeZone())}};
  if (last_tls_.has_value()) {
    fields.emplace_back("changed", OrNothing(rpc::DifferencesOf(*last_tls_, check)));
  }
  Log(LogLevel::kInfo, event, fields);
  Warn(check.warnings);
  last_tls_ = std::move(check);
}

}  // namespace lossd
