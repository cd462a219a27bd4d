#include "server/engine/schedule/session_queues.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace lossd::engine {
namespace {

// So many sessions whose first chunk is too large for what is left of a batch are passed over for smaller
// ones of others. More would fill batches a little better, and be looked at for every chunk that comes.
constexpr int kMostPassedOver = 8;

}  // namespace

void SessionQueues::Add(Chunk chunk, uint64_t number, Clock::time_point arrival) {
  Session& session = sessions_[chunk->session];
  session.id = chunk->session;
  Queue& queue = session.queues[chunk->batch_key.holder];
  queue.session = &session;
  queue.chunks.push_back({std::move(chunk), number, arrival});
  ++waiting_;
  if (queue.chunks.size() > 1) return;
  Unplace(session);
  const bool came_back = session.queues.size() == 1;
  if (came_back) session.tag = std::max(session.tag, time_);
  Place(session);
}

void SessionQueues::Join(Waiting waiting) {
  if (joined_.empty() || waiting.number < next_.number) {
    next_.number = waiting.number;
    next_.arrival = waiting.arrival;
  }
  ++next_.chunks;
  next_.rows += waiting.chunk->rows;
  joined_.push_back(std::move(waiting));
}

void SessionQueues::Place(Session& session) {
  for (auto& [holder, queue] : session.queues) Place(queue);
  std::erase_if(session.queues, [](const auto& entry) { return entry.second.chunks.empty(); });
  if (!session.queues.empty()) return;
  if (session.tag <= time_) {
    sessions_.erase(session.id);
    return;
  }
  session.idle = true;
  idle_.emplace(session.tag, session.id);
}

void SessionQueues::Place(Queue& queue) {
  while (!queue.chunks.empty() && queue.chunks.front().chunk->rows == 0) {
    Join(std::move(queue.chunks.front()));
    queue.chunks.pop_front();
  }
  if (queue.chunks.empty()) return;
  const Waiting& first = queue.chunks.front();
  queue.order = &OrderOf(first.chunk->batch_key);
  queue.place = queue.order->emplace(std::make_pair(queue.session->tag, first.number), &queue).first;
}

void SessionQueues::Unplace(Session& session) {
  for (auto& [holder, queue] : session.queues) {
    if (queue.order != nullptr) queue.order->erase(queue.place);
    queue.order = nullptr;
  }
  if (session.idle) idle_.erase({session.tag, session.id});
  session.idle = false;
}

SessionQueues::Order& SessionQueues::OrderOf(const BatchKey& kind) {
  const auto it = std::find_if(waiting_by_kind_.begin(), waiting_by_kind_.end(),
                               [&kind](const auto& entry) { return entry.first == kind; });
  if (it != waiting_by_kind_.end()) return it->second;
  return waiting_by_kind_.emplace_back(kind, Order()).second;
}

SessionQueues::Order* SessionQueues::Earliest() {
  Order* earliest = nullptr;
  for (auto& [kind, order] : waiting_by_kind_) {
    if (order.empty()) continue;
    if (earliest == nullptr || order.begin()->first < earliest->begin()->first) earliest = &order;
  }
  return earliest;
}

// Only when a chunk is taken: a session that has none for a moment must not find the time moved on to where
// another one has got to.
void SessionQueues::AdvanceTime() {
  time_ = std::max(time_, Earliest()->begin()->first.first);
  while (!idle_.empty() && idle_.begin()->first <= time_) {
    sessions_.erase(idle_.begin()->second);
    idle_.erase(idle_.begin());
  }
}

SessionQueues::Batch SessionQueues::Gather(const RowsPerBatch& rows_per_batch) {
  // Clients may think of any number of kinds.
  std::erase_if(waiting_by_kind_, [](const auto& entry) { return entry.second.empty(); });
  Order* order = next_kind_.has_value() ? &OrderOf(*next_kind_) : Earliest();
  if (!next_kind_.has_value() && order != nullptr) {
    next_kind_ = order->begin()->second->chunks.front().chunk->batch_key;
    next_most_ = rows_per_batch(*next_kind_);
  }
  int passed_over = 0;
  for (auto it = order == nullptr ? Order::iterator() : order->begin();
       order != nullptr && it != order->end() && passed_over < kMostPassedOver &&
       (next_.rows == 0 || next_.rows < next_most_);) {
    Queue& queue = *it->second;
    if (next_.rows > 0 && queue.chunks.front().chunk->rows > next_most_ - next_.rows) {
      ++passed_over;
      ++it;
      continue;
    }
    const auto place = it->first;
    TakeFirst(queue);
    it = order->upper_bound(place);  // perhaps the same one again, at its new place
  }
  next_.complete = (next_.rows > 0 && next_.rows >= next_most_) || Earliest() != nullptr;
  return next_;
}

void SessionQueues::TakeFirst(Queue& queue) {
  AdvanceTime();
  Session& session = *queue.session;
  Unplace(session);
  session.tag += queue.chunks.front().chunk->rows;
  Join(std::move(queue.chunks.front()));
  queue.chunks.pop_front();
  Place(session);
}

std::vector<SessionQueues::Chunk> SessionQueues::Take() {
  std::vector<Chunk> chunks;
  chunks.reserve(joined_.size());
  for (Waiting& waiting : joined_) chunks.push_back(std::move(waiting.chunk));
  waiting_ -= next_.chunks;
  joined_.clear();
  next_ = {};
  next_kind_.reset();
  return chunks;
}

void SessionQueues::Withdraw(const std::vector<Chunk>& chunks) {
  std::unordered_set<const QueuedChunk*> gone;
  std::unordered_set<uint64_t> sessions;
  for (const Chunk& chunk : chunks) {
    gone.insert(chunk.get());
    sessions.insert(chunk->session);
  }
  const auto withdrawn = [&](const Waiting& waiting) { return gone.contains(waiting.chunk.get()); };
  std::unordered_map<uint64_t, int64_t> given_back;  // rows of the next batch
  next_ = {};
  for (Waiting& waiting : std::exchange(joined_, {})) {
    if (withdrawn(waiting)) {
      given_back[waiting.chunk->session] += waiting.chunk->rows;
      --waiting_;
    } else {
      Join(std::move(waiting));
    }
  }
  if (next_.rows == 0) next_kind_.reset();
  for (const uint64_t id : sessions) {
    const auto it = sessions_.find(id);
    if (it == sessions_.end()) continue;
    Session& session = it->second;
    Unplace(session);
    session.tag = std::max(session.tag - given_back[id], time_);
    for (auto& [holder, queue] : session.queues) {
      waiting_ -= static_cast<int64_t>(std::erase_if(queue.chunks, withdrawn));
    }
    Place(session);
  }
}

}  // namespace lossd::engine
