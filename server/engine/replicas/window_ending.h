// The coordinator's side of the end of a window: docs/decisions/0022-replicas.md. The protocol is
// tests/model/replicas.pml, where this is Coordinator.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/common/mutex.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

// Another replica of a head, as the coordinator reaches it. Calls never block, and what is asked of one
// replica comes there in the order of the calls. `done` is called once, by any thread; UNAVAILABLE: the epoch
// is over, and whether it was done is not known.
class ReplicaPart {
 public:
  virtual ~ReplicaPart() = default;

  // Head's.
  virtual void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<uint64_t>)> done) = 0;
  virtual void Sum(uint64_t window_tokens, std::function<void(absl::StatusOr<GradientStats>)> done) = 0;
  // PublishPart once StepPart is done.
  virtual void Step(const JointStep& step, std::function<void(absl::Status)> done) = 0;
  virtual void Reopen(const absl::Status& why, std::function<void(absl::Status)> done) = 0;
};

// What replicas exchange blocks their devices: of two heads, one has to be first everywhere. Held while all
// of them are asked.
struct ExchangeOrder {
  Mutex mutex;
};

// Everything lives until the ending is over.
struct EndingReplicas {
  ReplicaCommunicators own;  // the coordinator's
  std::vector<std::shared_ptr<ReplicaPart>> others;
  ExchangeOrder* order = nullptr;
};

// Ends the window of `head`, the coordinator's, and of its replicas: seal, sum, step, each when all have done
// the one before. Who waits for the step at `head` is answered when all have published it; with UNAVAILABLE
// if a replica is lost before, and then the next epoch decides what becomes of it (SettleReplicas).
void EndWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_WINDOW_ENDING_H_
