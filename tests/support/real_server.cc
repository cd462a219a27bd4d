#include "tests/support/real_server.h"

#include <atomic>
#include <cstdlib>
#include <future>
#include <iostream>
#include <utility>

#include "client/src/common/convert.h"
#include "server/rpc/convert/convert.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::testing {
namespace {

void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << "real server: " << status << "\n";
  std::abort();
}

template <typename Value>
Value Require(absl::StatusOr<Value> value) {
  Require(value.status());
  return *std::move(value);
}

constexpr char kAnothersWrite[] = "another's";

void PublishZeros(engine::Head& head) {
  const engine::HeadConfig& sizes = head.config();
  const std::string id = Require(
      head.BeginWrite("another", engine::Replace::kYes, "behind " + std::to_string(head.weight_version())));
  const std::string rows(static_cast<size_t>(sizes.elements()) * sizeof(float), '\0');
  const std::string bias(static_cast<size_t>(sizes.bias_bytes()), '\0');
  Require(Require(head.FindWrite(id))->Write(0, sizes.vocab_size, kernels::DataType::kFloat32, rows, bias));
  std::promise<absl::StatusOr<uint64_t>> done;
  head.CommitWrite(id, [&](absl::StatusOr<uint64_t> version) { done.set_value(std::move(version)); });
  Require(Await("weights to be published", done));
}

class SilentStream : public engine::LaneListener {
 public:
  void OnAnswer(engine::ChunkAnswer /*answer*/) override {}
  void OnApplied(uint64_t /*applied*/) override {}
  void OnEnd(absl::Status /*status*/) override {}
};

}  // namespace

RealServer::RealServer() {
  options.device = MakeWholeNumberDevice;
  options.server.listen = port_.address();
  constexpr int64_t kRowBytes = (kHidden + 1) * static_cast<int64_t>(sizeof(float));  // with one of a bias
  options.server.row_message_bytes = 2 * kRowBytes;
}

std::string RealServer::target() {
  if (server_ == nullptr) Restart();
  return server_->target();
}

void RealServer::Restart(With with) {
  const CallRecorder::Pause pause;
  server_.reset();
  TestServerOptions with_head = options;
  // A lane that comes back early finds it there.
  if (with == With::kSameHead) with_head.prepare = [this](engine::Engine& engine) { CreateHead(engine); };
  server_ = std::make_unique<TestServer>(with_head);
  stubs_ = std::make_unique<Stubs>(server_->Channel());
  client_ = Require(Client::Connect(server_->target(), {}));
}

void RealServer::CreateHead(engine::Engine& engine) {
  PublishZeros(*Require(engine.CreateHead(Require(rpc::ToEngine(internal::ToRequest(config))))));
}

void RealServer::RecreateHead() {
  const CallRecorder::Pause pause;
  Require(client_->DeleteHead(kHeadName, /*discard_gradient=*/true));
  CreateHead(server_->engine());
}

uint64_t RealServer::Applied() {
  target();
  uint64_t sum = 0;
  for (const auto& session : EngineHead()->Sessions()) {
    sum += session.applied;
  }
  return sum;
}

void RealServer::AwaitApplied(uint64_t chunks) {
  Await("chunks to be applied", [&] { return Applied() >= chunks; });
}

void RealServer::FlushAfter(uint64_t chunks) {
  AwaitApplied(chunks);
  const std::shared_ptr<engine::Head> head = EngineHead();
  absl::StatusOr<engine::FlushInfo> flush = absl::UnknownError("not begun");
  Await("a flush that other lanes let begin", [&] {  // they may go on meanwhile
    const engine::HeadInfo info = head->Info();
    std::promise<absl::StatusOr<engine::FlushInfo>> begun;
    head->BeginFlush(info.generation, info.window_marks, 1,
                     [&](absl::StatusOr<engine::FlushInfo> told) { begun.set_value(std::move(told)); });
    flush = Await("a flush to begin", begun);
    return flush.ok();
  });
  Require(engine::CommitFlush(*head, flush->flush_id));
}

void RealServer::Publish(const std::string& name) {
  PublishZeros(*Require(server_->engine().FindHead(name)));
}

void RealServer::BeginWrite() {
  Require(EngineHead()->BeginWrite("another", engine::Replace::kYes, kAnothersWrite));
}

void RealServer::ForgetWrite() {
  BeginWrite();
  EngineHead()->DropWrite(kAnothersWrite);
}

void RealServer::Expire() {
  const std::shared_ptr<engine::Head> head = EngineHead();
  for (const auto& session : head->Info().window_marks) Require(head->CloseSession(session.session_id));
}

void RealServer::TakeLane(int lane) {
  AwaitApplied(1);  // the marks do not name it before
  const std::shared_ptr<engine::Head> head = EngineHead();
  const std::string session_id = head->Info().window_marks.at(0).session_id;
  Require(head->AttachLane(session_id, lane, std::make_shared<SilentStream>()));
}

void RealServer::Abort() {
  const std::shared_ptr<engine::Head> head = EngineHead();
  Require(engine::AbortFlush(*head, head->Info().flush_id));
}

void RealServer::BeforeOf(int lane, uint64_t sequence, std::function<void()> action) {
  const auto done = std::make_shared<std::atomic_flag>();
  recorder_.before_chunk = [lane, sequence, action = std::move(action), done](int at, uint64_t sent) {
    if ((lane < 0 || at == lane) && sent == sequence && !done->test_and_set()) action();
  };
}

std::vector<float> RealServer::window() {
  const CallRecorder::Pause pause;
  const std::string flush_id = Told().flush_id();
  if (!flush_id.empty()) return ReadGradient(*stubs_, config.name, flush_id);
  return PeekWindow(*stubs_, config.name).gradient;
}

std::vector<float> RealServer::weights() { return ReadWeights(nullptr); }

std::vector<float> RealServer::bias() {
  std::vector<float> bias;
  ReadWeights(&bias);
  return bias;
}

std::vector<float> RealServer::ReadWeights(std::vector<float>* bias) {
  const CallRecorder::Pause pause;
  std::vector<float> weights(static_cast<size_t>(config.vocab_size * config.hidden_size));
  std::vector<float> biases(config.bias ? static_cast<size_t>(config.vocab_size) : 0);
  Require(Own().ReadWeights(DataType::kFloat32, weights.data(), biases));
  if (bias != nullptr) *bias = std::move(biases);
  return weights;
}

void RealServer::set_weights(const std::vector<float>& weights) {
  target();
  const CallRecorder::Pause pause;
  const std::vector<float> bias(config.bias ? static_cast<size_t>(config.vocab_size) : 0);
  Require(Own().WriteWeights(DataType::kFloat32, weights.data(), bias));
}

v1::Head RealServer::Told() {
  const CallRecorder::Pause pause;
  return GetHead(*stubs_, config.name);
}

Head RealServer::Own() { return Require(client_->GetHead(config.name)); }

std::shared_ptr<engine::Head> RealServer::EngineHead() {
  return Require(server_->engine().FindHead(config.name));
}

}  // namespace lossd::testing
