// What the calls that end a head's window have in common: which window it is, and whether an error means that
// it went with a server that was restarted.
#ifndef LOSSD_CLIENT_SRC_GRADIENT_WINDOW_CALL_H_
#define LOSSD_CLIENT_SRC_GRADIENT_WINDOW_CALL_H_

#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "client/src/common/convert.h"
#include "client/src/common/head_context.h"

namespace lossd::internal {

// Whether the server may have done what it was asked for although there is no answer.
bool MayBeDone(const absl::Status& status);

// Why what is of another past than the head's is gone.
const char* CauseOfLoss(const ServerLife& life);

template <class Request>
void AddMarks(std::span<const SessionMarks> marks, Request* request) {
  for (const SessionMarks& session : marks) *request->add_marks() = ToProto(session);
}

// Used by one thread. The head must outlive it.
class WindowCall {
 public:
  explicit WindowCall(HeadContext& head) : head_(head) {}

  // Finds out about the server. Begin() does it, too.
  absl::Status FindServer();
  // Before anything else: finds out about the server and, unless one is named, about the window.
  absl::Status Begin(std::optional<uint64_t> generation = std::nullopt);
  // Instead of Begin: about a window that an earlier call began.
  void Resume(const ServerLife& life, uint64_t generation) {
    life_ = life;
    generation_ = generation;
  }
  uint64_t generation() const { return generation_; }
  const ServerLife& life() const { return life_; }

  // The status as it is, or "window lost" if its cause is that the server was restarted, or that marks are of
  // a replica that was, or of before a restore.
  absl::Status Explain(const absl::Status& status) const;

 private:
  HeadContext& head_;
  ServerLife life_;
  uint64_t generation_ = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_GRADIENT_WINDOW_CALL_H_
