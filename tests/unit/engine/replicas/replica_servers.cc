#include "tests/unit/engine/replicas/replica_servers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/data_type.h"
#include "server/engine/common/random_id.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/replica_connection.h"
#include "server/engine/replicas/own_part.h"
#include "tests/conformance/rank_threads.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing {
namespace {

// One row of a bf16 head takes 4 MiB where the processor multiplies bf16 by itself.
constexpr int64_t kWorkspaceBytes = int64_t{8} << 20;

std::vector<float> RandomFloats(uint64_t seed, int64_t count) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

std::string BytesOf(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// A callback, and what it is called with.
template <class Answered>
std::pair<std::function<void(absl::StatusOr<Answered>)>, std::future<absl::StatusOr<Answered>>> Awaited() {
  auto answer = std::make_shared<std::promise<absl::StatusOr<Answered>>>();
  std::future<absl::StatusOr<Answered>> asked = answer->get_future();
  return {[answer = std::move(answer)](absl::StatusOr<Answered> told) { answer->set_value(std::move(told)); },
          std::move(asked)};
}

// A replica that is reached by calls: as the coordinator's own, but that it does not come last.
class HeadPart : public OwnPart {
 public:
  HeadPart(const std::shared_ptr<Head>& head, const std::shared_ptr<const ReplicaCommunicators>& replicas)
      : OwnPart(head, replicas), head_(head), replicas_(replicas) {}

  void Step(const JointStep& step, std::function<void(absl::Status)> done) override {
    head_->StepPart(step, replicas_,
                    [head = head_, step, done = std::move(done)](const absl::Status& status) {
                      if (status.ok()) head->PublishPart(step);
                      done(status);
                    });
  }
  void Reopen(const absl::Status& why, std::function<void(absl::Status)> done) override {
    head_->ReopenPart(why);
    done(absl::OkStatus());
  }
  void Hold(const FlushInfo& flush, std::function<void(absl::Status)> done) override {
    done(head_->HoldPart(flush));
  }
  void EndFlush(const std::string& flush_id, FlushFate fate, Done done) override {
    done(head_->EndFlushPart(flush_id, fate));
  }

 private:
  const std::shared_ptr<Head> head_;
  const std::shared_ptr<const ReplicaCommunicators> replicas_;
};

}  // namespace

ReplicaServer::ReplicaServer(EngineOptions options, std::unique_ptr<Device> device)
    : engine_(*Engine::Create(std::move(options), std::move(device))) {}

void ReplicaServer::CreateHead(const HeadConfig& config) {
  const absl::StatusOr<std::shared_ptr<Head>> created = engine_->CreateHead(config);
  EXPECT_TRUE(created.ok()) << created.status();
  WriteWeights(1);
}

absl::Status ReplicaServer::OpenSession() {
  const std::string client_key = absl::StrCat("client ", engine_->options().place.replica);
  const absl::StatusOr<OpenedSession> opened = engine_->OpenSession("h", {client_key, 0, 1});
  if (!opened.ok()) return opened.status();
  sequence_ = opened->info.lanes[0].accepted;
  sent_ = 0;
  listener_ = std::make_shared<RecordingListener>();
  absl::StatusOr<LaneAttachment> lane = opened->head->AttachLane(opened->info.session_id, 0, listener_);
  if (!lane.ok()) return lane.status();
  lane_ = *std::move(lane);
  return absl::OkStatus();
}

void ReplicaServer::WriteWeights(uint64_t seed) {
  const std::shared_ptr<Head> of = head();
  const HeadConfig& config = of->config();
  const std::string write = *of->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
  const std::string rows = BytesOf(RandomFloats(seed, config.elements()));
  const std::string bias = config.bias ? BytesOf(RandomFloats(seed + 1, config.vocab_size)) : "";
  EXPECT_TRUE(
      (*of->FindWrite(write))->Write(0, config.vocab_size, kernels::DataType::kFloat32, rows, bias).ok());
  std::promise<void> published;
  of->CommitWrite(write, [&](const absl::StatusOr<uint64_t>& version) {
    EXPECT_TRUE(version.ok()) << version.status();
    published.set_value();
  });
  published.get_future().wait();
}

Chunk ReplicaServer::Tokens(const HeadConfig& config, uint64_t seed, int64_t tokens) {
  Chunk chunk;
  chunk.tokens = tokens;
  std::mt19937_64 random(seed);
  std::vector<int64_t> labels(static_cast<size_t>(tokens));
  for (int64_t& label : labels) {
    label = static_cast<int64_t>(random() % static_cast<uint64_t>(config.vocab_size));
  }
  chunk.labels.resize(labels.size() * sizeof(int64_t));
  std::memcpy(chunk.labels.data(), labels.data(), chunk.labels.size());
  const int64_t elements = tokens * config.hidden_size;
  const std::vector<float> hidden_states = RandomFloats(seed, elements);
  std::string converted(static_cast<size_t>(elements * kernels::SizeOf(config.weight_type)), '\0');
  kernels::Convert(kernels::DataType::kFloat32, hidden_states.data(), config.weight_type, converted.data(),
                   elements);
  chunk.hidden_type = config.weight_type;
  chunk.hidden_states = Payload::Of(std::move(converted));
  return chunk;
}

absl::Status ReplicaServer::Send(uint64_t seed, int64_t tokens, uint64_t generation, ComputeMode mode) {
  const absl::StatusOr<std::shared_ptr<Head>> found = engine_->FindHead("h");
  if (!found.ok()) return found.status();
  const std::shared_ptr<Head>& of = *found;
  absl::Status opened;
  if (!lane_.has_value()) opened = OpenSession();
  if (!opened.ok()) return opened;
  Chunk chunk = Tokens(of->config(), seed, tokens);
  chunk.sequence = sequence_ + 1;
  chunk.generation = generation;
  chunk.mode = mode;
  for (;;) {
    auto changed = std::make_shared<std::promise<void>>();
    const std::future<void> may_go_on = changed->get_future();
    const absl::StatusOr<Head::Submission> taken =
        of->Submit(*lane_, chunk, [changed = std::move(changed)] { changed->set_value(); });
    if (!taken.ok()) return taken.status();
    if (*taken == Head::Submission::kTaken) break;
    may_go_on.wait();  // what ends the window has to be over, or the head is deleted and forgets who waits
  }
  ++sequence_;
  return listener_->AwaitAnswers(++sent_).back().error;
}

std::vector<float> ReplicaServer::Weights() {
  const std::shared_ptr<Head> of = head();
  std::vector<float> weights(static_cast<size_t>(of->config().elements()));
  std::promise<void> read;
  of->ReadWeights(0, of->config().vocab_size, kernels::DataType::kFloat32, {weights.data()},
                  [&](const absl::StatusOr<uint64_t>& version) {
                    EXPECT_TRUE(version.ok()) << version.status();
                    read.set_value();
                  });
  read.get_future().wait();
  return weights;
}

HeadConfig ReplicaServers::AdamWHead() {
  HeadConfig config;
  config.name = "h";
  config.vocab_size = kVocab;
  config.hidden_size = kHidden;
  config.weight_type = kernels::DataType::kFloat32;
  config.optimizer.kind = OptimizerKind::kAdamW;
  return config;
}

HeadConfig ReplicaServers::FlushedHead() {
  HeadConfig config = AdamWHead();
  config.optimizer = {};
  return config;
}

ReplicaServers::ReplicaServers(const SetSize& size, const HeadConfig& config, EndTogether end_together,
                               FindPart find_part, Customize customize, Wrap wrap)
    : replicas_(size.replicas),
      ranks_(size.ranks),
      end_together_(std::move(end_together)),
      find_part_(std::move(find_part)),
      customize_(std::move(customize)),
      wrap_(std::move(wrap)) {
  const bool by_calls = end_together_ == nullptr && replicas_ > 1;
  if (by_calls) {
    end_together_ = [this](std::shared_ptr<Head> head, WindowEnd end) {
      endings_.Run([this, head = std::move(head), end = std::move(end)] { EndWindow(head, end, Others()); });
    };
    find_part_ = [this](const Head& /*head*/, int32_t replica) { return Reach(replica); };
  }
  for (int32_t replica = 0; replica < replicas_; ++replica) {
    servers_.push_back(std::make_unique<ReplicaServer>(OptionsOf(replica), DeviceOf(replica)));
    servers_.back()->CreateHead(config);
  }
  if (by_calls) Connect();
}

// A call that a server's device thread has answered may hold the head of another server a little longer: no
// server is to go before each of these threads has gone on to its next task.
ReplicaServers::~ReplicaServers() {
  for (const std::unique_ptr<ReplicaServer>& server : servers_) {
    if (server == nullptr) continue;
    const absl::StatusOr<std::shared_ptr<Head>> head = server->engine().FindHead("h");
    if (!head.ok()) continue;
    const auto row = std::make_shared<std::vector<float>>((*head)->config().hidden_size);
    const auto [done, read] = Awaited<uint64_t>();
    (*head)->ReadWeights(0, 1, kernels::DataType::kFloat32, {row->data()},
                         [row, done = done](const absl::StatusOr<uint64_t>& version) { done(version); });
    // Some tests leave a device that does nothing any more.
    (void)read.wait_for(std::chrono::seconds(10));
  }
}

void ReplicaServers::Connect() {
  connected_.resize(servers_.size());
  kernels::testing::MeetOnThreads(
      replicas_, [this](int32_t replica, kernels::collectives::Rendezvous& rendezvous) {
        const ReplicaNetwork network{.place = {replica, replicas_},
                                     .timeout = std::chrono::seconds(100),
                                     .connect_timeout = std::chrono::seconds(100)};
        auto connection = at(replica).engine().device().ConnectReplicas(network, rendezvous);
        ASSERT_TRUE(connection.ok()) << connection.status();
        connected_[static_cast<size_t>(replica)] = CommunicatorsOf(*std::move(connection));
      });
}

EngineOptions ReplicaServers::OptionsOf(int32_t replica) const {
  EngineOptions options;
  options.place = {replica, replicas_};
  options.end_together = end_together_;
  options.find_part = find_part_;
  if (customize_ != nullptr) customize_(replica, options);
  return options;
}

std::unique_ptr<Device> ReplicaServers::DeviceOf(int32_t replica) const {
  std::unique_ptr<Device> device =
      ranks_ == 1 ? *CreateCpuDevice(kWorkspaceBytes)
                  : *CreateRankThreads({.ranks = ranks_, .workspace_bytes = kWorkspaceBytes});
  return wrap_ == nullptr ? std::move(device) : wrap_(replica, std::move(device));
}

void ReplicaServers::Replace(int32_t replica) {
  std::unique_ptr<ReplicaServer>& server = servers_[static_cast<size_t>(replica)];
  server.reset();
  server = std::make_unique<ReplicaServer>(OptionsOf(replica), DeviceOf(replica));
}

JointReplicas ReplicaServers::Others() {
  JointReplicas replicas;
  replicas.own = connected_[0];
  replicas.epoch = epoch_;
  replicas.on_broken = [](const absl::Status& why) { ADD_FAILURE() << why; };
  for (int32_t replica = 1; replica < replicas_; ++replica) replicas.others.push_back(Reach(replica));
  return replicas;
}

std::shared_ptr<ReplicaPart> ReplicaServers::Reach(int32_t replica) {
  return std::make_shared<HeadPart>(at(replica).head(), connected_[static_cast<size_t>(replica)]);
}

std::vector<SessionMarks> ReplicaServers::Marks() const {
  std::vector<SessionMarks> all;
  for (const auto& server : servers_) {
    for (SessionMarks& session : server->Marks()) all.push_back(std::move(session));
  }
  return all;
}

ReplicaServers::Asked ReplicaServers::BeginStep(uint64_t generation, std::vector<SessionMarks> marks,
                                                const StepRequest& request) {
  auto [done, asked] = Awaited<StepResult>();
  at(0).head()->ApplyStep(generation, std::move(marks), request, std::move(done));
  return std::move(asked);
}

ReplicaServers::AskedToFlush ReplicaServers::BeginFlush(uint64_t generation, std::vector<SessionMarks> marks,
                                                        float gradient_scale) {
  auto [done, asked] = Awaited<FlushInfo>();
  at(0).head()->BeginFlush(generation, std::move(marks), gradient_scale, std::move(done));
  return std::move(asked);
}

ReplicaServers::AskedToEnd ReplicaServers::BeginCommit(const std::string& flush_id) {
  auto [done, asked] = Awaited<uint64_t>();
  at(0).head()->CommitFlush(flush_id, done);
  return std::move(asked);
}

ReplicaServers::AskedToEnd ReplicaServers::BeginAbort(const std::string& flush_id) {
  auto [done, asked] = Awaited<uint64_t>();
  at(0).head()->AbortFlush(flush_id, done);
  return std::move(asked);
}

absl::StatusOr<WindowStats> ReplicaServers::Stats(uint64_t generation, std::vector<SessionMarks> marks,
                                                  double gradient_scale) {
  auto [done, asked] = Awaited<WindowStats>();
  at(0).head()->ReadStats(generation, std::move(marks), gradient_scale, done);
  return Answer(std::move(asked));
}

absl::StatusOr<std::vector<float>> ReplicaServers::Gradient(const std::string& flush_id) {
  const std::shared_ptr<Head> head = at(0).head();
  const HeadConfig& config = head->config();
  const auto bias = static_cast<size_t>(config.bias ? config.vocab_size : 0);
  std::vector<float> gradient(static_cast<size_t>(config.elements()) + bias);
  std::promise<absl::Status> done;
  head->ReadGradient(flush_id, 0, config.vocab_size, kernels::DataType::kFloat32,
                     {gradient.data(), bias > 0 ? gradient.data() + config.elements() : nullptr},
                     [&done](const absl::Status& status) { done.set_value(status); });
  const absl::Status read = done.get_future().get();
  if (!read.ok()) return read;
  return gradient;
}

}  // namespace lossd::engine::testing
