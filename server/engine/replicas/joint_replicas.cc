#include "server/engine/replicas/joint_replicas.h"

#include "absl/strings/cord.h"

namespace lossd::engine {
namespace {

constexpr char kLost[] = "lossd/replica_lost";

}  // namespace

absl::Status ReplicaLost(absl::string_view why) {
  absl::Status status = absl::UnavailableError(why);
  status.SetPayload(kLost, absl::Cord());
  return status;
}

bool IsReplicaLost(const absl::Status& status) { return status.GetPayload(kLost).has_value(); }

bool CoordinatedEpoch::Ask(absl::FunctionRef<void()> ask) {
  const MutexLock lock(mutex_);
  if (!over_) ask();
  return !over_;
}

void CoordinatedEpoch::Close() {
  const MutexLock lock(mutex_);
  over_ = true;
}

}  // namespace lossd::engine
