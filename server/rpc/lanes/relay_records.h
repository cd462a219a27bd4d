// What the leader remembers of relays, so that ranks learn which of their chunks never arrived.
#ifndef LOSSD_SERVER_RPC_LANES_RELAY_RECORDS_H_
#define LOSSD_SERVER_RPC_LANES_RELAY_RECORDS_H_

#include <compare>
#include <cstdint>
#include <functional>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/engine/common/mutex.h"

namespace lossd::rpc {

struct RelayKey {
  int32_t rank = 0;
  uint64_t relay = 0;

  auto operator<=>(const RelayKey&) const = default;
};

// Thread-safe.
class RelayRecords {
 public:
  // INVALID_ARGUMENT if there is such a relay.
  absl::Status Begin(const RelayKey& key) ABSL_LOCKS_EXCLUDED(mutex_);
  // The leader knows this payload. INVALID_ARGUMENT if it is not behind those before.
  absl::Status Note(const RelayKey& key, uint64_t payload) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(const RelayKey& key) ABSL_LOCKS_EXCLUDED(mutex_);

  // Calls `tell` with the last payload, once the relay has ended: now, or by the thread of End. The relay is
  // forgotten then. One that has named no payload is not remembered at all: 0.
  void Settle(const RelayKey& key, std::function<void(uint64_t last_payload)> tell)
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Record {
    uint64_t last_payload = 0;
    bool over = false;
    std::function<void(uint64_t)> tell = nullptr;
  };

  engine::Mutex mutex_;
  std::map<RelayKey, Record> records_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LANES_RELAY_RECORDS_H_
