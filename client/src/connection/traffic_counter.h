// Bytes of messages that went to a server and came from it.
#ifndef LOSSD_CLIENT_SRC_CONNECTION_TRAFFIC_COUNTER_H_
#define LOSSD_CLIENT_SRC_CONNECTION_TRAFFIC_COUNTER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "lossd/client.h"

namespace lossd::internal {

// Thread-safe.
class TrafficCounter {
 public:
  void NoteSent(size_t bytes) { sent_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed); }
  void NoteReceived(size_t bytes) {
    received_.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }
  Traffic Total() const {
    return {sent_.load(std::memory_order_relaxed), received_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<int64_t> sent_ = 0;
  std::atomic<int64_t> received_ = 0;
};

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_CONNECTION_TRAFFIC_COUNTER_H_
