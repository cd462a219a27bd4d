#include "lossd/client.h"

#include <memory>
#include <utility>

#include "client/src/common/convert.h"
#include "client/src/common/head_context.h"
#include "client/src/common/head_impl.h"
#include "client/src/common/random_key.h"
#include "client/src/connection/connection.h"
#include "client/src/regions/region.h"

namespace lossd {

class Client::Impl {
 public:
  explicit Impl(std::shared_ptr<internal::Connection> shared) : connection(std::move(shared)) {}

  absl::StatusOr<std::shared_ptr<internal::HeadContext>> Handle(const absl::StatusOr<v1::Head>& head) const {
    if (!head.ok()) return head.status();
    auto info = internal::FromProto(*head);
    if (!info.ok()) return info.status();
    return std::make_shared<internal::HeadContext>(
        connection, std::move(info->config),
        internal::LogitsLimits{head->max_logits_bytes(), head->max_logits_rows()}, regions,
        unanswered->Of(head->config().name()));
  }

  const std::shared_ptr<internal::Connection> connection;
  const std::shared_ptr<internal::RegionMap> regions = std::make_shared<internal::RegionMap>();
  const std::shared_ptr<internal::UnansweredEndsMap> unanswered =
      std::make_shared<internal::UnansweredEndsMap>();
};

Client::Client(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const std::string& target,
                                                        const ClientOptions& options) {
  auto connection = internal::Connection::Create(target, options);
  if (!connection.ok()) return connection.status();
  const auto status = (*connection)->Call(&v1::StatusService::Stub::AsyncGetStatus, {});
  if (!status.ok()) return status.status();
  return std::unique_ptr<Client>(new Client(std::make_shared<Impl>(*std::move(connection))));
}

absl::StatusOr<Head> Client::CreateHead(const HeadConfig& config) {
  // On the wire it would be none that is given, and so 1.
  if (config.logit_scale == 0) {
    return absl::InvalidArgumentError("logit_scale is 0; it must be finite and above 0");
  }
  auto context = impl_->Handle(
      impl_->connection->Call(&v1::HeadService::Stub::AsyncCreateHead, internal::ToRequest(config)));
  if (!context.ok()) return context.status();
  return Head(std::make_shared<Head::Impl>(*std::move(context)));
}

absl::StatusOr<CopiedHead> Client::CopyHead(const std::string& source, const std::string& name,
                                            const CopyOptions& options) {
  v1::CopyHeadRequest request;
  request.set_source(source);
  request.set_name(name);
  request.set_frozen(options.frozen);
  request.set_master_weights(options.master_weights);
  request.set_source_version(options.source_version);
  request.set_copy_id(internal::RandomKey("copy"));
  const auto copy =
      impl_->connection->Call(&v1::HeadService::Stub::AsyncCopyHead, request, internal::kWorkCall);
  if (!copy.ok()) return copy.status();
  auto context = impl_->Handle(copy->head());
  if (!context.ok()) return context.status();
  return CopiedHead{Head(std::make_shared<Head::Impl>(*std::move(context))), copy->weight_version()};
}

absl::StatusOr<HeadInfo> Client::ParkHead(const std::string& name) {
  v1::ParkHeadRequest request;
  request.set_name(name);
  const auto parked =
      impl_->connection->Call(&v1::HeadService::Stub::AsyncParkHead, request, internal::kWorkCall);
  if (!parked.ok()) return parked.status();
  return internal::FromProto(parked->head());
}

absl::StatusOr<Head> Client::GetHead(const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  auto context = impl_->Handle(impl_->connection->Call(&v1::HeadService::Stub::AsyncGetHead, request));
  if (!context.ok()) return context.status();
  return Head(std::make_shared<Head::Impl>(*std::move(context)));
}

absl::StatusOr<std::vector<HeadInfo>> Client::ListHeads() {
  const auto response = impl_->connection->Call(&v1::HeadService::Stub::AsyncListHeads, {});
  if (!response.ok()) return response.status();
  std::vector<HeadInfo> heads;
  for (const auto& head : response->heads()) {
    auto info = internal::FromProto(head);
    if (!info.ok()) return info.status();
    heads.push_back(*std::move(info));
  }
  return heads;
}

absl::Status Client::DeleteHead(const std::string& name, bool discard_gradient) {
  v1::DeleteHeadRequest request;
  request.set_name(name);
  request.set_discard_gradient(discard_gradient);
  const auto deleted =
      impl_->connection->Call(&v1::HeadService::Stub::AsyncDeleteHead, request, internal::kDeletion);
  if (deleted.ok()) impl_->unanswered->Clear(name);
  return deleted.status();
}

absl::StatusOr<CheckpointInfo> Client::RestoreCheckpoint(const std::string& head, const std::string& tag) {
  v1::RestoreCheckpointRequest request;
  request.set_head(head);
  request.set_tag(tag);
  const auto restored =
      impl_->connection->Call(&v1::HeadService::Stub::AsyncRestoreCheckpoint, request, internal::kWorkCall);
  if (!restored.ok()) return restored.status();
  impl_->unanswered->Clear(head);
  return internal::FromProto(restored->checkpoint());
}

absl::StatusOr<std::vector<CheckpointInfo>> Client::ListCheckpoints(const std::string& head) {
  v1::ListCheckpointsRequest request;
  request.set_head(head);
  const auto listed =
      impl_->connection->Call(&v1::HeadService::Stub::AsyncListCheckpoints, request, internal::kWorkCall);
  if (!listed.ok()) return listed.status();
  std::vector<CheckpointInfo> checkpoints;
  for (const auto& checkpoint : listed->checkpoints()) {
    checkpoints.push_back(internal::FromProto(checkpoint));
  }
  return checkpoints;
}

absl::StatusOr<DeletedCheckpoint> Client::DeleteCheckpoint(const std::string& head, const std::string& tag) {
  v1::DeleteCheckpointRequest request;
  request.set_head(head);
  request.set_tag(tag);
  const auto deleted = impl_->connection->Call(
      &v1::HeadService::Stub::AsyncDeleteCheckpoint, request,
      {.repeated_not_found = internal::RepeatedNotFound::kIsDone, .patience = internal::Patience::kWork});
  if (!deleted.ok()) return deleted.status();
  DeletedCheckpoint result{internal::FromProto(deleted->checkpoint()), deleted->bytes_freed()};
  result.info.head = head;
  result.info.tag = tag;
  return result;
}

absl::Status Client::Drain() {
  // A server that is gone was drained.
  constexpr internal::CallOptions kOnce{.repeat = internal::Repeat::kNo};
  return impl_->connection->Call(&v1::StatusService::Stub::AsyncDrain, {}, kOnce).status();
}

absl::StatusOr<Region> Client::CreateRegion(RegionKind kind, int64_t bytes) {
  auto region = Region::Impl::Create(*impl_->connection, impl_->regions, kind, bytes);
  if (!region.ok()) return region.status();
  return Region(*std::move(region));
}

absl::StatusOr<ServerStatus> Client::Status() {
  const auto response = impl_->connection->Call(&v1::StatusService::Stub::AsyncGetStatus, {});
  if (!response.ok()) return response.status();
  return internal::FromProto(*response);
}

absl::StatusOr<ServerMemory> Client::Memory() {
  const auto response = impl_->connection->Call(&v1::StatusService::Stub::AsyncGetMemory, {});
  if (!response.ok()) return response.status();
  return internal::FromProto(*response);
}

Traffic Client::TrafficSoFar() const { return impl_->connection->traffic(); }

}  // namespace lossd
