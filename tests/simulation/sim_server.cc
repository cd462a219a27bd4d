#include "tests/simulation/sim_server.h"

#include <atomic>
#include <filesystem>
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

SimServer::SimServer(const ServerOptions& options, Sabotage sabotage) : options_(options) {
  engine::ids_given = 0;
  gate_.sabotage = sabotage;
  Start("");
}

SimServer::~SimServer() { Stop(); }

void SimServer::Start(const std::string& incarnation) {
  engine::EngineOptions options;
  options.device_loop = engine::DeviceLoop::kByCaller;
  options.session_lease = -absl::Hours(1);  // what has no stream has expired when somebody looks
  options.place_timeout = absl::InfiniteDuration();
  options.incarnation = incarnation;
  if (store_ == nullptr) {
    std::filesystem::remove_all(options_.checkpoint_folder);
    store_ = *engine::CheckpointStore::Open(options_.checkpoint_folder);
  }
  options.checkpoints = store_;
  engine_ = *engine::Engine::Create(std::move(options), MakeSimDevice(&gate_, options_.device));
}

void SimServer::Stop() {
  gate_.free = true;
  engine_.reset();
  gate_.free = false;
}

std::shared_ptr<engine::Head> SimServer::head() const {
  const auto head = engine_->FindHead(kHead);
  return head.ok() ? *head : nullptr;
}

void SimServer::Run(const std::function<void()>& call) {
  gate_.free = true;
  std::atomic<bool> done = false;
  std::thread caller([&] {
    call();
    done = true;
  });
  while (!done) engine_->StepDevice();
  caller.join();
  gate_.free = false;
}

uint64_t SimServer::Create(const Values& weights) {
  const std::shared_ptr<engine::Head> head = *engine_->CreateHead(options_.head);
  const std::string write = *head->BeginWrite("create", engine::Head::Replace::kYes, engine::RandomId());
  WriteRows(write, weights, 0, kVocab).IgnoreError();
  uint64_t version = 0;
  head->CommitWrite(write, [&](const absl::StatusOr<uint64_t>& published) { version = *published; });
  gate_.free = true;
  engine_->WaitIdle();
  gate_.free = false;
  return version;
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
  Values weights;
  head()->ReadWeights(0, kVocab, kernels::DataType::kFloat32, {weights.matrix.data(), weights.bias.data()},
                      [](const absl::StatusOr<uint64_t>& /*version*/) {});
  gate_.free = true;
  engine_->WaitIdle();
  gate_.free = false;
  return weights;
}

absl::Status SimServer::Drain(const std::function<void()>& streams_end) {
  engine_->BeginDrain();
  gate_.free = true;
  engine_->WaitIdle();
  gate_.free = false;
  streams_end();
  absl::Status saved;
  Run([&] {
    const absl::StatusOr<engine::DrainedHeads> heads = engine_->SaveForDrain();
    saved = heads.ok() && !heads->failed.empty() ? heads->failed.begin()->second : heads.status();
  });
  if (!saved.ok()) return saved;
  Stop();
  const absl::StatusOr<std::optional<engine::DrainRecord>> drain = store_->ReadDrain();
  if (!drain.ok()) return drain.status();
  if (!drain->has_value()) return absl::InternalError("there is no record of the drain");
  Start((*drain)->incarnation);
  absl::Status restored;
  Run([&] { restored = engine_->RestoreAtStart(*drain).status(); });
  return restored.ok() ? store_->ConsumeDrain() : restored;
}

absl::Status SimServer::Kill() {
  Stop();
  const absl::StatusOr<std::optional<engine::DrainRecord>> drain = store_->ReadDrain();
  if (!drain.ok()) return drain.status();
  if (drain->has_value()) return absl::InternalError("a drain is there after it was consumed");
  Start("");
  absl::Status restored;
  Run([&] { restored = engine_->RestoreAtStart(std::nullopt).status(); });
  return restored;
}

}  // namespace lossd::simulation
