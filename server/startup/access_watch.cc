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

AccessWatch::AccessWatch(const rpc::TlsFiles& tls, std::shared_ptr<rpc::AccessControl> access,
                         telemetry::ServiceCounters* counters)
    : tls_files_(tls), access_(std::move(access)), counters_(counters->access), tls_(tls) {}

void AccessWatch::LogStart() {
  if (tls_files_.enabled()) {
    if (auto check = rpc::CheckTls(tls_files_); check.ok()) TakeTls(*std::move(check), "TLS is on");
  }
  if (access_ == nullptr) return;
  Log(LogLevel::kInfo, "tokens are asked for", {{"count", access_->loaded().tokens}});
  Warn(access_->loaded().warnings);
}

void AccessWatch::Poll(const OnTokens& on_tokens) {
  PollTls(rpc::Look::kIfChanged);
  if (access_ != nullptr) PollTokens(rpc::Look::kIfChanged, on_tokens);
}

void AccessWatch::Reload(const OnTokens& on_tokens) {
  Log(LogLevel::kInfo, "told to read files again",
      {{"tls", tls_files_.enabled()}, {"tokens", access_ != nullptr}});
  PollTls(rpc::Look::kAnyway);
  if (access_ != nullptr) PollTokens(rpc::Look::kAnyway, on_tokens);
}

void AccessWatch::PollTls(rpc::Look look) {
  auto changed = tls_.Poll(look);
  if (!changed.has_value()) return;
  ++(changed->ok() ? counters_.tls_reloads : counters_.tls_reloads_failed);
  counters_.tls_unusable = changed->ok() ? 0 : 1;
  if (changed->ok()) return TakeTls(**std::move(changed), "reloaded the TLS certificate");
  // An expired one is shown to clients all the same.
  if (const auto read = rpc::ReadTls(tls_files_); read.ok()) {
    counters_.tls_not_after_seconds = absl::ToUnixSeconds(read->not_after);
  }
  Log(LogLevel::kError, "the TLS files have changed and cannot be used: new connections fail until they can",
      {{"reason", std::string(changed->status().message())}});
}

void AccessWatch::PollTokens(rpc::Look look, const OnTokens& on_tokens) {
  const auto changed = access_->Poll(look);
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
  on_tokens();
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
