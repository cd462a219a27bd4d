#include "server/engine/device/sharded/sharded_rank.h"

#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/chunk/chunk_options.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/sharded/replica_rendezvous.h"
#include "server/engine/device/sharded/row_places.h"
#include "server/engine/device/staging.h"
#include "server/engine/memory/process_memory.h"

namespace lossd::engine {
namespace {

const float* Floats(const std::string& bytes) {
  return bytes.empty() ? nullptr : reinterpret_cast<const float*>(bytes.data());
}

ChunkRows RowsOf(const ChunkHeader& chunk, const BatchKey& kind) {
  return {.tokens = chunk.tokens,
          .labels = reinterpret_cast<const int64_t*>(chunk.labels.data()),
          .ignore_index = chunk.ignore_index,
          .gradient_scale = chunk.gradient_scale,
          .z_gradient_scale = chunk.z_gradient_scale,
          .token_weights = Floats(chunk.token_weights),
          .lse_gradients = Floats(chunk.lse_gradients),
          .entropy_gradients = Floats(chunk.entropy_gradients),
          .accumulate = chunk.accumulate ? ChunkRows::Accumulate::kYes : ChunkRows::Accumulate::kNo,
          .losses = Wanted<float>(true),
          .returns = Marked(kind.returns),
          .dx = Wanted<float>(chunk.input_gradient)};
}

// The same at the rank that has the chunk's tensors and gets its results.
void TakePlaces(const RankPayload& payload, AnsweredChunk* answer, ResultBytes* dx, const BatchKey& kind,
                ChunkRows* rows) {
  rows->hidden_states = RowsIn(payload.hidden_states());
  rows->teacher_hidden = RowsIn(payload.teacher_hidden());
  answer->losses.resize(static_cast<size_t>(rows->tokens) * sizeof(float));
  rows->losses = reinterpret_cast<float*>(answer->losses.data());
  rows->returns = Allocate(kind.returns, rows->tokens, &answer->returns);
  if (rows->dx == nullptr) return;
  rows->dx = dx->data();
  rows->dx_place = dx->place();
}

// The leader's engine has checked both.
absl::Status Check(const HeadConfig& config, int32_t ranks) {
  absl::Status status = Validate(config);
  return status.ok() ? CheckRanks(config, ranks) : status;
}

absl::Status Unknown(const char* what, uint64_t number) {
  return absl::InternalError(absl::StrCat("the leader speaks of ", what, " ", number, ", which is not here"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ShardedRank>> ShardedRank::Create(std::unique_ptr<Device> device,
                                                                 const RankPlace& place,
                                                                 int64_t memory_limit_bytes,
                                                                 const std::string& memory_bound) {
  auto budget = std::make_shared<MemoryBudget>(memory_limit_bytes, 0, HeadMemoryAdvice(memory_bound));
  std::unique_ptr<ShardedRank> rank(new ShardedRank(std::move(device), place, std::move(budget)));
  auto reserved = rank->budget_->Reserve("", "the device", rank->device_->SharedMemory());
  if (!reserved.ok()) return reserved.status();
  rank->device_reservation_ = *std::move(reserved);
  return rank;
}

ShardedRank::ShardedRank(std::unique_ptr<Device> device, const RankPlace& place,
                         std::shared_ptr<MemoryBudget> budget)
    : device_(std::move(device)), place_(place), budget_(std::move(budget)) {}

absl::Status ShardedRank::Execute(GroupCommand command) {
  const RankWatch::Executing executing(place_.watch, NameOf(command));
  return std::visit([this](const auto& one) { return Do(one); }, command);
}

RankReport ShardedRank::Report() const {
  RankReport report = ReportOf(*device_, place_);
  report.totals = device_->Totals();
  report.memory_limit = budget_->limit();
  report.memory_peak = budget_->peak();
  report.memory = budget_->Usage();
  report.process = ReadProcessMemory();
  return report;
}

absl::StatusOr<ShardHead*> ShardedRank::Find(uint64_t head) const {
  const MutexLock lock(mutex_);
  const auto found = heads_.find(head);
  if (found == heads_.end()) return Unknown("head", head);
  return found->second.head.get();
}

absl::StatusOr<Gradient*> ShardedRank::FindGradient(uint64_t number) const {
  if (number == 0) return nullptr;
  const MutexLock lock(mutex_);
  const auto found = gradients_.find(number);
  if (found == gradients_.end()) return Unknown("gradient", number);
  return found->second.gradient.get();
}

absl::Status ShardedRank::With(uint64_t head, uint64_t gradient, HeadWork work) {
  const absl::StatusOr<ShardHead*> found = Find(head);
  if (!found.ok()) return found.status();
  const absl::StatusOr<Gradient*> its_gradient = FindGradient(gradient);
  if (!its_gradient.ok()) return its_gradient.status();
  return work(**found, *its_gradient);
}

absl::Status ShardedRank::WithBoth(uint64_t head, uint64_t other, BothWork work) {
  const absl::StatusOr<ShardHead*> found = Find(head);
  if (!found.ok()) return found.status();
  const absl::StatusOr<ShardHead*> its_other = Find(other);
  if (!its_other.ok()) return its_other.status();
  return work((*found)->local(), (*its_other)->local());
}

absl::Status ShardedRank::Do(const CreateHeadCommand& command) {
  if (absl::Status status = Check(command.config, place_.ranks); !status.ok()) return status;
  HeadConfig config = command.config;
  config.double_buffer = false;  // the second gradient comes by a command of its own, which reserves it
  absl::StatusOr<MemoryPlan> plan = ShardHead::Plan(*device_, config, place_, command.replica);
  if (!plan.ok()) return plan.status();
  if (config.class_weights != nullptr) plan->push_back({"class_weights", config.class_weight_bytes()});
  auto memory = budget_->Reserve(config.name, absl::StrCat("head ", config.name), *std::move(plan));
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::unique_ptr<ShardHead>> head =
      ShardHead::Create(device_.get(), command.config, place_, command.replica);
  if (!head.ok()) return head.status();
  const MutexLock lock(mutex_);
  heads_[command.head] = {*std::move(memory), *std::move(head)};
  return absl::OkStatus();
}

// One that could not be created here is not there. Memory is given back without the lock.
absl::Status ShardedRank::Do(const DeleteHeadCommand& command) {
  decltype(heads_)::node_type deleted;
  const MutexLock lock(mutex_);
  deleted = heads_.extract(command.head);
  return absl::OkStatus();
}

absl::Status ShardedRank::Do(const CreateGradientCommand& command) {
  if (absl::Status status = Check(command.config, place_.ranks); !status.ok()) return status;
  const HeadConfig own = ShardConfigOf(command.config, place_);
  auto memory =
      budget_->Reserve(own.name, absl::StrCat("a gradient of head ", own.name), device_->PlanGradient(own));
  if (!memory.ok()) return memory.status();
  absl::StatusOr<std::unique_ptr<Gradient>> gradient = device_->CreateGradient(own);
  if (!gradient.ok()) return gradient.status();
  const MutexLock lock(mutex_);
  gradients_[command.gradient] = {*std::move(memory), *std::move(gradient)};
  return absl::OkStatus();
}

absl::Status ShardedRank::Do(const DeleteGradientCommand& command) {
  decltype(gradients_)::node_type deleted;
  const MutexLock lock(mutex_);
  deleted = gradients_.extract(command.gradient);
  return absl::OkStatus();
}

absl::Status ShardedRank::Do(const ReadRowsCommand& command) {
  return With(command.head, command.gradient,
              [&](ShardHead& head, Gradient* gradient) { return head.ReadRows(command, gradient, nullptr); });
}

absl::Status ShardedRank::Do(const WriteRowsCommand& command) {
  return With(command.head, command.gradient, [&](ShardHead& head, Gradient* gradient) {
    return head.WriteRows(command, gradient, nullptr, nullptr);
  });
}

absl::Status ShardedRank::Do(const RestoreStateCommand& command) {
  const absl::StatusOr<ShardHead*> head = Find(command.head);
  return head.ok() ? (*head)->local().RestoreState() : head.status();
}

absl::Status ShardedRank::Do(const BlendWeightsCommand& command) {
  return WithBoth(command.head, command.source, [&](HeadBackend& head, const HeadBackend& source) {
    return head.BlendWeights(source, command.decay);
  });
}

absl::Status ShardedRank::Do(const CopyOptimizerCommand& command) {
  return WithBoth(command.head, command.source,
                  [](HeadBackend& head, const HeadBackend& source) { return head.CopyOptimizer(source); });
}

absl::Status ShardedRank::Do(const ResetCommand& command) {
  return With(command.head, command.gradient, [](ShardHead& head, Gradient* gradient) {
    head.local().Reset(gradient);
    return absl::OkStatus();
  });
}

absl::Status ShardedRank::Do(const FoldCommand& command) {
  return With(command.head, command.from, [&](ShardHead& head, Gradient* from) {
    const absl::StatusOr<Gradient*> to = FindGradient(command.to);
    return to.ok() ? head.local().Fold(from, *to) : to.status();
  });
}

absl::Status ShardedRank::Do(const SummarizeCommand& command) {
  return With(command.head, command.gradient, [&](ShardHead& head, Gradient* gradient) {
    return head.Merge(head.local().Summarize(gradient, command.scale)).status();
  });
}

absl::Status ShardedRank::Do(const ApplyStepCommand& command) {
  return With(command.head, command.gradient, [&](ShardHead& head, Gradient* gradient) {
    return head.Merge(head.local().ApplyStep(gradient, command.arguments)).status();
  });
}

namespace {

// A replica that was lost is the leader's business; this rank goes on.
absl::Status UnlessLost(absl::Status group, const absl::Status& outcome) {
  if (group.ok() && !absl::IsUnavailable(outcome)) return outcome;
  return group;
}

const ReplicaCommunicators* CommunicatorsOrNull(const std::shared_ptr<ReplicaConnection>& connection) {
  return connection == nullptr ? nullptr : &connection->communicators();
}

}  // namespace

absl::Status ShardedRank::Do(const SumSlicesCommand& command) {
  const std::shared_ptr<ReplicaConnection> by = FindConnection(command.connection);
  return With(command.head, command.gradient, [&](ShardHead& head, Gradient* gradient) {
    absl::Status summed;
    return UnlessLost(head.SumSlices(gradient, CommunicatorsOrNull(by), &summed), summed);
  });
}

absl::Status ShardedRank::Do(const AddToSumCommand& command) {
  const std::shared_ptr<ReplicaConnection> by = FindConnection(command.connection);
  return With(command.head, command.gradient, [&](ShardHead& head, Gradient* gradient) {
    absl::Status added;
    return UnlessLost(head.AddToSum(gradient, command.replica, CommunicatorsOrNull(by), &added), added);
  });
}

absl::Status ShardedRank::Do(const TallySumCommand& command) {
  const std::shared_ptr<ReplicaConnection> by = FindConnection(command.connection);
  return With(command.head, 0, [&](ShardHead& head, Gradient* /*gradient*/) {
    absl::StatusOr<GradientTallies> tallied;
    absl::Status group = head.TallySum(command.scale, CommunicatorsOrNull(by), &tallied);
    return UnlessLost(std::move(group), tallied.status());
  });
}

absl::Status ShardedRank::Do(const StepSlicesCommand& command) {
  return With(command.head, 0, [&](ShardHead& head, Gradient* /*gradient*/) {
    return head.local().StepSlices(command.arguments);
  });
}

absl::Status ShardedRank::Do(const GatherSlicesCommand& command) {
  const std::shared_ptr<ReplicaConnection> by = FindConnection(command.connection);
  return With(command.head, 0, [&](ShardHead& head, Gradient* /*gradient*/) {
    absl::Status gathered;
    return UnlessLost(head.GatherSlices(CommunicatorsOrNull(by), &gathered), gathered);
  });
}

absl::Status ShardedRank::Do(const ConnectReplicasCommand& command) {
  if (place_.rendezvous == nullptr) {
    return absl::InternalError("this rank cannot reach those of other replicas");
  }
  ReplicaRendezvous rounds(place_, nullptr);
  absl::StatusOr<std::shared_ptr<ReplicaConnection>> own = device_->ConnectReplicas(command.network, rounds);
  // Before the leader knows, who may name it then.
  if (own.ok()) TakeConnection(command.connection, *own);
  rounds.Finish(own.status()).IgnoreError();  // it is the leader's
  return absl::OkStatus();
}

// It may come while the connection is being made.
absl::Status ShardedRank::Do(const AbortReplicasCommand& command) {
  std::shared_ptr<ReplicaConnection> aborted;
  {
    const MutexLock lock(mutex_);
    last_aborted_ = std::max(last_aborted_, command.connection);
    if (connection_number_ <= last_aborted_) aborted = connection_;
  }
  if (aborted != nullptr) aborted->Abort();
  return absl::OkStatus();
}

std::shared_ptr<ReplicaConnection> ShardedRank::FindConnection(uint64_t number) const {
  const MutexLock lock(mutex_);
  return number == connection_number_ ? connection_ : nullptr;
}

void ShardedRank::TakeConnection(uint64_t number, const std::shared_ptr<ReplicaConnection>& connection) {
  std::shared_ptr<ReplicaConnection> before = connection;  // goes without the lock
  bool aborted = false;
  {
    const MutexLock lock(mutex_);
    connection_number_ = number;
    connection_.swap(before);
    aborted = number <= last_aborted_;
  }
  if (aborted) connection->Abort();
}

absl::Status ShardedRank::Do(const LogitsCommand& command) {
  const absl::StatusOr<ShardHead*> head = Find(command.head);
  if (!head.ok()) return head.status();
  const bool top = command.top_k > 0;
  return (*head)->local().Logits({.rows = command.rows,
                                  .logit_scale = command.logit_scale,
                                  .softcap = command.softcap,
                                  .bias = command.bias,
                                  .outputs = {.type = command.type,
                                              .logits = Wanted<float>(command.logits),
                                              .top_k = command.top_k,
                                              .top_tokens = Wanted<int32_t>(top),
                                              .top_logits = Wanted<float>(top),
                                              .log_sum_exp = Wanted<float>(top)}});
}

absl::Status ShardedRank::Do(const PrepareTeacherCommand& command) {
  return WithBoth(command.head, command.teacher,
                  [](HeadBackend& head, const HeadBackend& teacher) { return head.PrepareTeacher(teacher); });
}

absl::Status ShardedRank::Do(const ReleasePayloadCommand& command) {
  payloads_->Release(command.payload);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<RankPayload>> ShardedRank::FindPayload(const ChunkHeader& chunk,
                                                                      const BatchKey& kind,
                                                                      const HeadConfig& config) const {
  std::shared_ptr<RankPayload> payload = payloads_->Find(chunk.payload);
  if (payload == nullptr) return Unknown("payload", chunk.payload);
  const bool taught = kind.teacher.backend != nullptr;
  const int64_t hidden_bytes = chunk.tokens * config.hidden_size * kernels::SizeOf(kind.hidden_type);
  const int64_t teacher_bytes =
      taught ? chunk.tokens * kind.teacher.hidden_size * kernels::SizeOf(kind.teacher.hidden_type) : 0;
  if (payload->hidden_states().size() != hidden_bytes || payload->teacher_hidden().size() != teacher_bytes) {
    return absl::InternalError(absl::StrCat("payload ", chunk.payload, " has ",
                                            payload->hidden_states().size(), " and ",
                                            payload->teacher_hidden().size(), " bytes; the leader speaks of ",
                                            hidden_bytes, " and ", teacher_bytes));
  }
  return payload;
}

absl::Status ShardedRank::Hold(const StartBatchCommand& command, const BatchKey& kind,
                               const HeadConfig& config, Batch* batch) const {
  for (const ChunkHeader& chunk : command.chunks) {
    absl::StatusOr<std::shared_ptr<RankPayload>> payload = FindPayload(chunk, kind, config);
    if (!payload.ok()) return payload.status();
    HeldChunk& held = batch->held.emplace_back();
    held.payload = *std::move(payload);
    held.answer.batch = progress_.started + 1;
    held.answer.chunk = static_cast<uint32_t>(batch->held.size() - 1);
    if (!chunk.input_gradient) continue;
    const int64_t dx_bytes = chunk.tokens * config.hidden_size * kernels::SizeOf(kind.dx_type);
    held.dx = StagedResult(dx_bytes, device_.get());
  }
  return absl::OkStatus();
}

void ShardedRank::Answer(HeldChunk& chunk) const {
  chunk.payload->Answer(std::move(chunk.dx));
  tell_answered_(std::move(chunk.answer));
}

absl::Status ShardedRank::Do(const StartBatchCommand& command) {
  const absl::StatusOr<ShardHead*> head = Find(command.head);
  if (!head.ok()) return head.status();
  const absl::StatusOr<Gradient*> gradient = FindGradient(command.gradient);
  if (!gradient.ok()) return gradient.status();
  BatchKey kind = command.kind;
  kind.gradient = *gradient;
  if (command.teacher != 0) {
    const absl::StatusOr<ShardHead*> teacher = Find(command.teacher);
    if (!teacher.ok()) return teacher.status();
    kind.teacher.backend = &(*teacher)->local();
  }
  if (device_->BatchesUnderWay() >= device_->MostBatches()) {
    return absl::InternalError("the leader starts more batches than the device has room for");
  }
  if (kind.holder >= place_.ranks) return Unknown("rank", static_cast<uint64_t>(kind.holder));
  const bool holds = kind.holder == place_.rank;
  Batch& batch = under_way_.emplace_back(Batch{command.chunks, {}});
  if (holds) {
    const absl::Status held = Hold(command, kind, (*head)->config(), &batch);
    if (!held.ok()) return held;
  }
  ++progress_.started;
  if (place_.watch != nullptr) place_.watch->BatchStarted();
  std::vector<ChunkRows> rows;
  for (const ChunkHeader& chunk : batch.chunks) rows.push_back(RowsOf(chunk, kind));
  for (size_t i = 0; i < batch.held.size(); ++i) {
    HeldChunk& chunk = batch.held[i];
    TakePlaces(*chunk.payload, &chunk.answer, &chunk.dx, kind, &rows[i]);
  }
  // Some devices call it at every rank.
  const auto answer = [this, &batch](size_t chunk) {
    if (!batch.held.empty()) Answer(batch.held[chunk]);
  };
  (*head)->local().StartBatch(
      kind, rows,
      {.on_input_gradients = answer,
       .on_done = [this](const absl::StatusOr<BatchReport>& report) { End(report); }});
  return absl::OkStatus();
}

void ShardedRank::End(const absl::StatusOr<BatchReport>& report) {
  under_way_.pop_front();
  if (place_.watch != nullptr) place_.watch->BatchEnded();
  if (!report.ok()) {
    batch_failure_.Update(report.status());
  } else if (batch_failure_.ok()) {
    ++progress_.applied;
  }
}

absl::StatusOr<BatchProgress> ShardedRank::Poll() {
  device_->Poll();
  if (!batch_failure_.ok()) return batch_failure_;
  return progress_;
}

}  // namespace lossd::engine
