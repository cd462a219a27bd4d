// Calls about heads and their windows are the coordinator's: other replicas pass on what comes to them.
#ifndef LOSSD_SERVER_RPC_REPLICAS_PASSED_CALLS_H_
#define LOSSD_SERVER_RPC_REPLICAS_PASSED_CALLS_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "lossd/group/v1/pass.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/calls/call_reports.h"
#include "server/rpc/group/group_credentials.h"
#include "server/rpc/replicas/epoch_calls.h"

namespace lossd::rpc {

// How a replica calls the coordinator.
struct CoordinatorCalls {
  std::shared_ptr<grpc::Channel> channel;              // to its control
  std::function<void(grpc::ClientContext*)> identify;  // shows that the call is of the set; thread-safe
  std::shared_ptr<EpochCalls> epoch;                   // which calls end with; told of each that is started
  std::shared_ptr<const void> place = nullptr;         // of PassPlaces; the call holds it until it has ended
};
// UNAVAILABLE, saying why, while there is no way to it.
using FindCoordinator = std::function<absl::StatusOr<CoordinatorCalls>()>;

// Where a call is passed on to.
inline constexpr char kPassPath[] = "/lossd.group.v1.PassService/Pass";
// Has a call that is about to start passed on to the coordinator's `method`, as of the client whose call this
// replica serves.
void PreparePassed(const CoordinatorCalls& calls, const std::string& method,
                   const grpc::ServerContextBase& client, grpc::ClientContext* context);

// How many calls a replica passes on at a time. More than the coordinator's control takes of one connection
// would wait until others end, for as long as whoever has made these likes: they are told instead.
// Thread-safe.
class PassPlaces {
 public:
  explicit PassPlaces(int most) : most_(most) {}
  // Taken until nobody holds it. RESOURCE_EXHAUSTED while all are.
  absl::StatusOr<std::shared_ptr<const void>> Take();

 private:
  const int most_;
  const std::shared_ptr<std::atomic<int>> taken_ = std::make_shared<std::atomic<int>>(0);
};

// At a replica: every call that no service of the server takes. What is not passed on is UNIMPLEMENTED.
class PassedCalls final : public grpc::CallbackGenericService {
 public:
  // `reports`: where they are counted and logged; outlives this.
  PassedCalls(FindCoordinator find, CallReports* reports) : find_(std::move(find)), reports_(reports) {}
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override;

 private:
  const FindCoordinator find_;
  CallReports* const reports_;
};

// At the coordinator, one of its control's services. Takes calls of replicas, and makes them at the server's
// own channel, where nobody asks for a token: the replica has. UNAVAILABLE before Open and after Close.
// Thread-safe.
class PassService final
    : public group::v1::PassService::WithRawCallbackMethod_Pass<group::v1::PassService::Service> {
 public:
  explicit PassService(GroupCredentials credentials) : credentials_(std::move(credentials)) {}

  void Open(std::shared_ptr<grpc::Channel> server) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Pass(
      grpc::CallbackServerContext* context) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const GroupCredentials credentials_;
  engine::Mutex mutex_;
  std::shared_ptr<grpc::Channel> server_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_PASSED_CALLS_H_
