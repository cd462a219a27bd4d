// Tensors of chunks that came to a rank which is not the leader. They stay there, and the leader knows them
// by number.
#ifndef LOSSD_SERVER_ENGINE_GROUP_RANK_PAYLOADS_H_
#define LOSSD_SERVER_ENGINE_GROUP_RANK_PAYLOADS_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/mutex.h"
#include "server/engine/memory/payload.h"

namespace lossd::engine {

// Those of one chunk. Thread-safe.
class RankPayload {
 public:
  RankPayload(Payload hidden_states, Payload teacher_hidden)
      : hidden_states_(std::move(hidden_states)), teacher_hidden_(std::move(teacher_hidden)) {}

  const Payload& hidden_states() const { return hidden_states_; }
  const Payload& teacher_hidden() const { return teacher_hidden_; }

  // The chunk is answered: its dX [tokens, H], empty if it has none. Before the leader learns of it.
  void Answer(ResultBytes dx) ABSL_LOCKS_EXCLUDED(mutex_);
  // Empty until then.
  ResultBytes dx() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Payload hidden_states_;
  const Payload teacher_hidden_;
  mutable Mutex mutex_;
  ResultBytes dx_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe.
class RankPayloads {
 public:
  // Keeps it until it is released, under a number from 1 that no other ever has.
  uint64_t Add(std::shared_ptr<RankPayload> payload) ABSL_LOCKS_EXCLUDED(mutex_);
  // Null if it is not here.
  std::shared_ptr<RankPayload> Find(uint64_t number) const ABSL_LOCKS_EXCLUDED(mutex_);
  // By the leader, or because it never heard of it. Whoever has found it may go on with it.
  void Release(uint64_t number) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t count() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable Mutex mutex_;
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, std::shared_ptr<RankPayload>> payloads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_RANK_PAYLOADS_H_
