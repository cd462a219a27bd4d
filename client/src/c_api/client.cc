// lossd_connect and what is asked of the server as a whole.
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"
#include "client/src/c_api/structs.h"

namespace lossd::c_api {
namespace {

constexpr double kMostSeconds = 1e9;

absl::StatusOr<std::chrono::milliseconds> TimeOf(double seconds, absl::string_view name) {
  if (!(seconds >= 0 && seconds <= kMostSeconds)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", seconds, "; it must be in [0, ", kMostSeconds, "]"));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(seconds * 1000)));
}

absl::StatusOr<std::optional<TlsOptions>> TlsOf(const lossd_client_options& given) {
  TlsOptions tls{.ca_certificates = TextOf(given.tls_ca_certificates),
                 .certificate = TextOf(given.tls_certificate),
                 .key = TextOf(given.tls_key),
                 .server_name = TextOf(given.tls_server_name)};
  if (given.tls != 0) return tls;
  if (!tls.ca_certificates.empty() || !tls.certificate.empty() || !tls.key.empty() ||
      !tls.server_name.empty()) {
    return absl::InvalidArgumentError(
        "options.tls is 0, which means plain text, but there are tls_... fields that are set: set tls to 1");
  }
  return std::nullopt;
}

// Text that need not have an end.
template <size_t kSize>
std::string TextIn(const char (&text)[kSize]) {
  return {text, strnlen(text, kSize)};
}

std::function<absl::Status()> InterruptedOf(const lossd_client_options& given) {
  if (given.interrupted == nullptr && given.server_gone == nullptr) return nullptr;
  return [asked = given.interrupted, user = given.interrupted_user, thread = given.interrupted_thread,
          gone = given.server_gone] {
    const char* const text = gone == nullptr ? nullptr : __atomic_load_n(gone, __ATOMIC_ACQUIRE);
    if (text != nullptr) return absl::UnavailableError(text);
    const bool asks = asked != nullptr && (thread == 0 || thread == gettid());
    return asks && asked(user) != 0 ? absl::CancelledError("the call was interrupted") : absl::OkStatus();
  };
}

// `interrupted` comes first: where handlers of signals run in callbacks it is the one that is made for them.
std::function<TraceContext()> TraceOf(lossd_trace trace, void* user,
                                      const std::function<absl::Status()>& interrupted) {
  if (trace == nullptr) return nullptr;
  return [trace, user, interrupted] {
    if (interrupted != nullptr && !interrupted().ok()) return TraceContext{};  // the call has not long to go
    lossd_trace_context context{.struct_size = sizeof(context), .traceparent = {}, .tracestate = {}};
    trace(user, &context);
    return TraceContext{TextIn(context.traceparent), TextIn(context.tracestate)};
  };
}

absl::StatusOr<ClientOptions> OptionsOf(const lossd_client_options* given) {
  ClientOptions options;
  if (given == nullptr) return options;
  const auto read = Read(given, "options");
  if (!read.ok()) return read.status();
  const auto call = TimeOf(read->call_timeout_seconds, "options.call_timeout_seconds");
  if (!call.ok()) return call.status();
  const auto reconnect = TimeOf(read->reconnect_timeout_seconds, "options.reconnect_timeout_seconds");
  if (!reconnect.ok()) return reconnect.status();
  auto tls = TlsOf(*read);
  if (!tls.ok()) return tls.status();
  options.call_timeout = *call;
  options.reconnect_timeout = *reconnect;
  options.transfer_bytes = read->transfer_bytes;
  options.tls = *std::move(tls);
  options.token_file = TextOf(read->token_file);
  options.token_over_plain_text = read->token_over_plain_text != 0;
  options.interrupted = InterruptedOf(*read);
  options.trace = TraceOf(read->trace, read->trace_user, options.interrupted);
  return options;
}

// Calls that tell something as JSON.
template <typename Call>
lossd_status* TellJson(lossd_client* client, char** json, Call call) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(json, "json"); !status.ok()) return status;
    return PutJson(call(*client->client), json);
  });
}

}  // namespace
}  // namespace lossd::c_api

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_connect(const char* target, const lossd_client_options* options, lossd_client** client) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(target, "target"); !status.ok()) return status;
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    const auto converted = OptionsOf(options);
    if (!converted.ok()) return converted.status();
    return PutHandle(lossd::Client::Connect(target, *converted), client);
  });
}

void lossd_client_free(lossd_client* client) { delete client; }

lossd_status* lossd_client_status(lossd_client* client, char** json) {
  return TellJson(client, json, [](lossd::Client& of) { return of.Status(); });
}

lossd_status* lossd_client_memory(lossd_client* client, char** json) {
  return TellJson(client, json, [](lossd::Client& of) { return of.Memory(); });
}

lossd_status* lossd_client_heads(lossd_client* client, char** json) {
  return TellJson(client, json, [](lossd::Client& of) { return of.ListHeads(); });
}

lossd_status* lossd_client_traffic(lossd_client* client, char** json) {
  return TellJson(client, json,
                  [](lossd::Client& of) { return absl::StatusOr<lossd::Traffic>(of.TrafficSoFar()); });
}

lossd_status* lossd_client_drain(lossd_client* client) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    return client->client->Drain();
  });
}

lossd_status* lossd_client_delete_head(lossd_client* client, const char* name, int32_t discard_gradient) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(name, "name"); !status.ok()) return status;
    return client->client->DeleteHead(name, discard_gradient != 0);
  });
}

lossd_status* lossd_client_restore_checkpoint(lossd_client* client, const char* head, const char* tag,
                                              char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    const auto restored = client->client->RestoreCheckpoint(head, TextOf(tag));
    return json == nullptr ? restored.status() : PutJson(restored, json);
  });
}

lossd_status* lossd_client_delete_checkpoint(lossd_client* client, const char* head, const char* tag,
                                             char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(tag, "tag"); !status.ok()) return status;
    const auto deleted = client->client->DeleteCheckpoint(head, tag);
    return json == nullptr ? deleted.status() : PutJson(deleted, json);
  });
}

lossd_status* lossd_client_checkpoints(lossd_client* client, const char* head, char** json) {
  return TellJson(client, json, [&](lossd::Client& of) { return of.ListCheckpoints(TextOf(head)); });
}
