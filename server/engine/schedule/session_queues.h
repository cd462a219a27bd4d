// The chunks of one head that wait for the device: a queue for each session, and the batch that they make up
// next.
//
// Sessions share the device by rows, whatever the size of their chunks and the number of their lanes. Each
// has a tag: the rows it has been given, in the line's own time. The session with the lowest tag is next,
// and one that comes (back) starts where the lowest of those that wait is, or where it had got to if that is
// later: waiting earns nothing, and neither does leaving. This is start-time fair queueing (Goyal, Vin and
// Cheng, 1996): of two sessions that always have chunks waiting, neither is ever ahead by more than the
// largest chunk of each and one batch.
//
// A batch takes chunks of one kind: that of the session whose turn it is. Chunks of other sessions that go
// with it are taken in the order of their tags; those that do not are passed over, and their turn comes
// first afterwards. In a session the order of arrival is kept among chunks that one rank holds. Those of
// different holders come by different lanes, and never go into one batch: they stand beside each other, each
// holder's with the session's tag, so that the oldest goes first and takes with it what its holder has.
//
// Work per chunk is logarithmic in the number of sessions and linear in that of the kinds that wait. Belongs
// to the device's owner thread.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_QUEUES_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_QUEUES_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// A chunk as the queue sees it. What stands here does not change once it is queued.
struct QueuedChunk {
  BatchKey batch_key;
  int64_t rows = 0;      // none: costs the device nothing, and may be part of any batch
  uint64_t session = 0;  // whose chunk it is, among those of its head
};

class SessionQueues {
 public:
  using Clock = std::chrono::steady_clock;
  using Chunk = std::shared_ptr<QueuedChunk>;
  // HeadBackend's.
  using RowsPerBatch = std::function<int64_t(const BatchKey&)>;

  // `number` goes up with every chunk.
  void Add(Chunk chunk, uint64_t number, Clock::time_point arrival);
  // These leave, if they are still here; what they counted is given back to their sessions.
  void Withdraw(const std::vector<Chunk>& chunks);
  bool Empty() const { return waiting_ == 0; }

  // The batch that goes next.
  struct Batch {
    int64_t chunks = 0;
    int64_t rows = 0;
    // Full, or something waits that it cannot take. It then starts as soon as the device has room, also where
    // it could still grow: with chunks of several kinds or holders waiting that is always so. Nobody's turn
    // or mark depends on it, and it costs little: the device has work all the time, and what comes for this
    // kind later is gathered while the others have their turn.
    bool complete = false;
    uint64_t number = 0;  // of its oldest chunk
    Clock::time_point arrival;
  };
  // Lets it take what has come since.
  Batch Gather(const RowsPerBatch& rows_per_batch);
  // Its chunks, which leave; the chunks of a session are in the order of their arrival.
  std::vector<Chunk> Take();

 private:
  struct Waiting {
    Chunk chunk;
    uint64_t number = 0;
    Clock::time_point arrival;
  };
  struct Queue;
  // By the session's tag; among equals by age.
  using Order = std::map<std::pair<int64_t, uint64_t>, Queue*>;
  struct Session;
  // The chunks of a session that one rank holds.
  struct Queue {
    Session* session = nullptr;
    std::deque<Waiting> chunks;
    Order* order = nullptr;  // where it stands; null: nowhere
    Order::iterator place;
  };
  struct Session {
    uint64_t id = 0;
    int64_t tag = 0;
    std::map<int32_t, Queue> queues;  // by holder; none is empty
    bool idle = false;                // stands in idle_
  };

  void Join(Waiting waiting);
  // Puts the session where its tag and its chunks say. May forget it.
  void Place(Session& session);
  void Place(Queue& queue);
  void Unplace(Session& session);
  void TakeFirst(Queue& queue);
  // Where queues of this kind stand.
  Order& OrderOf(const BatchKey& kind);
  // The order of the kind of the session whose turn it is; null if none waits.
  Order* Earliest();
  void AdvanceTime();

  std::unordered_map<uint64_t, Session> sessions_;         // those with chunks, and those ahead of the others
  std::list<std::pair<BatchKey, Order>> waiting_by_kind_;  // by the kind of the queue's first chunk
  std::set<std::pair<int64_t, uint64_t>> idle_;            // by tag and id: sessions without a chunk
  int64_t time_ = 0;     // the lowest tag when the last chunk was taken; never goes back
  int64_t waiting_ = 0;  // chunks, with those of the next batch

  std::vector<Waiting> joined_;  // the next batch, in order
  Batch next_;
  int64_t next_most_ = 0;              // rows
  std::optional<BatchKey> next_kind_;  // of those that have rows
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_SESSION_QUEUES_H_
