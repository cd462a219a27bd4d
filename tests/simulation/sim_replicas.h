// Replicas of one head in one process, as if each were a server on a host of its own: an engine with sessions
// and a device, and between them what server/rpc/replicas does. Whatever happens anywhere, happens when the
// schedule lets it.
#ifndef LOSSD_TESTS_SIMULATION_SIM_REPLICAS_H_
#define LOSSD_TESTS_SIMULATION_SIM_REPLICAS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/checkpoint/checkpoint_store.h"
#include "server/engine/engine.h"
#include "tests/simulation/sim_device.h"
#include "tests/simulation/sim_ranks.h"
#include "tests/simulation/sim_set_epoch.h"
#include "tests/simulation/sim_worker.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

class SimReplicas {
 public:
  static constexpr int32_t kReplicas = SimSetEpoch::kReplicas;

  struct Options {
    SimDeviceOptions device;
    Sabotage sabotage = Sabotage::kNone;
    std::shared_ptr<engine::CheckpointStore> checkpoints;  // the coordinator's
    RankRecord* record = nullptr;
    // Heads have gone back to this checkpoint, or there was none and they are gone.
    std::function<void(const std::string& tag)> on_return;
  };

  // They have met.
  explicit SimReplicas(Options options);
  ~SimReplicas();
  SimReplicas(const SimReplicas&) = delete;
  SimReplicas& operator=(const SimReplicas&) = delete;

  engine::Engine& engine(int32_t replica) { return *at(replica).engine; }
  SimGate& gate(int32_t replica) { return at(replica).gate; }
  // Whether all are there, and alike.
  bool whole() const { return coordination_ != nullptr; }
  // What must not be; empty otherwise.
  const std::string& broken() const { return broken_; }
  int64_t sabotaged() const;
  // Whether one of them has added this item since it started.
  bool HasAdded(uint64_t item) const;

  // One turn of a device's loop.
  void StepDevice(int32_t replica);
  // Some of what is under way goes on: messages arrive, threads run, somebody notices a loss, all meet.
  void Go(Random& random);
  // All of it goes on, and devices do what they have, until `is_done` says so. False: it never does.
  bool GoUntil(const std::function<bool()>& is_done);
  // A client's call that waits, at the coordinator: one after the other, each while all are there.
  void Call(std::function<void()> call) { calls_.Run(std::move(call)); }
  // Whether one is under way.
  bool calling() const { return !calls_.idle(); }

  // The connection breaks.
  void Cut(Random& random);
  bool is_cut() const { return epoch_->is_cut(); }
  // kill -9, and the next start, with nothing.
  void Kill(int32_t replica);

 private:
  // A server. Its threads are idle when its engine goes.
  struct Process {
    SimGate gate;
    uint64_t history = 0;
    bool out = true;       // of the epoch, and done with it
    bool agrees = false;   // has yet to do with its heads what all have agreed on
    bool leaving = false;  // but not done
    std::unique_ptr<engine::Engine> engine;
    SimWorker device;
    SimWorker work;  // ReplicaSet's
  };

  Process& at(int32_t replica) { return processes_[static_cast<size_t>(replica)]; }
  const Process& at(int32_t replica) const { return processes_[static_cast<size_t>(replica)]; }
  void Start(int32_t replica);
  void TellEngine(engine::EngineOptions* options);
  // It leaves, and everything that the process does comes to its end.
  void Finish(int32_t replica);
  bool Idle(int32_t replica) const;
  // Those of the threads that may run.
  void ResumeThreads(const std::function<bool()>& goes);

  // The end of an epoch
  void Leave(int32_t replica);
  void LeaveWhereLost(const std::function<bool()>& goes);
  void AgreeWhereMet(const std::function<bool()>& goes);
  void TellAllWaiting();
  // The next one begins
  bool AllOut() const;
  void Meet();
  // Heads go on, or wait to go back. The last one to do so is connected with the others.
  void GoOnOrAbandon(int32_t replica);
  void Settle(const std::shared_ptr<SimSetEpoch>& epoch, const engine::Agreement& agreement);

  // What the coordinator asks
  absl::StatusOr<std::shared_ptr<SimSetEpoch>> Coordinated() const;
  engine::JointReplicas ReplicasOf(const std::shared_ptr<SimSetEpoch>& epoch, const engine::Head& head);
  void EndTogether(const std::shared_ptr<engine::Head>& head, const engine::WindowEnd& end);
  void PublishTogether(const std::shared_ptr<engine::Head>& head,
                       const std::shared_ptr<engine::StagedWrite>& write);
  // What the other one is asked: ReplicaSet's Take.
  void Deliver();
  void Take(const SimSetEpoch::Command& command);

  void Count(const char* event) { ++options_.record->events[event]; }
  void Say(const std::string& text);

  const Options options_;
  uint64_t histories_ = 0;
  uint64_t epochs_ = 0;
  std::string broken_;
  engine::Agreement agreement_;
  std::shared_ptr<SimSetEpoch> epoch_;
  std::shared_ptr<SimSetEpoch> coordination_;  // while all are there
  std::array<Process, kReplicas> processes_;
  SimWorker calls_;  // of clients, at the coordinator
  SimWorker meets_;  // the coordinator's thread that meets the others
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_REPLICAS_H_
