// The control stream of a group, as the engine sees it: commands from the leader, in one order, to every
// other rank.
#ifndef LOSSD_SERVER_ENGINE_GROUP_RANK_CHANNEL_H_
#define LOSSD_SERVER_ENGINE_GROUP_RANK_CHANNEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/device/device_report.h"
#include "server/engine/group/answered_chunk.h"
#include "server/engine/group/group_command.h"

namespace lossd::engine {

// The leader's end. Calls may come from any thread, and are executed by every other rank in one order: that
// in which Send and Ask were entered.
class RankChannel {
 public:
  virtual ~RankChannel() = default;

  // Does not wait. A command that cannot be delivered ends the group: what follows it (a collective) fails.
  virtual void Send(GroupCommand command) = 0;
  // Waits until every other rank has executed it, and returns the first error in the order of the ranks,
  // whose message names its rank. UNAVAILABLE if a rank is lost meanwhile.
  virtual absl::Status Ask(GroupCommand command) = 0;
  // As Send, to this rank alone; what it is told by both is executed in one order.
  virtual void SendTo(int32_t rank, GroupCommand command) = 0;
  // Chunks that their batch's holder has answered since the last call, those of a batch in their order.
  // Whatever BatchesApplied() covered before is among them, once. Each is what its command asked for: a rank
  // that says anything else is lost. Does not wait; any thread.
  virtual std::vector<AnsweredChunk> TakeAnswered() = 0;
  // How many batches (StartBatchCommand) every other rank has applied by now: the fewest of any. Does not
  // wait; any thread.
  virtual uint64_t BatchesApplied() const = 0;
  // What ranks have told of themselves, some moments ago; the leader's own place is empty. Any thread.
  virtual GroupReport Report() const = 0;
};

// As long as it lives, rank `rank` holds the payload of this number for the leader.
std::shared_ptr<const void> HoldAtRank(std::shared_ptr<RankChannel> channel, int32_t rank, uint64_t number);

// How far a rank is with the batches that it was told to start.
struct BatchProgress {
  uint64_t started = 0;
  uint64_t applied = 0;  // all of them in its part of dW

  bool under_way() const { return started > applied; }
};

// At the other ranks: what commands are executed by, one at a time, by one thread; those that may last for
// seconds (IsExecutedBeside) by another one, one at a time too, beside what comes after them; and those that
// interrupt others by any, as soon as they come.
class RankExecutor {
 public:
  virtual ~RankExecutor() = default;

  // The error of a command that is replied to is the reply, and changes nothing. Of any other command an
  // error means that this rank can no longer be trusted: it has to end, and with it the group.
  virtual absl::Status Execute(GroupCommand command) = 0;

  // A StartBatchCommand is executed when its batch is started. Looks how far batches have come; to be called
  // by the same thread, again and again while one is under way. An error is that of a batch: this rank has to
  // end.
  virtual absl::StatusOr<BatchProgress> Poll() = 0;

  // Before the first command: `tell` is called for each chunk of batches that this rank holds, as soon as it
  // is answered and before Poll says that its batch is applied; by the threads of Execute and Poll.
  virtual void TellAnswersTo(std::function<void(AnsweredChunk)> tell) = 0;

  // What the rank has and does. Any thread, beside every other call; the device may keep it waiting.
  virtual RankReport Report() const = 0;
};

// Nothing names what it makes before it is replied to.
inline bool TakesMemory(const GroupCommand& command) {
  return std::holds_alternative<CreateHeadCommand>(command) ||
         std::holds_alternative<CreateGradientCommand>(command);
}

// Whether it is executed beside other commands: begun when all before it are done.
inline bool IsExecutedBeside(const GroupCommand& command) {
  return TakesMemory(command) || std::holds_alternative<ConnectReplicasCommand>(command);
}

// Whether it is executed before all that have come and wait, since one of them may be waiting for it. It does
// not wait itself.
inline bool Interrupts(const GroupCommand& command) {
  return std::holds_alternative<AbortReplicasCommand>(command);
}

// Whether the leader waits for what becomes of it.
inline bool IsRepliedTo(const GroupCommand& command) {
  return TakesMemory(command) || std::holds_alternative<PrepareTeacherCommand>(command);
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_RANK_CHANNEL_H_
