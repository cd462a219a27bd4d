#include "server/engine/head/parts/batch_runner.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/chunk/token_lists.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/staging.h"

namespace lossd::engine {
namespace {

const float* Floats(const std::string& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<const float*>(bytes.data());
}

bool IsOfHiddenStates(const absl::Status& rejection) {
  return ReasonOf(rejection) == RejectReason::kNonFinite &&
         absl::EndsWith(FieldOf(rejection), "hidden_states");
}

}  // namespace

void BatchRunner::Run(std::shared_ptr<BatchOwner> owner, std::deque<StartedChunk> chunks,
                      std::shared_ptr<TeacherLease> teacher, std::function<void()> on_ended) {
  const bool rows = std::any_of(chunks.begin(), chunks.end(),
                                [](const StartedChunk& chunk) { return chunk.item->rows > 0; });
  if (rows || batches_.empty()) {
    auto batch = std::make_shared<Batch>();
    batch->owner = std::move(owner);
    batch->chunks = std::move(chunks);
    batch->started = absl::Now();
    batch->on_ended.push_back(std::move(on_ended));
    batch->teacher = std::move(teacher);
    batches_.push_back(batch);
    Queue(batch, 0);
    if (rows) return Compute(batch);
    return EndBatch(*batch, BatchReport{});
  }
  // All of them are rejected: they join the last batch, behind the chunks under way.
  const std::shared_ptr<Batch> last = batches_.back();
  const size_t first = last->chunks.size();
  for (StartedChunk& chunk : chunks) last->chunks.push_back(std::move(chunk));
  last->on_ended.push_back(std::move(on_ended));
  Queue(last, first);
}

void BatchRunner::Queue(const std::shared_ptr<Batch>& batch, size_t first) {
  std::set<int32_t> holders;
  for (size_t i = first; i < batch->chunks.size(); ++i) {
    StartedChunk& chunk = batch->chunks[i];
    holders.insert(chunk.item->batch_key.holder);
    turns_[chunk.item->batch_key.holder].push_back({batch, &chunk});
  }
  for (const int32_t holder : holders) AnswerRejected(holder);
}

void BatchRunner::Compute(const std::shared_ptr<Batch>& batch) {
  BatchKey kind;
  std::vector<ChunkRows> rows;
  int64_t tokens = 0;
  bool timed = false;
  Counters& counters = *parts_.counters;
  for (StartedChunk& chunk : batch->chunks) {
    if (chunk.item->rejected()) continue;
    if (!chunk.item->is_piece()) {
      counters.read_seconds.Observe(absl::ToDoubleSeconds(chunk.item->accepted - chunk.item->chunk.received));
      counters.queue_seconds.Observe(absl::ToDoubleSeconds(batch->started - chunk.item->accepted));
    }
    kind = chunk.item->batch_key;
    timed = timed || chunk.item->chunk.timing == Timing::kReport;
    rows.push_back(Describe(chunk));
    tokens += rows.back().tokens;
  }
  counters.batch_chunks.Observe(static_cast<double>(rows.size()));
  counters.batch_rows.Observe(static_cast<double>(tokens));
  BatchCallbacks callbacks;
  callbacks.on_input_gradients = [this, holder = kind.holder](size_t /*chunk*/) {
    AnswerNext(holder);
    AnswerRejected(holder);
  };
  if (timed) {
    callbacks.on_times = [batch](const DeviceTimes& times) { batch->device_times = times; };
  }
  callbacks.on_done = [this, batch](const absl::StatusOr<BatchReport>& report) {
    if (parts_.device_done != nullptr) *parts_.device_done = absl::Now();
    EndBatch(*batch, report);
  };
  if (batch->teacher != nullptr) batch->teacher->Begin();
  parts_.backend->StartBatch(kind, rows, std::move(callbacks));
}

ChunkRows BatchRunner::Describe(StartedChunk& started) const {
  const Chunk& chunk = started.item->chunk;
  ChunkAnswer& answer = started.answer;
  answer.disposition = started.item->repeat ? Disposition::kRepeated : Disposition::kAccumulated;
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
  rows.kept_tokens = KeptTokensOf(chunk);
  rows.target_lists = TargetListsOf(chunk);
  if (HasWeightGradient(chunk.mode)) {
    rows.lse_gradients = Floats(chunk.lse_gradients);
    rows.entropy_gradients = Floats(chunk.entropy_gradients);
  }
  rows.accumulate = started.item->weight_gradient == ChunkItem::WeightGradient::kWithBatch
                        ? ChunkRows::Accumulate::kYes
                        : ChunkRows::Accumulate::kNo;
  if (started.item->batch_key.holds) rows.hold = {started.item->session_id, chunk.hold};
  if (started.item->is_piece()) return rows;
  answer.losses.resize(static_cast<size_t>(chunk.tokens) * sizeof(float));
  rows.losses = reinterpret_cast<float*>(answer.losses.data());
  rows.returns = Allocate(started.item->batch_key.returns, chunk.tokens, &answer.returns);
  if (!HasInputGradient(chunk.mode)) return rows;
  if (chunk.dx.is_set()) {
    rows.dx = chunk.dx.data;
    rows.dx_place = chunk.dx.place;
  } else {
    const int64_t dx_bytes = chunk.tokens * parts_.config->hidden_size * kernels::SizeOf(chunk.dx_type);
    answer.dx = StagedResult(dx_bytes, parts_.device);
    rows.dx = answer.dx.data();
    rows.dx_place = answer.dx.place();
  }
  return rows;
}

// The times of a chunk whose results are there.
ChunkTimes BatchRunner::TimesOf(const Batch& batch, const ChunkItem& item) const {
  const absl::Time now = absl::Now();
  ChunkTimes times{.received = item.chunk.received,
                   .accepted = item.accepted,
                   .started = batch.started,
                   .input_ready = batch.started,
                   .compute_started = batch.started,
                   .computed = now,
                   .output_ready = now,
                   .earlier_done = std::nullopt};
  if (parts_.device_done != nullptr) times.earlier_done = *parts_.device_done;
  if (batch.device_times.has_value()) {
    times.input_ready = batch.device_times->input_ready;
    times.computed = batch.device_times->computed;
  }
  // The device was polled for these two times separately, so either may be later.
  times.compute_started = std::min(
      times.computed, std::max(times.input_ready, times.earlier_done.value_or(absl::InfinitePast())));
  return times;
}

void BatchRunner::AnswerNext(int32_t holder) {
  std::deque<Turn>& turns = turns_.at(holder);
  const Turn turn = std::move(turns.front());
  turns.pop_front();
  if (turns.empty()) turns_.erase(holder);
  Batch& batch = *turn.batch;
  StartedChunk& started = *turn.chunk;
  ChunkItem& item = *started.item;
  if (item.is_piece()) return;
  ChunkAnswer& answer = started.answer;
  if (item.rejected()) {
    answer.disposition = Disposition::kRejected;
    answer.error = item.rejection;
    parts_.counters->Reject(ReasonOf(item.rejection));
    ++parts_.counters->chunks_rejected;
    ++parts_.head_counters->chunks_rejected;
    if (IsOfHiddenStates(item.rejection)) ++parts_.counters->non_finite_hidden_states;
  } else {
    if (item.chunk.timing == Timing::kReport) answer.times = TimesOf(batch, item);
    const bool weighted = item.batch_key.class_weights == ClassWeights::kUse;
    SumTokens(item.chunk, weighted ? parts_.config->class_weights->data() : nullptr, &answer);
    if (!item.chunk.options.returns.z_loss) answer.returns.z_losses.clear();  // only for the sum
    if (!item.chunk.options.returns.divergence) answer.returns.divergences.clear();
    item.valid_tokens = answer.valid_tokens;
    if (!item.repeat) CountLosses(batch, item, answer);
  }
  started.answered = absl::Now();
  answer.ready = started.answered;
  // Counted first: the client that has the answer may ask for the count.
  if (!item.rejected()) {
    CountAnswered(batch, started);
    batch.owner->OnChunkAnswered(item);
  }
  if (item.listener != nullptr) item.listener->OnAnswer(std::move(answer));
}

void BatchRunner::AnswerRejected(int32_t holder) {
  for (auto found = turns_.find(holder);
       found != turns_.end() && found->second.front().chunk->item->rejected(); found = turns_.find(holder)) {
    AnswerNext(holder);
  }
}

// The device is done with the oldest batch.
void BatchRunner::EndBatch(Batch& batch, const absl::StatusOr<BatchReport>& report) {
  const std::shared_ptr<Batch> oldest = std::move(batches_.front());
  batches_.pop_front();
  batch.owner->OnBatchEnded();
  if (batch.teacher != nullptr) batch.teacher->End();
  if (report.ok()) {
    parts_.counters->rows_redone += static_cast<uint64_t>(report->rows_redone);
    parts_.counters->rows_held += static_cast<uint64_t>(report->rows_held);
    parts_.counters->rows_taken += static_cast<uint64_t>(report->rows_taken);
    parts_.counters->rows_recomputed += static_cast<uint64_t>(report->rows_recomputed);
    for (StartedChunk& chunk : batch.chunks) {
      CountDone(chunk);
      batch.owner->OnChunkDone(*chunk.item);
    }
  } else {
    for (auto& [holder, turns] : turns_) {
      std::erase_if(turns, [&oldest](const Turn& turn) { return turn.batch == oldest; });
    }
    std::erase_if(turns_, [](const auto& entry) { return entry.second.empty(); });
    batch.owner->OnDeviceFailure(report.status());
  }
  for (const auto& ended : batch.on_ended) ended();
}

void BatchRunner::CountDone(const StartedChunk& chunk) {
  const ChunkItem& item = *chunk.item;
  const bool with_batch = item.weight_gradient == ChunkItem::WeightGradient::kWithBatch;
  if (item.rejected() || (!item.is_piece() && !with_batch)) return;
  const absl::Time begun = item.is_piece() ? item.accepted : chunk.answered;
  parts_.counters->weight_gradient_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - begun));
}

void BatchRunner::CountAnswered(const Batch& batch, const StartedChunk& chunk) {
  const ChunkItem& item = *chunk.item;
  Counters& counters = *parts_.counters;
  counters.forward_seconds.Observe(absl::ToDoubleSeconds(chunk.answered - batch.started));
  if (item.repeat) {
    ++counters.chunks_repeated;
    return;
  }
  if (item.weight_gradient != ChunkItem::WeightGradient::kNone) {
    ++counters.chunks_accumulated;
  } else if (!HasInputGradient(item.chunk.mode)) {
    ++counters.chunks_loss_only;
  } else {
    ++counters.chunks_input_gradient;
  }
  counters.tokens_valid += static_cast<uint64_t>(item.valid_tokens);
  counters.tokens_ignored += static_cast<uint64_t>(item.chunk.tokens - item.valid_tokens);
}

void BatchRunner::CountLosses(Batch& batch, const ChunkItem& item, const ChunkAnswer& answer) {
  parts_.counters->non_finite_losses += static_cast<uint64_t>(answer.non_finite_losses);
  parts_.head_counters->tokens += static_cast<uint64_t>(answer.valid_tokens);
  parts_.counters->rows_skipped += static_cast<uint64_t>(answer.skipped_tokens);
  parts_.head_counters->rows_skipped += static_cast<uint64_t>(answer.skipped_tokens);
  if (const ChunkLists::Use use = item.chunk.lists.use; use != ChunkLists::Use::kNone) {
    Counters& counters = *parts_.counters;
    (use == ChunkLists::Use::kKept ? counters.kept_tokens : counters.target_tokens)
        .ObserveAll(ListSizes(item.chunk));
  }
  // Weights of tokens may be anything, even negative or a gradient: a weighted loss is no loss to report.
  if (!item.chunk.token_weights.empty()) return;
  const auto finite_tokens = static_cast<uint64_t>(answer.valid_tokens - answer.non_finite_losses);
  // A loss that is not finite would stay in the sum for good.
  const double finite_nats =
      answer.non_finite_losses == 0 ? answer.loss_sum : SumOfFiniteLosses(item.chunk, answer);
  if (item.chunk.mode == ComputeMode::kLossOnly) {
    parts_.head_counters->evaluation_tokens += finite_tokens;
    parts_.head_counters->evaluation_nats += finite_nats;
    return;
  }
  batch.loss_sum += answer.loss_sum;
  batch.valid_tokens += answer.valid_tokens;
  if (batch.valid_tokens > 0) {
    parts_.head_counters->loss = batch.loss_sum / static_cast<double>(batch.valid_tokens);
  }
  parts_.head_counters->loss_tokens += finite_tokens;
  parts_.head_counters->loss_nats += finite_nats;
}

}  // namespace lossd::engine
