#include "server/engine/device/sharded/sharded_device.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "server/engine/device/optimizer_state.h"
#include "server/engine/device/sharded/applied_batches.h"
#include "server/engine/device/sharded/held_batches.h"
#include "server/engine/device/sharded/idle_probe.h"
#include "server/engine/device/sharded/replica_rendezvous.h"
#include "server/engine/device/sharded/row_places.h"

namespace lossd::engine {
namespace {

// A gradient of every rank's; the leader's own part is here.
class ShardedGradient : public Gradient {
 public:
  ShardedGradient(uint64_t number, std::unique_ptr<Gradient> local, RankChannel* channel)
      : number_(number), local_(std::move(local)), channel_(channel) {}
  ~ShardedGradient() override { channel_->Send(DeleteGradientCommand{number_}); }
  ShardedGradient(const ShardedGradient&) = delete;
  ShardedGradient& operator=(const ShardedGradient&) = delete;

  uint64_t number() const { return number_; }
  Gradient* local() const { return local_.get(); }

 private:
  const uint64_t number_;
  const std::unique_ptr<Gradient> local_;
  RankChannel* const channel_;
};

uint64_t NumberOf(const Gradient* gradient) {
  return gradient == nullptr ? 0 : static_cast<const ShardedGradient*>(gradient)->number();
}

Gradient* LocalOf(const Gradient* gradient) {
  return gradient == nullptr ? nullptr : static_cast<const ShardedGradient*>(gradient)->local();
}

std::string BytesOf(const void* values, size_t bytes) {
  return values == nullptr ? std::string() : std::string(static_cast<const char*>(values), bytes);
}

ChunkHeader HeaderOf(const ChunkRows& chunk) {
  const auto tokens = static_cast<size_t>(chunk.tokens);
  return {.tokens = chunk.tokens,
          .labels = BytesOf(chunk.labels, tokens * sizeof(int64_t)),
          .ignore_index = chunk.ignore_index,
          .gradient_scale = chunk.gradient_scale,
          .z_gradient_scale = chunk.z_gradient_scale,
          .token_weights = BytesOf(chunk.token_weights, tokens * sizeof(float)),
          .lse_gradients = BytesOf(chunk.lse_gradients, tokens * sizeof(float)),
          .entropy_gradients = BytesOf(chunk.entropy_gradients, tokens * sizeof(float)),
          .accumulate = chunk.accumulate == ChunkRows::Accumulate::kYes,
          .input_gradient = chunk.wants_dx(),
          .payload = chunk.hidden_states.number};
}

// What the leader's own part knows of a chunk that another rank holds.
ChunkRows WithoutTensors(ChunkRows chunk, const WantedReturns& returns) {
  chunk.hidden_states = chunk.teacher_hidden = {};
  chunk.losses = Wanted<float>(true);
  chunk.returns = Marked(returns);
  chunk.dx = Wanted<float>(chunk.wants_dx());
  chunk.dx_place = MemoryPlace::kHost;
  return chunk;
}

// Batches of all heads of a device.
struct UnderWay {
  AppliedBatches batches;
  HeldBatches held;
};

class ShardedHead : public HeadBackend {
 public:
  ShardedHead(uint64_t number, std::unique_ptr<ShardHead> shard, RankChannel* channel, RankWatch* watch,
              UnderWay* under_way)
      : number_(number), shard_(std::move(shard)), channel_(channel), watch_(watch), under_way_(under_way) {}
  ~ShardedHead() override { channel_->Send(DeleteHeadCommand{number_}); }
  ShardedHead(const ShardedHead&) = delete;
  ShardedHead& operator=(const ShardedHead&) = delete;

  absl::Status PublishWeights(WeightBuffers staged) override;
  absl::Status ReadWeightRows(int64_t first_row, int64_t rows, kernels::DataType type, void* out) override {
    return Read({.what = HeadRows::kWeights, .type = type, .first_row = first_row, .rows = rows}, nullptr,
                out);
  }
  absl::Status ReadBias(int64_t first_row, int64_t rows, float* out) override {
    return Read({.what = HeadRows::kBias, .first_row = first_row, .rows = rows}, nullptr, out);
  }
  absl::Status BlendWeights(const HeadBackend& source, double decay) override;
  absl::Status CopyOptimizer(const HeadBackend& source) override;
  absl::Status Logits(const LogitRows& rows) override;
  int64_t RowsOfLogits() const override { return shard_->local().RowsOfLogits(); }
  absl::Status PrepareTeacher(const HeadBackend& teacher) override;
  int64_t RowsPerBatch(const BatchKey& kind) const override {
    return shard_->local().RowsPerBatch(LocalKind(kind));
  }
  void StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks, BatchCallbacks callbacks) override;

  absl::Status ReadGradient(const Gradient* gradient, int64_t first_row, int64_t rows, float* out) override {
    return Read({.what = HeadRows::kGradient, .first_row = first_row, .rows = rows}, gradient, out);
  }
  absl::Status ReadBiasGradient(const Gradient* gradient, int64_t first_row, int64_t rows,
                                float* out) override {
    return Read({.what = HeadRows::kBiasGradient, .first_row = first_row, .rows = rows}, gradient, out);
  }
  void Reset(Gradient* gradient) override {
    const RankWatch::Executing own = Tell(ResetCommand{number_, NumberOf(gradient)});
    shard_->local().Reset(LocalOf(gradient));
  }
  absl::Status Fold(Gradient* from, Gradient* to) override {
    const RankWatch::Executing own = Tell(FoldCommand{number_, NumberOf(from), NumberOf(to)});
    return shard_->local().Fold(LocalOf(from), LocalOf(to));
  }
  absl::StatusOr<GradientTallies> Summarize(const Gradient* gradient, double scale) override {
    const RankWatch::Executing own = Tell(SummarizeCommand{number_, NumberOf(gradient), scale});
    return shard_->Merge(shard_->local().Summarize(LocalOf(gradient), scale));
  }
  absl::StatusOr<GradientTallies> ApplyStep(const Gradient* gradient,
                                            const StepArguments& arguments) override;

  std::vector<kernels::RowSpan> SliceRows(const kernels::SliceLayout& /*slices*/,
                                          int32_t slice) const override {
    return shard_->SliceRows(slice);
  }
  absl::Status SumSlices(Gradient* gradient, const ReplicaCommunicators& replicas) override;
  absl::Status AddToSum(Gradient* gradient, int32_t replica, const ReplicaCommunicators& replicas) override;
  absl::StatusOr<GradientTallies> TallySum(double scale, const ReplicaCommunicators& replicas) override;
  absl::Status StepSlices(const StepArguments& arguments) override;
  absl::Status GatherSlices(const ReplicaCommunicators& replicas) override;
  absl::Status ReadSum(int64_t first_row, int64_t rows, float* out) override {
    return Read({.what = HeadRows::kSum, .first_row = first_row, .rows = rows}, nullptr, out);
  }
  absl::Status ReadBiasSum(int64_t first_row, int64_t rows, float* out) override {
    return Read({.what = HeadRows::kBiasSum, .first_row = first_row, .rows = rows}, nullptr, out);
  }

  std::vector<StateTensor> StateTensors() const override { return StateTensorsOf(shard_->config()); }
  absl::Status ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) override;
  absl::Status WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                          const void* in) override;
  absl::Status RestoreState() override {
    const RankWatch::Executing own = Tell(RestoreStateCommand{number_});
    return shard_->local().RestoreState();
  }
  absl::Status WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                             const float* bias) override;

  MemoryPlan MemoryReport() const override { return shard_->local().MemoryReport(); }

  uint64_t number() const { return number_; }
  const HeadBackend& local() const { return shard_->local(); }

 private:
  // Has the other ranks do it. As long as what is returned lives, the leader does its own part.
  [[nodiscard]] RankWatch::Executing Tell(GroupCommand command) {
    const char* const name = NameOf(command);
    channel_->Send(std::move(command));
    return {watch_, name};
  }
  absl::Status Read(ReadRowsCommand what, const Gradient* gradient, void* out);
  // As the leader's own part knows it.
  static BatchKey LocalKind(BatchKey kind);
  // Has the answers of the batch that is started next come from the rank that holds it.
  void HoldElsewhere(const BatchKey& kind, std::vector<ChunkRows>& chunks, BatchCallbacks& callbacks);

  const uint64_t number_;
  const std::unique_ptr<ShardHead> shard_;
  RankChannel* const channel_;
  RankWatch* const watch_;       // the leader's; may be null
  UnderWay* const under_way_;    // the device's
  std::set<uint64_t> teachers_;  // that every rank is prepared for
};

uint64_t NumberOf(const HeadBackend* head) {
  return head == nullptr ? 0 : static_cast<const ShardedHead*>(head)->number();
}

BatchKey ShardedHead::LocalKind(BatchKey kind) {
  if (kind.teacher.backend != nullptr) {
    kind.teacher.backend = &static_cast<const ShardedHead*>(kind.teacher.backend)->local();
  }
  kind.gradient = LocalOf(kind.gradient);
  return kind;
}

// Rows go where the old ones are, at every rank, and nothing takes memory: what fails on the way has lost a
// rank, and ends the group.
absl::Status ShardedHead::PublishWeights(WeightBuffers staged) {
  for (const StateEntry& entry : StateEntriesOf(shard_->config())) {
    if (entry.part != StatePart::kWeight && entry.part != StatePart::kMaster) continue;
    const HostBuffer& from = entry.of == StateOf::kBias ? staged.bias : staged.weights;
    const StateTensor& tensor = entry.tensor;
    const absl::Status written = WriteState(tensor.name, 0, tensor.rows, from.data());
    if (!written.ok()) return written;
  }
  return RestoreState();
}

absl::Status ShardedHead::Read(ReadRowsCommand what, const Gradient* gradient, void* out) {
  if (absl::Status has = shard_->CheckHas(what); !has.ok()) return has;
  what.head = number_;
  what.gradient = NumberOf(gradient);
  const RankWatch::Executing own = Tell(what);
  return shard_->ReadRows(what, LocalOf(gradient), out);
}

absl::Status ShardedHead::Logits(const LogitRows& rows) {
  const RankWatch::Executing own = Tell(LogitsCommand{.head = number_,
                                                      .rows = rows.rows,
                                                      .logit_scale = rows.logit_scale,
                                                      .softcap = rows.softcap,
                                                      .bias = rows.bias,
                                                      .type = rows.outputs.type,
                                                      .logits = rows.outputs.logits != nullptr,
                                                      .top_k = rows.outputs.top_k});
  return shard_->local().Logits(rows);
}

absl::Status ShardedHead::BlendWeights(const HeadBackend& source, double decay) {
  const RankWatch::Executing own = Tell(BlendWeightsCommand{number_, NumberOf(&source), decay});
  return shard_->local().BlendWeights(static_cast<const ShardedHead&>(source).local(), decay);
}

absl::Status ShardedHead::CopyOptimizer(const HeadBackend& source) {
  const RankWatch::Executing own = Tell(CopyOptimizerCommand{number_, NumberOf(&source)});
  return shard_->local().CopyOptimizer(static_cast<const ShardedHead&>(source).local());
}

absl::Status ShardedHead::PrepareTeacher(const HeadBackend& teacher) {
  const uint64_t number = NumberOf(&teacher);
  if (teachers_.count(number) > 0) return absl::OkStatus();
  absl::Status status = channel_->Ask(PrepareTeacherCommand{number_, number});
  status.Update(shard_->local().PrepareTeacher(static_cast<const ShardedHead&>(teacher).local()));
  if (status.ok()) teachers_.insert(number);
  return status;
}

void ShardedHead::StartBatch(const BatchKey& kind, std::span<const ChunkRows> chunks,
                             BatchCallbacks callbacks) {
  StartBatchCommand command{.head = number_,
                            .teacher = NumberOf(kind.teacher.backend),
                            .gradient = NumberOf(kind.gradient),
                            .kind = kind,
                            .chunks = {}};
  command.kind.teacher.backend = nullptr;
  command.kind.gradient = nullptr;
  for (const ChunkRows& chunk : chunks) command.chunks.push_back(HeaderOf(chunk));
  const RankWatch::Executing own = Tell(std::move(command));
  std::vector<ChunkRows> own_chunks(chunks.begin(), chunks.end());
  if (kind.holder != 0) HoldElsewhere(kind, own_chunks, callbacks);
  callbacks.on_done = [watch = watch_, done = under_way_->batches.Start(std::move(callbacks.on_done))](
                          absl::StatusOr<BatchReport> report) {
    if (watch != nullptr) watch->BatchEnded();
    done(std::move(report));
  };
  if (watch_ != nullptr) watch_->BatchStarted();
  shard_->local().StartBatch(LocalKind(kind), own_chunks, std::move(callbacks));
}

void ShardedHead::HoldElsewhere(const BatchKey& kind, std::vector<ChunkRows>& chunks,
                                BatchCallbacks& callbacks) {
  HeldBatches* const held = &under_way_->held;
  const uint64_t number = under_way_->batches.started() + 1;
  // The leader's own part gets no results, whatever its device says of them.
  held->Start(number, chunks, std::exchange(callbacks.on_input_gradients, [](size_t /*chunk*/) {}));
  callbacks.on_times = nullptr;
  callbacks.on_done = [held, number,
                       done = std::move(callbacks.on_done)](absl::StatusOr<BatchReport> report) {
    held->End(number);
    done(std::move(report));
  };
  for (ChunkRows& chunk : chunks) chunk = WithoutTensors(chunk, kind.returns);
}

absl::StatusOr<GradientTallies> ShardedHead::ApplyStep(const Gradient* gradient,
                                                       const StepArguments& arguments) {
  // What is wrong with the arguments is wrong at every rank, which then could not go on.
  const absl::StatusOr<kernels::OptimizerCoefficients> can = CoefficientsFor(shard_->config(), arguments);
  if (!can.ok()) return can.status();
  const RankWatch::Executing own = Tell(ApplyStepCommand{number_, NumberOf(gradient), arguments});
  return shard_->Merge(shard_->local().ApplyStep(LocalOf(gradient), arguments));
}

absl::Status ShardedHead::SumSlices(Gradient* gradient, const ReplicaCommunicators& replicas) {
  const RankWatch::Executing own = Tell(SumSlicesCommand{number_, NumberOf(gradient), replicas.connection});
  absl::Status summed;
  absl::Status group = shard_->SumSlices(LocalOf(gradient), &replicas, &summed);
  return group.ok() ? summed : group;
}

absl::Status ShardedHead::AddToSum(Gradient* gradient, int32_t replica,
                                   const ReplicaCommunicators& replicas) {
  const RankWatch::Executing own =
      Tell(AddToSumCommand{number_, NumberOf(gradient), replica, replicas.connection});
  absl::Status added;
  absl::Status group =
      shard_->AddToSum(gradient == nullptr ? nullptr : LocalOf(gradient), replica, &replicas, &added);
  return group.ok() ? added : group;
}

absl::StatusOr<GradientTallies> ShardedHead::TallySum(double scale, const ReplicaCommunicators& replicas) {
  const RankWatch::Executing own = Tell(TallySumCommand{number_, scale, replicas.connection});
  absl::StatusOr<GradientTallies> tallied;
  absl::Status group = shard_->TallySum(scale, &replicas, &tallied);
  return group.ok() ? tallied : group;
}

absl::Status ShardedHead::StepSlices(const StepArguments& arguments) {
  const absl::StatusOr<kernels::OptimizerCoefficients> can = CoefficientsFor(shard_->config(), arguments);
  if (!can.ok()) return can.status();
  const RankWatch::Executing own = Tell(StepSlicesCommand{number_, arguments});
  return shard_->local().StepSlices(arguments);
}

absl::Status ShardedHead::GatherSlices(const ReplicaCommunicators& replicas) {
  const RankWatch::Executing own = Tell(GatherSlicesCommand{number_, replicas.connection});
  absl::Status gathered;
  absl::Status group = shard_->GatherSlices(&replicas, &gathered);
  return group.ok() ? gathered : group;
}

absl::Status ShardedHead::ReadState(const std::string& tensor, int64_t first_row, int64_t rows, void* out) {
  return Read({.what = HeadRows::kState, .tensor = tensor, .first_row = first_row, .rows = rows}, nullptr,
              out);
}

absl::Status ShardedHead::WriteState(const std::string& tensor, int64_t first_row, int64_t rows,
                                     const void* in) {
  const absl::StatusOr<StateEntry> entry = FindState(shard_->config(), tensor);
  if (!entry.ok()) return entry.status();
  // Rows of a master may be anywhere: HeadBackend::WriteState.
  if (entry->part != StatePart::kMaster) {
    const absl::Status has =
        shard_->CheckHas({.what = HeadRows::kState, .tensor = tensor, .first_row = first_row, .rows = rows});
    if (!has.ok()) return has;
  }
  const WriteRowsCommand what{
      .head = number_, .what = HeadRows::kState, .tensor = tensor, .first_row = first_row, .rows = rows};
  const RankWatch::Executing own = Tell(what);
  return shard_->WriteRows(what, nullptr, in, nullptr);
}

absl::Status ShardedHead::WriteGradient(Gradient* gradient, int64_t first_row, int64_t rows, const float* dw,
                                        const float* bias) {
  const WriteRowsCommand what{.head = number_,
                              .what = HeadRows::kGradient,
                              .gradient = NumberOf(gradient),
                              .with_bias = bias != nullptr,
                              .first_row = first_row,
                              .rows = rows};
  const RankWatch::Executing own = Tell(what);
  return shard_->WriteRows(what, LocalOf(gradient), dw, bias);
}

// One connection of every rank's; the leader's own part is here.
class ShardedConnection final : public ReplicaConnection {
 public:
  ShardedConnection(uint64_t number, std::shared_ptr<ReplicaConnection> local,
                    std::shared_ptr<RankChannel> channel)
      : local_(std::move(local)), communicators_(local_->communicators()), channel_(std::move(channel)) {
    communicators_.connection = number;
  }

  const ReplicaCommunicators& communicators() const override { return communicators_; }
  void Abort() override {
    channel_->Send(AbortReplicasCommand{communicators_.connection});
    local_->Abort();
  }

 private:
  const std::shared_ptr<ReplicaConnection> local_;
  ReplicaCommunicators communicators_;
  const std::shared_ptr<RankChannel> channel_;
};

class ShardedDevice : public Device {
 public:
  ShardedDevice(std::unique_ptr<Device> local, const RankPlace& place, std::shared_ptr<RankChannel> channel)
      : local_(std::move(local)), place_(place), channel_(std::move(channel)) {
    if (place_.watch != nullptr) probe_.emplace(local_.get(), place_.watch, channel_.get());
  }

  std::string name() const override { return local_->name(); }
  bool IsHost() const override { return local_->IsHost(); }
  std::string description() const override {
    return absl::StrCat(place_.ranks, " ranks, each: ", local_->description());
  }
  std::string pci_bus_id() const override { return local_->pci_bus_id(); }
  int64_t AvailableMemory() const override {
    return AvailableMemoryOf(*local_, place_.host_ranks == 0 ? place_.ranks : place_.host_ranks);
  }
  absl::StatusOr<MemoryPlan> PlanMemory(const HeadConfig& config) const override {
    return PlanShard(config, HeadShard::Whole(config.vocab_size));
  }
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateHead(const HeadConfig& config) override {
    return CreateShard(config, HeadShard::Whole(config.vocab_size));
  }
  // The shard is a whole head, which may be one of replicas.
  absl::StatusOr<MemoryPlan> PlanShard(const HeadConfig& config, const HeadShard& shard) const override;
  absl::StatusOr<std::unique_ptr<HeadBackend>> CreateShard(const HeadConfig& config,
                                                           const HeadShard& shard) override;
  absl::StatusOr<std::shared_ptr<ReplicaConnection>> ConnectReplicas(
      const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) override;
  MemoryPlan PlanGradient(const HeadConfig& config) const override {
    return local_->PlanGradient(ShardConfigOf(config, place_));
  }
  absl::StatusOr<std::unique_ptr<Gradient>> CreateGradient(const HeadConfig& config) override;
  bool TakesTokenLists() const override { return false; }  // every rank has entries of its own
  bool HasFixedSegments(const HeadConfig& config) const override { return local_->HasFixedSegments(config); }
  int64_t PreferredChunkBytes() const override { return local_->PreferredChunkBytes(); }
  DeviceTotals Totals() const override { return local_->Totals(); }
  absl::Status RoundTrip() override { return local_->RoundTrip(); }
  GroupReport Group() const override {
    GroupReport group = channel_->Report();
    if (!group.ranks.empty()) group.ranks.front() = ReportOf(*local_, place_);
    return group;
  }
  MemoryPlan SharedMemory() const override { return local_->SharedMemory(); }
  std::optional<ResultBytes> RegisteredBytes(int64_t bytes) override {
    return local_->RegisteredBytes(bytes);
  }
  PoolUsage RegisteredUsage() const override { return local_->RegisteredUsage(); }

  int64_t RegionBytes(RegionKind kind, int64_t asked) const override {
    return local_->RegionBytes(kind, asked);
  }
  MemoryPlan PlanRegion(RegionKind kind, int64_t bytes) const override {
    return local_->PlanRegion(kind, bytes);
  }
  absl::StatusOr<std::shared_ptr<RegionMemory>> CreateRegionMemory(RegionKind kind, int64_t bytes) override {
    return local_->CreateRegionMemory(kind, bytes);
  }

  // While the others report a batch, the next one is computed. No more than a device has room for: what is
  // under way here may be so at any rank.
  int64_t MostBatches() const override { return std::max<int64_t>(local_->MostBatches(), 2); }
  int64_t BatchesUnderWay() const override { return under_way_.batches.under_way(); }
  void Poll() override {
    local_->Poll();
    const uint64_t applied = channel_->BatchesApplied();  // first: what these have answered has then come
    for (const AnsweredChunk& chunk : channel_->TakeAnswered()) under_way_.held.Answer(chunk);
    under_way_.batches.Poll(applied);
  }

 private:
  const std::unique_ptr<Device> local_;
  const RankPlace place_;
  const std::shared_ptr<RankChannel> channel_;
  std::atomic<uint64_t> last_number_ = 0;  // of a head or a gradient
  uint64_t last_connection_ = 0;           // of ConnectReplicas's one caller
  UnderWay under_way_;
  std::optional<IdleProbe> probe_;  // it uses the above
};

absl::StatusOr<MemoryPlan> ShardedDevice::PlanShard(const HeadConfig& config, const HeadShard& shard) const {
  if (!shard.whole()) return NoShards();
  if (absl::Status status = CheckRanks(config, place_.ranks); !status.ok()) return status;
  return ShardHead::Plan(*local_, config, place_, {shard.replica, shard.replicas});
}

absl::StatusOr<std::unique_ptr<HeadBackend>> ShardedDevice::CreateShard(const HeadConfig& config,
                                                                        const HeadShard& whole) {
  if (!whole.whole()) return NoShards();
  if (absl::Status status = CheckRanks(config, place_.ranks); !status.ok()) return status;
  const ReplicaPlace replica{whole.replica, whole.replicas};
  const uint64_t number = ++last_number_;
  absl::Status status = channel_->Ask(CreateHeadCommand{number, config, replica});
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<ShardHead>> shard =
        ShardHead::Create(local_.get(), config, place_, replica);
    if (shard.ok()) {
      return std::make_unique<ShardedHead>(number, *std::move(shard), channel_.get(), place_.watch,
                                           &under_way_);
    }
    status = shard.status();
  }
  channel_->Send(DeleteHeadCommand{number});
  return status;
}

absl::StatusOr<std::unique_ptr<Gradient>> ShardedDevice::CreateGradient(const HeadConfig& config) {
  const uint64_t number = ++last_number_;
  absl::Status status = channel_->Ask(CreateGradientCommand{number, config});
  if (status.ok()) {
    absl::StatusOr<std::unique_ptr<Gradient>> local = local_->CreateGradient(ShardConfigOf(config, place_));
    if (local.ok()) return std::make_unique<ShardedGradient>(number, *std::move(local), channel_.get());
    status = local.status();
  }
  channel_->Send(DeleteGradientCommand{number});
  return status;
}

absl::StatusOr<std::shared_ptr<ReplicaConnection>> ShardedDevice::ConnectReplicas(
    const ReplicaNetwork& network, kernels::collectives::Rendezvous& rendezvous) {
  if (place_.rendezvous == nullptr) {
    return absl::FailedPreconditionError("the ranks of this group cannot reach those of other replicas");
  }
  const uint64_t number = ++last_connection_;
  channel_->Send(ConnectReplicasCommand{number, network});
  ReplicaRendezvous rounds(place_, &rendezvous);
  absl::StatusOr<std::shared_ptr<ReplicaConnection>> local = local_->ConnectReplicas(network, rounds);
  absl::Status connected = rounds.Finish(local.status());
  if (connected.ok()) return std::make_shared<ShardedConnection>(number, *std::move(local), channel_);
  channel_->Send(AbortReplicasCommand{number});
  return connected;
}

}  // namespace

std::unique_ptr<Device> CreateShardedDevice(std::unique_ptr<Device> local, const RankPlace& place,
                                            std::shared_ptr<RankChannel> channel) {
  return std::make_unique<ShardedDevice>(std::move(local), place, std::move(channel));
}

int64_t AvailableMemoryOf(const Device& local, int32_t ranks) {
  const int64_t available = local.AvailableMemory();
  return local.IsHost() ? available / ranks : available;
}

}  // namespace lossd::engine
