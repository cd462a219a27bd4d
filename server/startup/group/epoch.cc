#include "server/startup/group/epoch.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/engine/common/random_id.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/socket_folder.h"
#include "server/startup/group/ending_processes.h"

namespace lossd {
namespace {

constexpr char kSocketName[] = "control.sock";
constexpr int kNotStarted = 127;  // as a shell says it

absl::Status CannotStart(const std::string& what, int error) {
  return absl::UnavailableError(
      absl::StrCat("the group cannot be started: ", what, ": ", std::generic_category().message(error)));
}

// In the new process, where only what is safe in a signal handler may be called.
[[noreturn]] void BecomeRank(pid_t parent, int link, const sigset_t& signals, char* const* arguments) {
  setpgid(0, 0);
  // Nothing survives the parent. It may have died before this was said.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(kNotStarted);
  signal(SIGTERM, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  sigprocmask(SIG_SETMASK, &signals, nullptr);
  if (fcntl(link, F_SETFD, 0) == 0) execv("/proc/self/exe", arguments);
  _exit(kNotStarted);
}

}  // namespace

void AddFlags(const std::vector<std::string>& flags, std::vector<std::string>* arguments) {
  arguments->insert(std::find(arguments->begin(), arguments->end(), "--"), flags.begin(), flags.end());
}

absl::StatusOr<std::unique_ptr<Epoch>> Epoch::Start(const EpochOptions& options) {
  const GroupOptions& group = options.group;
  std::unique_ptr<Epoch> epoch(new Epoch(options.number, group.first_rank()));
  std::string token = group.credentials.token;
  if (!group.SpansNodes()) {
    if (absl::Status made = epoch->MakeFolder(); !made.ok()) return made;
    token = engine::RandomId();
  }
  for (size_t local = 0; local < group.devices.size(); ++local) {
    if (absl::Status started = epoch->StartRank(options, token, local); !started.ok()) return started;
  }
  return epoch;
}

Epoch::~Epoch() {
  Kill();
  RemoveFolder();
}

absl::Status Epoch::MakeFolder() {
  absl::StatusOr<std::string> made = rpc::MakeSocketFolder("lossd-group", kSocketName);
  if (!made.ok()) return made.status();
  folder_ = *std::move(made);
  socket_ = absl::StrCat(folder_, "/", kSocketName);
  return absl::OkStatus();
}

void Epoch::RemoveFolder() {
  if (folder_.empty()) return;
  unlink(socket_.c_str());
  rmdir(folder_.c_str());
  folder_.clear();
}

absl::Status Epoch::StartRank(const EpochOptions& options, const std::string& token, size_t local) {
  rpc::FileDescriptor inherited;
  absl::StatusOr<ChildLink> link = ChildLink::Open(&inherited);
  if (!link.ok()) return link.status();
  const GroupOptions& group = options.group;
  const int32_t rank = first_rank_ + static_cast<int32_t>(local);
  std::vector<std::string> own = {absl::StrCat("--devices=", absl::StrJoin(group.devices, ",")),
                                  absl::StrCat("--group_rank=", rank),
                                  absl::StrCat("--group_ranks=", group.ranks()),
                                  absl::StrCat("--group_epoch=", options.number),
                                  absl::StrCat("--group_socket=", socket_),
                                  absl::StrCat("--group_parent=", inherited.get())};
  // What a launcher's variables say of the parent, they do not say of its ranks.
  if (!group.leader.empty()) {
    for (const std::string& flag :
         {std::string("--group=flags"), absl::StrCat("--group_nodes=", group.nodes),
          absl::StrCat("--group_node=", group.node), absl::StrCat("--group_leader=", group.leader),
          absl::StrCat("--group_host_ranks=", group.host_ranks),
          absl::StrCat("--group_host_rank=", group.host_rank),
          absl::StrCat("--group_first_of_host=", group.first_of_host ? "true" : "false")}) {
      own.push_back(flag);
    }
  }
  std::vector<std::string> arguments = options.arguments;
  AddFlags(own, &arguments);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) return CannotStart(absl::StrCat("no process for rank ", rank), errno);
  if (child == 0) BecomeRank(parent, inherited.get(), options.signals, pointers.data());
  link->TellToken(token);
  ranks_.push_back({.device = group.devices[local], .pid = child, .link = *std::move(link)});
  return absl::OkStatus();
}

bool Epoch::Running() const {
  for (const Rank& rank : ranks_) {
    if (rank.pid != 0) return true;
  }
  return false;
}

ChildLink::Said Epoch::ReadFirstRank() {
  ChildLink& link = ranks_.front().link;
  ChildLink::Said said;
  if (!link.closed()) said = link.Read();
  if (said.serving) RemoveFolder();
  return said;
}

void Epoch::Signal(int32_t rank, int number) const {
  if (pid(rank) != 0) kill(pid(rank), number);
}

std::vector<RankEnd> Epoch::Reap() {
  std::vector<RankEnd> ends;
  for (int32_t rank = first_rank(); rank < end_rank(); ++rank) {
    Rank& each = at(rank);
    const std::optional<int> status = Look(each);
    if (!status.has_value()) continue;
    each.pid = 0;
    ends.push_back({.rank = rank, .wait_status = *status});
  }
  return ends;
}

std::optional<int> Epoch::Look(Rank& rank) {
  int status = 0;
  while (rank.pid != 0 && waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == rank.pid) {
    rank.stopped = WIFSTOPPED(status);
    if (!rank.stopped && !WIFCONTINUED(status)) return status;
  }
  return std::nullopt;
}

Epoch::Killed Epoch::Kill() {
  Killed killed;
  for (int32_t rank = first_rank(); rank < end_rank(); ++rank) {
    if (pid(rank) == 0) continue;
    // Others notice that its sockets are closed before its end can be waited for.
    if (HasBegunToEnd(pid(rank))) {
      killed.ended_before.push_back({.rank = rank, .wait_status = 0});
    } else {
      killed.ranks.push_back(rank);
    }
    Signal(rank, SIGKILL);
  }
  for (const int32_t rank : killed.ranks) Await(rank);
  for (RankEnd& end : killed.ended_before) end.wait_status = Await(end.rank);
  return killed;
}

int Epoch::Await(int32_t rank) {
  Rank& each = at(rank);
  int status = 0;
  while (waitpid(each.pid, &status, 0) < 0 && errno == EINTR) {
  }
  each.pid = 0;
  return status;
}

}  // namespace lossd
