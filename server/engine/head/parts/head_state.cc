#include "server/engine/head/parts/head_state.h"

namespace lossd::engine {

Ancestor AncestorOf(const HeadCheckpoint& state) {
  Ancestor ancestor{{state.incarnation, state.restores}, state.window.generation, {}};
  for (const SessionCheckpoint& session : state.sessions) {
    SessionMarks& marks = ancestor.marks.emplace_back(SessionMarks{session.id, {}});
    for (const AccumulationLedger::Lane& lane : session.session.lanes) {
      marks.lanes.push_back({static_cast<int32_t>(marks.lanes.size()), lane.accepted, lane.accepted});
    }
  }
  return ancestor;
}

}  // namespace lossd::engine
