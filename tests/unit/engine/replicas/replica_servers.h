// Replicas of one head "h" in one process: engines on CPU devices of their own, or on groups of ranks that
// are threads, which reach each other by calls, and Gloo between their devices.
#ifndef LOSSD_TESTS_UNIT_ENGINE_REPLICAS_REPLICA_SERVERS_H_
#define LOSSD_TESTS_UNIT_ENGINE_REPLICAS_REPLICA_SERVERS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "server/engine/common/worker_pool.h"
#include "server/engine/engine.h"
#include "server/engine/replicas/window_ending.h"
#include "tests/unit/engine/engine_fixture.h"

namespace lossd::engine::testing {

// So many servers, each of so many ranks.
struct SetSize {
  int32_t replicas = 2;
  int32_t ranks = 1;
};
inline void PrintTo(const SetSize& size, std::ostream* out) { *out << size.replicas << " x " << size.ranks; }

// One server, and a client of it that has one session.
class ReplicaServer {
 public:
  // Without a head.
  ReplicaServer(EngineOptions options, std::unique_ptr<Device> device);
  void CreateHead(const HeadConfig& config);

  Engine& engine() { return *engine_; }
  std::shared_ptr<Head> head() const { return *engine_->FindHead("h"); }
  uint64_t generation() const { return head()->Info().generation; }
  // The client's: seeded hidden states and labels of so many tokens, for this window; waits until they are in
  // it.
  void Compute(uint64_t seed, int64_t tokens, uint64_t generation = 1) {
    const absl::Status computed = TryCompute(seed, tokens, generation);
    EXPECT_TRUE(computed.ok()) << computed;
  }
  // ABORTED if it is another window's turn; NOT_FOUND if the head is deleted.
  absl::Status TryCompute(uint64_t seed, int64_t tokens, uint64_t generation) {
    return Send(seed, tokens, generation, ComputeMode::kLossAndGradients);
  }
  // The same without a gradient.
  void ComputeLosses(uint64_t seed, int64_t tokens, uint64_t generation) {
    const absl::Status computed = Send(seed, tokens, generation, ComputeMode::kLossOnly);
    EXPECT_TRUE(computed.ok()) << computed;
  }
  // Seeded hidden states and labels for the head: a chunk without a place.
  static Chunk Tokens(const HeadConfig& config, uint64_t seed, int64_t tokens);
  // Those of sessions that have added to the window.
  std::vector<SessionMarks> Marks() const { return head()->Info().window_marks; }
  std::vector<float> Weights();
  // Seeded ones, the same at every server.
  void WriteWeights(uint64_t seed);
  // The client opens its session again, as one whose stream was cut.
  void Reconnect() { lane_.reset(); }

 private:
  absl::Status OpenSession();
  absl::Status Send(uint64_t seed, int64_t tokens, uint64_t generation, ComputeMode mode);

  std::unique_ptr<Engine> engine_;
  std::shared_ptr<RecordingListener> listener_;
  std::optional<LaneAttachment> lane_;
  uint64_t sequence_ = 0;
  size_t sent_ = 0;  // on this lane
};

class ReplicaServers {
 public:
  using EndTogether = std::function<void(std::shared_ptr<Head>, WindowEnd)>;
  // What else an engine is given, whenever one is made.
  using Customize = std::function<void(int32_t replica, EngineOptions& options)>;
  // What stands before the device of a server.
  using Wrap = std::function<std::unique_ptr<Device>(int32_t replica, std::unique_ptr<Device> device)>;
  using FindPart = std::function<absl::StatusOr<std::shared_ptr<ReplicaPart>>(const Head&, int32_t replica)>;
  static constexpr int64_t kVocab = 37;
  static constexpr int64_t kHidden = 6;

  // With one replica it is a server of its own, which works alone. `end_together`: what the coordinator does
  // when its head is to end a window; by default it ends it with the others of this process, by calls.
  // `find_part`: likewise, how it reaches one of them.
  ReplicaServers(const SetSize& size, const HeadConfig& config, EndTogether end_together = nullptr,
                 FindPart find_part = nullptr, Customize customize = nullptr, Wrap wrap = nullptr);
  ReplicaServers(int32_t replicas, const HeadConfig& config, EndTogether end_together = nullptr,
                 FindPart find_part = nullptr)
      : ReplicaServers(SetSize{replicas}, config, std::move(end_together), std::move(find_part)) {}
  ~ReplicaServers();
  ReplicaServers(const ReplicaServers&) = delete;
  ReplicaServers& operator=(const ReplicaServers&) = delete;
  // In fp32.
  static HeadConfig AdamWHead();
  // With neither an optimizer nor, by itself, anything else.
  static HeadConfig FlushedHead();

  ReplicaServer& at(int32_t replica) { return *servers_[static_cast<size_t>(replica)]; }
  // Those of all sessions.
  std::vector<SessionMarks> Marks() const;
  // Asks the coordinator, and waits.
  absl::StatusOr<StepResult> Step(uint64_t generation, const StepRequest& request) {
    return Step(generation, Marks(), request);
  }
  absl::StatusOr<StepResult> Step(uint64_t generation, std::vector<SessionMarks> marks,
                                  const StepRequest& request) {
    return Answer(BeginStep(generation, std::move(marks), request));
  }
  // The same in two halves.
  using Asked = std::future<absl::StatusOr<StepResult>>;
  Asked BeginStep(uint64_t generation, std::vector<SessionMarks> marks, const StepRequest& request);
  // UNAVAILABLE if the coordinator has gone without an answer.
  template <class Answered>
  static absl::StatusOr<Answered> Answer(std::future<absl::StatusOr<Answered>> asked) {
    try {
      return asked.get();
    } catch (const std::future_error&) {
      return absl::UnavailableError("the server has gone");
    }
  }
  // Flushes, likewise.
  using AskedToFlush = std::future<absl::StatusOr<FlushInfo>>;
  using AskedToEnd = std::future<absl::StatusOr<uint64_t>>;
  AskedToFlush BeginFlush(uint64_t generation, std::vector<SessionMarks> marks, float gradient_scale = 1);
  AskedToEnd BeginCommit(const std::string& flush_id);
  AskedToEnd BeginAbort(const std::string& flush_id);
  absl::StatusOr<FlushInfo> Flush(uint64_t generation, float gradient_scale = 1) {
    return Answer(BeginFlush(generation, Marks(), gradient_scale));
  }
  absl::StatusOr<uint64_t> Commit(const std::string& flush_id) { return Answer(BeginCommit(flush_id)); }
  absl::StatusOr<uint64_t> Abort(const std::string& flush_id) { return Answer(BeginAbort(flush_id)); }
  absl::StatusOr<WindowStats> Stats(uint64_t generation, std::vector<SessionMarks> marks,
                                    double gradient_scale = 1);
  // What a flush holds: dW, and behind it db if the head has a bias.
  absl::StatusOr<std::vector<float>> Gradient(const std::string& flush_id);
  // Another replica of the coordinator's head.
  std::shared_ptr<ReplicaPart> Part(int32_t replica) { return *find_part_(*at(0).head(), replica); }
  // The process of this replica ends, and another one takes its place, without a head.
  void Replace(int32_t replica);

 private:
  EngineOptions OptionsOf(int32_t replica) const;
  std::unique_ptr<Device> DeviceOf(int32_t replica) const;
  void Connect();
  JointReplicas Others();
  std::shared_ptr<ReplicaPart> Reach(int32_t replica);

  const int32_t replicas_;
  const int32_t ranks_;
  EndTogether end_together_;
  FindPart find_part_;
  Customize customize_;
  Wrap wrap_;

  std::shared_ptr<CoordinatedEpoch> epoch_ = std::make_shared<CoordinatedEpoch>();
  std::vector<std::unique_ptr<ReplicaServer>> servers_;
  // By replica; none if something else ends windows.
  std::vector<std::shared_ptr<const ReplicaCommunicators>> connected_;
  WorkerPool endings_{1};
};

}  // namespace lossd::engine::testing

#endif  // LOSSD_TESTS_UNIT_ENGINE_REPLICAS_REPLICA_SERVERS_H_
