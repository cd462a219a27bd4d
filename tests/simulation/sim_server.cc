#include "tests/simulation/sim_server.h"

#include <atomic>
#include <filesystem>
#include <limits>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/random_id.h"

namespace lossd::engine {

namespace {

uint64_t ids_given = 0;

}  // namespace

// Instead of the engine's own (random_id.cc): ids decide what goes first where order does not matter, and a
// schedule has to go the same way every time.
std::string RandomId() { return absl::StrCat("id-", absl::Dec(++ids_given, absl::kZeroPad8)); }

}  // namespace lossd::engine

namespace lossd::simulation {
namespace {

constexpr size_t kMostLate = 8;

template <typename Message>
void Append(std::deque<Message> more, std::deque<Message>* late) {
  for (Message& message : more) late->push_back(std::move(message));
  while (late->size() > kMostLate) late->pop_front();
}

}  // namespace

SimServer::SimServer(const ServerOptions& options, Sabotage sabotage) : options_(options) {
  engine::ids_given = 0;
  gate_.sabotage = sabotage;
  rank_record_.tracing = options.tracing;
  std::filesystem::remove_all(options_.checkpoint_folder);
  store_ = *engine::CheckpointStore::Open(options_.checkpoint_folder);
  if (!options_.replicas) {
    Start("");
    return;
  }
  replicas_ = std::make_unique<SimReplicas>(SimReplicas::Options{.device = options_.device,
                                                                 .sabotage = sabotage,
                                                                 .checkpoints = store_,
                                                                 .record = &rank_record_,
                                                                 .on_return = options_.on_return});
}

SimServer::~SimServer() {
  if (replicas_ == nullptr) Stop(OtherRank::kEnds);
}

void SimServer::Start(const std::string& incarnation) {
  engine::EngineOptions options;
  options.device_loop = engine::DeviceLoop::kByCaller;
  options.session_lease = -absl::Hours(1);  // what has no stream has expired when somebody looks
  options.place_timeout = absl::InfiniteDuration();
  options.incarnation = incarnation;
  options.checkpoints = store_;
  options.on_device_failure = [this](const absl::Status& status) { device_failure_ = status; };
  device_failure_ = absl::OkStatus();
  gate_.added.clear();
  engine_ = *engine::Engine::Create(std::move(options), MakeDevice());
}

std::unique_ptr<engine::Device> SimServer::MakeDevice() {
  if (!options_.group) return MakeSimDevice(&gate_, options_.device);
  group_ = std::make_unique<SimGroup>(SimGroup::Options{.epoch = ++epoch_,
                                                        .device = options_.device,
                                                        .sabotage = gate_.sabotage,
                                                        .leader_gate = &gate_,
                                                        .record = &rank_record_,
                                                        .step_leader = [this] { engine_->StepDevice(); }});
  return group_->MakeDevice();
}

void SimServer::Stop(OtherRank other) {
  const bool lives_on = group_ != nullptr && group_->rank_is_there() && other == OtherRank::kLivesOn;
  if (lives_on) {
    group_->LoseLeader();
  } else if (group_ != nullptr) {
    if (other == OtherRank::kEnds) group_->EndInOrder();
    group_->End();
    Append(group_->Untold(), &late_reports_);
    Append(group_->Undelivered(), &late_commands_);
  }
  gate_.free = true;
  engine_.reset();
  gate_.free = false;
  // One at most is there.
  if (lives_on) leftover_ = std::move(group_);
  group_.reset();
}

void SimServer::RunLeftover(int steps) {
  leftover_->Run(steps);
  Append(leftover_->Untold(), &late_reports_);
}

void SimServer::BeatLeftover() {
  leftover_->Beat();
  if (leftover_->rank_is_there()) return;
  Append(leftover_->Undelivered(), &late_commands_);
  leftover_.reset();
}

int64_t SimServer::sabotaged() const {
  int64_t all = gate_.sabotaged + rank_record_.sabotaged;
  if (replicas_ != nullptr) all += replicas_->sabotaged();
  for (const SimGroup* group : {group_.get(), leftover_.get()}) {
    if (group != nullptr) all += group->sabotaged();
  }
  return all;
}

bool SimServer::EveryRankHasAdded(uint64_t item) {
  if (replicas_ != nullptr) return replicas_->HasAdded(item);
  return gate_.added.contains(item) && (group_ == nullptr || group_->HasAdded(item));
}

bool SimServer::DeliverLate() {
  if (!late_reports_.empty()) {
    group_->Arrive(late_reports_.front());
    late_reports_.pop_front();
    return true;
  }
  if (late_commands_.empty()) return false;
  group_->Arrive(std::move(late_commands_.front()));
  late_commands_.pop_front();
  return true;
}

void SimServer::WaitIdle() {
  if (group_ != nullptr) group_->Heal();
  gate_.free = true;
  engine_->WaitIdle();
  gate_.free = false;
  if (group_ != nullptr) group_->RunAll();
}

void SimServer::WaitUntil(const std::function<bool()>& is_done) {
  if (replicas_ == nullptr) return WaitIdle();
  replicas_->GoUntil(is_done);
}

void SimServer::StepDevice(int32_t replica) {
  if (replicas_ != nullptr) return replicas_->StepDevice(replica);
  engine_->StepDevice();
}

std::shared_ptr<engine::Head> SimServer::head(int32_t replica) const {
  engine::Engine& engine = replicas_ == nullptr ? *engine_ : replicas_->engine(replica);
  const auto head = engine.FindHead(kHead);
  return head.ok() ? *head : nullptr;
}

void SimServer::Run(const std::function<void()>& call) {
  if (replicas_ != nullptr) {
    replicas_->Call(call);
    replicas_->GoUntil([this] { return !replicas_->calling(); });
    return;
  }
  // Two threads send commands: one after the other, so that a seed always gives the same run.
  if (group_ != nullptr) WaitIdle();
  gate_.free = true;
  std::atomic<bool> done = false;
  std::thread caller([&] {
    call();
    done = true;
  });
  while (!done) engine_->StepDevice();
  caller.join();
  gate_.free = false;
  if (group_ != nullptr) group_->RunAll();
}

absl::StatusOr<std::shared_ptr<engine::Head>> SimServer::CreateHead() {
  if (replicas_ == nullptr) return engine_->CreateHead(options_.head);
  absl::StatusOr<std::shared_ptr<engine::Head>> created;
  Run([&] { created = engine().CreateHead(options_.head); });
  return created;
}

uint64_t SimServer::Create(const Values& weights) {
  const absl::StatusOr<std::shared_ptr<engine::Head>> created = CreateHead();
  if (!created.ok()) return 0;
  const std::shared_ptr<engine::Head>& head = *created;
  const std::string write = *head->BeginWrite("create", engine::Head::Replace::kYes, engine::RandomId());
  WriteRows(write, weights, 0, kVocab).IgnoreError();
  const auto version = std::make_shared<std::optional<uint64_t>>();
  head->CommitWrite(
      write, [version](const absl::StatusOr<uint64_t>& published) { *version = published.value_or(0); });
  WaitUntil([&version] { return version->has_value(); });
  return version->value_or(0);
}

absl::Status SimServer::WriteRows(const std::string& write, const Values& weights, int64_t first,
                                  int64_t rows) {
  const absl::StatusOr<std::shared_ptr<engine::StagedWrite>> staged = head()->FindWrite(write);
  if (!staged.ok()) return staged.status();
  const auto bytes = [first, rows](const std::vector<float>& values, int64_t columns) {
    return absl::string_view(reinterpret_cast<const char*>(values.data() + first * columns),
                             static_cast<size_t>(rows * columns) * sizeof(float));
  };
  return (*staged)->Write(first, rows, kernels::DataType::kFloat32, bytes(weights.matrix, kHidden),
                          bytes(weights.bias, 1));
}

Values SimServer::Weights() {
  struct Read {
    std::vector<Values> weights;
    int answers = 0;
  };
  const auto read = std::make_shared<Read>();
  read->weights.resize(static_cast<size_t>(replica_count()));
  for (int32_t replica = 0; replica < replica_count(); ++replica) {
    Values& weights = read->weights[static_cast<size_t>(replica)];
    head(replica)->ReadWeights(0, kVocab, kernels::DataType::kFloat32,
                               {weights.matrix.data(), weights.bias.data()},
                               [read](const absl::StatusOr<uint64_t>& /*version*/) { ++read->answers; });
  }
  WaitUntil([&] { return read->answers == replica_count(); });
  Values first = read->weights.front();
  if (!(first == read->weights.back())) first.matrix.front() = std::numeric_limits<float>::quiet_NaN();
  return first;
}

absl::Status SimServer::Drain(const std::function<void()>& streams_end) {
  engine_->BeginDrain();
  WaitIdle();
  streams_end();
  absl::Status saved;
  Run([&] {
    const absl::StatusOr<engine::DrainedHeads> heads = engine_->SaveForDrain();
    saved = heads.ok() && !heads->failed.empty() ? heads->failed.begin()->second : heads.status();
  });
  if (!saved.ok()) return saved;
  Stop(OtherRank::kEnds);
  const absl::StatusOr<std::optional<engine::DrainRecord>> drain = store_->ReadDrain();
  if (!drain.ok()) return drain.status();
  if (!drain->has_value()) return absl::InternalError("there is no record of the drain");
  Start((*drain)->incarnation);
  absl::Status restored;
  Run([&] { restored = engine_->RestoreAtStart(*drain).status(); });
  return restored.ok() ? store_->ConsumeDrain() : restored;
}

absl::Status SimServer::Kill(OtherRank other) {
  Stop(other);
  const absl::StatusOr<std::optional<engine::DrainRecord>> drain = store_->ReadDrain();
  if (!drain.ok()) return drain.status();
  if (drain->has_value()) return absl::InternalError("a drain is there after it was consumed");
  Start("");
  absl::Status restored;
  Run([&] { restored = engine_->RestoreAtStart(std::nullopt).status(); });
  return restored;
}

}  // namespace lossd::simulation
