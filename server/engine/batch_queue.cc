#include "server/engine/batch_queue.h"

#include <algorithm>
#include <utility>

namespace lossd::engine {
namespace {

// One batch computes, the next is there when it ends. More of them only keep small chunks from being
// gathered.
constexpr int64_t kEnoughUnderWay = 2;

// A time to start that something else than the clock decides.
constexpr BatchQueue::Clock::time_point kWhenOneIsDone = BatchQueue::Clock::time_point::max();

}  // namespace

void BatchQueue::AddChunk(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                          Clock::time_point arrival) {
  Line& line = lines_[source.get()];
  line.entries.push_back({next_number_++, std::move(source), std::move(chunk), arrival, nullptr});
}

void BatchQueue::AddTask(const BatchSource* source, Task task) {
  lines_[source].entries.push_back({next_number_++, nullptr, nullptr, {}, std::move(task)});
}

void BatchQueue::AddFence(Task task) {
  if (lines_.empty()) {
    AddTask(nullptr, std::move(task));
    return;
  }
  // The last line to get there runs it.
  const auto missing = std::make_shared<size_t>(lines_.size());
  const auto shared = std::make_shared<Task>(std::move(task));
  for (auto& [source, line] : lines_) {
    AddTask(source, [missing, shared] {
      if (--*missing == 0) (*shared)();
    });
  }
}

BatchQueue::Step BatchQueue::Advance(Clock::time_point now) {
  std::vector<std::pair<uint64_t, Line*>> in_order;
  for (auto it = lines_.begin(); it != lines_.end();) {
    Line& line = it->second;
    if (line.entries.empty() && line.under_way == 0) {
      it = lines_.erase(it);
      continue;
    }
    if (!line.entries.empty()) in_order.emplace_back(line.entries.front().number, &line);
    ++it;
  }
  std::sort(in_order.begin(), in_order.end());
  Step step;
  bool waiting = false;
  for (const auto& [number, line] : in_order) {
    const Entry& first = line->entries.front();
    if (first.chunk == nullptr) {
      if (line->under_way > 0) continue;
      RunTask(*line);
      return {true, now};
    }
    Gather(*line);
    // Not past an older batch that waits for the device: full ones of others would leave it no gap.
    if (waiting && line->next.rows > 0) continue;
    const Clock::time_point start = StartTime(line->next, first.arrival);
    if (start <= now) {
      StartBatch(*line);
      return {true, now};
    }
    step.look_again = std::min(step.look_again, start);
    waiting = waiting || start == kWhenOneIsDone;
  }
  return step;
}

void BatchQueue::Gather(Line& line) {
  Gathered& next = line.next;
  while (!next.complete && next.chunks < line.entries.size()) {
    const Entry& entry = line.entries[next.chunks];
    if (!Fits(entry, next)) {
      next.complete = true;
      return;
    }
    const QueuedChunk& chunk = *entry.chunk;
    if (chunk.rows > 0 && next.kind == nullptr) {
      next.kind = &chunk.row_kind;
      next.most = entry.source->RowsPerBatch(chunk.row_kind);
    }
    ++next.chunks;
    next.rows += chunk.rows;
    next.complete = next.rows > 0 && next.rows >= next.most;
  }
}

bool BatchQueue::Fits(const Entry& entry, const Gathered& gathered) {
  if (entry.chunk == nullptr) return false;
  const QueuedChunk& chunk = *entry.chunk;
  if (chunk.rows == 0 || gathered.kind == nullptr) return true;
  return chunk.row_kind == *gathered.kind && chunk.rows <= gathered.most - gathered.rows;
}

BatchQueue::Clock::time_point BatchQueue::StartTime(const Gathered& gathered,
                                                    Clock::time_point arrival) const {
  constexpr Clock::time_point kAtOnce = Clock::time_point::min();
  if (gathered.rows == 0) return kAtOnce;
  const int64_t under_way = device_->BatchesUnderWay();
  if (under_way >= device_->MostBatches()) return kWhenOneIsDone;
  if (gathered.complete) return kAtOnce;
  if (under_way >= kEnoughUnderWay) return kWhenOneIsDone;
  return under_way > 0 ? kAtOnce : arrival + window_;
}

void BatchQueue::RunTask(Line& line) {
  const Task task = std::move(line.entries.front().task);
  line.entries.pop_front();
  task();
}

void BatchQueue::StartBatch(Line& line) {
  const std::shared_ptr<BatchSource> source = line.entries.front().source;
  const Gathered gathered = std::exchange(line.next, {});
  std::vector<std::shared_ptr<QueuedChunk>> batch;
  batch.reserve(gathered.chunks);
  for (size_t i = 0; i < gathered.chunks; ++i) {
    batch.push_back(std::move(line.entries.front().chunk));
    line.entries.pop_front();
  }
  ++line.under_way;
  // A line stays where it is while anything of it is under way.
  source->StartBatch(std::move(batch), [&line] { --line.under_way; });
}

}  // namespace lossd::engine
