// All replicas of a head, the coordinator first, asked one thing after the other by a thread that waits.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_ALL_PARTS_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_ALL_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/common/awaiting.h"
#include "server/engine/replicas/joint_replicas.h"

namespace lossd::engine {

class AllParts {
 public:
  // `replicas` outlives this.
  AllParts(const JointReplicas& replicas, std::shared_ptr<ReplicaPart> own) : replicas_(replicas) {
    parts_.push_back(std::move(own));
    parts_.insert(parts_.end(), replicas.others.begin(), replicas.others.end());
  }

  int32_t size() const { return static_cast<int32_t>(parts_.size()); }
  ReplicaPart& at(int32_t replica) { return *parts_[static_cast<size_t>(replica)]; }

  // ask(part, its number, what it answers to). ReplicaLost if one was lost, before any other error: what the
  // others say decides nothing then. `phase`: what the watch counts it as.
  template <class Value, class Ask>
  absl::StatusOr<std::vector<Value>> AskAll(std::optional<ReplicaPhase> phase, Ask ask);
  template <class Ask>
  absl::Status TellAll(std::optional<ReplicaPhase> phase, Ask ask);
  // The same of what the replicas exchange, or must do all or none of: an error of one ends the epoch at
  // once, for the others may wait for it at their devices.
  template <class Value, class Ask>
  absl::StatusOr<std::vector<Value>> AskTogether(std::optional<ReplicaPhase> phase, Ask ask);
  template <class Ask>
  absl::Status DoTogether(std::optional<ReplicaPhase> phase, Ask ask);

 private:
  static absl::Status StatusOf(const absl::Status& status) { return status; }
  template <class Value>
  static absl::Status StatusOf(const absl::StatusOr<Value>& answer) {
    return answer.status();
  }
  // Asks all for Answers, the errors among them.
  template <class Answer, class Ask>
  absl::StatusOr<std::vector<Answer>> Collect(std::optional<ReplicaPhase> phase, Ask ask);
  template <class Answer>
  static absl::Status FirstError(const absl::StatusOr<std::vector<Answer>>& answers);
  template <class Answer>
  std::function<void(Answer)> EndsEpoch(std::function<void(Answer)> done) const {
    return [broken = replicas_.on_broken, done = std::move(done)](Answer answer) {
      if (const absl::Status status = StatusOf(answer); !status.ok()) broken(status);
      done(std::move(answer));
    };
  }
  // A replica that hears of a loss from its device may answer before the loss itself is noticed.
  static absl::Status Lost(const absl::Status& status) {
    return absl::IsUnavailable(status) ? ReplicaLost(status.message()) : status;
  }

  const JointReplicas& replicas_;
  std::vector<std::shared_ptr<ReplicaPart>> parts_;  // by replica
};

template <class Answer, class Ask>
absl::StatusOr<std::vector<Answer>> AllParts::Collect(std::optional<ReplicaPhase> phase, Ask ask) {
  ReplicaWatch* const watch = phase.has_value() ? replicas_.watch : nullptr;
  std::vector<std::future<Answer>> asked;
  const bool current = replicas_.epoch->Ask([&] {
    const std::shared_ptr<ReplicaWatch::Asked> watched =
        watch == nullptr ? nullptr : watch->NoteAsked(*phase);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const auto answer = std::make_shared<std::promise<Answer>>();
      asked.push_back(answer->get_future());
      ask(*parts_[i], i, [watch, watched, i, answer](Answer given) {
        const bool done = StatusOf(given).ok();
        if (watched != nullptr) {
          watch->NoteAnswer(*watched, i, done ? ReplicaWatch::Answer::kDone : ReplicaWatch::Answer::kError);
        }
        answer->set_value(std::move(given));
      });
    }
  });
  if (!current) return ReplicaLost("a replica was lost");
  std::vector<Answer> answers;
  for (std::future<Answer>& answer : asked) answers.push_back(Await(answer));
  return answers;
}

template <class Answer>
absl::Status AllParts::FirstError(const absl::StatusOr<std::vector<Answer>>& answers) {
  if (!answers.ok()) return answers.status();
  absl::Status first;
  for (const Answer& answer : *answers) {
    absl::Status status = StatusOf(answer);
    if (IsReplicaLost(status)) return status;
    first.Update(status);
  }
  return first;
}

template <class Value, class Ask>
absl::StatusOr<std::vector<Value>> AllParts::AskAll(std::optional<ReplicaPhase> phase, Ask ask) {
  auto answers = Collect<absl::StatusOr<Value>>(phase, ask);
  if (absl::Status error = FirstError(answers); !error.ok()) return error;
  std::vector<Value> values;
  for (absl::StatusOr<Value>& answer : *answers) values.push_back(*std::move(answer));
  return values;
}

template <class Ask>
absl::Status AllParts::TellAll(std::optional<ReplicaPhase> phase, Ask ask) {
  return FirstError(Collect<absl::Status>(phase, ask));
}

template <class Value, class Ask>
absl::StatusOr<std::vector<Value>> AllParts::AskTogether(std::optional<ReplicaPhase> phase, Ask ask) {
  using Answer = absl::StatusOr<Value>;
  auto values = AskAll<Value>(phase, [&](ReplicaPart& part, size_t i, std::function<void(Answer)> done) {
    ask(part, i, EndsEpoch<Answer>(std::move(done)));
  });
  if (!values.ok()) return Lost(values.status());
  return values;
}

template <class Ask>
absl::Status AllParts::DoTogether(std::optional<ReplicaPhase> phase, Ask ask) {
  return Lost(TellAll(phase, [&](ReplicaPart& part, size_t i, ReplicaPart::Done done) {
    ask(part, i, EndsEpoch<absl::Status>(std::move(done)));
  }));
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_ALL_PARTS_H_
