// One simulated training run against the real engine, with whatever goes wrong, all of it decided by a seed.
//
// A trainer with several clients sends items of work as chunks, ends windows by flushes or steps, and
// recovers as the client library does: it reconnects, sends again what was not answered, follows the server's
// generation, and replays what a lost window held. The oracle knows what every sequence carries and adds it
// up. A divergence is anything that an undisturbed run would not show: a gradient, a weight, a loss or a dX
// that is another one, a mark that goes back, an item that was not consumed exactly once, a run that does not
// end.
#ifndef LOSSD_TESTS_SIMULATION_SCHEDULE_H_
#define LOSSD_TESTS_SIMULATION_SCHEDULE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "tests/simulation/sim_server.h"
#include "tests/simulation/sim_stream.h"
#include "tests/simulation/workload.h"

namespace lossd::simulation {

enum class Tracing { kNo, kYes };
// Which schedules have two of them.
enum class Replicas { kSome, kAll, kNone };

struct ScheduleOptions {
  uint64_t seed = 1;
  Sabotage sabotage = Sabotage::kNone;
  Tracing tracing = Tracing::kNo;
  Replicas replicas = Replicas::kSome;
  std::string folder;  // for checkpoints; emptied
};

struct Outcome {
  std::string divergence;  // empty: none
  std::string configuration;
  std::map<std::string, int64_t> events;  // how many of each kind
  std::vector<std::string> trace;
  int64_t sabotaged = 0;
};

Outcome RunSchedule(const ScheduleOptions& options);

// Without payloads, whose order changes from one time to the next.
std::string Text(const absl::Status& status);

// What a sequence carries, and what the client knows about it.
struct Entry {
  Item item;
  int64_t window_token = 0;  // of a deterministic session
  bool answered = false;
  bool rejected = false;
  bool may_repeat = false;
  bool sent = false;
};

struct LaneState {
  std::vector<Entry> log;  // by sequence, from 1
  uint64_t next_send = 1;
  uint64_t accepted = 0;  // as the client knows
  uint64_t applied = 0;
  uint64_t answered = 0;  // highest
  std::shared_ptr<SimStream> stream;
};

struct SessionState {
  std::string id;
  std::string incarnation;
  int32_t replica = 0;  // where it is
  size_t client = 0;
  int64_t next_place = 0;
  std::vector<LaneState> lanes;
};

struct ClientState {
  std::string key;
  int32_t lanes = 1;
  engine::Deterministic deterministic = engine::Deterministic::kNo;
  uint64_t generation = 1;
  std::deque<Item> pending;
  std::shared_ptr<SessionState> session;  // null: none open
};

// By session and lane.
using MarkMap = std::map<std::pair<std::string, int32_t>, uint64_t>;

// What each lane of each session has carried.
using Logs = std::map<std::string, std::vector<std::vector<Entry>>>;

// What the trainer has by way of results: all of it goes back when an earlier checkpoint is restored.
struct Progress {
  MarkMap settled;  // up to where items are consumed
  Values weights;
  std::set<uint64_t> consumed;  // items, by number
};

class Schedule {
 public:
  explicit Schedule(const ScheduleOptions& options);
  Outcome Run();

 private:
  using SessionMarks = engine::SessionMarks;
  enum class Phase { kIdle, kEnding, kReading, kCommitting, kAborting };
  // What a trainer believes in that has not heard of a restore.
  struct Past {
    std::vector<std::string> incarnations;  // by replica
    uint64_t restores = 0;
    uint64_t generation = 0;
    Logs logs;
    MarkMap settled;
  };
  // Weights on their way in, of which the server has half the rows.
  struct HalfWrite {
    enum class Fate { kUnderWay, kUndone, kForgotten };
    std::string id;
    Values weights;
    Fate fate = Fate::kUnderWay;  // kUndone: by a restore; kForgotten: the server has heard of no such write
  };
  struct Ending {
    bool by_step = false;
    uint64_t generation = 0;
    float scale = 1;
    std::vector<SessionMarks> marks;
    std::optional<engine::FlushInfo> flush;
    // The answer of a call that is under way.
    std::shared_ptr<std::optional<absl::StatusOr<engine::FlushInfo>>> begun;
    std::shared_ptr<std::optional<absl::StatusOr<engine::StepResult>>> stepped;
    std::shared_ptr<std::optional<absl::StatusOr<uint64_t>>> fated;  // the flush
    Values read;
    int64_t rows_read = 0;
    bool unanswered = false;          // the call was made before
    int evaluating = 0;               // losses alone are computed before it is made again
    bool moved = false;               // its marks, since then
    std::string aborted_by_operator;  // a flush: the trainer has not heard of it
  };

  // schedule.cc
  void Count(absl::string_view event) { ++outcome_.events[std::string(event)]; }
  void Say(absl::string_view text);
  void Diverge(absl::string_view what);
  bool Diverged() const { return !outcome_.divergence.empty(); }
  void Event();
  bool DeviceRests();
  void Disturb();
  void CalmDown();
  bool Finished() const;
  void CheckEnd();

  // sim_epochs.cc
  void RankEvent();
  void KillRank();
  void Part();
  void LeftoverEvent();
  // The next epoch, if this one's rank is lost or its device has failed; then true.
  bool EndLostEpoch();
  // The same for a rank that is going to be killed: before what would wait for it for ever.
  bool EndDoomedEpoch();
  void CheckApplied(uint64_t item);

  // sim_set_events.cc
  void SetEvent();
  int32_t AnyReplica();
  void KillReplica(int32_t replica);
  // Runs what waits for the disk or the device. Other things happen meanwhile where there are replicas.
  void RunCall(const std::function<void()>& call);
  // Things happen, at first by chance, until this is so.
  void GoOnUntil(const std::function<bool()>& is_done);
  bool SetIsSettled();
  // All replicas meet, if they have to. Whether the trainer's past is lost by that.
  bool SettleSet();
  // Where a session of the client is, or is to be.
  int32_t PlaceOf(const ClientState& client);
  // Those of all replicas.
  std::vector<SessionMarks> WindowMarks() const;
  std::vector<std::string> Incarnations() const;

  // sim_clients.cc
  std::string NameOf(const SessionState& session, size_t lane) const;
  void Connect(ClientState& client, size_t lane);
  bool OpenSession(ClientState& client);
  void Abandon(SessionState& session);
  void Plan(ClientState& client, size_t lane);
  void Send(ClientState& client, size_t lane);
  void Receive(ClientState& client, size_t lane);
  void TakeAnswer(ClientState& client, size_t lane, const engine::ChunkAnswer& answer);
  void EndStream(ClientState& client, size_t lane, const absl::Status& status);
  void Cut(ClientState& client, size_t lane);
  void Orphan(LaneState& lane);
  void TickOrphan();
  void CloseSession(ClientState& client);
  void RestartClient(ClientState& client);
  // Whose mark of the server's is this, in its window or before it?
  uint64_t MarkOf(const std::vector<SessionMarks>& window, const std::string& id, int32_t lane) const;
  void ForgetAbove(SessionState& session, size_t lane, uint64_t mark);
  bool AllAnswered() const;

  // sim_trainer.cc
  void Tick();
  void BeginEnding();
  std::vector<SessionMarks> KnownMarks() const;
  void LoseAnswer();
  void Evaluate();
  void MoveMarks();
  void Call();
  void TakeBegun();
  void TakeStepped();
  void CheckStepped(const engine::StepResult& result);
  void ReadRows();
  void CommitFlush();
  void AbortFlush();
  // Asks for this fate, and has the answer, unless it takes longer.
  std::optional<absl::StatusOr<uint64_t>> EndFlush(engine::FlushFate fate);
  void Consume();
  void BackToIdle() { phase_ = Phase::kIdle, ending_ = {}; }
  // The oracle: what a window with these marks must hold, and would where they are of that past.
  Values ContentOf(const std::vector<SessionMarks>& marks) const;
  static Values ContentIn(const Past& past, const std::vector<SessionMarks>& marks);
  void RepeatOldCall();
  void CallAsRival();
  void AbortAsOperator();
  // Whether a call to replicas has failed because one was lost meanwhile, perhaps with the head, or another
  // call is under way.
  bool ReplicaWasLost(const absl::Status& status) {
    if (server_->replicas() == nullptr) return false;
    return absl::IsUnavailable(status) || (absl::IsNotFound(status) && !SameServer());
  }
  // Whether an operator's abort is the reason why the trainer is told that its flush is not known.
  bool HearsOfAbort(const absl::Status& status);
  void ReadStats();
  absl::StatusOr<engine::Head::WindowStats> StatsOf(uint64_t generation,
                                                    const std::vector<SessionMarks>& marks);
  void CheckStats(const engine::Head::WindowStats& stats, const Values& content);
  void KeepPast();
  void CallOfAnotherPast();
  void CallOfAnotherPast(const Past& past, const std::vector<SessionMarks>& marks);
  std::optional<Values> WeightsOf(uint64_t version) const;

  // sim_failures.cc
  void SaveCheckpoint();
  void RestoreInPlace();
  void Drain();
  void Kill();
  bool MayLoseServer() const;
  void Restart();
  absl::Status TryToDelete(engine::Head::DiscardGradient discard);
  void DeleteHead();
  void WriteWeights();
  void KillStreams();
  void KillStreamsOf(int32_t replica);

  // sim_writes.cc
  // Begins a write with half of its rows, or ends the one that was begun.
  void StageWrite();
  void EndWrite();
  // The same in the middle of a restore that is about to begin.
  void CommitDuringRestore();
  void ForgetWrite();
  // By a restore.
  void UndoWrite();
  void CheckUndone(absl::string_view what, const absl::Status& status);
  // Commits a write of replicas, again where one was lost, while other things happen.
  absl::StatusOr<uint64_t> CommitThroughLosses(const HalfWrite& write);
  // Everything since the trainer's progress that the server goes on from is done again.
  void Replay(const Progress& progress);
  // Sessions carry again what they carried when `logs` were taken; what else they have is to be sent.
  void Recall(const Logs& logs);
  Logs TakeLogs() const;
  bool LostServer();
  bool SameServer() const;

  Random random_;
  // What only groups have is drawn from here, so that it changes nothing for a single device.
  Random rank_random_;
  Random set_random_;  // the same of replicas
  const ScheduleOptions options_;
  ServerOptions server_options_;
  Outcome outcome_;
  std::unique_ptr<SimServer> server_;
  bool calm_ = false;
  bool slow_device_ = false;
  bool slow_rank_ = false;

  std::vector<ClientState> clients_;
  std::map<std::string, std::shared_ptr<SessionState>> sessions_;  // all that there ever were
  std::deque<std::shared_ptr<SimStream>> orphans_;                 // that the server still believes in
  uint64_t items_ = 0;                                             // made so far
  std::map<uint64_t, Item> workload_;                              // good ones, by number
  int left_to_make_ = 0;

  std::vector<std::string> incarnations_;  // by replica
  uint64_t restores_ = 0;
  uint64_t generation_ = 1;  // as the trainer knows
  Progress progress_;
  // What each checkpoint belongs to; none for that of a drain in the middle of a call that ends a window.
  struct Saved {
    Progress progress;
    Logs logs;
  };
  std::map<std::string, Saved> saved_;
  std::deque<Past> pasts_;  // the last ones that the trainer lost
  std::string newest_;      // checkpoint; empty: none
  std::string restored_;    // that which the server's head began from
  std::map<uint64_t, Values> versions_;
  uint64_t version_ = 0;
  Phase phase_ = Phase::kIdle;
  Ending ending_;
  // A call that was answered, to be delivered again.
  struct OldCall {
    Ending ending;
    absl::StatusOr<uint64_t> generation;
    std::optional<engine::StepResult> step;
    std::vector<std::string> incarnations;
    uint64_t restores = 0;
  };
  std::optional<OldCall> old_call_;
  std::optional<HalfWrite> half_write_;
  bool committing_ = false;                     // an answer is awaited while other things happen
  std::map<uint64_t, Values> maybe_published_;  // by version
  int64_t replays_ = 0;
};

}  // namespace lossd::simulation

#endif  // LOSSD_TESTS_SIMULATION_SCHEDULE_H_
