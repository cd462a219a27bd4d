#include "server/engine/replicas/replica_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace lossd::engine {
namespace {

// Weight of a new answer in the mean of how late they are.
constexpr double kNewest = 1.0 / 8;
// Who has not answered for longer is named. Most devices take a second or two for what they are asked.
constexpr absl::Duration kPatience = absl::Seconds(10);

size_t Index(ReplicaPhase phase) { return static_cast<size_t>(phase); }

std::string HaveNotAnswered(const std::vector<size_t>& replicas, ReplicaPhase phase, absl::Duration waited) {
  return absl::StrCat(replicas.size() == 1 ? "replica " : "replicas ", absl::StrJoin(replicas, ", "),
                      replicas.size() == 1 ? " has" : " have", " not answered a ", Name(phase), " for ",
                      absl::StrFormat("%.0f s", absl::ToDoubleSeconds(waited)));
}

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
      late_lately_(answers_.size()) {}

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

std::shared_ptr<ReplicaWatch::Asked> ReplicaWatch::NoteAsked(ReplicaPhase phase, absl::Time now) {
  auto asked = std::make_shared<Asked>(phase, now, answers_.size());
  const MutexLock lock(mutex_);
  std::erase_if(asked_, [](const auto& other) { return other.expired(); });
  asked_.push_back(asked);
  return asked;
}

void ReplicaWatch::NoteAnswer(Asked& asked, size_t replica, Answer answer, absl::Time now) {
  const bool own = replica == static_cast<size_t>(place_.replica);
  if (own && answer == Answer::kDone) NotePhase(asked.phase_, now - asked.at_);
  const MutexLock lock(mutex_);
  if (replica >= asked.answered_.size()) return;
  asked.answered_[replica] = true;
  if (!asked.first_.has_value()) {
    if (answer == Answer::kError) return;
    asked.first_ = now;
  }
  const size_t phase = Index(asked.phase_);
  const double seconds = std::max(0.0, absl::ToDoubleSeconds(now - *asked.first_));
  Mean& mean = late_lately_[replica][phase];
  // The first few weigh the same.
  mean.seconds += std::max(kNewest, 1 / ++mean.answers) * (seconds - mean.seconds);
  answers_[replica].late[phase].Observe(seconds);
}

void ReplicaWatch::NotePlaced(int32_t replica) {
  const auto index = static_cast<size_t>(replica);
  if (index < answers_.size()) answers_[index].sessions_placed.fetch_add(1, std::memory_order_relaxed);
}

void ReplicaWatch::AddUnderWay(absl::Time now, ReplicaReport* report) const {
  for (const std::weak_ptr<const Asked>& held : asked_) {
    const std::shared_ptr<const Asked> asked = held.lock();
    if (asked == nullptr) continue;
    std::vector<size_t> missing;
    for (size_t replica = 0; replica < asked->answered_.size(); ++replica) {
      if (!asked->answered_[replica]) missing.push_back(replica);
    }
    if (missing.empty()) continue;
    const absl::Duration waited = now - asked->at_;
    if (report->waits_for.empty() && waited >= kPatience) {
      report->waits_for = HaveNotAnswered(missing, asked->phase_, waited);
    }
    for (const size_t replica : missing) {
      double& unanswered = report->replicas[replica].unanswered_seconds;
      unanswered = std::max(unanswered, absl::ToDoubleSeconds(waited));
    }
    if (!asked->first_.has_value()) continue;
    const double late = std::max(0.0, absl::ToDoubleSeconds(now - *asked->first_));
    for (const size_t replica : missing) {
      ReplicaReport::Answers& answers = report->replicas[replica];
      answers.late[Index(asked->phase_)].AddToSum(late);
      double& lately = answers.late_seconds[Index(asked->phase_)];
      lately = std::max(lately, late);
    }
  }
}

ReplicaReport ReplicaWatch::Read(absl::Time now) const {
  ReplicaReport report;
  report.place = place_;
  report.returns = returns_;
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
      answers.late_seconds[phase] = late_lately_[replica][phase].seconds;
    }
    answers.sessions_placed = answers_[replica].sessions_placed;
  }
  AddUnderWay(now, &report);
  return report;
}

}  // namespace lossd::engine
