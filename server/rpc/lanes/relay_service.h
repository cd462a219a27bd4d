// The leader's end of lanes that clients have opened at other ranks: it serves them as its own, but for their
// hidden states and dX, which it knows by the numbers that the rank has given them.
#ifndef LOSSD_SERVER_RPC_LANES_RELAY_SERVICE_H_
#define LOSSD_SERVER_RPC_LANES_RELAY_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "lossd/group/v1/relay.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/lanes/relay_records.h"
#include "server/rpc/lanes/relayed_requests.h"
#include "server/rpc/services/loss_service.h"

namespace lossd::rpc {

// One of the group's control server, which may serve it before there is anything behind it: relays are
// UNAVAILABLE before Open and after Close. Thread-safe.
class RelayService final
    : public group::v1::RelayService::WithRawCallbackMethod_Relay<
          group::v1::RelayService::WithCallbackMethod_Settle<group::v1::RelayService::Service>> {
 public:
  // OK for a call of one of this group's ranks.
  using Check = std::function<grpc::Status(const grpc::CallbackServerContext& context)>;

  explicit RelayService(Check check) : check_(std::move(check)) {}

  // `loss` outlives the relays, which it can wait for (LossService::AwaitRelayed).
  void Open(LossService* loss, RelayGroup group) ABSL_LOCKS_EXCLUDED(mutex_);
  // No relay begins any more.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Relay(
      grpc::CallbackServerContext* context) override ABSL_LOCKS_EXCLUDED(mutex_);
  grpc::ServerBidiReactor<group::v1::SettleRequest, group::v1::SettleResponse>* Settle(
      grpc::CallbackServerContext* context) override;

 private:
  const Check check_;
  RelayRecords records_;
  engine::Mutex mutex_;  // not held with those of streams
  LossService* loss_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<RelayGroup> group_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_RELAY_SERVICE_H_
