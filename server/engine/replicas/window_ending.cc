#include "server/engine/replicas/window_ending.h"

#include <utility>

#include "absl/strings/cord.h"

namespace lossd::engine {

namespace {

constexpr char kLost[] = "lossd/replica_lost";

// What all replicas answer, the coordinator first; then something happens, by the thread of the last answer,
// or by who asked, if that came later.
template <class Answer>
class Round {
 public:
  using Then = std::function<void(std::vector<Answer> answers)>;

  Round(size_t replicas, Then then)
      : then_(std::move(then)), answers_(replicas, absl::UnknownError("")), missing_(replicas + 1) {}

  // Everybody was asked.
  void Begin() { Count(nullptr); }

  static std::function<void(Answer)> AnswerOf(const std::shared_ptr<Round>& round, size_t replica) {
    return [round, replica](Answer answer) {
      round->Count([&](std::vector<Answer>& answers) { answers[replica] = std::move(answer); });
    };
  }

 private:
  void Count(const std::function<void(std::vector<Answer>&)>& take) {
    std::vector<Answer> all;
    {
      const MutexLock lock(mutex_);
      if (take != nullptr) take(answers_);
      if (--missing_ > 0) return;
      all = std::move(answers_);
    }
    then_(std::move(all));
  }

  const Then then_;
  Mutex mutex_;
  std::vector<Answer> answers_ ABSL_GUARDED_BY(mutex_);
  size_t missing_ ABSL_GUARDED_BY(mutex_);
};

absl::Status StatusOf(const absl::Status& status) { return status; }
template <class Value>
absl::Status StatusOf(const absl::StatusOr<Value>& answer) {
  return answer.status();
}

// Why not all have done it: that one was lost, before anything else, since then what the others say decides
// nothing.
template <class Answer>
absl::Status FirstError(const std::vector<Answer>& answers) {
  absl::Status first;
  for (const Answer& answer : answers) {
    const absl::Status status = StatusOf(answer);
    if (IsReplicaLost(status)) return status;
    if (first.ok()) first = status;
  }
  return first;
}

// The coordinator's own. It publishes, or opens its window again, when the others have.
class OwnPart : public ReplicaPart {
 public:
  OwnPart(std::shared_ptr<Head> head, std::shared_ptr<const ReplicaCommunicators> replicas)
      : head_(std::move(head)), replicas_(std::move(replicas)) {}

  void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<uint64_t>)> done) override {
    head_->SealPart(end, std::move(done));
  }
  void Sum(uint64_t window_tokens, std::function<void(absl::StatusOr<GradientStats>)> done) override {
    head_->SumPart(window_tokens, replicas_, std::move(done));
  }
  void Step(const JointStep& step, std::function<void(absl::Status)> done) override {
    head_->StepPart(step, replicas_, std::move(done));
  }
  void Reopen(const absl::Status& /*why*/, std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  void ReadRows(const PartRows& rows, std::function<void(absl::StatusOr<std::string>)> done) override {
    head_->ReadPartRows(rows, std::move(done));
  }
  void WriteRows(const PartRows& rows, std::string bytes, std::function<void(absl::Status)> done) override {
    head_->WritePartRows(rows, std::move(bytes), std::move(done));
  }

 private:
  const std::shared_ptr<Head> head_;
  const std::shared_ptr<const ReplicaCommunicators> replicas_;
};

class WindowEnding : public std::enable_shared_from_this<WindowEnding> {
 public:
  WindowEnding(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas)
      : head_(std::move(head)), end_(std::move(end)), replicas_(std::move(replicas)) {
    parts_.push_back(std::make_shared<OwnPart>(head_, replicas_.own));
    parts_.insert(parts_.end(), replicas_.others.begin(), replicas_.others.end());
  }

  void Seal();
  void GoOn();

 private:
  using Sealed = std::vector<absl::StatusOr<uint64_t>>;
  using Summed = std::vector<absl::StatusOr<GradientStats>>;

  // Asks all replicas: ask(part, what it answers to).
  template <class Answer, class Ask>
  void AskAll(std::function<void(std::vector<Answer>)> then, Ask ask);
  void Sum(const Sealed& sealed);
  void Tally();
  void Step(const Summed& summed);
  void Publish(const std::vector<absl::Status>& stepped);
  void Reopen(const absl::Status& why);
  // An error ends the epoch before the others have answered: they may wait for this one at their devices.
  template <class Answer>
  std::function<void(Answer)> AtOnce(std::function<void(Answer)> done);
  // Some may have done what others have not.
  void Break(const absl::Status& why);
  // It is over if one was lost.
  bool IsLost(const absl::Status& why) const;

  const std::shared_ptr<Head> head_;
  const WindowEnd end_;
  const EndingReplicas replicas_;
  std::vector<std::shared_ptr<ReplicaPart>> parts_;  // the coordinator's first
  JointStep step_;                                   // one round after the other works with it
};

template <class Answer, class Ask>
void WindowEnding::AskAll(std::function<void(std::vector<Answer>)> then, Ask ask) {
  const auto round = std::make_shared<Round<Answer>>(parts_.size(), std::move(then));
  bool current = false;
  const bool asked = replicas_.epoch->Ask([&] {
    current = head_->IsEnding(end_.ending);
    if (!current) return;
    for (size_t i = 0; i < parts_.size(); ++i) ask(*parts_[i], Round<Answer>::AnswerOf(round, i));
  });
  if (!asked) {
    (void)IsLost(ReplicaLost("a replica was lost"));
  } else if (current) {
    round->Begin();
  }  // else who waited was told, and another call ends the window
}

bool WindowEnding::IsLost(const absl::Status& why) const {
  if (!IsReplicaLost(why)) return false;
  head_->TellWaiting(why, end_.ending);
  return true;
}

template <class Answer>
std::function<void(Answer)> WindowEnding::AtOnce(std::function<void(Answer)> done) {
  return [self = shared_from_this(), done = std::move(done)](Answer answer) {
    if (!StatusOf(answer).ok()) self->replicas_.on_broken(StatusOf(answer));
    done(std::move(answer));
  };
}

void WindowEnding::Break(const absl::Status& why) { head_->TellWaiting(why, end_.ending); }

void WindowEnding::Seal() {
  AskAll<absl::StatusOr<uint64_t>>(
      [self = shared_from_this()](const Sealed& sealed) { self->Sum(sealed); },
      [this](ReplicaPart& part, std::function<void(absl::StatusOr<uint64_t>)> done) {
        part.Seal(end_, std::move(done));
      });
}

void WindowEnding::Sum(const Sealed& sealed) {
  if (const absl::Status refused = FirstError(sealed); !refused.ok()) {
    if (!IsLost(refused)) Reopen(refused);
    return;
  }
  for (const absl::StatusOr<uint64_t>& tokens : sealed) step_.window_tokens += *tokens;
  Tally();
}

void WindowEnding::GoOn() {
  step_.window_tokens = head_->part().step.window_tokens;
  Tally();
}

void WindowEnding::Tally() {
  AskAll<absl::StatusOr<GradientStats>>(
      [self = shared_from_this()](const Summed& summed) { self->Step(summed); },
      [this](ReplicaPart& part, std::function<void(absl::StatusOr<GradientStats>)> done) {
        part.Sum(step_.window_tokens, AtOnce<absl::StatusOr<GradientStats>>(std::move(done)));
      });
}

void WindowEnding::Step(const Summed& summed) {
  if (const absl::Status failed = FirstError(summed); !failed.ok()) return Break(failed);
  step_.stats = *summed.front();
  const bool refuses = end_.step.non_finite == NonFinite::kSkip && step_.stats.non_finite > 0;
  step_.skipped = refuses || step_.window_tokens == 0;
  AskAll<absl::Status>(
      [self = shared_from_this()](const std::vector<absl::Status>& stepped) { self->Publish(stepped); },
      [this](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.Step(step_, AtOnce<absl::Status>(std::move(done)));
      });
}

// At the coordinator it comes last: nobody is answered before all have the new version.
void WindowEnding::Publish(const std::vector<absl::Status>& stepped) {
  if (const absl::Status failed = FirstError(stepped); !failed.ok()) return Break(failed);
  const bool published = replicas_.epoch->Finish([this] { head_->PublishPart(step_); });
  if (!published) (void)IsLost(ReplicaLost("a replica was lost"));
}

void WindowEnding::Reopen(const absl::Status& why) {
  AskAll<absl::Status>(
      [self = shared_from_this(), why](const std::vector<absl::Status>& reopened) {
        if (self->IsLost(FirstError(reopened))) return;
        const bool told =
            self->replicas_.epoch->Finish([&] { self->head_->ReopenPart(why, self->end_.ending); });
        if (!told) (void)self->IsLost(ReplicaLost("a replica was lost"));
      },
      [&why](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.Reopen(why, std::move(done));
      });
}

}  // namespace

bool CoordinatedEpoch::Ask(absl::FunctionRef<void()> ask) {
  const MutexLock lock(mutex_);
  if (!over_) ask();
  return !over_;
}

bool CoordinatedEpoch::Finish(absl::FunctionRef<void()> finish) {
  {
    const MutexLock lock(mutex_);
    if (over_) return false;
    ++finishing_;
  }
  finish();
  const MutexLock lock(mutex_);
  --finishing_;
  finished_.NotifyAll();
  return true;
}

void CoordinatedEpoch::Close() {
  const MutexLock lock(mutex_);
  over_ = true;
  while (finishing_ > 0) finished_.Wait(mutex_);
}

absl::Status ReplicaLost(absl::string_view why) {
  absl::Status status = absl::UnavailableError(why);
  status.SetPayload(kLost, absl::Cord());
  return status;
}

bool IsReplicaLost(const absl::Status& status) { return status.GetPayload(kLost).has_value(); }

void EndWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas) {
  std::make_shared<WindowEnding>(std::move(head), std::move(end), std::move(replicas))->Seal();
}

void GoOnEndingWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas) {
  std::make_shared<WindowEnding>(std::move(head), std::move(end), std::move(replicas))->GoOn();
}

}  // namespace lossd::engine
