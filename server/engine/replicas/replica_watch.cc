#include "server/engine/replicas/replica_watch.h"

#include <algorithm>
#include <utility>

namespace lossd::engine {
namespace {

// Weight of a new answer in the mean of how late they are.
constexpr double kNewest = 1.0 / 8;

size_t Index(ReplicaPhase phase) { return static_cast<size_t>(phase); }

}  // namespace

const char* Name(ReplicaPhase phase) {
  switch (phase) {
    case ReplicaPhase::kSeal:
      return "seal";
    case ReplicaPhase::kSum:
      return "sum";
    case ReplicaPhase::kStep:
      return "step";
    case ReplicaPhase::kFlush:
      return "flush";
  }
  return "";
}

ReplicaWatch::ReplicaWatch(ReplicaPlace place)
    : place_(place),
      answers_(place.shared() && place.coordinates() ? static_cast<size_t>(place.replicas) : 0),
      late_seconds_(answers_.size()) {}

void ReplicaWatch::NameSet(std::string name) {
  const MutexLock lock(mutex_);
  name_ = std::move(name);
}

void ReplicaWatch::NoteWhole(const absl::Status& whole) {
  const MutexLock lock(mutex_);
  whole_ = whole;
}

void ReplicaWatch::NoteMeeting(uint64_t history) {
  const MutexLock lock(mutex_);
  ++epochs_;
  history_ = history;
}

void ReplicaWatch::NotePhase(ReplicaPhase phase, absl::Duration taken) {
  phases_[Index(phase)].Observe(absl::ToDoubleSeconds(taken));
}

void ReplicaWatch::NoteAnswers(ReplicaPhase phase, const std::vector<absl::Duration>& taken) {
  if (taken.empty() || taken.size() != answers_.size()) return;
  const absl::Duration first = *std::min_element(taken.begin(), taken.end());
  const MutexLock lock(mutex_);
  // The first few weigh the same.
  const double weight = std::max(kNewest, 1 / ++rounds_[Index(phase)]);
  for (size_t replica = 0; replica < taken.size(); ++replica) {
    const double seconds = absl::ToDoubleSeconds(taken[replica] - first);
    double& mean = late_seconds_[replica][Index(phase)];
    mean += weight * (seconds - mean);
    answers_[replica].late[Index(phase)].Observe(seconds);
  }
}

void ReplicaWatch::NotePlaced(int32_t replica) {
  const auto index = static_cast<size_t>(replica);
  if (index < answers_.size()) answers_[index].sessions_placed.fetch_add(1, std::memory_order_relaxed);
}

ReplicaReport ReplicaWatch::Read() const {
  ReplicaReport report;
  report.place = place_;
  report.refills = refills_;
  for (size_t phase = 0; phase < phases_.size(); ++phase) report.phases[phase] = phases_[phase].Read();
  report.replicas.resize(answers_.size());
  const MutexLock lock(mutex_);
  report.name = name_;
  report.whole = whole_;
  report.epochs = epochs_;
  report.history = history_;
  for (size_t replica = 0; replica < answers_.size(); ++replica) {
    ReplicaReport::Answers& answers = report.replicas[replica];
    for (size_t phase = 0; phase < phases_.size(); ++phase) {
      answers.late[phase] = answers_[replica].late[phase].Read();
    }
    answers.late_seconds = late_seconds_[replica];
    answers.sessions_placed = answers_[replica].sessions_placed;
  }
  return report;
}

}  // namespace lossd::engine
