// Ranks of a group for tests: in one process, over a real Unix socket, with executors that do what a test
// says.
#ifndef LOSSD_TESTS_UNIT_RPC_GROUP_RANKS_H_
#define LOSSD_TESTS_UNIT_RPC_GROUP_RANKS_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "lossd/group/v1/group.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_leader.h"
#include "server/rpc/group/group_member.h"

namespace lossd::rpc::testing {

// What commands are in these tests: two that are replied to, of which one takes memory, and four that are
// not: of these one is executed beside others, and one interrupts them.
engine::GroupCommand Question(uint64_t number);
engine::GroupCommand Taking(uint64_t number);
engine::GroupCommand Told(uint64_t number);
engine::GroupCommand Large(uint64_t number, size_t bytes);
engine::GroupCommand Beside(uint64_t number);
engine::GroupCommand Interrupting(uint64_t number);
uint64_t NumberOf(const engine::GroupCommand& command);

// Why a rank was lost, once somebody has said so.
class Loss {
 public:
  void Tell(int32_t rank, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for it: "1: why".
  std::string Await() ABSL_LOCKS_EXCLUDED(mutex_);
  int times() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  engine::Mutex mutex_;
  engine::CondVar changed_;
  std::string told_ ABSL_GUARDED_BY(mutex_);
  int times_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FakeExecutor final : public engine::RankExecutor {
 public:
  using Do = std::function<absl::Status(const engine::GroupCommand&)>;
  FakeExecutor() = default;
  explicit FakeExecutor(Do then) : do_(std::move(then)) {}

  // A batch is applied at once.
  absl::Status Execute(engine::GroupCommand command) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<engine::BatchProgress> Poll() override ABSL_LOCKS_EXCLUDED(mutex_);
  void TellAnswersTo(std::function<void(engine::AnsweredChunk)> tell) override { tell_ = std::move(tell); }
  engine::RankReport Report() const override ABSL_LOCKS_EXCLUDED(mutex_);
  // Tells the leader so; to be called by what is done with a command.
  void Answer(engine::AnsweredChunk chunk) { tell_(std::move(chunk)); }
  // What it reports from now on.
  void set_report(engine::RankReport report) ABSL_LOCKS_EXCLUDED(mutex_);
  // Numbers of the commands so far.
  std::vector<uint64_t> executed() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const Do do_;
  std::function<void(engine::AnsweredChunk)> tell_;
  mutable engine::Mutex mutex_;
  engine::RankReport report_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> executed_ ABSL_GUARDED_BY(mutex_);
  engine::BatchProgress batches_ ABSL_GUARDED_BY(mutex_);
};

// A folder of its own, and what all ranks of a test agree on.
class GroupUnderTest {
 public:
  explicit GroupUnderTest(int32_t ranks, absl::Duration rank_timeout = absl::Seconds(60));
  ~GroupUnderTest();

  std::string socket() const { return folder_ + "/control.sock"; }
  // That of the socket, or what was set. Port 0 becomes that of the leader once it was started.
  const std::string& address() const { return address_; }
  void set_address(std::string address) { address_ = std::move(address); }
  void set_credentials(GroupCredentials credentials) { credentials_ = std::move(credentials); }
  GroupIdentity& identity() { return identity_; }
  const GroupCredentials& credentials() const { return credentials_; }
  const GroupIdentity& identity() const { return identity_; }
  Loss& loss() { return loss_; }

  GroupLeaderOptions LeaderOptions();
  std::unique_ptr<GroupLeader> Lead() { return Lead(LeaderOptions()); }
  std::unique_ptr<GroupLeader> Lead(GroupLeaderOptions options);
  GroupMemberOptions MemberOptions(int32_t rank);
  // Aborts the test's process if the leader does not take it.
  std::unique_ptr<GroupMember> Join(int32_t rank);

  group::v1::MemberMessage Hello(int32_t rank) const;
  std::unique_ptr<group::v1::GroupService::Stub> Stub() const;
  // What a leader refuses this hello with, if it comes with this token.
  grpc::Status Refusal(const group::v1::MemberMessage& hello) const {
    return Refusal(hello, credentials_.token);
  }
  grpc::Status Refusal(const group::v1::MemberMessage& hello, const std::string& token) const;

 private:
  std::string folder_;
  std::string address_;
  GroupCredentials credentials_ = {.token = "a secret of the group"};
  GroupIdentity identity_;
  const absl::Duration rank_timeout_;
  Loss loss_;
};

// Runs a member until it ends.
class RunningMember {
 public:
  RunningMember(std::unique_ptr<GroupMember> member, FakeExecutor* executor)
      : member_(std::move(member)), thread_([this, executor] { ended_ = member_->Run(*executor); }) {}
  ~RunningMember() {
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Await() {
    thread_.join();
    return ended_;
  }
  GroupMember& member() { return *member_; }

 private:
  std::unique_ptr<GroupMember> member_;
  absl::Status ended_;
  std::thread thread_;
};

}  // namespace lossd::rpc::testing

#endif  // LOSSD_TESTS_UNIT_RPC_GROUP_RANKS_H_
