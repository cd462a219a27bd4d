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

class WindowEnding : public std::enable_shared_from_this<WindowEnding> {
 public:
  WindowEnding(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas)
      : head_(std::move(head)), end_(std::move(end)), replicas_(std::move(replicas)) {}

  void Seal();
  void GoOn();

 private:
  using Sealed = std::vector<absl::StatusOr<uint64_t>>;
  using Summed = std::vector<absl::StatusOr<GradientStats>>;

  // Asks all replicas: ask(replica, what it answers to), the coordinator being null.
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
  JointStep step_;  // one round after the other works with it
};

template <class Answer, class Ask>
void WindowEnding::AskAll(std::function<void(std::vector<Answer>)> then, Ask ask) {
  const auto round = std::make_shared<Round<Answer>>(1 + replicas_.others.size(), std::move(then));
  bool current = false;
  const bool asked = replicas_.epoch->Ask([&] {
    current = head_->IsEnding(end_.ending);
    if (!current) return;
    ask(nullptr, Round<Answer>::AnswerOf(round, 0));
    for (size_t i = 0; i < replicas_.others.size(); ++i) {
      ask(replicas_.others[i].get(), Round<Answer>::AnswerOf(round, 1 + i));
    }
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
      [this](ReplicaPart* other, std::function<void(absl::StatusOr<uint64_t>)> done) {
        if (other == nullptr) {
          head_->SealPart(end_, std::move(done));
        } else {
          other->Seal(end_, std::move(done));
        }
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
      [this](ReplicaPart* other, std::function<void(absl::StatusOr<GradientStats>)> done) {
        done = AtOnce<absl::StatusOr<GradientStats>>(std::move(done));
        if (other == nullptr) {
          head_->SumPart(step_.window_tokens, replicas_.own, std::move(done));
        } else {
          other->Sum(step_.window_tokens, std::move(done));
        }
      });
}

void WindowEnding::Step(const Summed& summed) {
  if (const absl::Status failed = FirstError(summed); !failed.ok()) return Break(failed);
  step_.stats = *summed.front();
  const bool refuses = end_.step.non_finite == NonFinite::kSkip && step_.stats.non_finite > 0;
  step_.skipped = refuses || step_.window_tokens == 0;
  AskAll<absl::Status>(
      [self = shared_from_this()](const std::vector<absl::Status>& stepped) { self->Publish(stepped); },
      [this](ReplicaPart* other, std::function<void(absl::Status)> done) {
        done = AtOnce<absl::Status>(std::move(done));
        if (other == nullptr) {
          head_->StepPart(step_, replicas_.own, std::move(done));
        } else {
          other->Step(step_, std::move(done));
        }
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
      [&why](ReplicaPart* other, const std::function<void(absl::Status)>& done) {
        if (other == nullptr) {
          done(absl::OkStatus());
        } else {
          other->Reopen(why, done);
        }
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
