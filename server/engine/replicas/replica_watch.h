// What a server counts and times of the set of replicas that it is one of. server/rpc/replicas and the end of
// windows fill it; telemetry and GetStatus show it.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/common/mutex.h"
#include "server/engine/common/replica_place.h"

namespace lossd::engine {

// What the coordinator asks of all replicas at once, and goes on when the last has answered. kFlush: to hold
// the window for a flush, to decide upon it, and to end it.
enum class ReplicaPhase { kSeal, kSum, kStep, kFlush };
inline constexpr std::array kReplicaPhases = {ReplicaPhase::kSeal, ReplicaPhase::kSum, ReplicaPhase::kStep,
                                              ReplicaPhase::kFlush};
const char* Name(ReplicaPhase phase);  // "seal"

template <class Value>
using EachPhase = std::array<Value, kReplicaPhases.size()>;

// At one moment.
struct ReplicaReport {
  struct Answers {
    // How much later than the first one it answered. The sum has it of what it has yet to answer, too.
    EachPhase<HistogramReading<kDurationBounds>> late;
    // The same lately: a mean in which the last ones weigh most; or of what it has yet to answer, if that is
    // more.
    EachPhase<double> late_seconds{};
    // For how long it has not answered what it was asked first; 0: it has answered all.
    double unanswered_seconds = 0;
    uint64_t sessions_placed = 0;
  };

  bool IsSet() const { return place.shared(); }
  // Why windows do not end; "" if they do.
  std::string WhyNot() const { return whole.ok() ? waits_for : std::string(whole.message()); }

  std::string name;
  ReplicaPlace place;
  absl::Status whole;  // OK while all are there; else why not
  // At the coordinator: "replica 2 has not answered a step for 41 s", of what was asked first and for so long
  // that it may hang; else "".
  std::string waits_for;
  uint64_t epochs = 0;   // how often all have met
  uint64_t returns = 0;  // how often heads went back to a checkpoint, or were gone, since not all were alike
  uint64_t history = 0;  // of the windows of all; 0: they have yet to meet
  EachPhase<HistogramReading<kDurationBounds>> phases;  // from being asked until this replica answered
  std::vector<Answers> replicas;                        // by number, at the coordinator; else empty
};

// Thread-safe.
class ReplicaWatch {
 public:
  class Asked;
  enum class Answer { kDone, kError };

  explicit ReplicaWatch(ReplicaPlace place);

  void NameSet(std::string name) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteWhole(const absl::Status& whole) ABSL_LOCKS_EXCLUDED(mutex_);
  // All have met, and are alike.
  void NoteMeeting(uint64_t history) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteReturn() { returns_.fetch_add(1, std::memory_order_relaxed); }
  // What was asked of this replica is done, so long after it was asked.
  void NotePhase(ReplicaPhase phase, absl::Duration taken);
  // At the coordinator: all are asked for what this phase is. It is under way until all have answered, or
  // nobody holds what this returns. Times are of the monotonic clock.
  std::shared_ptr<Asked> NoteAsked(ReplicaPhase phase, absl::Time now = MonotonicNow())
      ABSL_LOCKS_EXCLUDED(mutex_);
  // This one has done it, or could not. Who is late is counted from the first that has done it.
  void NoteAnswer(Asked& asked, size_t replica, Answer answer, absl::Time now = MonotonicNow())
      ABSL_LOCKS_EXCLUDED(mutex_);
  void NotePlaced(int32_t replica);

  ReplicaReport Read(absl::Time now = MonotonicNow()) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Answers {
    EachPhase<DurationHistogram> late;
    Counter sessions_placed{0};
  };
  struct Mean {
    double answers = 0;  // that it is of
    double seconds = 0;
  };

  void AddUnderWay(absl::Time now, ReplicaReport* report) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ReplicaPlace place_;
  Counter returns_{0};
  EachPhase<DurationHistogram> phases_;
  std::vector<Answers> answers_;  // by replica; empty where nobody is asked

  mutable Mutex mutex_;
  std::string name_ ABSL_GUARDED_BY(mutex_);
  absl::Status whole_ ABSL_GUARDED_BY(mutex_) = absl::UnavailableError("the replicas have yet to meet");
  uint64_t epochs_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t history_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<EachPhase<Mean>> late_lately_ ABSL_GUARDED_BY(mutex_);       // as answers_
  std::vector<std::weak_ptr<const Asked>> asked_ ABSL_GUARDED_BY(mutex_);  // the first one first
};

// The watch's, under its mutex.
class ReplicaWatch::Asked {
 public:
  Asked(ReplicaPhase phase, absl::Time at, size_t replicas)
      : phase_(phase), at_(at), answered_(replicas, false) {}

 private:
  friend class ReplicaWatch;

  const ReplicaPhase phase_;
  const absl::Time at_;
  std::optional<absl::Time> first_;  // when the first one had done it
  std::vector<bool> answered_;       // by replica
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_
