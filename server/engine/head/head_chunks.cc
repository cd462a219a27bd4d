// Chunks of a head as streams submit them: whether they are taken, and as what.
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/chunk/held_hidden_states.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/batch_key.h"
#include "server/engine/device/staging.h"
#include "server/engine/head/head.h"
#include "server/engine/regions/chunk_regions.h"

namespace lossd::engine {
namespace {

// A tile may outlive its chunks' answers, after which a client may write to its region again.
void KeepOperands(Chunk& chunk) {
  for (Payload* const rows : {&chunk.hidden_states, &chunk.teacher_hidden}) {
    const bool in_region = rows->size() > 0 && rows->kept_bytes() == 0;
    if (in_region && rows->place() != MemoryPlace::kDevice) *rows = rows->Gathered();
  }
}

// Whether a server with other devices, or more memory for them, would take the chunk: a head may come to one
// with its sessions.
bool IsOfThisServer(const absl::Status& rejection, const Chunk& chunk) {
  if (rejection.ok() || chunk.lists.use == ChunkLists::Use::kNone) return false;
  const bool too_long = ReasonOf(rejection) == RejectReason::kChunkTooLarge;
  return absl::IsUnimplemented(rejection) || (too_long && FieldOf(rejection) == FieldOf(chunk.lists));
}

// What can only be done with a chunk whose tensors are at the leader.
absl::Status CheckHolder(const Chunk& chunk, bool deterministic) {
  if (chunk.holder() == 0) return absl::OkStatus();
  const bool in_region = chunk.hidden_region.has_value() || chunk.teacher_hidden_region.has_value() ||
                         chunk.dx_region.has_value();
  if (!in_region && !deterministic) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kFailedPrecondition, in_region ? RejectReason::kRegion : RejectReason::kOption,
      "hidden_states",
      absl::StrCat(in_region ? "a chunk that names a region" : "a chunk of a deterministic session",
                   " came to rank ", chunk.holder(), "; it has to be sent to the server's own address"));
}

}  // namespace

absl::StatusOr<Head::Submission> Head::Submit(const LaneAttachment& lane, Chunk& chunk,
                                              std::function<void()> resume) {
  bool deterministic = false;
  {
    const MutexLock lock(mutex_);
    const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
    if (!admission.ok()) return admission.status();
    if (*admission == Admission::kWait) {
      sessions_.Wait(lane, std::move(resume));
      return Submission::kWait;
    }
    deterministic = sessions_.IsDeterministic(lane.session_id);
  }
  if (absl::Status refusal = CheckHolder(chunk, deterministic); !refusal.ok()) return refusal;
  if (absl::Status refusal = TakeHidden(lane, chunk, deterministic); !refusal.ok()) return refusal;
  // The whole content is checked before any of it is scheduled, and without the lock: it takes time. Only
  // this stream moves its lane on, so the sequence is still right afterwards; everything else is looked at
  // again.
  Taught taught;
  absl::Status rejection = CheckContent(chunk, &taught);
  if (absl::IsUnavailable(rejection) && chunk.options.distillation.has_value() &&
      environment_.await_head != nullptr) {
    if (AwaitTeacher(lane, chunk.options.distillation->teacher, resume)) return Submission::kWait;
    rejection = CheckContent(chunk, &taught);  // it may have come back meanwhile
    // Or it is on its way to where it is parked. To be rejected would be for good: the stream ends, and the
    // chunk comes again.
    if (absl::IsUnavailable(rejection)) return rejection;
  }
  std::optional<HeldHiddenStates::Piece> held;
  if (rejection.ok()) held = CopyHidden(lane, chunk);
  if (rejection.ok() && deterministic) KeepOperands(chunk);

  const MutexLock lock(mutex_);
  const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kWait) {
    sessions_.Wait(lane, std::move(resume));
    return Submission::kWait;
  }
  // A chunk that is rejected for a reason that may go away is remembered: otherwise its repeat would pass for
  // one that was taken.
  bool remembered = chunk.options.distillation.has_value() || IsOfThisServer(rejection, chunk);
  const bool placed = *admission == Admission::kTake && HasWeightGradient(chunk.mode) &&
                      sessions_.IsDeterministic(lane.session_id);
  if (placed && rejection.ok()) {
    rejection = MakeRoomLocked(lane.session_id, chunk);
    const bool of_lists = chunk.lists.use != ChunkLists::Use::kNone;
    if (of_lists && absl::IsResourceExhausted(rejection) && sessions_.MakesRoom(lane.session_id)) {
      sessions_.Wait(lane, std::move(resume));
      return Submission::kWait;
    }
    remembered = remembered || !rejection.ok();
  }
  if (absl::Status refusal = RefusalLocked(*admission, chunk, rejection, remembered, lane); !refusal.ok()) {
    return refusal;
  }
  if (*admission == Admission::kRepeat && rejection.ok()) {
    rejection = sessions_.EarlierRejection(lane.session_id, lane.lane, chunk);
  }
  if (absl::Status one = sessions_.CheckHolder(lane.session_id, lane.lane, chunk.holder()); !one.ok()) {
    return one;
  }
  // Now that the stream holds its lane: rows of another would come in the place of its successor's.
  chunk.hidden_held = held.has_value();
  if (held.has_value()) lane.held->Add(*std::move(held));
  // Chunks are not to go apart for what the device cannot do.
  if (!holds_ || chunk.lists.use != ChunkLists::Use::kNone) chunk.hold = {};
  std::shared_ptr<ChunkItem> item = MakeItemLocked(lane, *admission, chunk, std::move(rejection), taught);
  item->remembered = remembered;
  sessions_.Enqueue(item);
  environment_.scheduler->Submit(shared_from_this(), std::move(item));
  return Submission::kTaken;
}

// A chunk that was taken, and where its dW goes. The teacher of a rejected one stays the caller's: it may be
// the last owner of a deleted head, which is not to be destroyed under the lock.
std::shared_ptr<ChunkItem> Head::MakeItemLocked(const LaneAttachment& lane, Admission admission, Chunk& chunk,
                                                absl::Status rejection, Taught& taught) {
  auto item = std::make_shared<ChunkItem>();
  item->session_id = lane.session_id;
  item->lane = lane.lane;
  item->repeat = admission == Admission::kRepeat;
  item->batch_key.holder = chunk.holder();  // a rejected one keeps its place among those of its lane, too
  if (!rejection.ok()) {
    item->chunk = std::move(chunk);
    item->Reject(std::move(rejection));
    return item;
  }
  const bool adds = !item->repeat && !frozen() && HasWeightGradient(chunk.mode);
  if (adds && sessions_.IsDeterministic(lane.session_id)) {
    sessions_.ClaimPlace(chunk, item.get());
  } else if (adds) {
    item->weight_gradient = ChunkItem::WeightGradient::kWithBatch;
  }
  const std::shared_ptr<Head>& teacher = taught.teacher;
  item->batch_key = teacher == nullptr ? KindOf(chunk, config_)
                                       : KindOf(chunk, config_, &teacher->config_, teacher->backend_address_);
  sessions_.FixSegments(lane.session_id, &item->batch_key);
  item->batch_key.gradient = gradients_.Of(window_.InSecond(chunk.generation));
  item->rows = chunk.tokens;
  if (teacher != nullptr) item->batch_key.teacher.head_number = teacher->number_;
  item->teacher = std::move(taught.teacher);
  item->lesson = std::move(taught.lesson);
  item->chunk = std::move(chunk);
  sessions_.NoteTeacher(*item);
  return item;
}

absl::Status Head::MakeRoomLocked(const std::string& session_id, const Chunk& chunk) {
  if (absl::Status place = sessions_.CheckPlace(session_id, chunk); !place.ok()) return place;
  const int64_t missing = sessions_.MissingFor(session_id, chunk);
  if (missing == 0) return absl::OkStatus();
  const bool taught = chunk.options.distillation.has_value();
  absl::StatusOr<std::unique_ptr<MemoryReservation>> memory =
      environment_.budget->Reserve(config_.name,
                                   absl::StrCat(taught ? "soft targets" : "lists of tokens",
                                                " in a deterministic session of head ", config_.name),
                                   {{"tiles", missing}});
  if (!memory.ok()) {
    return MakeError(memory.status().code(), ReasonOf(memory.status()),
                     taught ? "teacher_hidden_states" : FieldOf(chunk.lists), memory.status().message());
  }
  sessions_.WidenFor(session_id, chunk, *std::move(memory));
  return absl::OkStatus();
}

// Never a rejection: what is held may be gone when the chunk comes again, or a copy of the chunk may bring
// its hidden states along.
absl::Status Head::TakeHidden(const LaneAttachment& lane, Chunk& chunk, bool deterministic) const {
  if (!TakesHeld(chunk)) return absl::OkStatus();
  // Whatever is wrong with the rest of it is found with its content.
  const bool sane = chunk.decode_status.ok() && ValidateTokens(chunk, config_, environment_.limits).ok() &&
                    ValidateLabelBytes(chunk).ok() && chunk.hold.number != 0;
  if (!sane) return absl::OkStatus();
  absl::Status missing = absl::NotFoundError("the session holds none here");
  if (lane.held != nullptr && chunk.holder() == 0) missing = lane.held->Take(config_.hidden_size, &chunk);
  if (missing.ok()) {
    // A tile may keep a part of them for longer than the rest, which would count as held.
    chunk.hidden_states = deterministic ? chunk.hidden_states.Gathered()
                                        : Staged(std::move(chunk.hidden_states), environment_.device);
    environment_.counters->hidden_states_taken += static_cast<uint64_t>(chunk.tokens);
    return absl::OkStatus();
  }
  environment_.counters->hidden_states_gone += static_cast<uint64_t>(chunk.tokens);
  const std::string message =
      absl::StrCat("sequence ", chunk.sequence,
                   " is to take hidden states that are held: ", std::string(missing.message()),
                   "; send it again with its hidden_states");
  const MutexLock lock(mutex_);
  absl::Status gone = PositionErrorLocked(absl::StatusCode::kFailedPrecondition, RejectReason::kUnknownHold,
                                          "hold.hidden_states", message, lane.session_id);
  Position position = PositionOf(gone).value_or(Position());
  position.hidden_states_gone = true;
  AttachPosition(&gone, position);
  return gone;
}

// What is to be held of a chunk whose content was checked, if it comes in its message and there is room.
std::optional<HeldHiddenStates::Piece> Head::CopyHidden(const LaneAttachment& lane,
                                                        const Chunk& chunk) const {
  const bool in_message = chunk.hidden_states.kept_bytes() > 0;  // not in a region or at another rank
  const bool wanted = chunk.holds_hidden && !HasWeightGradient(chunk.mode);
  if (!wanted || !in_message || lane.held == nullptr) return std::nullopt;
  std::optional<HeldHiddenStates::Piece> piece = lane.held->Copy(chunk);
  Counters& counters = *environment_.counters;
  (piece.has_value() ? counters.hidden_states_held : counters.hidden_states_not_held) +=
      static_cast<uint64_t>(chunk.tokens);
  return piece;
}

// Checks everything but the chunk's place, and finds its teacher and its regions.
absl::Status Head::CheckContent(Chunk& chunk, Taught* taught) const {
  const HeadConfig* teacher_config = nullptr;
  if (chunk.decode_status.ok() && chunk.options.distillation.has_value()) {
    absl::StatusOr<Taught> found = FindTeacher(*chunk.options.distillation);
    if (!found.ok()) return found.status();
    *taught = *std::move(found);
    teacher_config = &taught->teacher->config_;
  }
  absl::Status status =
      ResolveRegions(chunk, config_, environment_.limits, *environment_.regions, teacher_config);
  if (status.ok()) status = ValidateContent(chunk, config_, environment_.limits, teacher_config);
  const bool has_lists = chunk.lists.use != ChunkLists::Use::kNone;
  if (status.ok() && has_lists) status = CheckListsHere(chunk);
  if (status.ok()) SortTargets(chunk);
  return status;
}

absl::Status Head::CheckListsHere(const Chunk& chunk) const {
  const char* const field = FieldOf(chunk.lists);
  const auto unimplemented = [&](absl::string_view why) {
    return MakeError(absl::StatusCode::kUnimplemented, RejectReason::kOption, field,
                     absl::StrCat(field, " is set, but head ", config_.name, " ", why));
  };
  if (!environment_.device->TakesTokenLists()) {
    return unimplemented("lies over several devices; use a server of one device");
  }
  if (chunk.lists.use == ChunkLists::Use::kTargets) {
    return config_.fixed_segments ? unimplemented("has fixed_segments; use a head without")
                                  : absl::OkStatus();
  }
  if (const int64_t longest = LongestList(chunk); longest > longest_list_) {
    return Invalid(RejectReason::kChunkTooLarge, field,
                   absl::StrCat(field, " has a list of ", longest,
                                " tokens, which the server's workspace has no room for; raise "
                                "--workspace_bytes"));
  }
  return absl::OkStatus();
}

// Not ok for a chunk that must not be answered: if the answer were lost, a repeat could get another one.
absl::Status Head::RefusalLocked(Admission admission, const Chunk& chunk, const absl::Status& rejection,
                                 bool remembered, const LaneAttachment& attachment) const {
  const std::string& session_id = attachment.session_id;
  if (admission == Admission::kTake && remembered) {
    absl::Status room = CheckRoomForRejectionLocked(chunk, rejection, attachment);
    if (!room.ok()) return room;
  }
  if (chunk.options.distillation.has_value() && !rejection.ok()) {
    return TeacherRefusalLocked(admission, chunk, rejection, attachment);
  }
  if (admission == Admission::kRepeat && !rejection.ok() &&
      ReasonOf(rejection) == RejectReason::kUnknownRegion) {
    // Not rejected: that would say that it is in no window.
    return PositionErrorLocked(absl::StatusCode::kFailedPrecondition, RejectReason::kUnknownRegion,
                               FieldOf(rejection),
                               absl::StrCat("sequence ", chunk.sequence,
                                            " was taken before and cannot be computed again: its region is "
                                            "gone"),
                               session_id);
  }
  const uint64_t demanded = chunk.options.weight_version.value_or(0);
  if (admission == Admission::kTake && rejection.ok() && demanded > weights_.version()) {
    // Not rejected: once the weights are of that version, a repeat would look as if it had been taken.
    return PositionErrorLocked(
        absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, "options.weight_version",
        absl::StrCat("options.weight_version is ", demanded, "; the weights are of version ",
                     weights_.version(), " yet, and sequence ", chunk.sequence, " was not taken"),
        session_id);
  }
  return absl::OkStatus();
}

absl::StatusOr<Head::Admission> Head::AdmitLocked(const LaneAttachment& attachment, const Chunk& chunk) {
  if (!lifecycle_.admits().ok()) return lifecycle_.admits();
  const absl::StatusOr<const Lane*> lane = sessions_.Held(attachment);
  if (!lane.ok()) return lane.status();
  const AccumulationLedger::Place place = AccumulationLedger::Classify(**lane, chunk.sequence);
  if (chunk.sequence == 0 || place == AccumulationLedger::Place::kGap) {
    return PositionErrorLocked(absl::StatusCode::kFailedPrecondition, RejectReason::kGap, "sequence",
                               absl::StrCat("sequence is ", chunk.sequence, "; lane ", attachment.lane,
                                            " expects ", (*lane)->accepted + 1),
                               attachment.session_id);
  }
  // A restore discards chunks that come meanwhile, and its paused line would keep their leases of a teacher.
  if (lifecycle_.restoring()) return Admission::kWait;
  if (place == AccumulationLedger::Place::kRepeat) return Admission::kRepeat;
  if (lifecycle_.deleting()) return Admission::kWait;
  switch (window_.TurnOf(chunk.generation)) {
    case GradientWindow::Turn::kNow:
      return sessions_.MustWaitForRoom(attachment, chunk) ? Admission::kWait : Admission::kTake;
    case GradientWindow::Turn::kNext:
      // A deterministic session has one gradient of its own, which the sealed window needs.
      return sessions_.IsDeterministic(attachment.session_id) ? Admission::kWait : Admission::kTake;
    case GradientWindow::Turn::kWait:
      return Admission::kWait;
    case GradientWindow::Turn::kNever:
      break;
  }
  return GenerationErrorLocked(attachment, chunk.generation);
}

absl::Status Head::GenerationErrorLocked(const LaneAttachment& attachment, uint64_t named) const {
  const uint64_t current = window_.generation();
  std::string message = absl::StrCat("generation is ", named, "; the server is at ", current);
  if (window_.state() == WindowState::kSealed) {
    absl::StrAppend(&message, ", which is sealed by a flush (chunks of ", current + 1,
                    gradients_.has_second() ? " are taken)" : " wait for its commit)");
  }
  return PositionErrorLocked(absl::StatusCode::kAborted, RejectReason::kGeneration, "generation", message,
                             attachment.session_id);
}

absl::Status Head::PositionErrorLocked(absl::StatusCode code, RejectReason reason, absl::string_view field,
                                       absl::string_view message, const std::string& session_id) const {
  absl::Status status = MakeError(code, reason, field, message);
  AttachPosition(&status, {environment_.incarnation, window_.generation(), sessions_.Replay(session_id)});
  return status;
}

}  // namespace lossd::engine
