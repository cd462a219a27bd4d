#include "server/engine/chunk/session_marks.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace lossd::engine {

std::vector<SessionMarks> Canonical(std::vector<SessionMarks> marks) {
  std::sort(marks.begin(), marks.end(),
            [](const SessionMarks& a, const SessionMarks& b) { return a.session_id < b.session_id; });
  for (SessionMarks& session : marks) {
    std::sort(session.lanes.begin(), session.lanes.end(),
              [](const LaneMarks& a, const LaneMarks& b) { return a.lane < b.lane; });
    for (LaneMarks& lane : session.lanes) lane.applied = 0;
  }
  return marks;
}

bool Same(const std::vector<SessionMarks>& a, const std::vector<SessionMarks>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const SessionMarks& x, const SessionMarks& y) {
    return x.session_id == y.session_id &&
           std::equal(x.lanes.begin(), x.lanes.end(), y.lanes.begin(), y.lanes.end(),
                      [](const LaneMarks& l, const LaneMarks& m) {
                        return l.lane == m.lane && l.accepted == m.accepted;
                      });
  });
}

std::string SessionIdAt(int32_t replica, const std::string& random_id) {
  return absl::StrCat("r", replica, ".", random_id);
}

int32_t ReplicaOf(const std::string& session_id, int32_t replicas) {
  absl::string_view number = session_id;
  number = number.substr(0, number.find('.'));
  int32_t replica = 0;
  const bool named = absl::ConsumePrefix(&number, "r") && absl::SimpleAtoi(number, &replica) && replica >= 0;
  if (named) return replica % replicas;
  // FNV-1a: the same at all replicas, whatever they run on.
  uint64_t hash = 14695981039346656037U;
  for (const char letter : session_id) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211U;
  return static_cast<int32_t>(hash % static_cast<uint64_t>(replicas));
}

std::vector<SessionMarks> MarksAt(const ReplicaPlace& place, const std::vector<SessionMarks>& marks) {
  std::vector<SessionMarks> own;
  for (const SessionMarks& session : marks) {
    if (ReplicaOf(session.session_id, place.replicas) == place.replica) own.push_back(session);
  }
  return own;
}

std::string ToText(const std::vector<SessionMarks>& marks) {
  constexpr size_t kMostText = 1024;
  std::string text;
  for (const SessionMarks& session : marks) {
    for (const LaneMarks& lane : session.lanes) {
      if (text.size() > kMostText) return absl::StrCat(text, ", ...");
      absl::StrAppend(&text, text.empty() ? "" : ", ", session.session_id, "/", lane.lane, "=",
                      lane.accepted);
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace lossd::engine
