// How far the lanes of a session have come: what calls that end a window name.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_
#define LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/engine/common/replica_place.h"

namespace lossd::engine {

struct LaneMarks {
  int32_t lane = 0;
  uint64_t accepted = 0;
  uint64_t applied = 0;
};

// One of the histories that a head has: each restore from a checkpoint begins another one.
struct HeadPast {
  std::string incarnation;  // of the server; empty: not known
  uint64_t restores = 0;    // of the head, by then

  bool known() const { return !incarnation.empty(); }
  bool operator==(const HeadPast&) const = default;
};

struct SessionMarks {
  std::string session_id;
  std::vector<LaneMarks> lanes;
  // In which they are true: in another one the same numbers may stand for other chunks.
  HeadPast past = {};
  uint64_t generation = 0;  // that the head was known to have come to there
};

// One form for equal arguments: sorted, and only what the end of a window looks at.
std::vector<SessionMarks> Canonical(std::vector<SessionMarks> marks);

// Whether two in this form are equal, whatever their past.
bool Same(const std::vector<SessionMarks>& a, const std::vector<SessionMarks>& b);

// A session of a head over replicas is at one of them, which its id tells. One that comes out of a checkpoint
// of more replicas, or of a server that was alone, keeps its id, so that marks name it: it is at one of these
// all the same.
std::string SessionIdAt(int32_t replica, const std::string& random_id);
int32_t ReplicaOf(const std::string& session_id, int32_t replicas);
// Those of this replica's sessions.
std::vector<SessionMarks> MarksAt(const ReplicaPlace& place, const std::vector<SessionMarks>& marks);

// The first few of them: a message is no place for thousands.
std::string ToText(const std::vector<SessionMarks>& marks);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_SESSION_MARKS_H_
