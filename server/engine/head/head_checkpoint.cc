// Checkpoints of a head, as other threads ask for them.
#include <optional>
#include <utility>

#include "server/engine/head/head.h"
#include "server/engine/head/head_checkpointer.h"

namespace lossd::engine {

void Head::PostSettled(std::function<void()> task) {
  environment_.scheduler->Post(this, [self = shared_from_this(), task = std::move(task)]() mutable {
    bool settled = false;
    {
      const std::lock_guard lock(self->mutex_);
      settled = self->window_work_ == 0;
    }
    if (settled) return task();
    self->PostSettled(std::move(task));  // behind the work that came while this waited
  });
}

// --- Saving

void Head::Save(SaveAs as, StateSink* sink, std::function<void(absl::StatusOr<HeadCheckpoint>)> done) {
  // Not PostLast: what tiles hold stays there, so that the sum is that of an undisturbed run.
  environment_.scheduler->Post(this, [self = shared_from_this(), as, sink, done = std::move(done)]() mutable {
    std::optional<absl::StatusOr<HeadCheckpoint>> saved = HeadCheckpointer(self.get()).Save(as, sink);
    if (saved.has_value()) return done(*std::move(saved));
    self->Save(as, sink, std::move(done));  // behind the work that came while this waited
  });
}

void Head::Restore(RestoreAs as, const RestoreNumbers& numbers, std::shared_ptr<const StateSource> source,
                   std::vector<SessionMemory> memory, std::function<void(absl::StatusOr<FileKeys>)> done) {
  auto shared = std::make_shared<std::vector<SessionMemory>>(std::move(memory));
  PostSettled(
      [self = shared_from_this(), as, numbers, source = std::move(source), shared, done = std::move(done)] {
        done(HeadCheckpointer(self.get()).Restore(as, numbers, *source, std::move(*shared)));
      });
}

std::map<std::string, int32_t> Head::OpenSessions() const {
  std::map<std::string, int32_t> open;
  const std::lock_guard lock(mutex_);
  for (const auto& [id, session] : ledger_.sessions()) {
    if (session.state == AccumulationLedger::SessionState::kOpen) {
      open.emplace(id, static_cast<int32_t>(session.lanes.size()));
    }
  }
  return open;
}

uint64_t Head::restores() const {
  const std::lock_guard lock(mutex_);
  return restores_;
}

int64_t Head::deterministic_sessions() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(deterministic_.size());
}

}  // namespace lossd::engine
