// Distillation: the head whose soft targets a chunk wants, and what it takes to be one.
//
// Heads come and go while chunks name them. So that every chunk is counted exactly once all the same, one
// that is rejected and has a teacher is remembered: once the teacher is there its repeat would pass for one
// that was taken. And one that was taken, and whose teacher is gone, is not rejected when it comes again: it
// may be in dW.
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

// Rejected chunks of a lane that are remembered, and with these what is queued.
constexpr size_t kMostRemembered = 1024;

}  // namespace

absl::StatusOr<std::shared_ptr<Head>> Head::FindTeacher(const ChunkDistillation& distillation) const {
  absl::StatusOr<std::shared_ptr<Head>> teacher = environment_.find_head(distillation.teacher);
  if (!teacher.ok()) {
    return MakeError(teacher.status().code(), ReasonOf(teacher.status()), kTeacherField,
                     absl::StrCat(kTeacherField, ": ", teacher.status().message()));
  }
  if (absl::StatusOr<uint64_t> version = (*teacher)->TeacherVersion(); !version.ok()) return version.status();
  return teacher;
}

absl::StatusOr<uint64_t> Head::TeacherVersion() const {
  const std::lock_guard lock(mutex_);
  if (!ended_.ok()) {
    return MakeError(ended_.code(), ReasonOf(ended_), kTeacherField,
                     absl::StrCat(kTeacherField, ": ", ended_.message()));
  }
  if (weight_version_ > 0) return weight_version_;
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kNoWeights, kTeacherField,
                   absl::StrCat(kTeacherField, " is ", config_.name, ", which has no weights yet"));
}

// The version of the weights that these chunks' teacher has, and will have until they are done. All that have
// one have the same: they are of one kind. Without any lock held: the teacher may be this head.
absl::StatusOr<uint64_t> Head::PrepareTeacherOf(const std::vector<std::shared_ptr<QueuedChunk>>& chunks) {
  for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
    const auto& item = static_cast<const ChunkItem&>(*chunk);
    if (item.teacher == nullptr) continue;
    absl::StatusOr<uint64_t> version = item.teacher->TeacherVersion();
    if (!version.ok()) return version;
    absl::Status prepared = backend_->PrepareTeacher(*item.teacher->backend_);
    if (prepared.ok()) return version;
    if (!absl::IsInvalidArgument(prepared)) EndByFailure(prepared);
    return prepared;
  }
  return 0;
}

// Not ok if the stream ends instead of the chunk being rejected.
absl::Status Head::TeacherRefusalLocked(Admission admission, const Chunk& chunk,
                                        const absl::Status& rejection,
                                        const LaneAttachment& attachment) const {
  const Lane& lane = LaneLocked(attachment);
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
  const size_t remembered = LaneLocked(attachment).rejected.size();
  if (remembered < kMostRemembered) return absl::OkStatus();
  const std::string why = rejection.ok() ? "" : absl::StrCat(std::string(rejection.message()), " (and ");
  return PositionErrorLocked(
      absl::StatusCode::kFailedPrecondition, rejection.ok() ? RejectReason::kConflict : ReasonOf(rejection),
      rejection.ok() ? kTeacherField : FieldOf(rejection),
      absl::StrCat(why, "sequence ", chunk.sequence, " was not taken: ", remembered,
                   " chunks of this lane were rejected before; open another session", why.empty() ? "" : ")"),
      attachment.session_id);
}

// Not ok for a repeat that could be computed now but was rejected before.
absl::Status Head::EarlierRejection(const Lane& lane, const Chunk& chunk) {
  if (!AccumulationLedger::WasRejected(lane, chunk.sequence)) return absl::OkStatus();
  const bool distilled = chunk.options.distillation.has_value();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict,
                   distilled ? kTeacherField : "window_token",
                   absl::StrCat("sequence ", chunk.sequence, " was rejected before, when ",
                                distilled ? "it could not be computed with the teacher that there was"
                                          : "there was no place for it",
                                ", and is in no window; send its tokens as another chunk"));
}

const Head::Lane& Head::LaneLocked(const LaneAttachment& attachment) const {
  return ledger_.sessions().find(attachment.session_id)->second.lanes[static_cast<size_t>(attachment.lane)];
}

// Called by the last batch of others, or when the head itself is done.
void Head::Retire(std::function<void()> released) {
  on_unused_ = [this, released = std::move(released)] {
    Release();
    released();
  };
  if (teaching_ == 0) std::exchange(on_unused_, nullptr)();
}

void Head::EndTeaching() {
  if (--teaching_ == 0 && on_unused_) std::exchange(on_unused_, nullptr)();
}

}  // namespace lossd::engine
