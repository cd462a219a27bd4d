#include "server/engine/head/parts/accumulation_ledger.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

absl::Status Mismatch(absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kMarks, "marks", message);
}

}  // namespace

bool AccumulationLedger::Session::contributed() const {
  return std::any_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.contributed(); });
}

bool AccumulationLedger::Session::is_over() const {
  return state == SessionState::kClosed && !contributed() &&
         std::all_of(lanes.begin(), lanes.end(),
                     [](const Lane& lane) { return lane.applied == lane.started; });
}

AccumulationLedger::Session& AccumulationLedger::Add(const std::string& session_id, std::string client_key,
                                                     int32_t rank, int32_t lanes) {
  Session session;
  session.number = ++last_number_;
  session.client_key = std::move(client_key);
  session.rank = rank;
  session.lanes.resize(static_cast<size_t>(lanes));
  return sessions_.insert_or_assign(session_id, std::move(session)).first->second;
}

AccumulationLedger::Session* AccumulationLedger::Find(absl::string_view session_id) {
  const auto it = sessions_.find(session_id);
  return it == sessions_.end() ? nullptr : &it->second;
}

AccumulationLedger::Session* AccumulationLedger::FindByKey(absl::string_view client_key,
                                                           std::string* session_id) {
  for (auto& [id, session] : sessions_) {
    if (session.state == SessionState::kOpen && session.client_key == client_key) {
      *session_id = id;
      return &session;
    }
  }
  return nullptr;
}

void AccumulationLedger::Close(absl::string_view session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return;
  it->second.state = SessionState::kClosed;
  if (it->second.is_over()) sessions_.erase(it);
}

AccumulationLedger::Place AccumulationLedger::Classify(const Lane& lane, uint64_t sequence) {
  if (sequence <= lane.accepted) return Place::kRepeat;
  return sequence == lane.accepted + 1 ? Place::kNext : Place::kGap;
}

bool AccumulationLedger::WasRejected(const Lane& lane, uint64_t sequence) {
  return std::binary_search(lane.rejected.begin(), lane.rejected.end(), sequence);
}

void AccumulationLedger::ForgetApplied(absl::string_view session_id) {
  const auto it = sessions_.find(session_id);
  if (it == sessions_.end()) return;
  for (Lane& lane : it->second.lanes) lane.base = lane.applied;
}

void AccumulationLedger::ForgetIfOver(absl::string_view session_id) {
  const auto it = sessions_.find(session_id);
  if (it != sessions_.end() && it->second.is_over()) sessions_.erase(it);
}

uint64_t AccumulationLedger::Withdraw(Lane& lane) {
  const uint64_t withdrawn = lane.accepted - lane.started;
  lane.accepted = lane.started;
  // The base was moved up to losses that were queued (PassOver). What comes in their place may add to dW.
  lane.base = std::min(lane.base, lane.accepted);
  return withdrawn;
}

std::vector<SessionMarks> AccumulationLedger::WindowMarksOf(const Sessions& sessions, bool sealed) {
  std::vector<SessionMarks> all;
  for (const auto& [id, session] : sessions) {
    SessionMarks marks{id, {}};
    bool contributed = false;
    for (size_t i = 0; i < session.lanes.size(); ++i) {
      const Lane& lane = session.lanes[i];
      const uint64_t accepted = sealed ? lane.next_base : lane.accepted;
      contributed = contributed || accepted > lane.base;
      marks.lanes.push_back({static_cast<int32_t>(i), accepted, std::min(accepted, lane.applied)});
    }
    if (contributed) all.push_back(std::move(marks));
  }
  return all;
}

bool AccumulationLedger::InWindow(absl::string_view session_id) const {
  const auto found = sessions_.find(session_id);
  if (found == sessions_.end()) return false;
  const std::string& client_key = found->second.client_key;
  return std::any_of(sessions_.begin(), sessions_.end(), [&client_key](const auto& entry) {
    return entry.second.client_key == client_key && entry.second.contributed();
  });
}

absl::Status AccumulationLedger::Match(const Sessions& sessions, std::span<const SessionMarks> named) {
  std::set<std::pair<absl::string_view, int32_t>> seen;
  for (const SessionMarks& marks : named) {
    const auto it = sessions.find(marks.session_id);
    if (it == sessions.end()) {
      return Mismatch(
          absl::StrCat("marks name session ", marks.session_id, ", which this head does not know"));
    }
    const std::vector<Lane>& lanes = it->second.lanes;
    for (const LaneMarks& lane : marks.lanes) {
      if (lane.lane < 0 || static_cast<size_t>(lane.lane) >= lanes.size()) {
        return Mismatch(absl::StrCat("marks name lane ", lane.lane, " of session ", marks.session_id,
                                     ", which has ", lanes.size(), " lanes"));
      }
      const uint64_t accepted = lanes[static_cast<size_t>(lane.lane)].accepted;
      if (lane.accepted != accepted) {
        return Mismatch(absl::StrCat("session ", marks.session_id, " lane ", lane.lane,
                                     ": marks name accepted ", lane.accepted, ", the server has accepted ",
                                     accepted));
      }
      if (!seen.emplace(it->first, lane.lane).second) {
        return Mismatch(absl::StrCat("marks name session ", marks.session_id, " lane ", lane.lane, " twice"));
      }
    }
  }
  for (const auto& [id, session] : sessions) {
    for (size_t i = 0; i < session.lanes.size(); ++i) {
      const Lane& lane = session.lanes[i];
      if (lane.contributed() && !seen.contains({id, static_cast<int32_t>(i)})) {
        return Mismatch(absl::StrCat(
            "session ", id, " (rank ", session.rank, ") lane ", i, " contributed up to ", lane.accepted,
            " to this window, but the marks do not name it: whoever steps or flushes "
            "names those of every process that adds to the head (PyTorch: RemoteHead(group=...))"));
      }
    }
  }
  return absl::OkStatus();
}

bool AccumulationLedger::Settled() const {
  for (const auto& [id, session] : sessions_) {
    for (const Lane& lane : session.lanes) {
      if (lane.applied != lane.accepted) return false;
    }
  }
  return true;
}

bool AccumulationLedger::WindowEmpty() const {
  return std::none_of(sessions_.begin(), sessions_.end(),
                      [](const auto& entry) { return entry.second.contributed(); });
}

bool AccumulationLedger::OnlyLooked() const {
  return std::all_of(sessions_.begin(), sessions_.end(), [](const auto& entry) {
    const std::vector<Lane>& lanes = entry.second.lanes;
    return std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.only_looked(); });
  });
}

void AccumulationLedger::Seal() {
  sealed_ = true;
  for (auto& [id, session] : sessions_) {
    for (Lane& lane : session.lanes) lane.next_base = lane.accepted;
  }
}

void AccumulationLedger::Reopen() { sealed_ = false; }

void AccumulationLedger::BeginWindow() {
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    Session& session = it->second;
    for (Lane& lane : session.lanes) lane.base = sealed_ ? lane.next_base : lane.accepted;
    it = session.is_over() ? sessions_.erase(it) : std::next(it);
  }
  sealed_ = false;
}

void AccumulationLedger::Replace(std::map<std::string, Session, std::less<>> sessions, uint64_t last_number,
                                 WindowPhase phase) {
  sessions_ = std::move(sessions);
  last_number_ = std::max(last_number_, last_number);
  sealed_ = phase == WindowPhase::kSealed;
}

int64_t AccumulationLedger::open_sessions() const {
  return std::count_if(sessions_.begin(), sessions_.end(),
                       [](const auto& entry) { return entry.second.state == SessionState::kOpen; });
}

}  // namespace lossd::engine
