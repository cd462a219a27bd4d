#include "tests/unit/engine/replicas/replica_servers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <random>
#include <utility>

#include "server/engine/common/random_id.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "tests/unit/kernels/thread_ranks.h"

namespace lossd::engine::testing {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t{1} << 20;

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

// A replica that is reached by calls.
class HeadPart : public ReplicaPart {
 public:
  HeadPart(std::shared_ptr<Head> head, kernels::collectives::Communicator* communicator)
      : head_(std::move(head)),
        replicas_(std::make_shared<ReplicaCommunicators>(ReplicaCommunicators{communicator, communicator})) {}

  void Seal(const WindowEnd& end, std::function<void(absl::StatusOr<uint64_t>)> done) override {
    head_->SealPart(end, std::move(done));
  }
  void Sum(uint64_t window_tokens, std::function<void(absl::StatusOr<GradientStats>)> done) override {
    head_->SumPart(window_tokens, replicas_, std::move(done));
  }
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

 private:
  const std::shared_ptr<Head> head_;
  const std::shared_ptr<const ReplicaCommunicators> replicas_;
};

}  // namespace

ReplicaServer::ReplicaServer(EngineOptions options)
    : engine_(*Engine::Create(std::move(options), *CreateCpuDevice(kWorkspaceBytes))) {}

void ReplicaServer::CreateHead(const HeadConfig& config) {
  const absl::StatusOr<std::shared_ptr<Head>> created = engine_->CreateHead(config);
  EXPECT_TRUE(created.ok()) << created.status();
  WriteWeights(1);
}

void ReplicaServer::OpenSession() {
  const absl::StatusOr<OpenedSession> opened = engine_->OpenSession("h", "client", 0, 1);
  EXPECT_TRUE(opened.ok()) << opened.status();
  lane_ = *head()->AttachLane(opened->info.session_id, 0, listener_);
}

void ReplicaServer::WriteWeights(uint64_t seed) {
  const std::shared_ptr<Head> of = head();
  const HeadConfig& config = of->config();
  const std::string write = *of->BeginWrite(RandomId(), Head::Replace::kNo, RandomId());
  const std::string rows = BytesOf(RandomFloats(seed, config.elements()));
  EXPECT_TRUE(
      (*of->FindWrite(write))->Write(0, config.vocab_size, kernels::DataType::kFloat32, rows, {}).ok());
  std::promise<void> published;
  of->CommitWrite(write, [&](const absl::StatusOr<uint64_t>& version) {
    EXPECT_TRUE(version.ok()) << version.status();
    published.set_value();
  });
  published.get_future().wait();
}

absl::Status ReplicaServer::TryCompute(uint64_t seed, int64_t tokens, uint64_t generation) {
  if (!lane_.has_value()) OpenSession();
  const std::shared_ptr<Head> of = head();
  const HeadConfig& config = of->config();
  Chunk chunk;
  chunk.sequence = sequence_ + 1;
  chunk.generation = generation;
  chunk.tokens = tokens;
  std::mt19937_64 random(seed);
  std::vector<int64_t> labels(static_cast<size_t>(tokens));
  for (int64_t& label : labels) {
    label = static_cast<int64_t>(random() % static_cast<uint64_t>(config.vocab_size));
  }
  chunk.labels.resize(labels.size() * sizeof(int64_t));
  std::memcpy(chunk.labels.data(), labels.data(), chunk.labels.size());
  chunk.hidden_states = Payload::Of(BytesOf(RandomFloats(seed, tokens * config.hidden_size)));
  for (;;) {
    const auto changed = std::make_shared<std::promise<void>>();
    const absl::StatusOr<Head::Submission> taken =
        of->Submit(*lane_, chunk, [changed] { changed->set_value(); });
    if (!taken.ok()) return taken.status();
    if (*taken == Head::Submission::kTaken) break;
    changed->get_future().wait();  // what ends the window has to be over
  }
  ++sequence_;
  return listener_->AwaitAnswers(sequence_).back().error;
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

ReplicaServers::ReplicaServers(int32_t replicas, const HeadConfig& config, EndTogether end_together)
    : replicas_(replicas), end_together_(std::move(end_together)) {
  if (end_together_ == nullptr && replicas > 1) {
    communicators_ = kernels::testing::ConnectRanks(replicas);
    end_together_ = [this](std::shared_ptr<Head> head, WindowEnd end) {
      EndWindow(std::move(head), std::move(end), Others());
    };
  }
  for (int32_t replica = 0; replica < replicas; ++replica) {
    servers_.push_back(std::make_unique<ReplicaServer>(OptionsOf(replica)));
    servers_.back()->CreateHead(config);
  }
}

EngineOptions ReplicaServers::OptionsOf(int32_t replica) const {
  EngineOptions options;
  options.place = {replica, replicas_};
  options.end_together = end_together_;
  return options;
}

void ReplicaServers::Replace(int32_t replica) {
  std::unique_ptr<ReplicaServer>& server = servers_[static_cast<size_t>(replica)];
  server.reset();
  server = std::make_unique<ReplicaServer>(OptionsOf(replica));
}

EndingReplicas ReplicaServers::Others() {
  EndingReplicas replicas;
  replicas.own = std::make_shared<ReplicaCommunicators>(
      ReplicaCommunicators{communicators_[0].get(), communicators_[0].get()});
  replicas.epoch = epoch_;
  replicas.on_broken = [](const absl::Status& why) { ADD_FAILURE() << why; };
  for (size_t i = 1; i < servers_.size(); ++i) {
    replicas.others.push_back(std::make_shared<HeadPart>(servers_[i]->head(), communicators_[i].get()));
  }
  return replicas;
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
  auto answer = std::make_shared<std::promise<absl::StatusOr<StepResult>>>();
  Asked asked = answer->get_future();
  at(0).head()->ApplyStep(
      generation, std::move(marks), request,
      [answer = std::move(answer)](absl::StatusOr<StepResult> step) { answer->set_value(std::move(step)); });
  return asked;
}

absl::StatusOr<StepResult> ReplicaServers::Answer(Asked asked) {
  try {
    return asked.get();
  } catch (const std::future_error&) {
    return absl::UnavailableError("the server has gone");
  }
}

}  // namespace lossd::engine::testing
