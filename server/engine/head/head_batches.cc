// Chunks of a head on the device: started in the order of their lanes, applied when they are done. All on the
// device thread.
#include <deque>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// Turns NOT_FOUND into an error that ends the stream: NOT_FOUND would mean that the session is gone.
absl::Status AsPrecondition(absl::Status status) {
  if (absl::IsFailedPrecondition(status)) return status;
  return MakeError(absl::StatusCode::kFailedPrecondition, ReasonOf(status), FieldOf(status),
                   absl::StrCat("a chunk that was taken before cannot be computed again: ",
                                std::string(status.message())));
}

}  // namespace

int64_t Head::RowsPerBatch(const BatchKey& kind) const {
  // Pieces of tiles keep to themselves.
  return gradients_.IsWindows(kind.gradient) ? backend_->RowsPerBatch(kind) : 1;
}

void Head::StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) {
  std::deque<StartedChunk> started = Start(chunks);
  chunks.clear();
  std::shared_ptr<TeacherLease> teacher;  // keeps the head that it belongs to
  for (const StartedChunk& chunk : started) {
    if (const std::shared_ptr<Head>& head = chunk.item->teacher; head != nullptr && !chunk.item->rejected()) {
      teacher = std::shared_ptr<TeacherLease>(head, &head->teaching_);
    }
  }
  batches_.Run(shared_from_this(), std::move(started), std::move(teacher), std::move(on_ended));
}

// Those of the chunks that were not withdrawn.
std::deque<StartedChunk> Head::Start(const std::vector<std::shared_ptr<QueuedChunk>>& chunks) {
  std::deque<StartedChunk> started;
  std::vector<std::pair<std::shared_ptr<LaneListener>, absl::Status>> ended;
  const absl::StatusOr<uint64_t> teacher_version = PrepareTeacherOf(chunks);
  {
    const MutexLock lock(mutex_);
    SessionTable::Cut cut;
    for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
      auto item = std::static_pointer_cast<ChunkItem>(chunk);
      if (item->is_piece()) {
        sessions_.NotePieceStarted(*item);
        if (lifecycle_.alive().ok()) started.emplace_back().item = std::move(item);
        continue;
      }
      if (item->state == ChunkItem::State::kWithdrawn) continue;
      sessions_.Start(*item);
      if (absl::Status obstacle = FindObstacleLocked(*item, teacher_version.status(), &cut); !obstacle.ok()) {
        // Not rejected: that would say that it is in no window.
        ended.emplace_back(item->listener, AsPrecondition(std::move(obstacle)));
        ++environment_.counters->chunks_refused;
        continue;
      }
      sessions_.NoteStarted(*item);
      StartedChunk& entry = started.emplace_back();
      entry.answer.sequence = item->chunk.sequence;
      entry.answer.first_token = item->chunk.first_token;
      entry.answer.tokens = item->chunk.tokens;
      entry.answer.weight_version = weights_.version();
      entry.answer.hidden_held = item->chunk.hidden_held;
      if (item->teacher != nullptr) entry.answer.teacher_weight_version = teacher_version.value_or(0);
      entry.item = std::move(item);
    }
    FinishCutLocked(cut);
  }
  for (const auto& [listener, status] : ended) {
    if (listener != nullptr) listener->OnEnd(status);
  }
  return started;
}

absl::Status Head::FindObstacleLocked(ChunkItem& item, const absl::Status& teacher, SessionTable::Cut* cut) {
  if (item.rejected()) return absl::OkStatus();
  if (item.repeat) {
    // It may have been submitted before the first one was rejected.
    absl::Status earlier = sessions_.EarlierRejection(item.session_id, item.lane, item.chunk);
    if (!earlier.ok()) {
      item.Reject(std::move(earlier));
      return absl::OkStatus();
    }
  }
  absl::Status obstacle = CheckWeightVersion(item.chunk, weights_.version());
  if (obstacle.ok() && item.teacher != nullptr) obstacle = teacher;
  if (obstacle.ok() || item.repeat) return obstacle;
  sessions_.GiveUpPlace(item, cut);
  item.Reject(std::move(obstacle));
  return absl::OkStatus();
}

// An answered chunk stays in the window: if its batch fails, the head fails with the window.
void Head::OnChunkAnswered(const ChunkItem& item) {
  if (!item.in_window()) return;
  const MutexLock lock(mutex_);
  window_.Count(item.chunk.generation, static_cast<uint64_t>(item.valid_tokens), item.accepted);
}

void Head::OnChunkDone(ChunkItem& item) {
  std::optional<SessionTable::Applied> applied;
  if (item.numbered()) {
    const MutexLock lock(mutex_);
    applied = sessions_.Apply(item);
  }
  if (applied.has_value() && applied->listener != nullptr) applied->listener->OnApplied(applied->applied);
  if (item.is_piece() && !item.piece.rows.empty()) {
    Resumes waiting;
    {
      const MutexLock lock(mutex_);
      waiting = sessions_.FinishPiece(item);
    }
    Call(waiting);
  } else if (!item.rejected() && item.weight_gradient == ChunkItem::WeightGradient::kIntoTiles) {
    FillTiles(item);
  }
}

// A chunk that was answered, and the tiles that it completes.
void Head::FillTiles(ChunkItem& item) {
  item.chunk.dx = {};  // perhaps the last hold on a region
  SessionTable::Filled filled;
  {
    const MutexLock lock(mutex_);
    filled = sessions_.FillPlace(item);
  }
  for (std::shared_ptr<ChunkItem>& piece : filled.pieces) {
    environment_.scheduler->FollowUpWith(shared_from_this(), std::move(piece));
  }
  Call(filled.resumes);
}

// Called before the window ends or is read as a whole, before new weights come and before a save.
std::vector<std::shared_ptr<QueuedChunk>> Head::TakeUnfinished() {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return {};
  const LastTask* const due = DueLastTaskLocked();
  if (due == nullptr || due->closes == LastTask::Closes::kNone) return {};
  std::vector<std::shared_ptr<ChunkItem>> items =
      due->closes == LastTask::Closes::kAll ? sessions_.TakeUnfinished() : sessions_.TakeTaught();
  return {items.begin(), items.end()};
}

std::vector<std::shared_ptr<BatchSource>> Head::Borrowers() {
  {
    const MutexLock lock(mutex_);
    const LastTask* const due = DueLastTaskLocked();
    if (due == nullptr || !due->changes_weights) return {};
  }
  std::vector<std::shared_ptr<BatchSource>> students;
  for (std::shared_ptr<Head>& head : environment_.heads()) {
    if (head.get() == this) continue;  // its own tiles are closed by TakeUnfinished, or go with it
    const MutexLock lock(head->mutex_);
    if (head->lifecycle_.alive().ok() && head->sessions_.LearnsInTiles(number_)) {
      students.push_back(std::move(head));
    }
  }
  return students;
}

std::vector<std::shared_ptr<QueuedChunk>> Head::TakeBorrowed(const BatchSource& teacher) {
  const MutexLock lock(mutex_);
  if (!lifecycle_.alive().ok()) return {};
  std::vector<std::shared_ptr<ChunkItem>> items =
      sessions_.TakeTaughtBy(static_cast<const Head&>(teacher).number_);
  return {items.begin(), items.end()};
}

}  // namespace lossd::engine
