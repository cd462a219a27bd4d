// The engine's services and settings for one head, given to its constructor.
#ifndef LOSSD_SERVER_ENGINE_HEAD_HEAD_ENVIRONMENT_H_
#define LOSSD_SERVER_ENGINE_HEAD_HEAD_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/deterministic_session.h"
#include "server/engine/head/parts/staged_write.h"
#include "server/engine/head/parts/window_end.h"
#include "server/engine/head/replica/replica_part.h"
#include "server/engine/head/step_saver.h"
#include "server/engine/memory/memory_budget.h"
#include "server/engine/regions/region_table.h"
#include "server/engine/schedule/batch_scheduler.h"

namespace lossd::engine {

class Head;

// A session with chunks that wait for their teacher. The chunks stay with their streams, and end with these.
struct Student {
  std::weak_ptr<Head> head;
  std::string session_id;

  // Has its chunks looked at again (Head::ResumeSession). Called without any lock of a head held.
  void Resume() const;
};

// What a head shares with the rest of the engine; all of it outlives the head.
struct HeadEnvironment {
  BatchScheduler* scheduler = nullptr;
  Device* device = nullptr;
  Counters* counters = nullptr;
  const RegionTable* regions = nullptr;
  // Heads of the same device, by name; NOT_FOUND if there is none. Called without any lock of a head held.
  std::function<absl::StatusOr<std::shared_ptr<Head>>(const std::string&)> find_head;
  // True of a head that is parked, or on its way back, or whose weights are being changed at all replicas:
  // the student is resumed when that one may teach, or could not come, perhaps before this returns. Likewise.
  std::function<bool(const std::string& teacher, const Student& student)> await_head;
  // All of them. Likewise.
  std::function<std::vector<std::shared_ptr<Head>>()> heads;
  std::shared_ptr<MemoryBudget> budget;  // of the device
  // Memory for one more deterministic session of a head. Likewise, and not on the device thread.
  std::function<absl::StatusOr<SessionMemory>(const HeadConfig&)> take_session_memory = {};
  ChunkLimits limits;
  // How long chunks of a deterministic session wait for others to bring what is missing before them.
  absl::Duration place_timeout = absl::Seconds(10);
  std::string incarnation;
  ReplicaPlace place;
  // At the coordinator of replicas: has all of them end this head's window (EndWindow). Called without any
  // lock held.
  std::function<void(std::shared_ptr<Head>, WindowEnd)> end_together = {};
  // The same: has all of them publish this write, which is prepared here (Head::PrepareWrite).
  std::function<void(std::shared_ptr<Head>, std::shared_ptr<StagedWrite>)> publish_together = {};
  // There: another replica of this head. UNAVAILABLE if not all are there.
  std::function<absl::StatusOr<std::shared_ptr<ReplicaPart>>(const Head&, int32_t replica)> find_part = {};
  // Told, perhaps by several heads, when the device can no longer be trusted.
  std::function<void(const absl::Status&)> on_device_failure;
  // When the device was done with its last batch, of whatever head; null if nobody asks. The device thread's.
  std::shared_ptr<std::optional<absl::Time>> device_done = {};
  // Not null if the head has double_buffer; the head gives it back with the rest of its memory.
  std::shared_ptr<Gradient> second_gradient = {};
  // Whether checkpoints of the head are kept here.
  bool keeps_checkpoints = false;
  // Null: no step has the head saved. Otherwise `on_step_save` is called when a save has begun, or was passed
  // over; it does not block. The device thread's, without any lock held.
  std::shared_ptr<StepSaver> step_saver = {};
  std::function<void(std::shared_ptr<Head>, StepSaver::Due)> on_step_save = {};
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_HEAD_ENVIRONMENT_H_
