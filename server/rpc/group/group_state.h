// What the leader knows of its group: who has joined, what it waits for, and whether the group is still
// whole.
#ifndef LOSSD_SERVER_RPC_GROUP_GROUP_STATE_H_
#define LOSSD_SERVER_RPC_GROUP_GROUP_STATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/collectives/rendezvous.h"
#include "lossd/group/v1/group.pb.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/device_report.h"
#include "server/engine/group/answered_chunk.h"
#include "server/engine/group/awaited_answers.h"
#include "server/engine/group/group_command.h"
#include "server/rpc/convert/lane_addresses.h"
#include "server/rpc/group/group_identity.h"

namespace lossd::rpc {

// The stream of one rank, as the state of its group sees it. Its calls return at once, and may come with the
// state's lock held: they must not call the state.
class RankStream {
 public:
  virtual ~RankStream() = default;
  virtual void Write(std::shared_ptr<const group::v1::LeaderMessage> message) = 0;
  // Ends it with OK when everything before is written.
  virtual void Close() = 0;
  // Ends it at once, though messages wait.
  virtual void Cancel() = 0;
  // Whether messages wait, and none was written since this was last asked.
  virtual bool IsStuck() = 0;
  // Where the rank is, as people read it; may be empty.
  virtual std::string Peer() const { return {}; }
};

// Told once, when the first rank is lost, by one of gRPC's threads or that of heartbeats, without a lock.
using RankLost = std::function<void(int32_t rank, const std::string& why)>;
// What a rank has replied to a command: data, or the error that it came to. If `lost` is not ok a rank was
// lost before, and whether the command was executed is not known.
using RankAnswered = std::function<void(const absl::Status& lost, const absl::StatusOr<std::string>& data)>;
// By when a rank is to have answered what it is asked alone. kSoon: it waits for no device and for no other
// rank, and whoever does not answer it within PatienceWithAnswers() is lost. kWhenDone: there is no saying.
enum class Answers { kSoon, kWhenDone };
// Told once of each command that a rank has not answered for PatienceWithCommands(), by the thread of
// heartbeats, without a lock.
using AnswerLate = std::function<void(int32_t rank, const std::string& command, absl::Duration age)>;
// Told once, when a rank first asks for it, by the thread of its stream, without a lock.
using DrainAsked = std::function<void(int32_t rank)>;

// Whose offers the leader's AllGather waits for, and for how long; none if it does not wait.
struct AwaitedOffers {
  std::vector<int32_t> ranks = {};
  absl::Duration time = absl::ZeroDuration();
};

// Thread-safe. A group loses a rank once: from then on commands are dropped, what waits fails, what comes is
// late and changes nothing, and the streams of all ranks are cancelled.
class GroupState {
 public:
  // All may be null.
  GroupState(GroupIdentity identity, absl::Duration rank_timeout, RankLost on_lost,
             DrainAsked on_drain = nullptr, AnswerLate on_late = nullptr);

  // Streams call these. A rank that has joined is welcomed, and counts as lost when it leaves before End().
  // The errors are group.proto's.
  absl::Status Join(const group::v1::Hello& hello, std::shared_ptr<RankStream> stream)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // INTERNAL if the message makes no sense.
  absl::Status Take(int32_t rank, const group::v1::MemberMessage& message) ABSL_LOCKS_EXCLUDED(mutex_);
  void Leave(int32_t rank, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Sends heartbeats, and looks for ranks that have been silent, have taken nothing, or have not answered
  // what is answered soon, for too long. Every HeartbeatInterval().
  void Beat() ABSL_LOCKS_EXCLUDED(mutex_);

  int32_t ranks() const { return identity_.ranks; }
  int64_t epoch() const { return identity_.epoch; }
  // DEADLINE_EXCEEDED, naming the ranks that have not joined; UNAVAILABLE if one is lost meanwhile.
  absl::Status AwaitRanks(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status AwaitReports(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);
  // Those of the ranks that have joined; from rank 1 on.
  std::vector<RankLanes> Lanes() ABSL_LOCKS_EXCLUDED(mutex_);
  // RankChannel's.
  void Send(const engine::GroupCommand& command) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Ask(const engine::GroupCommand& command) ABSL_LOCKS_EXCLUDED(mutex_);
  void SendTo(int32_t rank, const engine::GroupCommand& command) ABSL_LOCKS_EXCLUDED(mutex_);
  // RankQuestions'.
  void AskRank(int32_t rank, const std::string& name, std::string command, Answers answers, RankAnswered done)
      ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<engine::AnsweredChunk> TakeAnswered() ABSL_LOCKS_EXCLUDED(answered_mutex_);
  // Does not wait for the lock: the device's loop asks all the time.
  uint64_t batches_applied() const { return batches_applied_; }
  engine::GroupReport Report() ABSL_LOCKS_EXCLUDED(mutex_);
  // Rendezvous's, for the leader itself.
  kernels::collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                         std::vector<std::string>* all) ABSL_LOCKS_EXCLUDED(mutex_);
  AwaitedOffers Awaited() ABSL_LOCKS_EXCLUDED(mutex_);

  // Tells every rank, if it is news.
  void SetServing(bool ready) ABSL_LOCKS_EXCLUDED(mutex_);
  // Tells every rank, once; what SetServing() says from then on is not told.
  void TellDraining() ABSL_LOCKS_EXCLUDED(mutex_);

  // Tells every rank that the group ends in order, behind all commands. False if that is past: it has ended,
  // or lost a rank.
  bool End() ABSL_LOCKS_EXCLUDED(mutex_);
  // Returns when every rank's stream is over, or after `timeout`.
  void AwaitLeft(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Clock = std::chrono::steady_clock;

  struct Member {
    std::shared_ptr<RankStream> stream;  // null: has not joined, or has left
    bool joined = false;
    int64_t silent = 0;    // heartbeats of ours since the last sign of life
    int64_t stuck = 0;     // and since it last took something, or there was nothing to take
    uint64_t applied = 0;  // batches
    std::optional<engine::RankReport> report = {};
    RankLanes lanes = {};
  };
  struct Round {
    std::vector<std::optional<std::string>> offers;
    std::vector<int32_t> Missing() const;
  };
  struct Question {
    std::vector<std::optional<absl::Status>> replies;  // by rank; the leader's own is there
    bool answered() const;
  };

  absl::Status Check(const group::v1::Hello& hello) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeOffer(int32_t rank, const group::v1::Offer& offer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeReply(int32_t rank, const group::v1::Reply& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What waits for the answer to a command of AskRank; null if the reply is to another one.
  RankAnswered TakeAsked(int32_t rank, uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells those who still wait for an answer that there will be none.
  void GiveUpAsked() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status TakeAnswered(int32_t rank, absl::StatusOr<engine::AnsweredChunk> chunk)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status TakeApplied(int32_t rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whatever does not have to be answered with the lock released.
  absl::Status TakeLocked(int32_t rank, const group::v1::MemberMessage& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Why the member is to be given up at this heartbeat; empty if it is not.
  std::string Missed(Member& member) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What waits for an answer is one heartbeat older.
  struct Late {
    int32_t rank = 0;
    std::string command;
  };
  struct Unanswered {
    std::vector<Late> late;    // those that have become so now
    std::optional<Late> lost;  // whose rank is to be given up
  };
  Unanswered AgeAsked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeReport(int32_t rank, absl::StatusOr<engine::RankReport> report)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // To every rank that is there.
  void Broadcast(const std::shared_ptr<const group::v1::LeaderMessage>& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives it its number.
  uint64_t BroadcastCommand(const std::shared_ptr<group::v1::LeaderMessage>& message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if this is the first loss: TellLost has to follow, unlocked.
  bool Lose(int32_t rank, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // First to `on_lost_`, in which the process may end: who starts the ranks again would end it as soon as
  // another one ended, and nobody would learn which one was lost.
  void TellLost(int32_t rank, const std::string& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until `is_there` says so of all ranks but the leader. `what` is what the others have not done.
  using IsThere = bool (*)(const Member& member);
  absl::Status Await(absl::Duration timeout, IsThere is_there, const char* what) ABSL_LOCKS_EXCLUDED(mutex_);
  kernels::collectives::Result AwaitOffers(const Round& round, Clock::time_point deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Round& RoundOf(int64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GroupIdentity identity_;
  const absl::Duration rank_timeout_;
  const RankLost on_lost_;
  const DrainAsked on_drain_;
  const AnswerLate on_late_;

  std::atomic<uint64_t> batches_applied_ = 0;  // the fewest of any member

  engine::Mutex mutex_;
  engine::CondVar changed_;
  std::vector<Member> members_ ABSL_GUARDED_BY(mutex_);  // by rank; that of the leader stays empty
  std::map<int64_t, Round> rounds_ ABSL_GUARDED_BY(mutex_);
  int64_t own_round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<Clock::time_point> own_round_since_ ABSL_GUARDED_BY(mutex_);  // while the leader waits in it
  std::map<uint64_t, Question> questions_ ABSL_GUARDED_BY(mutex_);
  struct Asked {
    int32_t rank = 0;
    std::string name;
    Answers answers = Answers::kWhenDone;
    RankAnswered done;
    int64_t age = 0;  // heartbeats of ours since it was asked
  };
  std::map<uint64_t, Asked> asked_ ABSL_GUARDED_BY(mutex_);  // by AskRank, by number
  uint64_t last_command_ ABSL_GUARDED_BY(mutex_) = 0;
  engine::AwaitedAnswers answers_ ABSL_GUARDED_BY(mutex_);  // of the batches that ranks were told to start
  std::optional<bool> serving_ ABSL_GUARDED_BY(mutex_);     // what was told last
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool drain_asked_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status over_ ABSL_GUARDED_BY(mutex_);  // not OK: a rank is lost, or the group has ended

  // The device's loop asks all the time, and finds nothing most of the time.
  std::atomic<bool> any_answered_ = false;
  engine::Mutex answered_mutex_;  // taken last
  std::vector<engine::AnsweredChunk> answered_ ABSL_GUARDED_BY(answered_mutex_);
};

// "rank 1", "ranks 1, 3".
std::string RankList(const std::vector<int32_t>& ranks, const std::string& member = "rank");

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_GROUP_STATE_H_
