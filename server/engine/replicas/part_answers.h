// What all replicas have answered to one question, the coordinator first.
#ifndef LOSSD_SERVER_ENGINE_REPLICAS_PART_ANSWERS_H_
#define LOSSD_SERVER_ENGINE_REPLICAS_PART_ANSWERS_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/replicas/window_ending.h"

namespace lossd::engine {

inline absl::Status StatusOf(const absl::Status& status) { return status; }
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

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_REPLICAS_PART_ANSWERS_H_
