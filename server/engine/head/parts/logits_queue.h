// Calls for logits that wait for a head's device, in a line of their own, and what they hold together.
//
// Thread-compatible: guarded by Head::mutex_.
#ifndef LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_QUEUE_H_
#define LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_QUEUE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/engine/head/parts/logits_call.h"

namespace lossd::engine {

class LogitsQueue {
 public:
  // `head`: its name, for messages. `limit`: bytes that hidden states and answers may hold together.
  LogitsQueue(std::string head, int64_t limit) : head_(std::move(head)), limit_(limit) {}

  // Takes the call, with room for so many bytes. RESOURCE_EXHAUSTED, and the call is untouched, if there is
  // no room or too many wait.
  absl::Status Add(LogitsCall& call, int64_t bytes);
  bool empty() const { return calls_.empty(); }
  size_t size() const { return calls_.size(); }
  // The call whose turn it is. The reference is valid until the call is taken out.
  LogitsCall& front() { return calls_.front(); }
  LogitsCall TakeFront();

 private:
  const std::string head_;
  const int64_t limit_;
  LogitsRoom room_;
  std::deque<LogitsCall> calls_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_PARTS_LOGITS_QUEUE_H_
