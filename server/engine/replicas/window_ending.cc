#include "server/engine/replicas/window_ending.h"

#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/cord.h"
#include "server/engine/replicas/part_answers.h"

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

// The coordinator's own. It publishes, or opens its window again, and holds and ends a flush, when the others
// have.
class OwnPart : public ReplicaPart {
 public:
  OwnPart(std::shared_ptr<Head> head, std::shared_ptr<const ReplicaCommunicators> replicas)
      : head_(std::move(head)), replicas_(std::move(replicas)) {}

  void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<uint64_t>)> done) override {
    head_->SealPart(end, done);
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
  void Hold(const FlushInfo& /*flush*/, std::function<void(absl::Status)> done) override {
    done(absl::OkStatus());
  }
  void Decide(const std::string& flush_id, FlushFate fate, std::function<void(absl::Status)> done) override {
    done(head_->DecidePart(flush_id, fate));
  }
  void EndFlush(const std::string& /*flush_id*/, std::function<void(absl::Status)> done) override {
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
  void Decide();

 private:
  using Done = std::vector<absl::Status>;
  using Sealed = std::vector<absl::StatusOr<uint64_t>>;
  using Summed = std::vector<absl::StatusOr<GradientStats>>;

  // Asks all replicas: ask(part, what it answers to). Who has answered for a phase is noted.
  template <class Answer, class Ask>
  void AskAll(std::optional<ReplicaPhase> phase, std::function<void(std::vector<Answer>)> then, Ask ask);
  // Asks all for what exchanges nothing.
  void AskEach(ReplicaPhase phase, std::function<void(const Done&)> then,
               std::function<void(ReplicaPart&, std::function<void(absl::Status)>)> ask);
  // When all others have done it, the coordinator does, and answers.
  void Finish(const Done& done, absl::FunctionRef<void()> finish);
  // What each replica answers to, which is `done` but for that.
  template <class Answer>
  std::vector<std::function<void(Answer)>> Watched(std::optional<ReplicaPhase> phase,
                                                   std::vector<std::function<void(Answer)>> done) const;
  void Sum(const Sealed& sealed);
  void Tally();
  void GoOnWith(const Summed& summed);
  void Step(const StepRequest& request, const GradientStats& stats);
  void Publish(const Done& stepped);
  void Describe(const GradientStats& stats);
  void Hold(const FlushInfo& flush);
  void EndFlush(const Done& decided);
  void Reopen(const absl::Status& why, std::function<void()> finish);
  // An error ends the epoch before the others have answered: they may wait for this one at their devices.
  template <class Answer>
  std::function<void(Answer)> AtOnce(std::function<void(Answer)> done);
  // Some may have done what others have not: who waits is told, and has to ask again.
  void Break(const absl::Status& why);
  // It is over if one was lost.
  bool IsLost(const absl::Status& why) const;

  const std::shared_ptr<Head> head_;
  const WindowEnd end_;
  const EndingReplicas replicas_;
  std::vector<std::shared_ptr<ReplicaPart>> parts_;  // by replica
  JointStep step_;                                   // one round after the other works with it
};

template <class Answer>
std::vector<std::function<void(Answer)>> WindowEnding::Watched(
    std::optional<ReplicaPhase> phase, std::vector<std::function<void(Answer)>> done) const {
  ReplicaWatch* const watch = replicas_.watch;
  if (watch == nullptr || !phase.has_value()) return done;
  const std::shared_ptr<ReplicaWatch::Asked> asked = watch->NoteAsked(*phase);
  for (size_t replica = 0; replica < done.size(); ++replica) {
    done[replica] = [watch, asked, replica, done = std::move(done[replica])](Answer answer) {
      watch->NoteAnswer(*asked, replica,
                        StatusOf(answer).ok() ? ReplicaWatch::Answer::kDone : ReplicaWatch::Answer::kError);
      done(std::move(answer));
    };
  }
  return done;
}

template <class Answer, class Ask>
void WindowEnding::AskAll(std::optional<ReplicaPhase> phase, std::function<void(std::vector<Answer>)> then,
                          Ask ask) {
  const auto round = std::make_shared<Round<Answer>>(parts_.size(), std::move(then));
  bool current = false;
  const bool asked = replicas_.epoch->Ask([&] {
    current = head_->IsEnding(end_.ending);
    if (!current) return;
    std::vector<std::function<void(Answer)>> done;
    for (size_t i = 0; i < parts_.size(); ++i) done.push_back(Round<Answer>::AnswerOf(round, i));
    done = Watched<Answer>(phase, std::move(done));
    for (size_t i = 0; i < parts_.size(); ++i) ask(*parts_[i], std::move(done[i]));
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

void WindowEnding::AskEach(ReplicaPhase phase, std::function<void(const Done&)> then,
                           std::function<void(ReplicaPart&, std::function<void(absl::Status)>)> ask) {
  AskAll<absl::Status>(phase, std::move(then), [this, &ask](ReplicaPart& part, auto done) {
    ask(part, AtOnce<absl::Status>(std::move(done)));
  });
}

void WindowEnding::Finish(const Done& done, absl::FunctionRef<void()> finish) {
  if (const absl::Status failed = FirstError(done); !failed.ok()) return Break(failed);
  if (!replicas_.epoch->Finish(finish)) (void)IsLost(ReplicaLost("a replica was lost"));
}

void WindowEnding::Seal() {
  AskAll<absl::StatusOr<uint64_t>>(
      ReplicaPhase::kSeal, [self = shared_from_this()](const Sealed& sealed) { self->Sum(sealed); },
      [this](ReplicaPart& part, std::function<void(absl::StatusOr<uint64_t>)> done) {
        part.Seal(end_, std::move(done));
      });
}

void WindowEnding::Sum(const Sealed& sealed) {
  if (const absl::Status refused = FirstError(sealed); !refused.ok()) {
    if (IsLost(refused)) return;
    return Reopen(refused, [this, refused] { head_->ReopenPart(refused, end_.ending); });
  }
  for (const absl::StatusOr<uint64_t>& tokens : sealed) step_.window_tokens += *tokens;
  Tally();
}

void WindowEnding::GoOn() {
  const PartState part = head_->part();
  step_.window_tokens = part.step.window_tokens;
  if (part.flush.has_value()) return Hold(*part.flush);
  Tally();
}

void WindowEnding::Tally() {
  AskAll<absl::StatusOr<GradientStats>>(
      ReplicaPhase::kSum, [self = shared_from_this()](const Summed& summed) { self->GoOnWith(summed); },
      [this](ReplicaPart& part, std::function<void(absl::StatusOr<GradientStats>)> done) {
        part.Sum(step_.window_tokens, AtOnce<absl::StatusOr<GradientStats>>(std::move(done)));
      });
}

void WindowEnding::GoOnWith(const Summed& summed) {
  if (const absl::Status failed = FirstError(summed); !failed.ok()) return Break(failed);
  const GradientStats& stats = *summed.front();
  if (const auto* const step = std::get_if<StepRequest>(&end_.by); step != nullptr) return Step(*step, stats);
  if (std::holds_alternative<FlushEnd>(end_.by)) {
    return Hold(head_->DescribeFlush(step_.window_tokens, stats));
  }
  const WindowStats found{stats, step_.window_tokens};
  Reopen(absl::CancelledError("it was looked at"), [this, found] { head_->EndLook(found, end_.ending); });
}

void WindowEnding::Step(const StepRequest& request, const GradientStats& stats) {
  step_.stats = stats;
  const bool refuses = request.non_finite == NonFinite::kSkip && step_.stats.non_finite > 0;
  step_.skipped = refuses || step_.window_tokens == 0;
  AskEach(
      ReplicaPhase::kStep, [self = shared_from_this()](const Done& stepped) { self->Publish(stepped); },
      [this](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.Step(step_, std::move(done));
      });
}

// At the coordinator it comes last: nobody is answered before all have the new version.
void WindowEnding::Publish(const Done& stepped) {
  Finish(stepped, [this] { head_->PublishPart(step_); });
}

void WindowEnding::Hold(const FlushInfo& flush) {
  AskEach(
      ReplicaPhase::kFlush,
      [self = shared_from_this(), flush](const Done& held) {
        self->Finish(held, [&] {
          if (const absl::Status own = self->head_->HoldPart(flush); !own.ok()) self->Break(own);
        });
      },
      [&flush](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.Hold(flush, std::move(done));
      });
}

// Otherwise one that has committed could be lost after a client has seen the next window.
void WindowEnding::Decide() {
  AskEach(
      ReplicaPhase::kFlush, [self = shared_from_this()](const Done& decided) { self->EndFlush(decided); },
      [this](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.Decide(FlushIdOf(end_.by), *end_.fate, std::move(done));
      });
}

void WindowEnding::EndFlush(const Done& decided) {
  if (const absl::Status failed = FirstError(decided); !failed.ok()) return Break(failed);
  const std::string flush_id = FlushIdOf(end_.by);
  AskEach(
      ReplicaPhase::kFlush,
      [self = shared_from_this(), flush_id](const Done& ended) {
        self->Finish(ended, [&] {
          if (const absl::Status own = self->head_->EndFlushPart(flush_id); !own.ok()) self->Break(own);
        });
      },
      [&flush_id](ReplicaPart& part, std::function<void(absl::Status)> done) {
        part.EndFlush(flush_id, std::move(done));
      });
}

void WindowEnding::Reopen(const absl::Status& why, std::function<void()> finish) {
  AskAll<absl::Status>(
      std::nullopt,
      [self = shared_from_this(), finish = std::move(finish)](const Done& reopened) {
        if (self->IsLost(FirstError(reopened))) return;
        if (!self->replicas_.epoch->Finish(finish)) (void)self->IsLost(ReplicaLost("a replica was lost"));
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
  const bool decides = end.fate.has_value();
  const auto ending = std::make_shared<WindowEnding>(std::move(head), std::move(end), std::move(replicas));
  decides ? ending->Decide() : ending->Seal();
}

void GoOnEndingWindow(std::shared_ptr<Head> head, WindowEnd end, EndingReplicas replicas) {
  std::make_shared<WindowEnding>(std::move(head), std::move(end), std::move(replicas))->GoOn();
}

}  // namespace lossd::engine
