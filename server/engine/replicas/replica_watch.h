// What a server counts and times of the set of replicas that it is one of. server/rpc/replicas and the end of
// windows fill it; telemetry and GetStatus show it.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/engine/common/counters.h"
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
    EachPhase<HistogramReading<kDurationBounds>> late;  // how much later than the first one it answered
    EachPhase<double> late_seconds{};  // the same lately: a mean in which the last ones weigh most
    uint64_t sessions_placed = 0;
  };

  bool IsSet() const { return place.shared(); }

  std::string name;
  ReplicaPlace place;
  absl::Status whole;    // OK while all are there; else why not
  uint64_t epochs = 0;   // how often all have met
  uint64_t refills = 0;  // how often this one came to that with nothing, and was filled by the others
  uint64_t history = 0;  // of the windows of all; 0: they have yet to meet
  EachPhase<HistogramReading<kDurationBounds>> phases;  // from being asked until this replica answered
  std::vector<Answers> replicas;                        // by number, at the coordinator; else empty
};

// Thread-safe.
class ReplicaWatch {
 public:
  explicit ReplicaWatch(ReplicaPlace place);

  void NameSet(std::string name) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteWhole(const absl::Status& whole) ABSL_LOCKS_EXCLUDED(mutex_);
  // All have met, and have settled what was left half done.
  void NoteMeeting(uint64_t history) ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteRefill() { refills_.fetch_add(1, std::memory_order_relaxed); }
  // What was asked of this replica is done, so long after it was asked.
  void NotePhase(ReplicaPhase phase, absl::Duration taken);
  // At the coordinator: all have done it, replica i so long after they were asked.
  void NoteAnswers(ReplicaPhase phase, const std::vector<absl::Duration>& taken) ABSL_LOCKS_EXCLUDED(mutex_);
  void NotePlaced(int32_t replica);

  ReplicaReport Read() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Answers {
    EachPhase<DurationHistogram> late;
    Counter sessions_placed{0};
  };

  const ReplicaPlace place_;
  Counter refills_{0};
  EachPhase<DurationHistogram> phases_;
  std::vector<Answers> answers_;  // by replica; empty where nobody is asked

  mutable Mutex mutex_;
  std::string name_ ABSL_GUARDED_BY(mutex_);
  absl::Status whole_ ABSL_GUARDED_BY(mutex_) = absl::UnavailableError("the replicas have yet to meet");
  uint64_t epochs_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t history_ ABSL_GUARDED_BY(mutex_) = 0;
  EachPhase<double> rounds_ ABSL_GUARDED_BY(mutex_){};                   // that NoteAnswers was told of
  std::vector<EachPhase<double>> late_seconds_ ABSL_GUARDED_BY(mutex_);  // as answers_
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_REPLICA_WATCH_H_
