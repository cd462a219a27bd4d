#include "server/engine/head.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/errors.h"

namespace lossd::engine {

Head::Head(HeadConfig config, HeadEnvironment environment, std::unique_ptr<HeadBackend> backend,
           std::unique_ptr<MemoryReservation> reservation)
    : config_(std::move(config)),
      environment_(std::move(environment)),
      reservation_(std::move(reservation)),
      backend_(std::move(backend)) {}

Head::~Head() = default;

HeadInfo Head::Info() const {
  const std::lock_guard lock(mutex_);
  HeadInfo info;
  info.config = config_;
  info.weight_version = weight_version_;
  info.generation = window_.generation;
  info.window_state = window_.state;
  info.window_tokens = window_.tokens;
  info.window_marks = ledger_.WindowMarks();
  if (reservation_ != nullptr) info.memory = reservation_->plan();
  info.open_sessions = ledger_.open_sessions();
  return info;
}

absl::Status Head::MarkDeleted(const absl::Status& status, DiscardGradient discard) {
  const std::lock_guard lock(mutex_);
  if (discard == DiscardGradient::kNo && !ledger_.WindowEmpty()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "discard_gradient",
                     absl::StrCat("the window of head ", config_.name, " holds gradients of ", window_.tokens,
                                  " tokens; flush it, or set discard_gradient"));
  }
  ended_ = status;
  return absl::OkStatus();
}

void Head::Shutdown(std::function<void()> released) {
  EndStreams();
  environment_.scheduler->Post([self = shared_from_this(), released = std::move(released)] {
    self->Release();
    released();
  });
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
  const std::unique_ptr<HeadBackend> backend = std::move(backend_);  // goes before its reservation
  const std::lock_guard lock(mutex_);
  staged = std::move(staged_);
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

absl::StatusOr<Head::Submission> Head::Submit(const LaneAttachment& lane, Chunk& chunk,
                                              std::function<void()> resume) {
  {
    const std::lock_guard lock(mutex_);
    const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
    if (!admission.ok()) return admission.status();
    if (*admission == Admission::kWait) {
      lanes_.at({lane.session_id, lane.lane}).resume = std::move(resume);
      return Submission::kWait;
    }
  }
  // The whole content is checked before any of it is scheduled, and without the lock: it takes time. Only
  // this stream moves its lane on, so the sequence is still right afterwards; everything else is looked at
  // again.
  absl::Status rejection = ValidateContent(chunk, config_, environment_.limits);

  const std::lock_guard lock(mutex_);
  const absl::StatusOr<Admission> admission = AdmitLocked(lane, chunk);
  if (!admission.ok()) return admission.status();
  if (*admission == Admission::kWait) {
    lanes_.at({lane.session_id, lane.lane}).resume = std::move(resume);
    return Submission::kWait;
  }
  auto item = std::make_shared<ChunkItem>();
  item->numbered = *admission == Admission::kTake;
  if (!rejection.ok()) {
    item->kind = ItemKind::kRejected;
    item->rejection = std::move(rejection);
  } else if (!item->numbered) {
    item->kind = ItemKind::kRepeat;
  } else if (chunk.mode == ComputeMode::kLossOnly) {
    item->kind = ItemKind::kLossOnly;
  }
  item->session_id = lane.session_id;
  item->lane = lane.lane;
  item->chunk = std::move(chunk);
  EnqueueLocked(std::move(item));
  return Submission::kTaken;
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
    if (chunk.generation == current) return Admission::kTake;
    return GenerationErrorLocked(attachment, chunk.generation);
  }
  if (chunk.generation == current + 1) return Admission::kWait;
  // While freezing it is not yet known whether the window stays open.
  if (chunk.generation == current && window_.state == WindowState::kFreezing) return Admission::kWait;
  return GenerationErrorLocked(attachment, chunk.generation);
}

absl::Status Head::GenerationErrorLocked(const LaneAttachment& attachment, uint64_t named) const {
  std::string message = absl::StrCat("generation is ", named, "; the server is at ", window_.generation);
  if (window_.state == WindowState::kFrozen) {
    absl::StrAppend(&message, ", which is frozen by a flush (chunks of ", window_.generation + 1,
                    " wait for its commit)");
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
  session.last_active = absl::Now();
  if (item->numbered) AccumulationLedger::Accept(session.lanes[static_cast<size_t>(item->lane)]);
  LaneRuntime& runtime = lanes_.at({item->session_id, item->lane});
  item->listener = runtime.listener;
  item->accepted = absl::Now();
  runtime.queued.push_back(item);
  ++environment_.counters->queued_chunks;
  environment_.scheduler->Post([self = shared_from_this(), item = std::move(item)] { self->Process(item); });
}

void Head::Process(const std::shared_ptr<ChunkItem>& item) {
  if (!Start(*item)) return;
  ChunkAnswer answer;
  answer.sequence = item->chunk.sequence;
  answer.first_token = item->chunk.first_token;
  answer.tokens = item->chunk.tokens;
  if (item->kind == ItemKind::kRejected) {
    answer.disposition = Disposition::kRejected;
    answer.error = item->rejection;
    environment_.counters->Reject(ReasonOf(item->rejection));
    ++environment_.counters->chunks_rejected;
    if (item->listener != nullptr) item->listener->OnAnswer(std::move(answer));
    Finish(*item, 0);
    return;
  }
  Compute(*item, std::move(answer));
}

bool Head::Start(ChunkItem& item) {
  const std::lock_guard lock(mutex_);
  if (item.state == ItemState::kWithdrawn) return false;
  item.state = ItemState::kStarted;
  --environment_.counters->queued_chunks;
  lanes_.at({item.session_id, item.lane}).queued.pop_front();
  if (item.numbered) {
    AccumulationLedger::Start(ledger_.Find(item.session_id)->lanes[static_cast<size_t>(item.lane)]);
  }
  return true;
}

void Head::Compute(ChunkItem& item, ChunkAnswer answer) {
  const Chunk& chunk = item.chunk;
  const absl::Time started = absl::Now();
  absl::Time answered = started;
  environment_.counters->queue_seconds.Observe(absl::ToDoubleSeconds(started - item.accepted));
  answer.disposition = item.kind == ItemKind::kRepeat ? Disposition::kRepeated : Disposition::kAccumulated;
  answer.weight_version = weight_version();
  answer.dx_type = chunk.dx_type;
  answer.losses.resize(static_cast<size_t>(chunk.tokens) * sizeof(float));

  RowBatch batch;
  batch.tokens = chunk.tokens;
  batch.hidden_type = chunk.hidden_type;
  batch.hidden_states = chunk.hidden_states.data();
  batch.labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  batch.ignore_index = chunk.ignore_index;
  batch.gradient_scale = chunk.gradient_scale;
  batch.accumulate =
      item.kind == ItemKind::kAccumulate ? RowBatch::Accumulate::kYes : RowBatch::Accumulate::kNo;
  batch.losses = reinterpret_cast<float*>(answer.losses.data());
  if (chunk.mode == ComputeMode::kLossAndGradients) {
    answer.dx.resize(
        static_cast<size_t>(chunk.tokens * config_.hidden_size * kernels::SizeOf(chunk.dx_type)));
    batch.dx_type = chunk.dx_type;
    batch.dx = answer.dx.data();
  }

  const absl::StatusOr<BatchReport> report = backend_->ProcessBatch(batch, [&] {
    for (int64_t row = 0; row < chunk.tokens; ++row) {
      if (batch.labels[row] == chunk.ignore_index) continue;
      ++answer.valid_tokens;
      answer.loss_sum += batch.losses[row];
    }
    answered = absl::Now();
    if (item.listener != nullptr) item.listener->OnAnswer(std::move(answer));
  });
  if (!report.ok()) {
    // dW may hold part of this chunk: nobody may read it or add to it any more.
    {
      const std::lock_guard lock(mutex_);
      ended_ = report.status();
    }
    EndStreams();
    environment_.on_device_failure(report.status());
    return;
  }
  Counters& counters = *environment_.counters;
  counters.forward_seconds.Observe(absl::ToDoubleSeconds(answered - started));
  counters.rows_redone += static_cast<uint64_t>(report->rows_redone);
  if (item.kind == ItemKind::kAccumulate) {
    counters.weight_gradient_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - answered));
    ++counters.chunks_accumulated;
  } else if (item.kind == ItemKind::kLossOnly) {
    ++counters.chunks_loss_only;
  } else {
    ++counters.chunks_repeated;
  }
  if (item.kind != ItemKind::kRepeat) {
    counters.tokens_valid += static_cast<uint64_t>(report->valid_tokens);
    counters.tokens_ignored += static_cast<uint64_t>(chunk.tokens - report->valid_tokens);
  }
  Finish(item, item.kind == ItemKind::kAccumulate ? report->valid_tokens : 0);
}

void Head::Finish(const ChunkItem& item, int64_t valid_tokens) {
  if (!item.numbered) return;
  uint64_t applied = 0;
  std::shared_ptr<LaneListener> listener;  // of the lane's stream of now, which may be a later one
  {
    const std::lock_guard lock(mutex_);
    // A started sequence keeps its session in the ledger until the window ends, and the window cannot end
    // before it.
    Lane& lane = ledger_.Find(item.session_id)->lanes[static_cast<size_t>(item.lane)];
    AccumulationLedger::Apply(lane);
    applied = lane.applied;
    window_.tokens += static_cast<uint64_t>(valid_tokens);
    if (const auto it = lanes_.find({item.session_id, item.lane}); it != lanes_.end()) {
      listener = it->second.listener;
    }
  }
  if (listener != nullptr) listener->OnApplied(applied);
}

}  // namespace lossd::engine
