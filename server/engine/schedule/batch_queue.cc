#include "server/engine/schedule/batch_queue.h"

#include <algorithm>
#include <utility>

namespace lossd::engine {
namespace {

// One batch computes, the next is there when it ends. More of them only keep small chunks from being
// gathered.
constexpr int64_t kEnoughUnderWay = 2;

// A batch is charged for at least this many rows: even a small one reads all weights and writes all of dW.
constexpr int64_t kCheapestRows = 128;

// A time to start that something else than the clock decides.
constexpr BatchQueue::Clock::time_point kWhenOneIsDone = BatchQueue::Clock::time_point::max();

}  // namespace

void BatchQueue::AddChunk(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                          Clock::time_point arrival) {
  Line& line = lines_[source.get()];
  line.held.push_back({std::move(source), std::move(chunk), next_number_++, arrival, nullptr});
  Release(line);
}

void BatchQueue::AddTask(const BatchSource* source, Task task) {
  lines_[source].held.push_back({nullptr, nullptr, next_number_++, {}, std::move(task)});
}

void BatchQueue::AddLastTask(std::shared_ptr<BatchSource> source, Task task) {
  Line& line = lines_[source.get()];
  line.held.push_back({std::move(source), nullptr, next_number_++, {}, std::move(task)});
}

void BatchQueue::AddJob(const std::shared_ptr<BatchSource>& source, int64_t rows, Task task) {
  const int64_t cost = std::max<int64_t>(1, std::max(rows, kCheapestRows) * source->CostPerRow() / 3);
  lines_[source.get()].jobs.push_back({next_number_++, cost, std::move(task)});
}

void BatchQueue::AddFollowUp(std::shared_ptr<BatchSource> source, std::shared_ptr<QueuedChunk> chunk,
                             Clock::time_point arrival) {
  Line& line = lines_[source.get()];
  TakeUp(line, {std::move(source), std::move(chunk), next_number_++, arrival, nullptr});
}

void BatchQueue::Pause(const BatchSource* source) {
  if (may_pause_) lines_[source].paused = true;
}

void BatchQueue::Resume(const BatchSource* source) {
  if (const auto it = lines_.find(source); it != lines_.end()) it->second.paused = false;
}

void BatchQueue::ResumeAll() {
  may_pause_ = false;
  for (auto& [source, line] : lines_) line.paused = false;
}

void BatchQueue::AddFence(Task task) {
  const auto paused = [](const auto& line) { return line.second.paused; };
  if (std::all_of(lines_.begin(), lines_.end(), paused)) {
    AddTask(nullptr, std::move(task));
    return;
  }
  // Each line arrives once for its tasks and, if it has jobs, once for those. The last arrival runs the task.
  const auto missing = std::make_shared<size_t>(0);
  const Task arrive = [missing, task = std::move(task)] {
    if (--*missing == 0) task();
  };
  // Nobody knows how long a line is paused.
  for (auto& [source, line] : lines_) {
    if (line.paused) continue;
    ++*missing;
    AddTask(source, arrive);
    if (line.jobs.empty()) continue;
    ++*missing;
    line.jobs.push_back({next_number_++, 0, arrive});
  }
}

void BatchQueue::Withdraw(const BatchSource* source,
                          const std::vector<std::shared_ptr<QueuedChunk>>& chunks) {
  const auto it = lines_.find(source);
  if (it == lines_.end()) return;
  Line& line = it->second;
  line.chunks.Withdraw(chunks);
  std::erase_if(line.held, [&](const Entry& entry) {
    return entry.chunk != nullptr && std::find(chunks.begin(), chunks.end(), entry.chunk) != chunks.end();
  });
  if (line.chunks.Empty()) line.source = nullptr;
}

// Queues the chunks that are no longer behind a task.
void BatchQueue::Release(Line& line) {
  while (!line.held.empty() && line.held.front().chunk != nullptr) {
    TakeUp(line, std::move(line.held.front()));
    line.held.pop_front();
  }
}

void BatchQueue::TakeUp(Line& line, Entry entry) {
  line.source = std::move(entry.source);
  line.chunks.Add(std::move(entry.chunk), entry.number, entry.arrival);
}

BatchQueue::Step BatchQueue::Advance(Clock::time_point now) {
  Settle();
  if (recall_.has_value()) return GoOnWithRecall(now);
  // In turns, so that neither can keep the other waiting.
  if (!task_was_last_ && RunReadyTask()) return {true, now};
  const Step step = StartReady(now);
  if (!step.progress && task_was_last_ && RunReadyTask()) return {true, now};
  return step;
}

void BatchQueue::Settle() {
  const auto busy = [](const auto& line) { return line.second.busy(); };
  if (std::none_of(lines_.begin(), lines_.end(), busy)) lines_.clear();
  std::erase_if(lines_, [&](const auto& line) { return line.second.lead == 0 && !busy(line); });
}

bool BatchQueue::RunReadyTask() {
  Line* oldest = nullptr;
  for (auto& [source, line] : lines_) {
    if (line.paused || line.held.empty() || !line.chunks.Empty() || line.under_way > 0) continue;
    if (oldest == nullptr || line.held.front().number < oldest->held.front().number) oldest = &line;
  }
  if (oldest == nullptr) return false;
  if (TakeUpUnfinished(*oldest) || BeginRecall(*oldest)) return true;
  RunTask(*oldest);
  return true;
}

void BatchQueue::RunTask(Line& line) {
  const Task task = std::move(line.held.front().task);
  line.held.pop_front();
  Release(line);
  task_was_last_ = true;
  task();
}

bool BatchQueue::BeginRecall(Line& line) {
  const std::shared_ptr<BatchSource>& lender = line.held.front().source;
  if (lender == nullptr) return false;
  std::vector<std::shared_ptr<BatchSource>> borrowers = lender->Borrowers();
  if (borrowers.empty()) return false;
  recall_ = Recall{&line, std::move(borrowers), {}};
  return true;
}

// What is under way may leave more. As nothing else starts, this comes to an end.
BatchQueue::Step BatchQueue::GoOnWithRecall(Clock::time_point now) {
  if (recall_->chunks.empty()) {
    for (const std::shared_ptr<BatchSource>& borrower : recall_->borrowers) {
      const auto it = lines_.find(borrower.get());
      if (it != lines_.end() && it->second.under_way > 0) return {};
    }
    const std::shared_ptr<BatchSource> lender = recall_->line->held.front().source;
    for (const std::shared_ptr<BatchSource>& borrower : recall_->borrowers) {
      for (std::shared_ptr<QueuedChunk>& chunk : borrower->TakeBorrowed(*lender)) {
        Withdraw(borrower.get(), {chunk});
        recall_->chunks.emplace_back(borrower, std::move(chunk));
      }
    }
  }
  if (recall_->chunks.empty()) {
    Line& line = *recall_->line;
    recall_.reset();
    RunTask(line);
    return {true, now};
  }
  if (device_->BatchesUnderWay() >= device_->MostBatches()) return {};
  const auto [source, chunk] = std::move(recall_->chunks.front());
  recall_->chunks.pop_front();
  Start(lines_[source.get()], *source, {chunk}, chunk->rows);
  return {true, now};
}

bool BatchQueue::TakeUpUnfinished(Line& line) {
  const std::shared_ptr<BatchSource> source = line.held.front().source;
  if (source == nullptr) return false;
  for (std::shared_ptr<QueuedChunk>& chunk : source->TakeUnfinished()) {
    TakeUp(line, {source, std::move(chunk), next_number_++, {}, nullptr});
  }
  return !line.chunks.Empty();
}

BatchQueue::Step BatchQueue::StartReady(Clock::time_point now) {
  std::vector<Candidate> in_order;
  for (auto& [source, line] : lines_) {
    if (line.paused) continue;
    if (!line.jobs.empty()) in_order.push_back({line.lead, line.jobs.front().number, Kind::kJob, &line});
    if (line.chunks.Empty()) continue;
    const BatchSource& of_line = *line.source;
    line.next = line.chunks.Gather([&of_line](const BatchKey& kind) { return of_line.RowsPerBatch(kind); });
    if (line.next.rows == 0) {
      StartBatch(line);
      return {true, now};
    }
    in_order.push_back({line.lead, line.next.number, Kind::kBatch, &line});
  }
  std::sort(in_order.begin(), in_order.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.lead, a.number) < std::pair(b.lead, b.number);
  });
  Step step;
  for (const Candidate& candidate : in_order) {
    const Clock::time_point start = StartTime(candidate);
    if (start <= now) {
      for (auto& [source, other] : lines_) other.lead = std::max<int64_t>(0, other.lead - candidate.lead);
      task_was_last_ = false;
      if (candidate.kind == Kind::kJob) {
        RunJob(*candidate.line);
      } else {
        StartBatch(*candidate.line);
      }
      return {true, now};
    }
    if (start == kWhenOneIsDone) break;
    step.look_again = std::min(step.look_again, start);
  }
  return step;
}

BatchQueue::Clock::time_point BatchQueue::StartTime(const Candidate& candidate) const {
  constexpr Clock::time_point kAtOnce = Clock::time_point::min();
  const Line& line = *candidate.line;
  const int64_t under_way = device_->BatchesUnderWay();
  if (candidate.kind == Kind::kJob) return under_way == 0 ? kAtOnce : kWhenOneIsDone;
  if (under_way >= device_->MostBatches()) return kWhenOneIsDone;
  if (line.next.complete || !line.held.empty()) return kAtOnce;
  if (under_way >= kEnoughUnderWay) return kWhenOneIsDone;
  return under_way > 0 ? kAtOnce : line.next.arrival + window_;
}

void BatchQueue::RunJob(Line& line) {
  const Job job = std::move(line.jobs.front());
  line.jobs.pop_front();
  line.lead += job.cost;
  job.task();
}

void BatchQueue::StartBatch(Line& line) {
  const std::shared_ptr<BatchSource> source = line.source;
  const int64_t rows = std::exchange(line.next, {}).rows;
  std::vector<std::shared_ptr<QueuedChunk>> batch = line.chunks.Take();
  if (line.chunks.Empty()) line.source = nullptr;
  task_was_last_ = false;
  Start(line, *source, std::move(batch), rows);
}

void BatchQueue::Start(Line& line, BatchSource& source, std::vector<std::shared_ptr<QueuedChunk>> batch,
                       int64_t rows) {
  if (rows > 0) line.lead += std::max(rows, kCheapestRows) * source.CostPerRow();
  ++line.under_way;
  // A line stays where it is while anything of it is under way.
  source.StartBatch(std::move(batch), [&line] { --line.under_way; });
}

}  // namespace lossd::engine
