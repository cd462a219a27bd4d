// The end of a flush of a head that is not over replicas, whose calls are answered at once.
#ifndef LOSSD_TESTS_UNIT_ENGINE_END_FLUSH_H_
#define LOSSD_TESTS_UNIT_ENGINE_END_FLUSH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/head/head.h"

namespace lossd::engine {

inline absl::StatusOr<uint64_t> CommitFlush(Head& head, const std::string& flush_id) {
  absl::StatusOr<uint64_t> answer = absl::UnknownError("there is no answer");
  head.CommitFlush(flush_id, [&](const absl::StatusOr<uint64_t>& generation) { answer = generation; });
  return answer;
}

inline absl::StatusOr<uint64_t> AbortFlush(Head& head, const std::string& flush_id) {
  absl::StatusOr<uint64_t> answer = absl::UnknownError("there is no answer");
  head.AbortFlush(flush_id, [&](const absl::StatusOr<uint64_t>& generation) { answer = generation; });
  return answer;
}

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_UNIT_ENGINE_END_FLUSH_H_
