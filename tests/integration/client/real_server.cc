#include "tests/integration/client/real_server.h"

#include <cstdlib>
#include <future>
#include <iostream>
#include <thread>
#include <utility>

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

}  // namespace

std::string RealServer::target() {
  if (server_ == nullptr) Start();
  return server_->target();
}

void RealServer::Start(With with) {
  const CallRecorder::Pause pause;
  server_ = std::make_unique<TestServer>(options);
  stubs_ = std::make_unique<Stubs>(server_->Channel());
  client_ = Require(Client::Connect(server_->target(), {}));
  if (with == With::kSameHead) CreateHead();
}

void RealServer::Restart(With with) {
  options.server.listen = server_->target();
  server_.reset();
  Start(with);
}

void RealServer::CreateHead() {
  const Head head = Require(client_->CreateHead(config));
  const std::vector<float> weights(static_cast<size_t>(config.vocab_size * config.hidden_size));
  const std::vector<float> bias(config.bias ? static_cast<size_t>(config.vocab_size) : 0);
  Require(head.WriteWeights(DataType::kFloat32, weights.data(), bias));
}

void RealServer::RecreateHead() {
  const CallRecorder::Pause pause;
  Require(client_->DeleteHead(kHeadName, /*discard_gradient=*/true));
  CreateHead();
}

void RealServer::AwaitApplied(uint64_t chunks) {
  const auto applied = [head = EngineHead()] {
    uint64_t sum = 0;
    for (const auto& session : head->Info().window_marks) {
      for (const auto& lane : session.lanes) sum += lane.applied;
    }
    return sum;
  };
  while (applied() < chunks) std::this_thread::yield();
}

void RealServer::FlushAfter(uint64_t chunks) {
  AwaitApplied(chunks);
  const std::shared_ptr<engine::Head> head = EngineHead();
  const engine::HeadInfo info = head->Info();
  std::promise<absl::StatusOr<engine::FlushInfo>> begun;
  head->BeginFlush(info.generation, info.window_marks, 1,
                   [&](absl::StatusOr<engine::FlushInfo> flush) { begun.set_value(std::move(flush)); });
  Require(head->CommitFlush(Require(begun.get_future().get()).flush_id));
}

void RealServer::Abort() {
  const std::shared_ptr<engine::Head> head = EngineHead();
  Require(head->AbortFlush(head->Info().flush_id));
}

void RealServer::Before(uint64_t sequence, std::function<void()> action) {
  recorder_.before_chunk = [sequence, action = std::move(action), done = false](int /*lane*/,
                                                                                uint64_t sent) mutable {
    if (sent == sequence && !std::exchange(done, true)) action();
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
