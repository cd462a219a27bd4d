// What a rank has yet to write to its leader: gRPC takes one message at a time.
#ifndef LOSSD_SERVER_RPC_GROUP_MESSAGE_QUEUE_H_
#define LOSSD_SERVER_RPC_GROUP_MESSAGE_QUEUE_H_

#include <deque>
#include <memory>
#include <utility>

#include "lossd/group/v1/group.pb.h"

namespace lossd::rpc {

// Guarded by the stream's mutex. The message in front is being written.
class MessageQueue {
 public:
  using Message = group::v1::MemberMessage;

  // The message to be written now; null if one is being written.
  const Message* Push(std::shared_ptr<const Message> message) {
    messages_.push_back(std::move(message));
    return messages_.size() == 1 ? messages_.front().get() : nullptr;
  }
  // After the one in front was written: the next one; null if there is none.
  const Message* Pop() {
    messages_.pop_front();
    return messages_.empty() ? nullptr : messages_.front().get();
  }
  // After the one in front could not be written: none will be.
  void Clear() { messages_.clear(); }
  bool empty() const { return messages_.empty(); }

 private:
  std::deque<std::shared_ptr<const Message>> messages_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_MESSAGE_QUEUE_H_
