// One epoch of a simulated set of two replicas: the coordinator's questions to the other one and its answers
// on their way, and what their devices exchange by. The schedule lets each message arrive, or cuts the
// connection, which each replica notices when it likes.
#ifndef LOSSD_TESTS_SIMULATION_SIM_SET_EPOCH_H_
#define LOSSD_TESTS_SIMULATION_SIM_SET_EPOCH_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/engine/device/replica_communicators.h"
#include "server/engine/replicas/joint_replicas.h"
#include "server/rpc/group/group_leader.h"
#include "tests/simulation/sim_communicator.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

// One thread's at a time.
class SimSetEpoch : public rpc::RankQuestions, public std::enable_shared_from_this<SimSetEpoch> {
 public:
  static constexpr int32_t kReplicas = 2;
  using Reply = std::function<void(absl::StatusOr<std::string> data)>;
  struct Command {
    std::string name;
    std::string bytes;
    Reply reply;
  };

  SimSetEpoch();

  // The coordinator's.
  void Ask(int32_t replica, const std::string& name, std::string command, rpc::Answers answers,
           rpc::RankAnswered done) override;
  const std::shared_ptr<engine::CoordinatedEpoch>& coordinated() const { return coordinated_; }
  // What the devices of a replica exchange by; keeps the epoch.
  std::shared_ptr<const engine::ReplicaCommunicators> communicators(int32_t replica);

  // The network
  bool HasCommand() const { return !commands_.empty(); }
  Command NextCommand();
  // The next answer comes to the coordinator. False: there is none.
  bool DeliverAnswer();
  // Some of what is on its way may arrive nevertheless, and so may what devices exchange.
  void Cut(Random& random);
  bool is_cut() const { return cut_; }

  // A replica notices that the epoch is over: what devices exchange fails, here and there.
  void Lose(int32_t replica);
  bool has_lost(int32_t replica) const { return lost_[static_cast<size_t>(replica)]; }
  // It says nothing more, and hears nothing. Whoever waits for an answer is told.
  void Leave(int32_t replica);
  bool has_left(int32_t replica) const { return left_[static_cast<size_t>(replica)]; }

 private:
  struct Answer {
    uint64_t number = 0;
    absl::StatusOr<std::string> data;
  };

  SimMeeting MakeMeeting();
  kernels::collectives::Code Comes() const;
  kernels::collectives::Code Waits(const SimMeeting::Met& met) const;

  const std::shared_ptr<engine::CoordinatedEpoch> coordinated_ = std::make_shared<engine::CoordinatedEpoch>();
  SimMeeting device_meeting_;
  SimMeeting host_meeting_;
  std::array<std::unique_ptr<kernels::collectives::Communicator>, kReplicas> devices_;
  std::array<std::unique_ptr<kernels::collectives::Communicator>, kReplicas> hosts_;
  std::array<engine::ReplicaCommunicators, kReplicas> communicators_;

  std::deque<Command> commands_;
  std::deque<Answer> answers_;
  std::map<uint64_t, rpc::RankAnswered> asked_;
  uint64_t last_number_ = 0;
  bool cut_ = false;
  bool devices_cut_ = false;
  bool aborted_ = false;  // what devices exchange
  std::array<bool, kReplicas> lost_{};
  std::array<bool, kReplicas> left_{};
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_SET_EPOCH_H_
