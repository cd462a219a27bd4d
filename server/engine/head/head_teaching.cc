// Distillation: finds the head that teaches a chunk, and checks whether it can.
//
// Heads come and go while chunks name them. Every chunk must be counted exactly once all the same. So a
// rejected chunk with a teacher is remembered: once the teacher is there, its repeat would pass for a chunk
// that was taken. And a chunk that was taken is not rejected when it comes again after its teacher has gone:
// it may be in dW.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// Once a lane has this many remembered chunks it takes no more that may have to be remembered. Chunks that
// are queued by then can come on top.
constexpr size_t kMostRemembered = 1024;

}  // namespace

absl::StatusOr<Head::Taught> Head::FindTeacher(const ChunkDistillation& distillation) const {
  absl::StatusOr<std::shared_ptr<Head>> teacher = environment_.find_head(distillation.teacher);
  if (!teacher.ok()) {
    return MakeError(teacher.status().code(), ReasonOf(teacher.status()), kTeacherField,
                     absl::StrCat(kTeacherField, ": ", teacher.status().message()));
  }
  absl::StatusOr<std::shared_ptr<const void>> lesson = (*teacher)->BeginLesson();
  if (!lesson.ok()) return lesson.status();
  return Taught{*std::move(teacher), *std::move(lesson)};
}

absl::StatusOr<std::shared_ptr<const void>> Head::BeginLesson() {
  const MutexLock lock(mutex_);
  if (absl::Status teaches = CheckTeachesLocked(); !teaches.ok()) return teaches;
  if (absl::StatusOr<uint64_t> version = TeacherVersionLocked(); !version.ok()) return version.status();
  return lessons_->Take();
}

bool Head::AwaitLessons(const Student& student) {
  const MutexLock lock(mutex_);
  if (CheckTeachesLocked().ok()) return false;
  students_.insert_or_assign(student.session_id, student);
  return true;
}

void Student::Resume() const {
  if (const std::shared_ptr<Head> waits = head.lock(); waits != nullptr) waits->ResumeSession(session_id);
}

// The chunk waits in its own head first, since the teacher may resume it at once.
bool Head::AwaitTeacher(const LaneAttachment& lane, const std::string& teacher,
                        const std::function<void()>& resume) {
  {
    const MutexLock lock(mutex_);
    if (!sessions_.Held(lane).ok()) return false;
    sessions_.Wait(lane, resume);
  }
  if (environment_.await_head(teacher, {weak_from_this(), lane.session_id})) return true;
  const MutexLock lock(mutex_);
  return !sessions_.StopWaiting(lane);
}

// Replicas change weights, or put them back, in several tasks of the device, and batches of other heads may
// run in between. So no lesson begins meanwhile, and those that have begun are over before.
absl::Status Head::CheckTeachesLocked() const {
  if (!environment_.place.shared() || !lifecycle_.alive().ok()) return absl::OkStatus();
  const bool changes = window_.state() == WindowState::kSealing && ChangesWeights(window_.by());
  if (!changes && lifecycle_.may_end_window().ok()) return absl::OkStatus();
  const std::string why = changes ? "its weights are being changed at all replicas"
                                  : std::string(lifecycle_.may_end_window().message());
  return MakeError(
      absl::StatusCode::kUnavailable, RejectReason::kConflict, kTeacherField,
      absl::StrCat(kTeacherField, " is ", config_.name, ", and ", why, "; send the chunk again"));
}

absl::StatusOr<uint64_t> Head::TeacherVersion() const {
  const MutexLock lock(mutex_);
  return TeacherVersionLocked();
}

absl::StatusOr<uint64_t> Head::TeacherVersionLocked() const {
  if (const absl::Status& ended = lifecycle_.alive(); !ended.ok()) {
    return MakeError(ended.code(), ReasonOf(ended), kTeacherField,
                     absl::StrCat(kTeacherField, ": ", ended.message()));
  }
  if (weights_.version() > 0) return weights_.version();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, kTeacherField,
                   absl::StrCat(kTeacherField, " is ", config_.name, ", which has no weights yet"));
}

// Returns the version of the teacher's weights, which stays until the chunks are done. All of these chunks
// with a teacher have the same, since a batch is of one kind. Called without a lock: the teacher may be this
// head.
absl::StatusOr<uint64_t> Head::PrepareTeacherOf(const std::vector<std::shared_ptr<QueuedChunk>>& chunks) {
  for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
    const auto& item = static_cast<const ChunkItem&>(*chunk);
    // What a piece takes was prepared for its chunks, with the weights that they had: until it is done the
    // teacher keeps these, even if it was deleted (BatchSource::Borrowers).
    if (item.teacher == nullptr || item.is_piece()) continue;
    absl::StatusOr<uint64_t> version = item.teacher->TeacherVersion();
    if (!version.ok()) return version;
    absl::Status prepared = backend_->PrepareTeacher(*item.teacher->backend_);
    if (prepared.ok()) return version;
    if (!absl::IsInvalidArgument(prepared)) OnDeviceFailure(prepared);
    return prepared;
  }
  return 0;
}

// Not ok if the stream must end because the chunk cannot be rejected: it was taken before.
absl::Status Head::TeacherRefusalLocked(Admission admission, const Chunk& chunk,
                                        const absl::Status& rejection,
                                        const LaneAttachment& attachment) const {
  const Lane& lane = sessions_.LaneOf(attachment.session_id, attachment.lane);
  if (admission == Admission::kRepeat && !AccumulationLedger::WasRejected(lane, chunk.sequence)) {
    return PositionErrorLocked(
        absl::StatusCode::kFailedPrecondition, ReasonOf(rejection), FieldOf(rejection),
        absl::StrCat("sequence ", chunk.sequence,
                     " was taken before and cannot be computed again: ", std::string(rejection.message())),
        attachment.session_id);
  }
  return absl::OkStatus();
}

// Not ok if there is no room to remember the chunk, were it rejected, now or when it is started.
absl::Status Head::CheckRoomForRejectionLocked(const Chunk& chunk, const absl::Status& rejection,
                                               const LaneAttachment& attachment) const {
  const size_t remembered = sessions_.LaneOf(attachment.session_id, attachment.lane).rejected.size();
  if (remembered < kMostRemembered) return absl::OkStatus();
  const std::string why = rejection.ok() ? "" : absl::StrCat(std::string(rejection.message()), " (and ");
  return PositionErrorLocked(
      absl::StatusCode::kFailedPrecondition, rejection.ok() ? RejectReason::kConflict : ReasonOf(rejection),
      rejection.ok() ? kTeacherField : FieldOf(rejection),
      absl::StrCat(why, "sequence ", chunk.sequence, " was not taken: ", remembered,
                   " chunks of this lane were rejected before; open another session", why.empty() ? "" : ")"),
      attachment.session_id);
}

}  // namespace lossd::engine
