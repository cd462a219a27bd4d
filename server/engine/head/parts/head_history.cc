#include "server/engine/head/parts/head_history.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace lossd::engine {
namespace {

// A window that was put back more often has forgotten the first of them: marks of those are refused.
constexpr ptrdiff_t kMostAncestors = 8;

// Null if it had none.
const SessionMarks* MarksIn(const Ancestor& ancestor, const std::string& session_id) {
  const auto found =
      std::find_if(ancestor.marks.begin(), ancestor.marks.end(),
                   [&session_id](const SessionMarks& one) { return one.session_id == session_id; });
  return found == ancestor.marks.end() ? nullptr : &*found;
}

uint64_t AcceptedIn(const SessionMarks* session, int32_t lane) {
  if (session == nullptr) return 0;
  for (const LaneMarks& mark : session->lanes) {
    if (mark.lane == lane) return mark.accepted;
  }
  return 0;
}

}  // namespace

std::optional<uint64_t> HeadHistory::restored_from() const {
  if (ancestors_.empty() || ancestors_.back().past.incarnation != now_.incarnation) return std::nullopt;
  return ancestors_.back().past.restores;
}

bool HeadHistory::Has(uint64_t generation, const SessionMarks& marks) const {
  if (!marks.past.known() || marks.past == now_) return true;
  const auto ancestor = std::find_if(ancestors_.begin(), ancestors_.end(),
                                     [&marks](const Ancestor& one) { return one.past == marks.past; });
  if (ancestor == ancestors_.end() || ancestor->generation != generation) return false;
  if (marks.generation > generation) return false;  // this window was over there
  // Looked for once: a caller may name as many lanes as a message holds.
  const SessionMarks* const then = MarksIn(*ancestor, marks.session_id);
  return std::all_of(marks.lanes.begin(), marks.lanes.end(),
                     [then](const LaneMarks& mark) { return mark.accepted <= AcceptedIn(then, mark.lane); });
}

void HeadHistory::Continue(uint64_t restores, std::vector<Ancestor> ancestors) {
  now_.restores = restores;
  ancestors_ = std::move(ancestors);
  ForgetTheFirst();
}

void HeadHistory::Restore(uint64_t restores, std::vector<Ancestor> before, Ancestor saved) {
  now_.restores = restores;
  ancestors_ = std::move(before);
  ancestors_.push_back(std::move(saved));
  ForgetTheFirst();
}

void HeadHistory::ForgetTheFirst() {
  if (std::ssize(ancestors_) <= kMostAncestors) return;
  ancestors_.erase(ancestors_.begin(), ancestors_.end() - kMostAncestors);
}

}  // namespace lossd::engine
