// Chunks of a head on the device: started as a batch, answered, applied; and its end if the device fails. All
// on the device thread.
#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/staging.h"
#include "server/engine/head/head.h"

namespace lossd::engine {
namespace {

const float* Floats(const std::string& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<const float*>(bytes.data());
}

bool IsOfHiddenStates(const absl::Status& rejection) {
  return ReasonOf(rejection) == RejectReason::kNonFinite &&
         absl::EndsWith(FieldOf(rejection), "hidden_states");
}

// An error that ends a stream: NOT_FOUND would say that its session is gone.
absl::Status AsPrecondition(absl::Status status) {
  if (absl::IsFailedPrecondition(status)) return status;
  return MakeError(absl::StatusCode::kFailedPrecondition, ReasonOf(status), FieldOf(status),
                   absl::StrCat("a chunk that was taken before cannot be computed again: ",
                                std::string(status.message())));
}

}  // namespace

void Head::StartBatch(std::vector<std::shared_ptr<QueuedChunk>> chunks, std::function<void()> on_ended) {
  std::deque<StartedChunk> started = Start(chunks);
  chunks.clear();
  bool rows = false;
  for (const StartedChunk& chunk : started) rows = rows || chunk.item->rows > 0;
  if (rows || batches_.empty()) {
    auto batch = std::make_shared<Batch>();
    batch->chunks = std::move(started);
    batch->started = absl::Now();
    batch->on_ended.push_back(std::move(on_ended));
    batches_.push_back(batch);
    if (rows) return Compute(batch);
    return EndBatch(*batch, BatchReport{});
  }
  // Only rejected ones: their turn comes after what is under way.
  Batch& last = *batches_.back();
  const bool their_turn = last.answered == last.chunks.size();
  for (StartedChunk& chunk : started) last.chunks.push_back(std::move(chunk));
  last.on_ended.push_back(std::move(on_ended));
  if (their_turn) AnswerRejected(last);
}

// Those of the chunks that were not withdrawn.
std::deque<Head::StartedChunk> Head::Start(const std::vector<std::shared_ptr<QueuedChunk>>& chunks) {
  std::deque<StartedChunk> started;
  std::vector<std::pair<std::shared_ptr<LaneListener>, absl::Status>> ended;
  const absl::StatusOr<uint64_t> teacher_version = PrepareTeacherOf(chunks);
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<QueuedChunk>& chunk : chunks) {
      auto item = std::static_pointer_cast<ChunkItem>(chunk);
      if (IsFollowUp(*item)) {
        if (ended_.ok()) started.emplace_back().item = std::move(item);
        continue;
      }
      if (item->state == ItemState::kWithdrawn) continue;
      item->state = ItemState::kStarted;
      --environment_.counters->queued_chunks;
      --counters_.queued_chunks;
      lanes_.at({item->session_id, item->lane}).queued.pop_front();
      if (item->kind == ItemKind::kRepeat) {
        // It may have been submitted before the first one was rejected.
        const AccumulationLedger::Session& session = *ledger_.Find(item->session_id);
        absl::Status earlier = EarlierRejection(session.lanes[static_cast<size_t>(item->lane)], item->chunk);
        if (!earlier.ok()) Reject(std::move(earlier), *item);
      }
      absl::Status obstacle = CheckWeightVersion(item->chunk, weight_version_);
      if (obstacle.ok() && item->teacher != nullptr) obstacle = teacher_version.status();
      if (!obstacle.ok() && item->kind != ItemKind::kRejected) {
        if (item->kind == ItemKind::kRepeat) {
          // Not rejected: that would say that it is in no window.
          ended.emplace_back(item->listener, AsPrecondition(std::move(obstacle)));
          ++environment_.counters->chunks_refused;
          continue;
        }
        GiveUpPlaceLocked(*item);
        Reject(std::move(obstacle), *item);
      }
      if (item->numbered) StartInLedgerLocked(*item);
      StartedChunk& entry = started.emplace_back();
      entry.answer.sequence = item->chunk.sequence;
      entry.answer.first_token = item->chunk.first_token;
      entry.answer.tokens = item->chunk.tokens;
      entry.answer.weight_version = weight_version_;
      if (item->teacher != nullptr) entry.answer.teacher_weight_version = teacher_version.value_or(0);
      entry.item = std::move(item);
    }
  }
  for (const auto& [listener, status] : ended) {
    if (listener != nullptr) listener->OnEnd(status);
  }
  return started;
}

void Head::StartInLedgerLocked(const ChunkItem& item) {
  Lane& lane = ledger_.Find(item.session_id)->lanes[static_cast<size_t>(item.lane)];
  AccumulationLedger::Start(lane);
  if (item.kind == ItemKind::kRejected && item.remembered) AccumulationLedger::Reject(lane);
}

void Head::Reject(absl::Status rejection, ChunkItem& item) {
  item.kind = ItemKind::kRejected;
  item.rejection = std::move(rejection);
  item.rows = 0;
  item.chunk.DropPayload();
}

void Head::Compute(const std::shared_ptr<Batch>& batch) {
  RowKind kind;
  std::vector<ChunkRows> rows;
  int64_t tokens = 0;
  bool timed = false;
  Counters& counters = *environment_.counters;
  for (StartedChunk& chunk : batch->chunks) {
    if (chunk.item->kind == ItemKind::kRejected) continue;
    if (!IsFollowUp(*chunk.item)) {
      counters.read_seconds.Observe(absl::ToDoubleSeconds(chunk.item->accepted - chunk.item->chunk.received));
      counters.queue_seconds.Observe(absl::ToDoubleSeconds(batch->started - chunk.item->accepted));
    }
    kind = chunk.item->row_kind;
    batch->teacher = chunk.item->teacher;
    timed = timed || chunk.item->chunk.timing == Timing::kReport;
    rows.push_back(Describe(chunk));
    tokens += rows.back().tokens;
  }
  counters.batch_chunks.Observe(static_cast<double>(rows.size()));
  counters.batch_rows.Observe(static_cast<double>(tokens));
  BatchCallbacks callbacks;
  callbacks.on_input_gradients = [this, batch](size_t /*chunk*/) {
    AnswerRejected(*batch);
    AnswerNext(*batch);
    AnswerRejected(*batch);
  };
  if (timed) {
    callbacks.on_times = [batch](const DeviceTimes& times) { batch->device_times = times; };
  }
  callbacks.on_done = [self = shared_from_this(), batch](const absl::StatusOr<BatchReport>& report) {
    if (self->environment_.device_done != nullptr) *self->environment_.device_done = absl::Now();
    self->EndBatch(*batch, report);
  };
  if (batch->teacher != nullptr) batch->teacher->BeginTeaching();
  backend_->StartBatch(kind, rows, std::move(callbacks));
}

// What the device gets, and where it puts its results: into the answer, or dX into a region.
ChunkRows Head::Describe(StartedChunk& started) const {
  const Chunk& chunk = started.item->chunk;
  ChunkAnswer& answer = started.answer;
  const ItemKind kind = started.item->kind;
  answer.disposition = kind == ItemKind::kRepeat ? Disposition::kRepeated : Disposition::kAccumulated;
  answer.dx_type = chunk.dx_type;
  ChunkRows rows;
  rows.tokens = chunk.tokens;
  rows.hidden_states = RowsIn(chunk.hidden_states);
  rows.teacher_hidden = RowsIn(chunk.teacher_hidden);
  rows.labels = reinterpret_cast<const int64_t*>(chunk.labels.data());
  rows.ignore_index = chunk.ignore_index;
  rows.gradient_scale = chunk.gradient_scale;
  rows.z_gradient_scale = chunk.options.z_gradient_scale;
  rows.token_weights = Floats(chunk.token_weights);
  if (chunk.mode != ComputeMode::kLossOnly) rows.lse_gradients = Floats(chunk.lse_gradients);
  rows.accumulate = kind == ItemKind::kAccumulate || kind == ItemKind::kWeightGradient
                        ? ChunkRows::Accumulate::kYes
                        : ChunkRows::Accumulate::kNo;
  if (kind == ItemKind::kWeightGradient) return rows;
  answer.losses.resize(static_cast<size_t>(chunk.tokens) * sizeof(float));
  rows.losses = reinterpret_cast<float*>(answer.losses.data());
  rows.returns = Allocate(started.item->row_kind.returns, chunk.tokens, &answer.returns);
  if (chunk.dx.data != nullptr) {
    rows.dx = chunk.dx.data;
    rows.dx_place = chunk.dx.place;
  } else if (chunk.mode == ComputeMode::kLossAndGradients) {
    const int64_t dx_bytes = chunk.tokens * config_.hidden_size * kernels::SizeOf(chunk.dx_type);
    answer.dx = StagedResult(dx_bytes, environment_.device);
    rows.dx = answer.dx.data();
    rows.dx_place = answer.dx.place();
  }
  return rows;
}

// The times of a chunk whose results are there.
ChunkTimes Head::TimesOf(const Batch& batch, const ChunkItem& item) const {
  const absl::Time now = absl::Now();
  ChunkTimes times{.received = item.chunk.received,
                   .accepted = item.accepted,
                   .started = batch.started,
                   .input_ready = batch.started,
                   .compute_started = batch.started,
                   .computed = now,
                   .output_ready = now,
                   .earlier_done = std::nullopt};
  if (environment_.device_done != nullptr) times.earlier_done = *environment_.device_done;
  if (batch.device_times.has_value()) {
    times.input_ready = batch.device_times->input_ready;
    times.computed = batch.device_times->computed;
  }
  // The device may have been asked about both in either order.
  times.compute_started = std::min(
      times.computed, std::max(times.input_ready, times.earlier_done.value_or(absl::InfinitePast())));
  return times;
}

void Head::AnswerNext(Batch& batch) {
  StartedChunk& started = batch.chunks[batch.answered++];
  ChunkItem& item = *started.item;
  if (IsFollowUp(item)) return;
  ChunkAnswer& answer = started.answer;
  if (item.kind == ItemKind::kRejected) {
    answer.disposition = Disposition::kRejected;
    answer.error = item.rejection;
    environment_.counters->Reject(ReasonOf(item.rejection));
    ++environment_.counters->chunks_rejected;
    ++counters_.chunks_rejected;
    if (IsOfHiddenStates(item.rejection)) ++environment_.counters->non_finite_hidden_states;
  } else {
    if (item.chunk.timing == Timing::kReport) answer.times = TimesOf(batch, item);
    const bool weighted = item.row_kind.class_weights == ClassWeights::kUse;
    SumTokens(item.chunk, weighted ? config_.class_weights->data() : nullptr, &answer);
    if (!item.chunk.options.returns.z_loss) answer.returns.z_losses.clear();  // only for the sum
    if (!item.chunk.options.returns.divergence) answer.returns.divergences.clear();
    item.valid_tokens = answer.valid_tokens;
    if (item.kind != ItemKind::kRepeat) CountLosses(batch, item, answer);
  }
  started.answered = absl::Now();
  answer.ready = started.answered;
  if (item.listener != nullptr) item.listener->OnAnswer(std::move(answer));
}

void Head::AnswerRejected(Batch& batch) {
  while (batch.answered < batch.chunks.size() &&
         batch.chunks[batch.answered].item->kind == ItemKind::kRejected) {
    AnswerNext(batch);
  }
}

// The device is done with the oldest batch.
void Head::EndBatch(Batch& batch, const absl::StatusOr<BatchReport>& report) {
  const std::shared_ptr<Batch> oldest = std::move(batches_.front());
  batches_.pop_front();
  ++gradient_changes_;
  if (batch.teacher != nullptr) batch.teacher->EndTeaching();
  if (report.ok()) {
    AnswerRejected(batch);
    environment_.counters->rows_redone += static_cast<uint64_t>(report->rows_redone);
    if (batch.valid_tokens > 0) counters_.loss = batch.loss_sum / static_cast<double>(batch.valid_tokens);
    for (StartedChunk& chunk : batch.chunks) {
      Count(batch, chunk);
      Finish(*chunk.item);
      if (chunk.item->kind == ItemKind::kPlaced) FillTiles(chunk);
      if (!chunk.item->piece.rows.empty()) FinishPiece(*chunk.item);
    }
  } else {
    EndByFailure(report.status());
  }
  for (const auto& ended : batch.on_ended) ended();
}

// dW may hold part of a chunk: nobody may read it or add to it any more.
void Head::EndByFailure(const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    ended_ = status;
  }
  EndStreams();
  environment_.on_device_failure(status);
}

void Head::Count(const Batch& batch, const StartedChunk& chunk) {
  const ItemKind kind = chunk.item->kind;
  if (kind == ItemKind::kRejected) return;
  Counters& counters = *environment_.counters;
  if (IsFollowUp(*chunk.item)) {
    counters.weight_gradient_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - chunk.item->accepted));
    return;
  }
  counters.forward_seconds.Observe(absl::ToDoubleSeconds(chunk.answered - batch.started));
  if (kind == ItemKind::kPlaced) {
    ++counters.chunks_accumulated;
  } else if (kind == ItemKind::kAccumulate) {
    counters.weight_gradient_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - chunk.answered));
    ++counters.chunks_accumulated;
  } else if (kind == ItemKind::kInputGradient) {
    ++counters.chunks_input_gradient;
  } else if (kind == ItemKind::kLossOnly) {
    ++counters.chunks_loss_only;
  } else {
    ++counters.chunks_repeated;
  }
  if (kind == ItemKind::kRepeat) return;
  counters.tokens_valid += static_cast<uint64_t>(chunk.item->valid_tokens);
  counters.tokens_ignored += static_cast<uint64_t>(chunk.item->chunk.tokens - chunk.item->valid_tokens);
}

void Head::CountLosses(Batch& batch, const ChunkItem& item, const ChunkAnswer& answer) {
  environment_.counters->non_finite_losses += static_cast<uint64_t>(answer.non_finite_losses);
  counters_.tokens += static_cast<uint64_t>(answer.valid_tokens);
  // Weights of tokens may be anything, negative or a gradient, and what they are multiplied with is no loss.
  if (!item.chunk.token_weights.empty()) return;
  const auto finite_tokens = static_cast<uint64_t>(answer.valid_tokens - answer.non_finite_losses);
  // One that is not finite would stay in the sum for good.
  const double finite_nats =
      answer.non_finite_losses == 0 ? answer.loss_sum : SumOfFiniteLosses(item.chunk, answer);
  if (item.kind == ItemKind::kLossOnly) {
    counters_.evaluation_tokens += finite_tokens;
    counters_.evaluation_nats += finite_nats;
    return;
  }
  batch.loss_sum += answer.loss_sum;
  batch.valid_tokens += answer.valid_tokens;
  counters_.loss_tokens += finite_tokens;
  counters_.loss_nats += finite_nats;
}

void Head::CountGradient(double norm, int64_t non_finite) {
  counters_.gradient_norm = norm;
  environment_.counters->non_finite_gradients += static_cast<uint64_t>(non_finite);
}

void Head::Finish(const ChunkItem& item) {
  if (!item.numbered) return;
  uint64_t applied = 0;
  std::shared_ptr<LaneListener> listener;  // of the lane's stream of now, which may be a later one
  {
    const std::lock_guard lock(mutex_);
    // A started sequence keeps its session in the ledger until the window ends, and the window cannot end
    // before it; that of a frozen head until it is applied.
    Lane& lane = ledger_.Find(item.session_id)->lanes[static_cast<size_t>(item.lane)];
    AccumulationLedger::Apply(lane);
    applied = lane.applied;
    // What is in a tile can get lost no more.
    if (item.kind == ItemKind::kAccumulate || item.kind == ItemKind::kPlaced) {
      const bool next = InNextWindowLocked(item.chunk.generation);
      (next ? window_.next_tokens : window_.tokens) += static_cast<uint64_t>(item.valid_tokens);
      std::optional<absl::Time>& since = next ? window_.next_since : window_.since;
      if (!since.has_value()) since = item.accepted;
    }
    if (frozen()) ledger_.ForgetApplied(item.session_id);
    const auto it = lanes_.find({item.session_id, item.lane});
    if (it != lanes_.end()) listener = it->second.listener;
  }
  if (listener != nullptr) listener->OnApplied(applied);
}

}  // namespace lossd::engine
