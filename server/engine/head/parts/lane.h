// A lane of a session as its stream sees it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_LANE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_LANE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/held_hidden_states.h"
#include "server/engine/chunk/session_marks.h"

namespace lossd::engine {

// What a lane's stream hears. Called from the device thread or from a thread that calls Head, without any
// lock held; calls for one lane are made one after the other, except OnEnd, which may come at any time and
// more than once.
class LaneListener {
 public:
  virtual ~LaneListener() = default;
  virtual void OnAnswer(ChunkAnswer answer) = 0;
  virtual void OnApplied(uint64_t applied) = 0;
  // The stream is over for this reason: fenced by another, head deleted, session closed.
  virtual void OnEnd(absl::Status status) = 0;
};

// A live stream's hold on a lane.
struct LaneAttachment {
  std::string session_id;
  int32_t lane = 0;
  uint64_t epoch = 0;  // a fencing token: goes up with every stream of the lane
  LaneMarks marks;
  uint64_t generation = 0;
  uint64_t session_number = 0;  // among the head's sessions; unlike the id, anybody may see it
  int32_t rank = 0;             // the session's
  std::shared_ptr<HeldHiddenStates> held = {};  // the session's; null: nothing is held
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_LANE_H_
