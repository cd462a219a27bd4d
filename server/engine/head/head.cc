#include "server/engine/head/head.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/monotonic_clock.h"
#include "server/engine/device/batch_key.h"
#include "server/engine/regions/chunk_regions.h"

namespace lossd::engine {
namespace {

std::atomic<uint64_t> heads_made = 0;

}  // namespace

Head::Head(HeadConfig config, HeadEnvironment environment, std::unique_ptr<HeadBackend> backend,
           std::unique_ptr<MemoryReservation> reservation)
    : config_(std::move(config)),
      second_gradient_(std::move(environment.second_gradient)),
      environment_(std::move(environment)),
      reservation_(std::move(reservation)),
      backend_(std::move(backend)),
      backend_address_(backend_.get()),
      number_(++heads_made),
      logits_rows_(backend_->RowsOfLogits()) {}

Head::~Head() = default;

absl::Status Head::CheckDiscard(DiscardGradient discard) const {
  const std::lock_guard lock(mutex_);
  return CheckDiscardLocked(discard);
}

absl::Status Head::CheckDiscardLocked(DiscardGradient discard) const {
  if (discard == DiscardGradient::kYes || frozen() || ledger_.WindowEmpty()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "discard_gradient",
                   absl::StrCat("the window of head ", config_.name, " holds gradients of ", window_.tokens,
                                " tokens; flush it, or set discard_gradient"));
}

absl::Status Head::MarkDeleted(const absl::Status& status, DiscardGradient discard) {
  const std::lock_guard lock(mutex_);
  if (absl::Status may = CheckDiscardLocked(discard); !may.ok()) return may;
  ended_ = status;
  return absl::OkStatus();
}

void Head::Shutdown(std::function<void()> released) {
  EndStreams();
  environment_.scheduler->Post(
      this, [self = shared_from_this(), released = std::move(released)] { self->Retire(released); });
}

// After ended_ was set.
void Head::EndStreams() {
  std::vector<std::shared_ptr<LaneListener>> listeners;
  absl::Status status;
  {
    const std::lock_guard lock(mutex_);
    status = ended_;
    for (const auto& [key, runtime] : lanes_) {
      WithdrawLocked(key);
      listeners.push_back(DropListenerLocked(key));
    }
    lanes_.clear();
  }
  for (const auto& listener : listeners) {
    if (listener != nullptr) listener->OnEnd(status);
  }
}

void Head::Release() {
  std::shared_ptr<StagedWrite> staged;
  std::unique_ptr<MemoryReservation> reservation;
  std::shared_ptr<Gradient> second;
  const std::unique_ptr<HeadBackend> backend = std::move(backend_);  // goes before its reservation
  std::map<std::string, std::shared_ptr<DeterministicSession>> sessions;
  const std::lock_guard lock(mutex_);
  staged = std::move(staged_);
  sessions = std::exchange(deterministic_, {});
  for (const auto& [id, session] : sessions) Drop(session->memory);
  second = std::move(second_gradient_);
  reservation = std::move(reservation_);
}

void Head::BeginDrain(const absl::Status& status) {
  std::vector<std::function<void()>> waiters;
  {
    const std::lock_guard lock(mutex_);
    draining_ = status;
    waiters = TakeWaitersLocked();
  }
  for (const auto& waiter : waiters) waiter();
}

std::vector<std::function<void()>> Head::TakeWaitersLocked() {
  std::vector<std::function<void()>> waiters;
  for (auto& [key, runtime] : lanes_) {
    if (runtime.resume) waiters.push_back(std::exchange(runtime.resume, nullptr));
  }
  return waiters;
}

std::vector<std::function<void()>> Head::TakeWaitersLocked(const std::string& session_id) {
  std::vector<std::function<void()>> waiters;
  for (auto it = lanes_.lower_bound({session_id, 0}); it != lanes_.end() && it->first.first == session_id;
       ++it) {
    if (it->second.resume) waiters.push_back(std::exchange(it->second.resume, nullptr));
  }
  return waiters;
}

absl::StatusOr<Head::Submission> Head::Submit(const LaneAttachment& lane, Chunk& chunk,
                                              std::function<void()> resume) {
  bool deterministic = false;
  {
    const std::lock_guard lock(mutex_);
    const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
    if (!admission.ok()) return admission.status();
    if (*admission == Admission::kWait) {
      lanes_.at({lane.session_id, lane.lane}).resume = std::move(resume);
      return Submission::kWait;
    }
    deterministic = TilesOfLocked(lane.session_id) != nullptr;
  }
  // The whole content is checked before any of it is scheduled, and without the lock: it takes time. Only
  // this stream moves its lane on, so the sequence is still right afterwards; everything else is looked at
  // again.
  std::shared_ptr<Head> teacher;
  absl::Status rejection = CheckContent(chunk, &teacher);
  if (rejection.ok() && deterministic) KeepOperands(chunk);

  const std::lock_guard lock(mutex_);
  const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kWait) {
    lanes_.at({lane.session_id, lane.lane}).resume = std::move(resume);
    return Submission::kWait;
  }
  const bool adds = *admission == Admission::kTake && chunk.mode == ComputeMode::kLossAndGradients;
  DeterministicTiles* tiles = adds ? TilesOfLocked(lane.session_id) : nullptr;
  // Whether a repeat could be computed though the first one was not: then it must not pass for one that was.
  bool remembered = chunk.options.distillation.has_value();
  if (tiles != nullptr && rejection.ok()) {
    rejection = CheckPlaceLocked(*tiles, chunk);
    remembered = remembered || !rejection.ok();
  }
  if (absl::Status refusal = RefusalLocked(*admission, chunk, rejection, remembered, lane); !refusal.ok()) {
    return refusal;
  }
  if (*admission == Admission::kRepeat && rejection.ok()) {
    rejection = EarlierRejection(LaneLocked(lane), chunk);
  }
  auto item = std::make_shared<ChunkItem>();
  item->numbered = *admission == Admission::kTake;
  item->remembered = remembered;
  if (!rejection.ok()) {
    item->kind = ItemKind::kRejected;
    item->rejection = std::move(rejection);
  } else if (!item->numbered) {
    item->kind = ItemKind::kRepeat;
  } else if (chunk.mode == ComputeMode::kLossOnly) {
    item->kind = ItemKind::kLossOnly;
  } else if (frozen()) {
    item->kind = ItemKind::kInputGradient;
  } else if (tiles != nullptr) {
    item->kind = ItemKind::kPlaced;
    item->deterministic = deterministic_.at(lane.session_id);
    item->kept_bytes = DeterministicTiles::Bytes(chunk);
    tiles->Claim(chunk);
    item->deterministic->waiting_since = absl::InfiniteFuture();
  }
  if (item->kind != ItemKind::kRejected) {
    item->row_kind = teacher == nullptr
                         ? KindOf(chunk, config_)
                         : KindOf(chunk, config_, &teacher->config_, teacher->backend_address_);
    item->row_kind.gradient = GradientOfLocked(chunk.generation);
    item->rows = chunk.tokens;
    if (teacher != nullptr) item->row_kind.teacher.head_number = teacher->number_;
    item->teacher = std::move(teacher);
  }
  item->session_id = lane.session_id;
  item->lane = lane.lane;
  item->chunk = std::move(chunk);
  if (item->kind == ItemKind::kRejected) item->chunk.DropPayload();
  EnqueueLocked(std::move(item));
  return Submission::kTaken;
}

// Everything but the chunk's place; finds what it names.
absl::Status Head::CheckContent(Chunk& chunk, std::shared_ptr<Head>* teacher) const {
  const HeadConfig* teacher_config = nullptr;
  if (chunk.decode_status.ok() && chunk.options.distillation.has_value()) {
    absl::StatusOr<std::shared_ptr<Head>> found = FindTeacher(*chunk.options.distillation);
    if (!found.ok()) return found.status();
    *teacher = *std::move(found);
    teacher_config = &(*teacher)->config_;
  }
  absl::Status status =
      ResolveRegions(chunk, config_, environment_.limits, *environment_.regions, teacher_config);
  if (status.ok()) status = ValidateContent(chunk, config_, environment_.limits, teacher_config);
  return status;
}

// Not ok for chunks whose answer, lost and asked for again, would later be another one.
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
  if (admission == Admission::kTake && rejection.ok() && demanded > weight_version_) {
    // Not rejected: once the weights are of that version, a repeat would look as if it had been taken.
    return PositionErrorLocked(
        absl::StatusCode::kFailedPrecondition, RejectReason::kWeightVersion, "options.weight_version",
        absl::StrCat("options.weight_version is ", demanded, "; the weights are of version ", weight_version_,
                     " yet, and sequence ", chunk.sequence, " was not taken"),
        session_id);
  }
  return absl::OkStatus();
}

absl::StatusOr<Head::Admission> Head::AdmitLocked(const LaneAttachment& attachment, const Chunk& chunk) {
  if (!ended_.ok()) return ended_;
  if (!draining_.ok()) return draining_;
  const auto runtime = lanes_.find({attachment.session_id, attachment.lane});
  AccumulationLedger::Session* session = ledger_.Find(attachment.session_id);
  if (runtime == lanes_.end() || session == nullptr || runtime->second.epoch != attachment.epoch) {
    return MakeError(absl::StatusCode::kAborted, RejectReason::kFenced, "lane",
                     absl::StrCat("this stream no longer holds lane ", attachment.lane));
  }
  const Lane& lane = session->lanes[static_cast<size_t>(attachment.lane)];
  const AccumulationLedger::Place place = AccumulationLedger::Classify(lane, chunk.sequence);
  if (chunk.sequence == 0 || place == AccumulationLedger::Place::kGap) {
    return PositionErrorLocked(absl::StatusCode::kFailedPrecondition, RejectReason::kGap, "sequence",
                               absl::StrCat("sequence is ", chunk.sequence, "; lane ", attachment.lane,
                                            " expects ", lane.accepted + 1),
                               attachment.session_id);
  }
  if (place == AccumulationLedger::Place::kRepeat) return Admission::kRepeat;
  const uint64_t current = window_.generation;
  if (window_.state == WindowState::kOpen) {
    if (chunk.generation == current) {
      return MustWaitForRoomLocked(attachment, chunk) ? Admission::kWait : Admission::kTake;
    }
    return GenerationErrorLocked(attachment, chunk.generation);
  }
  if (chunk.generation == current + 1) {
    // A deterministic session has one gradient of its own, which the frozen window needs.
    const bool next = InNextWindowLocked(chunk.generation) && second_gradient_ != nullptr &&
                      TilesOfLocked(attachment.session_id) == nullptr;
    return next ? Admission::kTake : Admission::kWait;
  }
  // While freezing it is not yet known whether the window stays open.
  if (chunk.generation == current && window_.state == WindowState::kFreezing) return Admission::kWait;
  return GenerationErrorLocked(attachment, chunk.generation);
}

absl::Status Head::GenerationErrorLocked(const LaneAttachment& attachment, uint64_t named) const {
  std::string message = absl::StrCat("generation is ", named, "; the server is at ", window_.generation);
  if (window_.state == WindowState::kFrozen) {
    absl::StrAppend(&message, ", which is frozen by a flush (chunks of ", window_.generation + 1,
                    second_gradient_ != nullptr ? " are taken)" : " wait for its commit)");
  }
  return PositionErrorLocked(absl::StatusCode::kAborted, RejectReason::kGeneration, "generation", message,
                             attachment.session_id);
}

absl::Status Head::PositionErrorLocked(absl::StatusCode code, RejectReason reason, absl::string_view field,
                                       absl::string_view message, const std::string& session_id) const {
  Position position{environment_.incarnation, window_.generation, {}};
  const auto session = ledger_.sessions().find(session_id);
  if (session != ledger_.sessions().end()) {
    const std::vector<Lane>& lanes = session->second.lanes;
    for (size_t i = 0; i < lanes.size(); ++i) {
      position.replay.push_back({static_cast<int32_t>(i), lanes[i].accepted + 1});
    }
  }
  absl::Status status = MakeError(code, reason, field, message);
  AttachPosition(&status, position);
  return status;
}

void Head::EnqueueLocked(std::shared_ptr<ChunkItem> item) {
  AccumulationLedger::Session& session = *ledger_.Find(item->session_id);
  session.last_active = MonotonicNow();
  item->session = session.number;
  if (item->numbered) AccumulationLedger::Accept(session.lanes[static_cast<size_t>(item->lane)]);
  LaneRuntime& runtime = lanes_.at({item->session_id, item->lane});
  item->listener = runtime.listener;
  item->accepted = absl::Now();
  runtime.queued.push_back(item);
  ++environment_.counters->queued_chunks;
  ++counters_.queued_chunks;
  environment_.scheduler->Submit(shared_from_this(), std::move(item));
}

}  // namespace lossd::engine
