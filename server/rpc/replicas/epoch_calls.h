// The calls that a replica has passed on to the coordinator, which end when it has lost the coordinator.
#ifndef LOSSD_SERVER_RPC_REPLICAS_EPOCH_CALLS_H_
#define LOSSD_SERVER_RPC_REPLICAS_EPOCH_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/engine/common/mutex.h"

namespace lossd::rpc {

// Those of one epoch. A coordinator that vanishes without a reset of its connections is missed by its
// heartbeats alone; calls over the same connection would otherwise wait for it as long as their clients do.
// Thread-safe.
class EpochCalls {
 public:
  // One that has been started. Whoever has made it holds its context until it is over. If the epoch has ended
  // it is cancelled at once.
  void Add(const std::shared_ptr<grpc::ClientContext>& call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Cancels all of them, and whatever is added later. How they have ended may be told by this thread. Only
  // the first `why`, which is an error, counts.
  void End(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // What a client is told whose call has ended like this: UNAVAILABLE, with why the coordinator was lost, if
  // it was cancelled here.
  grpc::Status Told(const grpc::Status& status) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable engine::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);  // OK: it has not
  std::vector<std::weak_ptr<grpc::ClientContext>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REPLICAS_EPOCH_CALLS_H_
