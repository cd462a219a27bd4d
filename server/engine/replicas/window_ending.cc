#include "server/engine/replicas/window_ending.h"

#include <numeric>
#include <utility>

namespace lossd::engine {
namespace {

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

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <class Value>
const absl::Status& StatusOf(const absl::StatusOr<Value>& answer) {
  return answer.status();
}

// Why not all have done it: that one was lost, before anything else, since then what the others say decides
// nothing.
template <class Answer>
absl::Status FirstError(const std::vector<Answer>& answers) {
  absl::Status first;
  for (const Answer& answer : answers) {
    const absl::Status& status = StatusOf(answer);
    if (absl::IsUnavailable(status)) return status;
    if (first.ok()) first = status;
  }
  return first;
}

class WindowEnding : public std::enable_shared_from_this<WindowEnding> {
 public:
  WindowEnding(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas)
      : head_(std::move(head)), end_(std::move(end)), replicas_(std::move(replicas)) {}

  void Seal();

 private:
  using Sealed = std::vector<absl::StatusOr<uint64_t>>;
  using Summed = std::vector<absl::StatusOr<GradientStats>>;

  // Asks all replicas: ask(replica, what it answers to), the coordinator being null.
  template <class Answer, class Ask>
  void AskAll(std::function<void(std::vector<Answer>)> then, Ask ask);
  void Sum(const Sealed& sealed);
  void Step(const Summed& summed);
  void Publish(const std::vector<absl::Status>& stepped);
  void Reopen(const absl::Status& why);
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
  {
    const MutexLock lock(replicas_.order->mutex);
    ask(nullptr, Round<Answer>::AnswerOf(round, 0));
    for (size_t i = 0; i < replicas_.others.size(); ++i) {
      ask(replicas_.others[i].get(), Round<Answer>::AnswerOf(round, 1 + i));
    }
  }
  round->Begin();
}

bool WindowEnding::IsLost(const absl::Status& why) const {
  if (!absl::IsUnavailable(why)) return false;
  head_->TellWaiting(why);
  return true;
}

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
  AskAll<absl::StatusOr<GradientStats>>(
      [self = shared_from_this()](const Summed& summed) { self->Step(summed); },
      [this](ReplicaPart* other, std::function<void(absl::StatusOr<GradientStats>)> done) {
        if (other == nullptr) {
          head_->SumPart(step_.window_tokens, replicas_.own, std::move(done));
        } else {
          other->Sum(step_.window_tokens, std::move(done));
        }
      });
}

void WindowEnding::Step(const Summed& summed) {
  if (const absl::Status failed = FirstError(summed); !failed.ok()) {
    head_->TellWaiting(failed);
    return;
  }
  step_.stats = *summed.front();
  const bool refuses = end_.step.non_finite == NonFinite::kSkip && step_.stats.non_finite > 0;
  step_.skipped = refuses || step_.window_tokens == 0;
  AskAll<absl::Status>(
      [self = shared_from_this()](const std::vector<absl::Status>& stepped) { self->Publish(stepped); },
      [this](ReplicaPart* other, std::function<void(absl::Status)> done) {
        if (other == nullptr) {
          head_->StepPart(step_, replicas_.own, std::move(done));
        } else {
          other->Step(step_, std::move(done));
        }
      });
}

// At the coordinator it comes last: nobody is answered before all have the new version.
void WindowEnding::Publish(const std::vector<absl::Status>& stepped) {
  if (const absl::Status failed = FirstError(stepped); !failed.ok()) {
    head_->TellWaiting(failed);
    return;
  }
  head_->PublishPart(step_);
}

void WindowEnding::Reopen(const absl::Status& why) {
  AskAll<absl::Status>(
      [self = shared_from_this(), why](const std::vector<absl::Status>& reopened) {
        if (!self->IsLost(FirstError(reopened))) self->head_->ReopenPart(why);
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

void EndWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas) {
  std::make_shared<WindowEnding>(std::move(head), std::move(end), std::move(replicas))->Seal();
}

}  // namespace lossd::engine
