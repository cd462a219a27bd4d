// A replica of a head, as the coordinator reaches it: docs/decisions/0022-replicas.md.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/part_rows.h"

namespace lossd::engine {

// Calls never block, and what is asked of one replica comes there in the order of the calls. `done` is called
// once, by any thread; with ReplicaLost if the epoch was over before. Thread-safe.
class ReplicaPart {
 public:
  virtual ~ReplicaPart() = default;

  // Head's.
  virtual void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<uint64_t>)> done) = 0;
  virtual void Sum(uint64_t window_tokens, std::function<void(absl::StatusOr<GradientStats>)> done) = 0;
  // PublishPart once StepPart is done.
  virtual void Step(const JointStep& step, std::function<void(absl::Status)> done) = 0;
  virtual void Reopen(const absl::Status& why, std::function<void(absl::Status)> done) = 0;
  virtual void Hold(const FlushInfo& flush, std::function<void(absl::Status)> done) = 0;
  virtual void Decide(const std::string& flush_id, FlushFate fate,
                      std::function<void(absl::Status)> done) = 0;
  virtual void EndFlush(const std::string& flush_id, std::function<void(absl::Status)> done) = 0;

  // Head::ReadPartRows and WritePartRows, at any time.
  virtual void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) = 0;
  virtual void WriteRows(const PartRows& rows, std::string bytes, std::function<void(absl::Status)> done) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_REPLICA_PART_H_
