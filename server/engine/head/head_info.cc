#include "server/engine/head/head_info.h"

#include <algorithm>

#include "server/engine/common/monotonic_clock.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

const char* Name(WindowState state) {
  switch (state) {
    case WindowState::kOpen:
      return "open";
    case WindowState::kFreezing:
      return "freezing";
    case WindowState::kFrozen:
      return "frozen";
  }
  return "open";
}

HeadInfo Head::Info() const {
  const std::lock_guard lock(mutex_);
  HeadInfo info;
  info.config = config_;
  info.weight_version = weight_version_;
  info.generation = window_.generation;
  info.window_state = window_.state;
  info.window_tokens = window_.tokens;
  if (!frozen()) info.window_marks = ledger_.WindowMarks();
  if (reservation_ != nullptr) info.memory = reservation_->plan();
  for (const auto& [id, session] : deterministic_) {
    const MemoryPlan& plan = session->plan;
    info.memory.insert(info.memory.end(), plan.begin(), plan.end());
  }
  info.memory = Merged(info.memory);
  if (staged_ != nullptr) info.staged_rows = staged_->rows();
  info.open_sessions = ledger_.open_sessions();
  info.optimizer_steps = optimizer_steps_;
  info.max_logits_bytes = MostLogitsBytes(environment_.limits);
  info.max_logits_rows = environment_.limits.max_chunk_tokens;
  info.flush_since = FlushSinceLocked();
  if (info.flush_since.has_value() && window_.state == WindowState::kFrozen) {
    info.flush_id = window_.flush.flush_id;
  }
  return info;
}

std::optional<absl::Time> Head::FlushSinceLocked() const {
  if (window_.state == WindowState::kOpen || window_.step.has_value()) return std::nullopt;
  return window_.flush_begun;
}

HeadSnapshot Head::Snapshot() const {
  const std::lock_guard lock(mutex_);
  return HeadSnapshot{.weight_version = weight_version_,
                      .generation = window_.generation,
                      .optimizer_steps = optimizer_steps_,
                      .window_state = window_.state,
                      .window_tokens = window_.tokens,
                      .window_since = window_.since,
                      .flush_since = FlushSinceLocked(),
                      .open_sessions = ledger_.open_sessions()};
}

std::vector<SessionSnapshot> Head::Sessions() const {
  std::vector<SessionSnapshot> sessions;
  const std::lock_guard lock(mutex_);
  const absl::Time now = MonotonicNow();
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state != AccumulationLedger::SessionState::kOpen) continue;
    SessionSnapshot& snapshot = sessions.emplace_back();
    snapshot.number = session.number;
    snapshot.rank = session.rank;
    snapshot.lanes = static_cast<int64_t>(session.lanes.size());
    snapshot.idle = std::max(absl::ZeroDuration(), now - session.last_active);
    for (const Lane& lane : session.lanes) {
      snapshot.accepted += lane.accepted - lane.base;
      snapshot.applied += std::max(lane.applied, lane.base) - lane.base;
    }
    // Those of a session are neighbours.
    for (auto lane = lanes_.lower_bound({id, 0}); lane != lanes_.end() && lane->first.first == id; ++lane) {
      if (lane->second.listener != nullptr) ++snapshot.streams;
    }
  }
  return sessions;
}

}  // namespace lossd::engine
