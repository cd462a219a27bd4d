// The memory and the state that a head keeps for a deterministic session.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_SESSION_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_SESSION_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/head/parts/deterministic_tiles.h"
#include "server/engine/memory/memory_budget.h"

namespace lossd::engine {

// A gradient of its own, and the memory that it and the tiles take: made before the session is opened.
struct SessionMemory {
  std::unique_ptr<MemoryReservation> reservation;
  std::unique_ptr<Gradient> gradient;  // goes first
};
// An assignment would give the reservation back first.
inline void Drop(SessionMemory& memory) { const SessionMemory gone = std::exchange(memory, {}); }

struct DeterministicSession {
  SessionMemory memory;  // the device thread's
  // For rows of teachers and for lists in the tiles: made when the first of them come, and wider or longer
  // ones. Goes after the tiles, whose memory it stands for.
  std::vector<std::unique_ptr<MemoryReservation>> more_memory;
  MemoryPlan plan;  // what is reserved, with `more_memory`; guarded by the head's mutex
  const std::string id;
  const int32_t rank;
  const uint64_t number;     // the session's, among those of its head
  DeterministicTiles tiles;  // this and what follows: guarded by the head's mutex
  // When chunks began to wait for room without a chunk that could make some.
  absl::Time waiting_since = absl::InfiniteFuture();
  // Chunks that have their places and are not all in dW, by the numbers of the heads that teach them.
  std::map<uint64_t, int64_t> taught = {};

  void Keep(std::unique_ptr<MemoryReservation> more) {
    plan.insert(plan.end(), more->plan().begin(), more->plan().end());
    plan = Merged(plan);
    more_memory.push_back(std::move(more));
  }
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_DETERMINISTIC_SESSION_H_
