// The real engine with one head, as a process that can be drained, killed and started again, and which may
// have another rank beside it; or replicas of the head (sim_replicas). Its device's loop is run step by step.
#ifndef LOSSD_TESTS_SIMULATION_SIM_SERVER_H_
#define LOSSD_TESTS_SIMULATION_SIM_SERVER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/engine.h"
#include "tests/simulation/sim_device.h"
#include "tests/simulation/sim_ranks.h"
#include "tests/simulation/sim_replicas.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

inline constexpr char kHead[] = "lm_head";

struct ServerOptions {
  SimDeviceOptions device;
  engine::HeadConfig head;
  bool group = false;     // of two ranks
  bool replicas = false;  // two of them, each of one device
  bool tracing = false;
  // Where checkpoints go, of all schedules of a run, one after the other.
  std::string checkpoint_folder;
  std::function<void(const std::string& tag)> on_return = {};  // SimReplicas'
};

// One thread's.
class SimServer {
 public:
  SimServer(const ServerOptions& options, Sabotage sabotage);
  ~SimServer();

  // Those of a replica, where there are several: the coordinator is the first.
  engine::Engine& engine(int32_t replica = 0) {
    return replicas_ == nullptr ? *engine_ : replicas_->engine(replica);
  }
  // Null if it is not there.
  std::shared_ptr<engine::Head> head(int32_t replica = 0) const;
  SimGate& gate(int32_t replica = 0) { return replicas_ == nullptr ? gate_ : replicas_->gate(replica); }
  // One turn of the device's loop.
  void StepDevice(int32_t replica = 0);
  // Null if there is only one.
  SimReplicas* replicas() { return replicas_.get(); }
  int32_t replica_count() const { return replicas_ == nullptr ? 1 : SimReplicas::kReplicas; }
  // Null for a single device. Each start makes another one, of the next epoch.
  SimGroup* group() { return group_.get(); }
  RankRecord& rank_record() { return rank_record_; }
  int64_t sabotaged() const;
  // Whether rank 1 of an ended epoch is still there, its leader being gone.
  bool has_leftover() const { return leftover_ != nullptr; }
  void RunLeftover(int steps);
  // It notices at last.
  void BeatLeftover();
  // What the engine has said of its device; OK: it works.
  const absl::Status& device_failure() const { return device_failure_; }
  // Whether every rank has added this item to its part of the gradient since the server started.
  bool EveryRankHasAdded(uint64_t item);
  // Something that an earlier epoch sent arrives; false: nothing is on its way.
  bool DeliverLate();

  // Runs the device until there is nothing left for it to do. Not when a rank is lost, nor of replicas.
  void WaitIdle();
  // The same, or of replicas until `is_done`, which is the case then.
  void WaitUntil(const std::function<bool()>& is_done);
  // Runs what waits for the disk, or for the device, while the device goes on by itself.
  void Run(const std::function<void()>& call);
  // Creates the head, with these weights; their version, or 0 if a device does not do what it should.
  uint64_t Create(const Values& weights);
  // Not a number where replicas have not the same.
  Values Weights();
  // Rows [first, first + rows) of `weights` as a part of this write.
  absl::Status WriteRows(const std::string& write, const Values& weights, int64_t first, int64_t rows);

  // SIGTERM, and the next start. Everything accepted is finished; `streams_end` is called between.
  absl::Status Drain(const std::function<void()>& streams_end);
  // What becomes of rank 1, which is on another host.
  enum class OtherRank { kEnds, kDies, kLivesOn };
  // kill -9, and the next start: with the newest checkpoint, or without a head.
  absl::Status Kill(OtherRank other);

 private:
  void Start(const std::string& incarnation);
  std::unique_ptr<engine::Device> MakeDevice();
  void Stop(OtherRank other);
  absl::StatusOr<std::shared_ptr<engine::Head>> CreateHead();

  const ServerOptions options_;
  SimGate gate_;
  RankRecord rank_record_;
  uint64_t epoch_ = 0;
  std::deque<SimGroup::Command> late_commands_;
  std::deque<SimGroup::Report> late_reports_;
  absl::Status device_failure_;
  std::shared_ptr<engine::CheckpointStore> store_;
  std::unique_ptr<SimGroup> group_;  // outlives the engine
  std::unique_ptr<SimGroup> leftover_;
  std::unique_ptr<engine::Engine> engine_;  // null, where there are
  std::unique_ptr<SimReplicas> replicas_;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_SERVER_H_
