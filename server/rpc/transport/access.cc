#include "server/rpc/transport/access.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"

namespace lossd::rpc {
namespace {

constexpr char kHeader[] = "authorization";
constexpr absl::string_view kScheme = "Bearer ";

std::string_view View(const grpc::string_ref& text) { return {text.data(), text.size()}; }

std::string_view MethodIn(const CallMetadata& metadata) {
  const auto path = metadata.find(":path");
  return path == metadata.end() ? std::string_view() : MethodOfPath(View(path->second));
}

grpc::Status Unauthenticated(const std::string& message) {
  return {grpc::StatusCode::UNAUTHENTICATED, message};
}

}  // namespace

AccessControl::AccessControl(std::string path, FileWatch watch, TokensRead read,
                             telemetry::ServiceCounters* counters)
    : path_(std::move(path)),
      counters_(counters),
      reports_(counters == nullptr ? nullptr : std::make_unique<CallReports>(counters)),
      watch_(std::move(watch)),
      loaded_({.tokens = read.tokens.size(), .warnings = std::move(read.warnings)}),
      tokens_(std::make_shared<const Tokens>(std::move(read.tokens))) {}

absl::StatusOr<std::shared_ptr<AccessControl>> AccessControl::Create(const std::string& path,
                                                                     telemetry::ServiceCounters* counters) {
  FileWatch watch({path});  // before it is read, so that no change is missed
  absl::StatusOr<TokensRead> read = ReadTokens(path);
  if (!read.ok()) return read.status();
  return std::shared_ptr<AccessControl>(
      new AccessControl(path, std::move(watch), *std::move(read), counters));
}

std::optional<TokenHash> AccessControl::TokenOf(const CallMetadata& metadata) {
  // With two it would not be clear whose word counts.
  if (metadata.count(kHeader) != 1) return std::nullopt;
  const std::string_view value = View(metadata.find(kHeader)->second);
  if (!absl::StartsWithIgnoreCase({value.data(), value.size()}, kScheme)) return std::nullopt;
  return HashToken(value.substr(kScheme.size()));
}

std::string AccessControl::NameOf(const CallMetadata& metadata) const {
  const std::optional<TokenHash> hash = TokenOf(metadata);
  if (!hash.has_value()) return {};
  const std::shared_ptr<const Tokens> tokens = Current();
  const Token* const token = tokens->Find(*hash);
  return token == nullptr ? std::string() : token->name;
}

std::shared_ptr<const Tokens> AccessControl::Current() const {
  const engine::MutexLock lock(mutex_);
  return tokens_;
}

grpc::Status AccessControl::Check(const TokenHash& hash, std::string_view method) const {
  const std::shared_ptr<const Tokens> tokens = Current();
  const Token* const token = tokens->Find(hash);
  if (token == nullptr) {
    return Unauthenticated(
        "the token is not one of this server's: it is mistyped, or was replaced; ask whoever runs the server "
        "for the current one");
  }
  const std::optional<Role> least = LeastRole(method);
  if (!least.has_value()) {
    return {grpc::StatusCode::UNIMPLEMENTED, "this server has no such method, or none that a role may call"};
  }
  if (token->role >= *least) return grpc::Status::OK;
  return {grpc::StatusCode::PERMISSION_DENIED,
          absl::StrCat(absl::string_view(method.data(), method.size()), " needs a token of the role ",
                       RoleName(*least), "; the one that was sent has the role ", RoleName(token->role))};
}

grpc::Status AccessControl::Judge(const CallMetadata& metadata, std::string_view method) const {
  if (LeastRole(method) == Role::kAnybody) return grpc::Status::OK;
  const std::optional<TokenHash> token = TokenOf(metadata);
  if (token.has_value()) return Check(*token, method);
  return Unauthenticated(
      metadata.count(kHeader) == 0
          ? "this server asks for a token: send the metadata 'authorization: Bearer TOKEN' "
            "(ClientOptions::token_file, --token_file of the tools)"
          : "the metadata authorization must be there once, as 'Bearer TOKEN'");
}

grpc::Status AccessControl::Process(const InputMetadata& metadata, grpc::AuthContext* /*context*/,
                                    OutputMetadata* /*consumed*/, OutputMetadata* /*response*/) {
  grpc::Status status = Judge(metadata, MethodIn(metadata));
  if (!status.ok()) Report(status, metadata);
  return status;
}

// Tells of calls that no service ever sees.
void AccessControl::Report(const grpc::Status& refusal, const CallMetadata& metadata) {
  if (counters_ == nullptr) return;
  if (refusal.error_code() == grpc::StatusCode::UNAUTHENTICATED) {
    ++(TokenOf(metadata).has_value() ? counters_->access.unknown_token : counters_->access.no_token);
  } else if (refusal.error_code() == grpc::StatusCode::PERMISSION_DENIED) {
    ++counters_->access.role;
  }
  const auto path = metadata.find(":path");
  if (path == metadata.end()) return;
  reports_->Refuse(View(path->second), {.code = refusal.error_code(),
                                        .message = refusal.error_message(),
                                        .trace_id = TraceIdOf(metadata),
                                        .token = NameOf(metadata)});
}

std::optional<absl::StatusOr<AccessControl::Loaded>> AccessControl::Poll(Look look) {
  std::optional<absl::StatusOr<TokensRead>> changed =
      watch_.Reread(look, [this] { return ReadTokens(path_); });
  if (!changed.has_value()) return std::nullopt;
  absl::StatusOr<TokensRead>& read = *changed;
  if (!read.ok()) return read.status();
  Loaded loaded{.tokens = read->tokens.size(),
                .change = read->tokens.ChangeFrom(*Current()),
                .warnings = std::move(read->warnings)};
  auto tokens = std::make_shared<const Tokens>(std::move(read->tokens));
  const engine::MutexLock lock(mutex_);
  tokens_ = std::move(tokens);
  return loaded;
}

}  // namespace lossd::rpc
