// The control stream of a simulated group of two: the leader's real GroupState, and a connection to rank 1
// that brings what it brings in order, but each of whose directions may stand still for a while, or until
// somebody notices.
#ifndef LOSSD_TESTS_SIMULATION_SIM_CONTROL_H_
#define LOSSD_TESTS_SIMULATION_SIM_CONTROL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "lossd/group/v1/group.pb.h"
#include "server/engine/group/group_command.h"
#include "server/rpc/group/group_state.h"

namespace lossd::simulation {

// One thread's at a time, but for Ask() and written().
class SimControl {
 public:
  using FromRank = group::v1::MemberMessage;

  // Rank 1 joins at once, without knowing the epoch.
  explicit SimControl(int64_t epoch);

  // The leader's end
  void Send(const engine::GroupCommand& command) { state_.Send(command); }
  // Waits for the reply, which other calls have to bring; in a thread of its own.
  absl::Status Ask(const engine::GroupCommand& command) { return state_.Ask(command); }
  uint64_t BatchesApplied() const { return state_.batches_applied(); }
  // Whether it has lost the rank, and why.
  bool lost() const { return !why_lost_.empty(); }
  const std::string& why_lost() const { return why_lost_; }
  // How many messages it has sent.
  uint64_t written() const;
  // Replies that have come to it.
  int64_t replies() const { return replies_; }
  void EndInOrder() { state_.End(); }
  // Its process is no more. What it has sent goes on its way; what comes to it stays there.
  void LoseLeader();

  // The rank's end
  struct Command {
    uint64_t number = 0;
    engine::GroupCommand command;
  };
  // The next one that has come.
  std::optional<Command> Next();
  bool HasNext();
  void TellApplied() { Tell(Applied()); }
  static FromRank Applied();
  void Reply(uint64_t number, const absl::Status& status);
  // Its process is gone. The leader sees that some heartbeats later, unless it hears nothing.
  void Close() { closed_ = true; }
  // It has heard nothing for so long that it takes the leader for lost.
  bool IsLeftAlone() const { return silent_ >= patience_; }

  // The network
  enum class Way { kToLeader, kToRank };
  void Stall(Way way);
  void Heal();
  bool stalls() const { return to_leader_stalls_ || wire_->stalls(); }
  // A heartbeat of each end.
  void BeatLeader() { state_.Beat(); }
  void BeatRank();
  // What somebody who says this first is told, over another connection.
  absl::Status Hello(int64_t epoch);
  // A message of rank 1 that the leader takes though it came over no stream of this epoch: what it never
  // does.
  void TakeStray(const FromRank& message) { state_.Take(1, message).IgnoreError(); }
  // What has not come to the leader.
  std::deque<FromRank> TakeUndelivered() { return std::exchange(to_leader_, {}); }

 private:
  // The leader's messages on their way.
  class Wire final : public rpc::RankStream {
   public:
    using Message = std::shared_ptr<const group::v1::LeaderMessage>;

    void Write(Message message) override;
    void Close() override {}
    void Cancel() override {}
    bool IsStuck() override;

    // Empty: nothing has come.
    std::optional<Message> Read();
    void Stall(bool stalls);
    bool stalls() const;
    uint64_t written() const;

   private:
    mutable std::mutex mutex_;
    std::deque<Message> under_way_;
    bool stalls_ = false;
    uint64_t written_ = 0;
  };

  void Tell(FromRank message);
  void Deliver();
  // Takes what is there to be read.
  void Listen();

  const int64_t patience_;
  std::string why_lost_;
  rpc::GroupState state_;
  const std::shared_ptr<Wire> wire_ = std::make_shared<Wire>();
  std::deque<FromRank> to_leader_;
  std::deque<Command> commands_;
  bool to_leader_stalls_ = false;
  bool closed_ = false;  // by the rank
  int64_t since_closed_ = 0;
  int64_t silent_ = 0;  // heartbeats of the rank since the last sign of the leader
  int64_t replies_ = 0;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SIM_CONTROL_H_
