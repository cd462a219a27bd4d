#include "server/startup/group/supervisor.h"

#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/listen_address.h"
#include "server/rpc/transport/listener.h"
#include "server/startup/group/ending_processes.h"
#include "server/startup/group/epoch.h"
#include "server/startup/group/group_options.h"
#include "server/telemetry/common/logging.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogField;
using telemetry::LogLevel;
using Clock = std::chrono::steady_clock;

constexpr int kMostInOrder = 2;  // exit statuses up to this are a leader's own end
constexpr int kSignalled = 128;  // and the signal's number, as a shell says it
// timeout(1) and others tell a process and then its process group: that is one signal.
constexpr std::chrono::seconds kSameSignal(1);
constexpr int kMostShortLives = 5;
// How often the parent looks at ranks that stand still.
constexpr std::chrono::seconds kLook(1);
// How long ranks may outlive a leader that has ended in order.
constexpr std::chrono::seconds kFarewell(5);

// That of a leader is the group's; another node's first rank ends with 0 when the leader has ended the group.
bool EndsGroup(const Epoch& epoch, const RankEnd& end) {
  if (end.rank != epoch.first_rank() || !WIFEXITED(end.wait_status)) return false;
  return WEXITSTATUS(end.wait_status) <= (end.rank == 0 ? kMostInOrder : 0);
}

// A rank that ends with 0 was told to: the end of the node's first one follows.
bool IsLoss(const RankEnd& end) { return !WIFEXITED(end.wait_status) || WEXITSTATUS(end.wait_status) != 0; }

// Noticed that another rank was lost.
bool IsSecondary(const RankEnd& end) {
  return WIFEXITED(end.wait_status) && WEXITSTATUS(end.wait_status) == kRankLost;
}

int StatusOf(const RankEnd& end) {
  if (IsSecondary(end)) return EXIT_FAILURE;
  return WIFEXITED(end.wait_status) ? WEXITSTATUS(end.wait_status) : kSignalled + WTERMSIG(end.wait_status);
}

class Supervisor {
 public:
  explicit Supervisor(SupervisorOptions options)
      : options_(std::move(options)), first_listen_(options_.listen) {}

  int Run();

 private:
  // What became of an epoch: the program's exit status, or none: there is to be another.
  using Outcome = std::optional<int>;

  void TakeSignals();
  // False: told to end meanwhile.
  bool AwaitEndingProcesses() const;
  // The ports that this node's first rank will listen on, for as long as this process lives: ranks may take
  // them late, since they wait for other nodes first, and have none while a new epoch begins.
  void HoldPorts();
  void HoldPort(const char* flag, std::string* listen);
  absl::StatusOr<std::unique_ptr<Epoch>> StartEpoch(int64_t number);
  Outcome Watch(Epoch& epoch);
  Outcome AfterLoss(Epoch& epoch, std::vector<RankEnd> losses);
  // The first rank has ended by itself.
  int Finish(Epoch& epoch, const RankEnd& first);

  // Waits for a signal, a child's end or what the first rank says.
  void Wait(const Epoch& epoch, std::chrono::milliseconds most) const;
  std::vector<int> ReadSignals() const;
  void HandleSignals(Epoch& epoch);
  void HandleEnd(Epoch& epoch, int number);
  // Kills ranks whose group has long since given them up. Returns whether there are others that stand still.
  bool KillStill(Epoch& epoch);
  void NoteServing(Epoch& epoch);
  bool IsEnding() const { return draining_ || signalled_.has_value(); }

  SupervisorOptions options_;
  const std::string first_listen_;  // as the command line has it
  std::vector<std::unique_ptr<rpc::Listener>> held_;
  sigset_t before_{};  // signals that ranks begin with blocked
  rpc::FileDescriptor signals_;
  std::optional<Clock::time_point> signalled_;      // to end
  bool draining_ = false;                           // whoever told the group to
  std::optional<Clock::time_point> serving_since_;  // this epoch
  int short_lives_ = 0;
  std::map<int32_t, Clock::duration> still_;  // how long ranks of this epoch stand still
  Clock::time_point looked_;
};

void LogStart(const Epoch& epoch) {
  nlohmann::json ranks = nlohmann::json::array();
  for (int32_t rank = epoch.first_rank(); rank < epoch.end_rank(); ++rank) {
    ranks.push_back({{"rank", rank}, {"pid", epoch.pid(rank)}, {"device", epoch.device(rank)}});
  }
  Log(LogLevel::kInfo, "started the ranks of a group",
      {{"epoch", epoch.number()}, {"ranks", telemetry::LogValue::Of(ranks)}});
}

void LogLoss(const Epoch& epoch, const RankEnd& end) {
  const bool exited = WIFEXITED(end.wait_status);
  Log(LogLevel::kError, IsSecondary(end) ? "a rank ended because it lost another one" : "a rank died",
      {{"epoch", epoch.number()},
       {"of_rank", end.rank},
       {"device", epoch.device(end.rank)},
       {exited ? "status" : "signal", exited ? WEXITSTATUS(end.wait_status) : WTERMSIG(end.wait_status)}});
}

void Supervisor::TakeSignals() {
  signal(SIGPIPE, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);  // who started this may have had it ignored: children would then be nobody's
  sigset_t taken;
  sigemptyset(&taken);
  for (const int number : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) sigaddset(&taken, number);
  pthread_sigmask(SIG_BLOCK, &taken, &before_);
  signals_ = rpc::FileDescriptor(signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  // What ranks are told may come before they are ready for it, or are another program yet.
  for (const int number : {SIGHUP, SIGRTMIN}) sigaddset(&before_, number);
  sigaddset(&taken, SIGRTMIN);
  pthread_sigmask(SIG_BLOCK, &taken, nullptr);
}

void Supervisor::HoldPorts() {
  if (options_.group.node == 0) {
    HoldPort("--listen", &options_.listen);
    HoldPort("--metrics_listen", &options_.metrics_listen);
  }
  if (options_.group.first_of_host) HoldPort("--health_listen", &options_.health_listen);
}

void Supervisor::HoldPort(const char* flag, std::string* listen) {
  const std::vector<std::string> addresses = absl::StrSplit(*listen, ',', absl::SkipEmpty());
  for (const std::string& address : addresses) {
    absl::StatusOr<std::unique_ptr<rpc::Listener>> held = rpc::Listener::Hold(address);
    if (!held.ok()) {
      // The rank that cannot have it either ends the group, and tells the other nodes.
      Log(LogLevel::kWarning, "a port cannot be held for the ranks",
          {{"flag", flag}, {"listen", address}, {"reason", std::string(held.status().message())}});
      continue;
    }
    const std::string with_port = WithPort(*listen, (*held)->port());
    // Which free port a second address gets is up to its rank.
    if (rpc::SplitHostPort(address).port == 0 && with_port == *listen) continue;
    *listen = with_port;
    held_.push_back(*std::move(held));
  }
}

absl::StatusOr<std::unique_ptr<Epoch>> Supervisor::StartEpoch(int64_t number) {
  EpochOptions epoch{
      .number = number, .group = options_.group, .arguments = options_.arguments, .signals = before_};
  AddFlags({absl::StrCat("--listen=", options_.listen), absl::StrCat("--group_listen=", first_listen_),
            absl::StrCat("--metrics_listen=", options_.metrics_listen),
            absl::StrCat("--health_listen=", options_.health_listen)},
           &epoch.arguments);
  return Epoch::Start(epoch);
}

bool Supervisor::AwaitEndingProcesses() const {
  constexpr int kLookMs = 20;
  const auto deadline = Clock::now() + absl::ToChronoNanoseconds(options_.group.start_timeout);
  std::vector<pid_t> ending = EndingProcesses();
  if (!ending.empty()) Log(LogLevel::kInfo, "waits for processes that are ending", {{"ending", ending}});
  for (; !ending.empty(); ending = EndingProcesses()) {
    if (Clock::now() >= deadline) {
      Log(LogLevel::kWarning, "starts beside processes that do not end", {{"ending", ending}});
      break;
    }
    pollfd signals{signals_.get(), POLLIN, 0};
    poll(&signals, 1, kLookMs);
    for (const int number : ReadSignals()) {
      if (number != SIGTERM && number != SIGINT) continue;
      Log(LogLevel::kInfo, "told to end", {{"signal", number}});
      return false;
    }
  }
  return true;
}

void LogDevices(const GroupOptions& group) {
  if (group.shared_out == 0) return;
  Log(LogLevel::kInfo, absl::StrCat("takes ", absl::StrJoin(group.devices, ","), " of ", group.shared_out,
                                    " devices that this process sees"));
}

int Supervisor::Run() {
  TakeSignals();
  if (!signals_.valid()) return EXIT_FAILURE;
  LogDevices(options_.group);
  if (!AwaitEndingProcesses()) return EXIT_SUCCESS;
  HoldPorts();
  for (int64_t number = 1;; ++number) {
    const absl::StatusOr<std::unique_ptr<Epoch>> epoch = StartEpoch(number);
    if (!epoch.ok()) {
      Log(LogLevel::kError, "cannot start", {{"reason", std::string(epoch.status().message())}});
      return EXIT_FAILURE;
    }
    LogStart(**epoch);
    serving_since_.reset();
    still_.clear();
    if (const Outcome outcome = Watch(**epoch); outcome.has_value()) return *outcome;
  }
}

Supervisor::Outcome Supervisor::Watch(Epoch& epoch) {
  constexpr std::chrono::milliseconds kLong(60'000);
  for (bool still = false;;) {
    Wait(epoch, still ? kLook : kLong);
    HandleSignals(epoch);
    NoteServing(epoch);
    const std::vector<RankEnd> ends = epoch.Reap();
    const auto first = std::find_if(ends.begin(), ends.end(),
                                    [&epoch](const RankEnd& end) { return EndsGroup(epoch, end); });
    if (first != ends.end()) return Finish(epoch, *first);
    std::vector<RankEnd> losses;
    std::copy_if(ends.begin(), ends.end(), std::back_inserter(losses), IsLoss);
    if (!losses.empty()) return AfterLoss(epoch, std::move(losses));
    still = KillStill(epoch);
  }
}

// Whoever is in its group counts it as lost after `rank_timeout`, but a rank that is alone on its node has
// nobody there to notice that the group is no longer whole.
bool Supervisor::KillStill(Epoch& epoch) {
  const Clock::time_point now = Clock::now();
  // This process may have stood still itself, and all the group with it: that is held against nobody.
  const Clock::duration passed = std::min<Clock::duration>(now - looked_, kLook);
  looked_ = now;
  bool still = false;
  for (int32_t rank = epoch.first_rank(); rank < epoch.end_rank(); ++rank) {
    if (!epoch.stopped(rank)) {
      still_.erase(rank);
      continue;
    }
    still = true;
    const auto [since, is_new] = still_.try_emplace(rank, 0);
    if (!is_new) since->second += passed;
    if (absl::FromChrono(since->second) < 2 * options_.group.rank_timeout) continue;
    Log(LogLevel::kError, "a rank stands still: killed",
        {{"epoch", epoch.number()}, {"of_rank", rank}, {"pid", epoch.pid(rank)}});
    epoch.Signal(rank, SIGKILL);
  }
  return still;
}

Supervisor::Outcome Supervisor::AfterLoss(Epoch& epoch, std::vector<RankEnd> losses) {
  const auto [killed, ended_before] = epoch.Kill();
  losses.insert(losses.end(), ended_before.begin(), ended_before.end());
  NoteServing(epoch);  // it may have said so just before
  for (const RankEnd& end : losses) LogLoss(epoch, end);
  if (!killed.empty()) {
    Log(LogLevel::kInfo, "killed the other ranks", {{"epoch", epoch.number()}, {"killed", killed}});
  }
  if (IsEnding()) {
    Log(LogLevel::kError, "the group was lost while it ended: what was not saved is lost");
    return EXIT_FAILURE;
  }
  if (!serving_since_.has_value()) {
    const auto first = std::find_if_not(losses.begin(), losses.end(), IsSecondary);
    // The leader may have served, and be lost before it has told other nodes. Whether it comes back they find
    // out as they join it.
    if (options_.group.node > 0 && first == losses.end()) return {};
    Log(LogLevel::kError, "the group ended before it served");
    return first == losses.end() ? EXIT_FAILURE : StatusOf(*first);
  }
  const bool short_life = absl::FromChrono(Clock::now() - *serving_since_) < options_.group.short_life;
  short_lives_ = short_life ? short_lives_ + 1 : 0;
  if (short_lives_ < kMostShortLives) return {};
  Log(LogLevel::kError, "gave up: one epoch after the other is lost soon after it serves",
      {{"epochs", short_lives_}});
  return EXIT_FAILURE;
}

int Supervisor::Finish(Epoch& epoch, const RankEnd& first) {
  NoteServing(epoch);
  const int status = WEXITSTATUS(first.wait_status);
  // The others may wait for a leader that never was.
  if (status != 0 || !serving_since_.has_value()) epoch.Kill();
  const Clock::time_point deadline = Clock::now() + kFarewell;
  while (epoch.Running() && Clock::now() < deadline) {
    Wait(epoch, std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()));
    ReadSignals();  // the group ends as it is
    epoch.ReadFirstRank();
    epoch.Reap();
  }
  if (const std::vector<int32_t> killed = epoch.Kill().ranks; !killed.empty()) {
    Log(LogLevel::kWarning, "killed ranks that did not end after the first", {{"killed", killed}});
  }
  // The leader's own node ends with its status; who starts this one again only on failure has to do so, too.
  if (options_.group.node > 0 && !serving_since_.has_value() && !IsEnding()) {
    Log(LogLevel::kError, "the group ended before it served: the log of node 0 says why");
    return EXIT_FAILURE;
  }
  return status;
}

void Supervisor::Wait(const Epoch& epoch, std::chrono::milliseconds most) const {
  std::array<pollfd, 2> polled = {pollfd{signals_.get(), POLLIN, 0}, pollfd{epoch.link(), POLLIN, 0}};
  poll(polled.data(), polled.size(), static_cast<int>(most.count()));
}

std::vector<int> Supervisor::ReadSignals() const {
  std::vector<int> numbers;
  signalfd_siginfo info{};
  while (read(signals_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    numbers.push_back(static_cast<int>(info.ssi_signo));
  }
  return numbers;
}

void Supervisor::HandleSignals(Epoch& epoch) {
  for (const int number : ReadSignals()) {
    if (number == SIGHUP) {
      for (int32_t rank = epoch.first_rank(); rank < epoch.end_rank(); ++rank) epoch.Signal(rank, SIGHUP);
    }
    if (number == SIGTERM || number == SIGINT) HandleEnd(epoch, number);
  }
}

void Supervisor::HandleEnd(Epoch& epoch, int number) {
  if (!signalled_.has_value()) {
    signalled_ = Clock::now();
    Log(LogLevel::kInfo, "told to end", {{"signal", number}});
    // Its name for it (main.cc, NodeFront): the signal itself may come to it from others, too.
    epoch.Signal(epoch.first_rank(), SIGRTMIN);
    return;
  }
  if (Clock::now() - *signalled_ < kSameSignal) return;
  Log(LogLevel::kWarning, "told to end at once", {{"signal", number}, {"killed", epoch.Kill().ranks}});
  telemetry::FlushLog();
  sigset_t unblocked;
  sigemptyset(&unblocked);
  sigaddset(&unblocked, number);
  signal(number, SIG_DFL);
  raise(number);
  pthread_sigmask(SIG_UNBLOCK, &unblocked, nullptr);
  _exit(kSignalled + number);  // the first process of a container does not die of a signal of its own
}

void Supervisor::NoteServing(Epoch& epoch) {
  const ChildLink::Said said = epoch.ReadFirstRank();
  draining_ = draining_ || said.draining;
  if (said.serving) serving_since_ = Clock::now();
}

}  // namespace

std::string WithPort(const std::string& listen, int port) {
  std::vector<std::string> addresses = absl::StrSplit(listen, ',');
  const auto first = std::find_if(addresses.begin(), addresses.end(), [](const std::string& address) {
    return !address.empty() && !rpc::IsUnixSocket(address);
  });
  if (first == addresses.end() || port == 0 || rpc::SplitHostPort(*first).port != 0) return listen;
  *first = absl::StrCat(first->substr(0, first->rfind(':')), ":", port);
  return absl::StrJoin(addresses, ",");
}

int Supervise(const SupervisorOptions& options) { return Supervisor(options).Run(); }

}  // namespace lossd
