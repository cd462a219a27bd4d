#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/common/convert.h"
#include "client/src/common/head_impl.h"
#include "client/src/common/random_key.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/gradient/window_call.h"
#include "client/src/session/session.h"
#include "lossd/client.h"

namespace lossd {

Head::Head(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

const HeadConfig& Head::config() const { return impl_->context->config(); }

absl::StatusOr<HeadInfo> Head::Info() const {
  v1::GetHeadRequest request;
  request.set_name(config().name);
  const auto head = impl_->context->connection().Call(&v1::HeadService::Stub::AsyncGetHead, request);
  if (!head.ok()) return head.status();
  return internal::FromProto(*head);
}

absl::StatusOr<SavedCheckpoint> Head::SaveCheckpoint(const std::string& tag,
                                                     std::span<const SessionMarks> marks) const {
  v1::SaveCheckpointRequest request;
  request.set_head(config().name);
  request.set_tag(tag);
  // The call waits for a server that goes away. One that comes back without what sessions of this process did
  // must not pass for it.
  const internal::ServerLife life = impl_->context->life();
  request.set_incarnation(life.incarnation);
  if (life.history != 0) request.set_history(life.history);
  if (life.known()) request.set_restores(impl_->context->restores());
  internal::AddMarks(marks, &request);
  const auto saved = impl_->context->connection().Call(&v1::HeadService::Stub::AsyncSaveCheckpoint, request,
                                                       internal::kWorkCall);
  if (const auto position = internal::PositionOf(saved.status());
      position && absl::IsAborted(saved.status())) {
    return internal::WindowLostError(config().name, position->generation(), internal::CauseOfLoss(life));
  }
  if (!saved.ok()) return saved.status();
  return SavedCheckpoint{internal::FromProto(saved->checkpoint()),
                         saved->bytes_written(),
                         {saved->deleted().begin(), saved->deleted().end()}};
}

absl::StatusOr<Session> Head::OpenSession(const SessionOptions& options) const {
  if (options.chunk_bytes < 0) {
    return absl::InvalidArgumentError("chunk_bytes is negative");
  }
  if (options.lanes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lanes is ", options.lanes, "; it must be at least 1, or 0 for a number that suits the head"));
  }
  SessionOptions named = options;
  if (named.client_key.empty()) named.client_key = internal::RandomKey("client");
  auto impl = Session::Impl::Open(impl_->context, named);
  if (!impl.ok()) return impl.status();
  return Session(*std::move(impl));
}

}  // namespace lossd
