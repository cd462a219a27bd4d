#include "tests/conformance/rank_threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/collectives/gloo_communicator.h"
#include "server/engine/common/worker_pool.h"
#include "server/engine/device/cpu/cpu_backend.h"
#include "server/engine/device/rank_status.h"
#include "server/engine/device/sharded/sharded_device.h"
#include "server/engine/device/sharded/sharded_rank.h"
#include "server/engine/group/awaited_answers.h"
#include "server/rpc/group/group_wire.h"
#include "tests/conformance/held_device.h"
#include "tests/support/wait.h"

namespace lossd::engine::testing {
namespace {

using kernels::collectives::Communicator;
using kernels::collectives::Rendezvous;
using kernels::collectives::Result;

// Where the threads meet.
class Meeting {
 public:
  explicit Meeting(size_t ranks) : ranks_(ranks) {}

  std::vector<std::string> AllGather(size_t rank, int round, std::string own) {
    std::unique_lock lock(mutex_);
    std::vector<std::optional<std::string>>& said = rounds_[round];
    said.resize(ranks_);
    said[rank] = std::move(own);
    changed_.notify_all();
    lossd::testing::Await("all ranks to meet", changed_, lock, [&said] {
      return std::all_of(said.begin(), said.end(), [](const auto& one) { return one.has_value(); });
    });
    std::vector<std::string> all;
    for (const std::optional<std::string>& one : said) all.push_back(*one);
    return all;
  }

 private:
  const size_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::vector<std::optional<std::string>>> rounds_;
};

class ThreadRendezvous : public Rendezvous {
 public:
  ThreadRendezvous(Meeting& meeting, int32_t rank) : meeting_(meeting), rank_(static_cast<size_t>(rank)) {}
  Result AllGather(std::string own, std::chrono::milliseconds /*timeout*/,
                   std::vector<std::string>* all) override {
    *all = meeting_.AllGather(rank_, round_++, std::move(own));
    return {};
  }

 private:
  Meeting& meeting_;
  const size_t rank_;
  int round_ = 0;
};

// What a rank that is not the leader has to do.
class Mailbox {
 public:
  struct Letter {
    std::string command;
    std::promise<absl::Status> done;
  };

  std::future<absl::Status> Add(std::string command) {
    const std::lock_guard lock(mutex_);
    Letter& letter = letters_.emplace_back();
    letter.command = std::move(command);
    changed_.notify_one();
    return letter.done.get_future();
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_one();
  }
  bool Empty() {
    const std::lock_guard lock(mutex_);
    return letters_.empty();
  }
  std::optional<Letter> Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || !letters_.empty(); });
    if (letters_.empty()) return std::nullopt;
    Letter letter = std::move(letters_.front());
    letters_.pop_front();
    return letter;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Letter> letters_;
  bool closed_ = false;
};

[[noreturn]] void GiveUp(int32_t rank, const absl::Status& status) {
  std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
  std::abort();
}

// What a rank is connected by.
struct Connections {
  std::unique_ptr<Communicator> host;
  std::unique_ptr<Communicator> device;  // null: the host's

  RankPlace place(Rendezvous& rendezvous) const {
    return {.rank = host->rank(),
            .ranks = host->size(),
            .host = host.get(),
            .device = device == nullptr ? host.get() : device.get(),
            .rendezvous = &rendezvous};
  }
};

Connections Connect(Rendezvous& rendezvous, int32_t rank, const RankThreadOptions& options) {
  Connections connections;
  Result connected = kernels::collectives::ConnectGloo(
      {.rank = rank, .size = options.ranks, .timeout = std::chrono::minutes(10)}, rendezvous,
      &connections.host);
  if (connected.ok() && options.connect != nullptr) {
    connected = options.connect(rank, rendezvous, &connections.device);
  }
  if (!connected.ok()) GiveUp(rank, ToStatus(connected));
  return connections;
}

absl::StatusOr<std::unique_ptr<Device>> CreateDevice(const RankThreadOptions& options, int32_t rank) {
  return options.create == nullptr ? CreateCpuDevice(options.workspace_bytes) : options.create(rank);
}

class RankThreads : public RankChannel {
 public:
  explicit RankThreads(const RankThreadOptions& options)
      : options_(options),
        meeting_(static_cast<size_t>(options.ranks)),
        mailboxes_(static_cast<size_t>(options.ranks)),
        executors_(static_cast<size_t>(options.ranks)),
        applied_(static_cast<size_t>(options.ranks)),
        made_payloads_(static_cast<size_t>(options.ranks)) {
    for (auto& made : made_payloads_) payloads_.emplace_back(made.get_future());
    for (int32_t rank = 1; rank < options.ranks; ++rank) {
      threads_.emplace_back([this, rank] { RunRank(rank); });
    }
    connections_ = Connect(rendezvous_, 0, options_);
  }
  ~RankThreads() override {
    for (Mailbox& mailbox : mailboxes_) mailbox.Close();
    for (std::thread& thread : threads_) thread.join();
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  void Send(GroupCommand command) override { (void)Post(command); }
  void SendTo(int32_t rank, GroupCommand command) override {
    const std::lock_guard lock(mutex_);
    (void)mailboxes_[static_cast<size_t>(rank)].Add(rpc::SerializeCommand(command));
  }
  std::vector<AnsweredChunk> TakeAnswered() override {
    const std::lock_guard lock(answered_mutex_);
    return std::exchange(answered_, {});
  }
  absl::Status Ask(GroupCommand command) override {
    absl::Status first;
    int32_t rank = 0;
    for (std::future<absl::Status>& done : Post(command)) {
      const absl::Status status = lossd::testing::Await("a rank's answer", std::move(done));
      ++rank;
      if (!status.ok() && first.ok()) {
        first = absl::Status(status.code(), absl::StrCat("rank ", rank, ": ", status.message()));
      }
    }
    return first;
  }

  uint64_t BatchesApplied() const override {
    uint64_t fewest = std::numeric_limits<uint64_t>::max();
    for (size_t rank = 1; rank < applied_.size(); ++rank) fewest = std::min(fewest, applied_[rank].load());
    return fewest;
  }
  GroupReport Report() const override { return {}; }

  RankPlace place() { return connections_.place(rendezvous_); }
  // What a rank that is not the leader holds; waits until it is there.
  RankPayloads& payloads(int32_t rank) { return *payloads_[static_cast<size_t>(rank)].get(); }

 private:
  // To all ranks in one order, whichever threads send.
  std::vector<std::future<absl::Status>> Post(const GroupCommand& command) {
    const std::lock_guard lock(mutex_);
    if (const auto* batch = std::get_if<StartBatchCommand>(&command)) {
      const std::lock_guard answered_lock(answered_mutex_);
      awaited_.Start(*batch);
    }
    const std::string bytes = rpc::SerializeCommand(command);
    std::vector<std::future<absl::Status>> done;
    if (Interrupts(command)) {
      for (ShardedRank* const executor : executors_) {
        if (executor != nullptr) executor->Execute(*rpc::ParseCommand(bytes)).IgnoreError();
      }
      return done;
    }
    for (size_t rank = 1; rank < mailboxes_.size(); ++rank) done.push_back(mailboxes_[rank].Add(bytes));
    return done;
  }

  void RunRank(int32_t rank) {
    ThreadRendezvous rendezvous(meeting_, rank);
    const Connections connections = Connect(rendezvous, rank, options_);
    absl::StatusOr<std::unique_ptr<Device>> device = CreateDevice(options_, rank);
    if (!device.ok()) GiveUp(rank, device.status());
    const RankPlace place = connections.place(rendezvous);
    if (absl::Status joined = (*device)->JoinRanks(place.device); !joined.ok()) GiveUp(rank, joined);
    const int64_t limit =
        options_.memory_limit == nullptr ? std::numeric_limits<int64_t>::max() : options_.memory_limit(rank);
    absl::StatusOr<std::unique_ptr<ShardedRank>> own = ShardedRank::Create(*std::move(device), place, limit);
    if (!own.ok()) GiveUp(rank, own.status());
    (*own)->TellAnswersTo([this, rank](const AnsweredChunk& chunk) { TakeAnswer(rank, chunk); });
    made_payloads_[static_cast<size_t>(rank)].set_value((*own)->payloads());
    Mailbox& mailbox = mailboxes_[static_cast<size_t>(rank)];
    SetExecutor(rank, own->get());
    std::optional<WorkerPool> beside(1);
    while (std::optional<Mailbox::Letter> letter = mailbox.Next()) {
      Execute(**own, rank, *std::move(letter), *beside);
      Follow(**own, rank);
    }
    beside.reset();
    SetExecutor(rank, nullptr);
  }
  void SetExecutor(int32_t rank, ShardedRank* executor) {
    const std::lock_guard lock(mutex_);
    executors_[static_cast<size_t>(rank)] = executor;
  }

  // By the wire's bytes, and checked as the leader of a group does.
  void TakeAnswer(int32_t rank, const AnsweredChunk& chunk) {
    absl::StatusOr<AnsweredChunk> came = rpc::ParseAnswer(rpc::SerializeAnswer(chunk));
    if (!came.ok()) GiveUp(rank, came.status());
    const std::lock_guard lock(answered_mutex_);
    if (const absl::Status taken = awaited_.Take(rank, *came); !taken.ok()) GiveUp(rank, taken);
    answered_.push_back(*std::move(came));
  }

  static void Execute(ShardedRank& own, int32_t rank, Mailbox::Letter letter, WorkerPool& beside) {
    absl::StatusOr<GroupCommand> command = rpc::ParseCommand(letter.command);
    if (!command.ok()) GiveUp(rank, command.status());
    if (IsExecutedBeside(*command)) {
      beside.Run([&own, command = *std::move(command),
                  taking = std::make_shared<Mailbox::Letter>(std::move(letter))] {
        taking->done.set_value(own.Execute(command));
      });
      return;
    }
    const bool replied_to = IsRepliedTo(*command);
    const absl::Status status = own.Execute(*std::move(command));
    if (!status.ok() && !replied_to) GiveUp(rank, status);
    letter.done.set_value(status);
  }

  // Until nothing is under way or there is another command.
  void Follow(ShardedRank& own, int32_t rank) {
    const auto place = static_cast<size_t>(rank);
    for (;;) {
      const absl::StatusOr<BatchProgress> progress = own.Poll();
      if (!progress.ok()) GiveUp(rank, progress.status());
      CheckAnswered(rank, progress->applied);
      applied_[place] = progress->applied;
      if (!progress->under_way() || !mailboxes_[place].Empty()) return;
    }
  }

  void CheckAnswered(int32_t rank, uint64_t applied) {
    const std::lock_guard lock(answered_mutex_);
    if (const absl::Status checked = awaited_.CheckApplied(rank, applied); !checked.ok()) {
      GiveUp(rank, checked);
    }
  }

  const RankThreadOptions options_;
  Meeting meeting_;
  ThreadRendezvous rendezvous_{meeting_, 0};  // the leader's
  std::mutex mutex_;
  std::deque<Mailbox> mailboxes_;               // by rank; the leader has none to read
  std::vector<ShardedRank*> executors_;         // the same; null: not ready, or gone
  std::vector<std::atomic<uint64_t>> applied_;  // batches
  std::vector<std::promise<std::shared_ptr<RankPayloads>>> made_payloads_;
  std::vector<std::shared_future<std::shared_ptr<RankPayloads>>> payloads_;
  std::mutex answered_mutex_;  // taken last
  AwaitedAnswers awaited_;
  std::vector<AnsweredChunk> answered_;
  std::vector<std::thread> threads_;
  Connections connections_;
};

}  // namespace

absl::StatusOr<RankThreadGroup> CreateRankThreadGroup(const RankThreadOptions& options) {
  absl::StatusOr<std::unique_ptr<Device>> local = CreateDevice(options, 0);
  if (!local.ok()) return local.status();
  auto ranks = std::make_shared<RankThreads>(options);
  const RankPlace place = ranks->place();
  if (absl::Status joined = (*local)->JoinRanks(place.device); !joined.ok()) return joined;
  return RankThreadGroup{
      CreateShardedDevice(*std::move(local), place, ranks), ranks,
      [group = ranks.get()](int32_t rank) -> RankPayloads& { return group->payloads(rank); }};
}

absl::StatusOr<std::unique_ptr<Device>> CreateRankThreads(const RankThreadOptions& options) {
  absl::StatusOr<RankThreadGroup> group = CreateRankThreadGroup(options);
  if (!group.ok()) return group.status();
  if (options.holder == nullptr) return std::move(group->leader);
  return CreateHeldDevice(std::move(group->leader), group->channel, group->payloads, options.holder);
}

}  // namespace lossd::engine::testing
