// A group of two ranks in one process, as if on two hosts: the leader, which is the engine's device, and
// rank 1, which runs only when the schedule or the leader lets it. The parts of a group are the real ones;
// what is simulated is the network between both (sim_control), the communicators and each rank's device.
#ifndef LOSSD_TESTS_SIMULATION_SIM_RANKS_H_
#define LOSSD_TESTS_SIMULATION_SIM_RANKS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "server/engine/device/sharded/sharded_rank.h"
#include "server/engine/group/rank_channel.h"
#include "tests/simulation/coroutine.h"
#include "tests/simulation/sim_communicator.h"
#include "tests/simulation/sim_control.h"
#include "tests/simulation/sim_device.h"

namespace lossd::simulation {

// What epochs leave behind, of all groups of a schedule, one after the other.
struct RankRecord {
  std::map<std::string, int64_t> events;
  int64_t sabotaged = 0;
  bool tracing = false;
  std::vector<std::string> trace;  // since the schedule last took it
};

class SimGroup {
 public:
  struct Options {
    uint64_t epoch = 1;
    SimDeviceOptions device;
    Sabotage sabotage = Sabotage::kNone;
    SimGate* leader_gate = nullptr;
    RankRecord* record = nullptr;
    std::function<void()> step_leader;  // one turn of the leader's device
  };
  // What may still arrive somewhere after the end of the epoch.
  struct Command {
    uint64_t epoch = 0;
    engine::GroupCommand command;
  };
  struct Report {
    uint64_t epoch = 0;
    SimControl::FromRank message;
  };

  explicit SimGroup(Options options);
  ~SimGroup();

  // As the engine sees the group, which outlives it and all heads on it.
  std::unique_ptr<engine::Device> MakeDevice();

  // The schedule's. Rank 1 goes on for so many steps: a command, or the rest of a batch behind what ranks do
  // together.
  void Run(int steps);
  // Until it has nothing to do, or waits for the leader.
  void RunAll();
  // kill -9.
  void Kill();
  // The same, when ranks next do something together.
  void KillInCollective();
  // One direction of the control stream stands still, until somebody notices or it goes on.
  void Part(SimControl::Way way);
  void Heal();
  // A heartbeat of each rank.
  void Beat();
  // Heartbeats, until the leader takes the rank for lost.
  void AwaitSilence();
  // The leader's process is gone: nothing is sent, nothing waited for. Rank 1 does not know it yet, and goes
  // on with what it was told.
  void LoseLeader();
  // The leader says that it is the end, so that nobody is lost.
  void EndInOrder();
  // Both processes are gone.
  void End();
  // What an earlier epoch sent.
  void Arrive(Command command);
  void Arrive(const Report& report);
  // Rank 1 says hello again, as if its first one had not been answered.
  void RepeatHello();

  // Whether ranks can no longer work together.
  bool lost() const { return gone_ || control_.lost() || timed_out_; }
  // Or will not be able to for long.
  bool doomed() const { return lost() || dies_in_collective_ || control_.stalls(); }
  // Whether the leader knows that it has lost the rank.
  bool noticed() const { return control_.lost(); }
  // Whether a direction of the control stream stands still.
  bool stalls() const { return control_.stalls(); }
  // Whether rank 1's process is there.
  bool rank_is_there() const { return !gone_; }
  // What must not be: why rank 1 ended though nobody killed it, say; empty otherwise.
  const std::string& broken() const { return broken_; }
  bool HasAdded(uint64_t item);
  int64_t sabotaged() const { return gate_.sabotaged; }
  // How many batches rank 1 is behind the leader's StartBatch.
  uint64_t lag() const { return sent_ - applied_; }
  // Commands that rank 1 has not begun.
  std::deque<Command> Undelivered();
  // Reports of batches that did not come to the leader, as far as rank 1 may have sent them.
  std::deque<Report> Untold();

 private:
  class Channel;

  // The leader's side, each with turn_ held.
  void Send(const engine::GroupCommand& command);
  absl::Status Ask(const engine::GroupCommand& command);
  // False: the answer will not come by itself.
  bool ComesOn(int64_t replies);
  uint64_t BatchesApplied();
  SimMeeting MakeMeeting();
  kernels::collectives::Code LeaderComes();
  kernels::collectives::Code LeaderWaits(const SimMeeting::Met& met);
  void Resume();
  // The leader waits for this, and rank 1 does what leads to it.
  void ResumeFor(const SimMeeting::Met& met);
  // Rank 1's process ends, whatever it is at.
  void EndRank();

  // Rank 1's side.
  void Body();
  void Serve(engine::RankExecutor& executor);
  void Execute(engine::RankExecutor& executor, SimControl::Command command);
  void Break(const std::string& why);
  // The leader hears how far batches have come.
  void TellBatches(engine::RankExecutor& executor);
  kernels::collectives::Code RankWaits(const SimMeeting::Met& met);
  // Returns when it may do the next thing; false: it is killed.
  bool Pause();

  void BeatOnce();
  void Count(const char* event) { ++options_.record->events[event]; }
  void Say(const std::string& text);

  const Options options_;
  std::weak_ptr<engine::RankChannel> channel_;
  const std::thread::id owner_ = std::this_thread::get_id();  // of the engine's device loop
  std::mutex turn_;                                           // whoever lets rank 1 run has it
  SimMeeting host_meeting_;
  SimMeeting device_meeting_;
  const std::unique_ptr<kernels::collectives::Communicator> host_;
  const std::unique_ptr<kernels::collectives::Communicator> device_;

  SimControl control_;
  SimGate gate_;                // rank 1's
  std::deque<Command> strays_;  // commands of earlier epochs
  uint64_t sent_ = 0;           // batches
  uint64_t applied_ = 0;        // by rank 1
  int steps_ = 0;
  bool free_ = false;
  const SimMeeting::Met* awaited_ = nullptr;  // by the leader
  int64_t hopeless_ = 0;                      // turns in which it waits for a rank that is lost
  bool dies_in_collective_ = false;
  bool timed_out_ = false;   // a collective, for the leader
  bool gone_ = false;        // rank 1
  bool leaderless_ = false;  // the leader is gone
  std::string broken_;
  Coroutine rank_;  // last: it uses the rest
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_RANKS_H_
