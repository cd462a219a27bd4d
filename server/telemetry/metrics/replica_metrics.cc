// The set of servers that hold replicas of the same heads. None of a server whose heads are its own.
#include <string>

#include "server/telemetry/metrics/collect.h"

namespace lossd::telemetry {
namespace {

using engine::ReplicaPhase;
using engine::ReplicaReport;

constexpr Metric kWhole{"lossd_replica_set_whole",
                        "1 while all replicas are there; the labels say which of which set this is.",
                        kGauge,
                        {"set", "replica"}};
constexpr Metric kEpochs{"lossd_replica_epochs_total", "How often all replicas have met.", kCounter};
constexpr Metric kReturns{
    "lossd_replica_returns_total",
    "How often heads went back to a checkpoint, or were gone, since the replicas were not alike.", kCounter};
constexpr Metric kPhases{
    "lossd_replica_phase_seconds",
    "Time of this replica in each phase of the end of a window, from being asked until it answered.",
    kHistogram,
    {"phase"}};
constexpr Metric kLate{"lossd_replica_late_seconds",
                       "How much later than the first one each replica answered, by phase; at replica 0. "
                       "The sum counts who has yet to answer, too.",
                       kHistogram,
                       {"replica", "phase"}};
constexpr Metric kUnanswered{
    "lossd_replica_unanswered_seconds",
    "For how long each replica has not answered what it was asked first at the end of a window, 0 if it has "
    "answered all; at replica 0.",
    kGauge,
    {"replica"}};
constexpr Metric kPlaced{"lossd_replica_sessions_placed_total",
                         "Sessions that were opened at each replica; at replica 0.",
                         kCounter,
                         {"replica"}};

size_t Index(ReplicaPhase phase) { return static_cast<size_t>(phase); }

void CollectAnswers(const ReplicaReport& set, Exposition& out) {
  out.Begin(kLate);
  for (size_t replica = 0; replica < set.replicas.size(); ++replica) {
    for (const ReplicaPhase phase : engine::kReplicaPhases) {
      out.Add({std::to_string(replica), Name(phase)}, set.replicas[replica].late[Index(phase)]);
    }
  }
  out.Begin(kUnanswered);
  for (size_t replica = 0; replica < set.replicas.size(); ++replica) {
    out.Add({std::to_string(replica)}, set.replicas[replica].unanswered_seconds);
  }
  out.Begin(kPlaced);
  for (size_t replica = 0; replica < set.replicas.size(); ++replica) {
    out.Add({std::to_string(replica)}, set.replicas[replica].sessions_placed);
  }
}

}  // namespace

void CollectReplicas(const ReplicaReport& set, Exposition& out) {
  if (!set.IsSet()) return;
  out.Begin(kWhole);
  out.Add({set.name, std::to_string(set.place.replica)}, set.whole.ok() ? 1 : 0);
  out.Only(kEpochs, set.epochs);
  out.Only(kReturns, set.returns);
  out.Begin(kPhases);
  for (const ReplicaPhase phase : engine::kReplicaPhases) out.Add({Name(phase)}, set.phases[Index(phase)]);
  if (set.place.coordinates()) CollectAnswers(set, out);
}

}  // namespace lossd::telemetry
