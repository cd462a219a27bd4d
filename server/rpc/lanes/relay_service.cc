#include "server/rpc/lanes/relay_service.h"

#include <memory>

namespace lossd::rpc {
namespace {

class RefusedRelay final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit RefusedRelay(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it
};

class SettleCall final : public grpc::ServerBidiReactor<group::v1::SettleRequest, group::v1::SettleResponse> {
 public:
  // `known`: whether the call is a rank's. Of others nothing is read.
  SettleCall(const grpc::Status& known, RelayRecords* records) : records_(records) {
    if (known.ok()) {
      StartRead(&request_);
    } else {
      Finish(known);
    }
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Finish({grpc::StatusCode::INVALID_ARGUMENT, "it names no relay"});
    records_->Settle({request_.relay().rank(), request_.relay().relay()}, [this](uint64_t last_payload) {
      response_.set_last_payload(last_payload);
      StartWriteAndFinish(&response_, {}, grpc::Status::OK);
    });
  }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it

 private:
  RelayRecords* const records_;
  group::v1::SettleRequest request_;
  group::v1::SettleResponse response_;
};

}  // namespace

void RelayService::Open(LossService* loss, RelayGroup group) {
  const engine::MutexLock lock(mutex_);
  loss_ = loss;
  group_ = std::move(group);
}

void RelayService::Close() {
  const engine::MutexLock lock(mutex_);
  loss_ = nullptr;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* RelayService::Relay(
    grpc::CallbackServerContext* context) {
  if (const grpc::Status known = check_(*context); !known.ok()) return new RefusedRelay(known);
  // Held until the stream is among those that Close's caller waits for.
  const engine::MutexLock lock(mutex_);
  if (loss_ == nullptr) {
    return new RefusedRelay(
        {grpc::StatusCode::UNAVAILABLE, "the leader of the group does not serve now; try again"});
  }
  auto requests = std::make_unique<RelayedRequests>(*group_, &records_);
  RelayedRequests* const ends = requests.get();  // with the stream, which is there until then
  return loss_->ServeRelayed(context, std::move(requests), [ends] { ends->End(); });
}

grpc::ServerBidiReactor<group::v1::SettleRequest, group::v1::SettleResponse>* RelayService::Settle(
    grpc::CallbackServerContext* context) {
  return new SettleCall(check_(*context), &records_);
}

}  // namespace lossd::rpc
