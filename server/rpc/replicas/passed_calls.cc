#include "server/rpc/replicas/passed_calls.h"

#include <array>
#include <cstddef>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/rpc/calls/call_record.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/replicas/call_pipe.h"

namespace lossd::rpc {
namespace {

using Stream = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
using Metadata = std::multimap<grpc::string_ref, grpc::string_ref>;

constexpr char kMethodKey[] = "lossd-pass-method";
// Who calls, and for what: logs tell it where the call is served.
constexpr std::array kClientKeys = {"authorization", "traceparent", kPassedPeerKey};

class RefusedCall final : public Stream {
 public:
  explicit RefusedCall(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it
};

std::string ValueOf(const Metadata& metadata, const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

void CopyClient(const Metadata& metadata, grpc::ClientContext* context) {
  for (const char* key : kClientKeys) {
    if (const std::string value = ValueOf(metadata, key); !value.empty()) context->AddMetadata(key, value);
  }
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

}  // namespace

void PreparePassed(const CoordinatorCalls& calls, const std::string& method,
                   const grpc::ServerContextBase& client, grpc::ClientContext* context) {
  calls.identify(context);
  context->AddMetadata(kMethodKey, method);
  Metadata told = client.client_metadata();
  told.erase(kPassedPeerKey);  // which is not the client's to say
  CopyClient(told, context);
  context->AddMetadata(kPassedPeerKey, client.peer());
}

absl::StatusOr<std::shared_ptr<const void>> PassPlaces::Take() {
  const std::shared_ptr<std::atomic<int>> taken = taken_;
  if (taken->fetch_add(1) < most_) {
    return std::shared_ptr<const void>(nullptr, [taken](std::nullptr_t) { --*taken; });
  }
  --*taken;
  return absl::ResourceExhaustedError(
      absl::StrCat(most_, " calls are passed on to replica 0 already; try again, or call another replica"));
}

grpc::ServerGenericBidiReactor* PassedCalls::CreateReactor(grpc::GenericCallbackServerContext* context) {
  const std::string method = context->method();
  if (!IsPassedOn(method)) {
    return new RefusedCall({grpc::StatusCode::UNIMPLEMENTED, absl::StrCat("there is no method ", method)});
  }
  const std::shared_ptr<CallRecord> record = CallRecord::Begin(reports_, method, *context);
  const absl::StatusOr<CoordinatorCalls> coordinator = find_();
  if (!coordinator.ok()) {
    const grpc::Status status = ToGrpcStatus(coordinator.status());
    if (record != nullptr) record->NoteStatus(status);
    return new RefusedCall(status);
  }
  return CallPipe::Begin(
      *context,
      {.channel = coordinator->channel,
       .method = kPassPath,
       .prepare = [&](grpc::ClientContext* made) { PreparePassed(*coordinator, method, *context, made); },
       .epoch = coordinator->epoch,
       .on_end =
           [record, place = coordinator->place](const grpc::Status& status) {
             if (record != nullptr) record->NoteStatus(status);
           }});
}

void PassService::Open(std::shared_ptr<grpc::Channel> server) {
  const engine::MutexLock lock(mutex_);
  server_ = std::move(server);
}

void PassService::Close() {
  const engine::MutexLock lock(mutex_);
  server_ = nullptr;
}

Stream* PassService::Pass(grpc::CallbackServerContext* context) {
  if (!ShowsToken(credentials_, *context)) {
    return new RefusedCall({grpc::StatusCode::PERMISSION_DENIED, "the token is not that of this set"});
  }
  std::shared_ptr<grpc::Channel> server;
  {
    const engine::MutexLock lock(mutex_);
    server = server_;
  }
  if (server == nullptr) {
    return new RefusedCall({grpc::StatusCode::UNAVAILABLE, "replica 0 does not serve now; try again"});
  }
  const std::string method = ValueOf(context->client_metadata(), kMethodKey);
  if (!IsPassedOn(method) && method != kOpenSessionPath && method != kCloseSessionPath) {
    return new RefusedCall({grpc::StatusCode::UNIMPLEMENTED, "no such method is passed on"});
  }
  return CallPipe::Begin(
      *context,
      {.channel = server,
       .method = method,
       .prepare = [context](grpc::ClientContext* made) { CopyClient(context->client_metadata(), made); },
       .epoch = nullptr,
       .on_end = nullptr});
}

}  // namespace lossd::rpc
