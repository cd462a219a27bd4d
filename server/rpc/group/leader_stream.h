// A rank's end of its stream to the leader.
#ifndef LOSSD_SERVER_RPC_GROUP_LEADER_STREAM_H_
#define LOSSD_SERVER_RPC_GROUP_LEADER_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <deque>
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
#include "lossd/group/v1/group.grpc.pb.h"
#include "server/engine/common/mutex.h"
#include "server/rpc/group/group_member.h"
#include "server/rpc/group/message_queue.h"

namespace lossd::rpc {

// Thread-safe. One call of Join, from Open() to the destructor, which cancels it if need be.
class LeaderStream final
    : public grpc::ClientBidiReactor<group::v1::MemberMessage, group::v1::LeaderMessage> {
 public:
  using Clock = std::chrono::steady_clock;
  using Lost = std::function<void(const absl::Status&)>;

  using Ended = std::function<void()>;
  using ServingChanged = std::function<void(Serving)>;

  // What GroupMemberOptions says of them; all may be null.
  struct Events {
    Lost on_lost;
    Ended on_end;
    ServingChanged on_serving;
  };
  // `member` is what messages call a rank (GroupIdentity).
  LeaderStream(group::v1::GroupService::Stub* stub, std::string member, absl::Duration rank_timeout,
               Events events);
  ~LeaderStream() override;

  // Shows the token and says hello. Once, and first.
  void Begin(const GroupCredentials& credentials, const group::v1::Hello& hello) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the welcome. Otherwise what the leader refused it with, UNAVAILABLE, with the reason, if it
  // could not be reached, DEADLINE_EXCEEDED if there is nothing by then.
  absl::Status AwaitWelcome(Clock::time_point until) ABSL_LOCKS_EXCLUDED(mutex_);

  // Every HeartbeatInterval(): says that we are there, and listens whether the leader is.
  void Beat() ABSL_LOCKS_EXCLUDED(mutex_);

  // Rendezvous's.
  kernels::collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                         std::vector<std::string>* all) ABSL_LOCKS_EXCLUDED(mutex_);

  // Waits for the next command until then, and returns none if there is none. CANCELLED after the last one of
  // a group that has ended in order, UNAVAILABLE when the leader is lost.
  absl::StatusOr<std::optional<group::v1::NumberedCommand>> Next(Clock::time_point until)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // What is called with commands that interrupt others, by the thread that reads the stream: it must not
  // wait. They are dropped while it is null, and behind this call what was set before is called no more.
  using Interrupt = std::function<void(const std::string& command)>;
  void SetInterrupt(Interrupt interrupt) ABSL_LOCKS_EXCLUDED(interrupt_mutex_);
  void Reply(uint64_t number, const absl::StatusOr<std::string>& data) ABSL_LOCKS_EXCLUDED(mutex_);
  void Reply(uint64_t number, const absl::Status& status) {
    Reply(number, status.ok() ? absl::StatusOr<std::string>("") : status);
  }
  void TellAnswered(std::string answered) ABSL_LOCKS_EXCLUDED(mutex_);
  void TellApplied() ABSL_LOCKS_EXCLUDED(mutex_);
  void Report(std::string report) ABSL_LOCKS_EXCLUDED(mutex_);
  void RequestDrain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Break() ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t epoch() ABSL_LOCKS_EXCLUDED(mutex_);  // 0 before the welcome
  bool ended() ABSL_LOCKS_EXCLUDED(mutex_);     // in order
  Serving serving() ABSL_LOCKS_EXCLUDED(mutex_);

  // The oldest command that Next() has not returned, and for how long it has been here; empty: there is none.
  struct Waiting {
    std::string command;
    double seconds = 0;
  };
  Waiting OldestWaiting() ABSL_LOCKS_EXCLUDED(mutex_);

  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone(const grpc::Status& status) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Take() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Write(std::shared_ptr<const group::v1::MemberMessage> message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After the end, once everything is written.
  void LeaveInOrder() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if this is news: `on_lost` is to be called, unlocked.
  bool Lose(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string WhoIsMissing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  group::v1::GroupService::Stub* const stub_;
  const std::string member_;
  const absl::Duration rank_timeout_;
  const Events events_;
  grpc::ClientContext context_;
  group::v1::LeaderMessage incoming_;

  engine::Mutex mutex_;
  engine::CondVar changed_;
  MessageQueue outgoing_ ABSL_GUARDED_BY(mutex_);
  struct Arrived {
    group::v1::NumberedCommand command;
    Clock::time_point at;
  };
  std::deque<Arrived> commands_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;  // a read is under way: gRPC still takes messages
  bool welcome_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  Serving serving_ ABSL_GUARDED_BY(mutex_) = Serving::kNotYet;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;    // in order
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;  // by ourselves
  bool done_ ABSL_GUARDED_BY(mutex_) = false;     // gRPC is done with this
  absl::Status done_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  int64_t silent_ ABSL_GUARDED_BY(mutex_) = 0;  // heartbeats of ours since the leader's last sign of life
  int64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::vector<std::string>> gathered_ ABSL_GUARDED_BY(mutex_);
  group::v1::Waiting waiting_ ABSL_GUARDED_BY(mutex_);  // as of the latest offer

  engine::Mutex interrupt_mutex_;
  Interrupt interrupt_ ABSL_GUARDED_BY(interrupt_mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_GROUP_LEADER_STREAM_H_
