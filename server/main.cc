// lossd: flags and wiring only.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/engine/memory/process_memory.h"
#include "server/rpc/calls/grpc_log.h"
#include "server/rpc/calls/methods.h"
#include "server/rpc/connections/server_setup.h"
#include "server/rpc/health_server.h"
#include "server/rpc/replicas/replica_set.h"
#include "server/rpc/server.h"
#include "server/rpc/transport/access.h"
#include "server/rpc/transport/file_descriptor.h"
#include "server/rpc/transport/listener.h"
#include "server/rpc/transport/tls.h"
#include "server/startup/access_watch.h"
#include "server/startup/exposure.h"
#include "server/startup/group/led_group.h"
#include "server/startup/group/parent_link.h"
#include "server/startup/group/parted_ranks.h"
#include "server/startup/group/rank_lanes.h"
#include "server/startup/group/run_rank.h"
#include "server/startup/group/stuck_ranks.h"
#include "server/startup/group/supervisor.h"
#include "server/startup/options.h"
#include "server/startup/out_of_memory.h"
#include "server/startup/port_file.h"
#include "server/startup/processors.h"
#include "server/startup/replicas/join_replicas.h"
#include "server/startup/restart.h"
#include "server/startup/start_heads.h"
#include "server/telemetry/common/log_writer.h"
#include "server/telemetry/common/logging.h"
#include "server/telemetry/common/service_counters.h"
#include "server/telemetry/metrics.h"
#include "server/version.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

// Freed memory that malloc may keep for the next requests, and the seconds between two looks at it.
constexpr int64_t kFreedMemoryKept = int64_t{512} << 20;
constexpr int64_t kSecondsToFreedMemory = 5;

constexpr int kExitFailure = 1;

// SIGHUP never ends the process. Before anything else, since it may come at any time: it waits until there
// are files to be read again. Also where whoever started the process (nohup) had it ignored.
void BlockHangUp() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGHUP, SIG_DFL);
}

// Opens /dev/null in place of standard files that were closed, if any. A file or a connection of the server
// would get such a number, and with it the lines of the log. A library may have taken it already, with
// FD_CLOEXEC, which no file that a process is started with has.
bool OpenStandardFiles() {
  bool opened = false;
  for (int file = STDIN_FILENO; file <= STDERR_FILENO; ++file) {
    if (fcntl(file, F_GETFD) == 0) continue;
    const int nothing = open("/dev/null", O_RDWR);
    if (dup2(nothing, file) == file) opened = true;
    if (nothing > STDERR_FILENO) close(nothing);
  }
  return opened;
}

// Executes the program again: libraries read some settings only while they are loaded. Returns if that fails.
void StartAnew(char** argv) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) execv(self.c_str(), argv);
}

// Signals are waited for by the main thread alone; every other thread inherits the block. The leader of a
// group goes on ignoring SIGTERM and SIGINT: its parent hears them, and says so by SIGRTMIN.
sigset_t BlockSignals(const GroupOptions& group) {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGHUP);
  if (!group.process.has_value()) {
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
  }
  sigaddset(&signals, SIGRTMIN);  // of Drain
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error like a full disk, not a death
  return signals;
}

// Logs the risks of listening on addresses that others can reach.
void WarnOfExposure(const Exposure& exposure) {
  for (const ExposureWarning& warning : WarningsOf(exposure)) {
    Log(LogLevel::kWarning, warning.event, {{"listen", warning.listen}, {"remedy", warning.remedy}});
  }
}

timespec TimeUntil(std::chrono::steady_clock::time_point when) {
  using std::chrono::nanoseconds;
  constexpr int64_t kSecond = 1'000'000'000;
  const int64_t left =
      std::chrono::duration_cast<nanoseconds>(when - std::chrono::steady_clock::now()).count();
  const int64_t wait = std::max<int64_t>(left, 0);
  return {.tv_sec = wait / kSecond, .tv_nsec = wait % kSecond};
}

// Says elsewhere than on the server's own port whether it is ready.
using TellReady = std::function<void(bool ready)>;

// Returns at a signal to stop, or when the device has failed.
void WaitForEnd(const sigset_t& signals, const std::atomic<bool>& device_failed, engine::Engine& engine,
                rpc::Server& server, const TellReady& tell_ready, AccessWatch& access_watch) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kTick(1);
  constexpr timespec kAtOnce{0, 0};
  sigset_t signals_to_end = signals;
  sigdelset(&signals_to_end, SIGHUP);
  engine::FreedMemory freed(kFreedMemoryKept);
  StuckRanks stuck_ranks([&](bool ready) {
    server.SetReady(ready);
    tell_ready(ready);
  });
  PartedRanks parted_ranks(
      [] { EndRank(kRankLost, "some ranks do not reach each other: all wait, and nothing comes"); });
  Clock::time_point next_tick = Clock::now() + kTick;
  int64_t ticks = 0;
  while (!device_failed) {
    const timespec wait = TimeUntil(next_tick);
    int signal_number = sigtimedwait(&signals, nullptr, &wait);
    if (signal_number == SIGHUP) {
      access_watch.Reload([&server] { server.EndRevokedStreams(); });
      signal_number = sigtimedwait(&signals_to_end, nullptr, &kAtOnce);  // many SIGHUPs would hide it
    }
    if (signal_number > 0) {
      Log(LogLevel::kInfo, "draining", {{"signal", signal_number}});
      return;
    }
    if (Clock::now() < next_tick) continue;
    next_tick = Clock::now() + kTick;
    engine.ExpireSessions();
    server.Tick();
    access_watch.Poll([&server] { server.EndRevokedStreams(); });
    const engine::GroupReport group = engine.device().Group();
    stuck_ranks.Look(group);
    parted_ranks.Look(group);
    if (++ticks % kSecondsToFreedMemory == 0) freed.Look();
  }
}

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot start", {{"reason", std::string(status.message())}});
  return kExitFailure;
}

// Whether a signal is pending that should end the process.
bool ToldToEnd() {
  sigset_t pending;
  sigemptyset(&pending);
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1 ||
         sigismember(&pending, SIGRTMIN) == 1;
}

int Stopped() {
  Log(LogLevel::kInfo, "stopped before it served");
  return 0;
}

// The limit of open files has to cover connections, regions and the files of the process itself.
void FitOpenFiles(engine::EngineOptions& options) {
  constexpr int64_t kEnough = 4096;
  const int64_t files = engine::RaiseFileLimit();
  options.regions.most = std::clamp<int64_t>(files / 8, 1, options.regions.most);
  if (files >= kEnough) return;
  Log(LogLevel::kWarning, "few open files are allowed: clients beyond them cannot connect",
      {{"allowed", files},
       {"remedy", "raise the hard limit of open files (ulimit -Hn, LimitNOFILE) to 65536"}});
}

void WarnOfLostWindows(const engine::Engine& engine) {
  std::vector<engine::HeadInfo> heads = engine.ParkedHeads();
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) heads.push_back(head->Info());
  for (const engine::HeadInfo& info : heads) {
    if (info.window_marks.empty()) continue;
    Log(LogLevel::kWarning, "a gradient window was not flushed and ends with the process",
        {{"head", info.config.name}, {"generation", info.generation}, {"tokens", info.window_tokens}});
  }
}

// What a server consists of, in the order in which it starts. Null if none is wanted.

absl::StatusOr<std::unique_ptr<rpc::HealthServer>> StartHealth(const std::string& listen) {
  if (listen.empty()) return nullptr;
  return rpc::HealthServer::Start(listen);
}

// Checkpoints are of all replicas, and one writes and reads them.
void LeaveCheckpointsToCoordinator(Options* options) {
  if (options->checkpoint_dir.empty()) return;
  Log(LogLevel::kInfo, "replica 0 keeps the checkpoints of all: its --checkpoint_dir counts",
      {{"replica", options->replicas.place.replica}});
  options->checkpoint_dir.clear();
  options->restore = false;
}

absl::StatusOr<Restart> OpenRestart(Options& options) {
  absl::StatusOr<Restart> restart =
      Restart::Open(options.checkpoint_dir, options.restore ? Restore::kYes : Restore::kNo);
  if (!restart.ok()) return restart;
  options.engine.checkpoints = restart->store();
  // Sessions of replicas are not those of the process before.
  if (!options.replicas.place.shared()) options.engine.incarnation = restart->incarnation();
  return restart;
}

// This process's own device, or that of the group that it leads, which outlives it.
absl::StatusOr<std::unique_ptr<engine::Device>> CreateDevice(const Options& options, const ParentLink* parent,
                                                             std::unique_ptr<LedGroup>* group) {
  absl::StatusOr<engine::ChosenDevice> chosen = engine::CreateDevice(options.device);
  if (!chosen.ok()) return chosen.status();
  if (!chosen->why_cpu.empty()) Log(LogLevel::kInfo, "using the CPU", {{"reason", chosen->why_cpu}});
  if (parent == nullptr) return std::move(chosen->device);
  absl::StatusOr<LedGroup::Led> led = LedGroup::Lead(options.group, std::move(chosen->device), ToldToEnd);
  if (!led.ok()) return led.status();
  *group = std::move(led->group);
  return std::move(led->device);
}

absl::StatusOr<std::unique_ptr<engine::Engine>> StartEngine(Options& options, const ParentLink* parent,
                                                            std::unique_ptr<LedGroup>* group,
                                                            std::unique_ptr<rpc::ReplicaSet>* replicas) {
  absl::StatusOr<std::unique_ptr<engine::Device>> device = CreateDevice(options, parent, group);
  if (!device.ok()) return device.status();
  if (options.replicas.place.shared()) {
    const bool leads = parent != nullptr;
    absl::StatusOr<std::unique_ptr<rpc::ReplicaSet>> joined = JoinReplicas(
        options.replicas,
        {.device_kind = engine::KindOf(leads ? options.group.devices.front() : (*device)->name()),
         .ranks = leads ? options.group.ranks() : 1,
         .agreed = options.group.agreed},
        &options.engine);
    if (!joined.ok()) return joined.status();
    *replicas = *std::move(joined);
    options.server.replicas = replicas->get();
    options.server.advertised_host = options.replicas.advertised_host;
  }
  if (options.engine.memory_limit_bytes == 0) {
    options.engine.memory_limit_bytes = (*device)->AvailableMemory();
    if ((*device)->IsHost()) options.engine.memory_bound = engine::MemoryBound();
  }
  return engine::Engine::Create(options.engine, *std::move(device));
}

absl::StatusOr<std::unique_ptr<rpc::Listener>> ListenForMetrics(const std::string& listen) {
  if (listen.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<rpc::Listener>> listener = rpc::Listener::Open(listen);
  if (listener.ok()) return listener;
  return absl::Status(listener.status().code(),
                      absl::StrCat("--metrics_listen: ", listener.status().message()));
}

absl::StatusOr<std::unique_ptr<telemetry::MetricsServer>> StartMetrics(
    const rpc::Listener* listener, const telemetry::HttpHosts& hosts, const engine::Engine& engine,
    const telemetry::ServiceCounters& counters) {
  if (listener == nullptr) return nullptr;
  std::vector<int> sockets;
  for (const rpc::FileDescriptor& socket : listener->sockets()) sockets.push_back(socket.get());
  return telemetry::MetricsServer::Start(std::move(sockets), hosts, &engine, &counters);
}

// Null if no token is asked for.
absl::StatusOr<std::shared_ptr<rpc::AccessControl>> StartAccess(const std::string& tokens,
                                                                telemetry::ServiceCounters* counters) {
  if (tokens.empty()) return nullptr;
  return rpc::AccessControl::Create(tokens, counters);
}

absl::Status StartServing(Restart& restart, rpc::Server& server) {
  // A server that is started later must not resume from the record that this one resumed from.
  if (absl::Status taken = restart.Take(); !taken.ok()) return taken;
  server.Serve();
  return absl::OkStatus();
}

void LogServing(const Options& options, const Ports& ports, const engine::Engine& engine,
                const rpc::Server& server) {
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"listen", options.server.listen},
       {"port", ports.grpc},
       {"metrics_port", ports.metrics},
       {"health_port", ports.health},
       {"device", engine.device().description()},
       {"memory_limit_bytes", options.engine.memory_limit_bytes},
       {"incarnation", engine.incarnation()}});
  if (engine.device().IsHost()) LogOddThreads();
  if (!options.engine.memory_bound.empty()) {
    Log(LogLevel::kInfo, "the memory limit comes from a control group",
        {{"bound", options.engine.memory_bound}});
  }
  if (engine.regions().enabled()) {
    Log(LogLevel::kInfo, "sharing memory with clients on this host",
        {{"socket", server.region_socket_path()}, {"region_bytes", options.engine.regions.total_bytes}});
  }
}

enum class Device { kWorks, kFailed };

// Drains and saves; the exit status. `replicas` may be null.
int End(const Options& options, Device device, engine::Engine& engine, rpc::Server& server,
        rpc::ReplicaSet* replicas) {
  const absl::Time deadline = absl::Now() + options.drain_timeout;
  const bool saves = options.engine.checkpoints != nullptr && device == Device::kWorks;
  // Replica 0 saves all of them, if it is told to end as well.
  const bool stays = replicas != nullptr && !replicas->place().coordinates() && device == Device::kWorks;
  if (!saves && !stays) WarnOfLostWindows(engine);
  if (saves && replicas != nullptr) replicas->TellDraining();
  // Half of the time is for the disk.
  const absl::Duration patience = saves || stays ? options.drain_timeout / 2 : options.drain_timeout;
  server.Drain(device == Device::kFailed ? absl::ZeroDuration() : patience);
  if (stays && !replicas->StayForDrain(deadline)) WarnOfLostWindows(engine);
  // If one is missing, the save says so.
  if (saves && replicas != nullptr) {
    replicas->AwaitOthersDrained(deadline - options.drain_timeout / 4).IgnoreError();
  }
  const bool saved = !saves || SaveForRestart(engine);
  Log(saved ? LogLevel::kInfo : LogLevel::kError, saved ? "stopped" : "stopped after a drain that failed",
      {{"chunks", engine.counters().chunks_accumulated.load()}});
  return device == Device::kFailed || !saved ? kExitFailure : 0;
}

// `parent` is null but in the process of a group's leader.
int Serve(Options options, ParentLink* parent) {
  FitOpenFiles(options.engine);
  sigset_t signals = BlockSignals(options.group);
  std::atomic<bool> device_failed = false;
  options.engine.on_device_failure = [&device_failed, parent](const absl::Status& status) {
    Log(LogLevel::kError, "the device failed", {{"reason", std::string(status.message())}});
    if (parent != nullptr) {
      EndRank(absl::IsUnavailable(status) ? kRankLost : kDeviceFailed, "the device failed");
    }
    device_failed = true;
  };
  options.engine.on_step_save = LogStepSaves();
  options.server.on_drain = [] { kill(getpid(), SIGRTMIN); };
  telemetry::ServiceCounters counters(rpc::MethodNames());
  options.server.counters = &counters;

  if (absl::Status can = CheckPortFile(options.port_file); !can.ok()) return Fail(can);
  const auto health = StartHealth(options.health_listen);
  if (!health.ok()) return Fail(health.status());
  if (!options.replicas.place.coordinates()) LeaveCheckpointsToCoordinator(&options);
  absl::StatusOr<Restart> restart = OpenRestart(options);
  if (!restart.ok()) return Fail(restart.status());
  std::unique_ptr<LedGroup> group;
  std::unique_ptr<rpc::ReplicaSet> replicas;
  const auto engine = StartEngine(options, parent, &group, &replicas);
  if (absl::IsCancelled(engine.status()) && ToldToEnd()) return Stopped();
  if (!engine.ok()) return Fail(engine.status());
  const absl::Cleanup leave = [&replicas] { replicas.reset(); };  // while the engine lives
  // Before the heads, whose weights may take long: until then nobody could tell the server from one that is
  // down.
  const auto listener = ListenForMetrics(options.metrics_listen);
  if (!listener.ok()) return Fail(listener.status());
  const auto metrics = StartMetrics(listener->get(), options.metrics_hosts, **engine, counters);
  if (!metrics.ok()) return Fail(metrics.status());
  const auto access = StartAccess(options.tokens, &counters);
  if (!access.ok()) return Fail(access.status());
  options.server.access = *access;
  AccessWatch access_watch(options.server.tls, *access, &counters);
  if (group != nullptr) group->TellLanes(&options.server);
  if (replicas != nullptr) replicas->Meet(engine->get());
  absl::Status restored;
  do {
    const auto may_not_meet = [&device_failed] { return device_failed || ToldToEnd(); };
    if (replicas != nullptr && !replicas->AwaitMeeting(may_not_meet)) {
      return device_failed ? kExitFailure : Stopped();
    }
    restored = restart->RestoreHeads(**engine);
    // A replica was lost meanwhile: what it has not restored then comes when all are there again.
  } while (replicas != nullptr && absl::IsUnavailable(restored));
  if (!restored.ok()) return Fail(restored);
  if (!options.replicas.place.coordinates()) options.heads.clear();  // which the coordinator creates at all
  const absl::Status heads = StartHeads(options.heads, options.server.weights_dir, ToldToEnd, engine->get());
  if (absl::IsCancelled(heads) && ToldToEnd()) return Stopped();
  if (!heads.ok()) return Fail(heads);
  const auto server = rpc::Server::Open(options.server, engine->get());
  if (!server.ok()) return Fail(server.status());
  const Ports ports{.grpc = (*server)->port(),
                    .metrics = *listener == nullptr ? 0 : (*listener)->port(),
                    .health = *health == nullptr ? 0 : (*health)->port()};
  // Every step that may fail comes before the drain is taken: a start that fails leaves it to the next one.
  absl::StatusOr<PortFile> port_file = PortFile::Write(options.port_file, ports);
  if (!port_file.ok()) return Fail(port_file.status());
  if (absl::Status serving = StartServing(*restart, **server); !serving.ok()) return Fail(serving);
  if (parent != nullptr) parent->TellServing();
  const TellReady tell_ready = [&health, &group](bool ready) {
    if (*health != nullptr) {
      (*health)->Set(ready ? rpc::HealthServer::Ready::kYes : rpc::HealthServer::Ready::kNo);
    }
    if (group != nullptr) group->SetServing(ready);
  };
  tell_ready(true);
  LogServing(options, ports, **engine, **server);
  access_watch.LogStart();
  WarnOfExposure(options.exposure);
  // Last, so that whoever waits for the file finds the whole start in the log.
  telemetry::FlushLog();
  const absl::Status published = port_file->Publish();
  if (published.ok()) WaitForEnd(signals, device_failed, **engine, **server, tell_ready, access_watch);
  if (parent != nullptr) parent->TellDraining();
  if (group != nullptr) group->TellDraining();
  tell_ready(false);
  sigdelset(&signals, SIGRTMIN);
  sigdelset(&signals, SIGHUP);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second signal ends the process at once
  const int status =
      End(options, device_failed ? Device::kFailed : Device::kWorks, **engine, **server, replicas.get());
  return published.ok() ? status : Fail(published);  // by then, clients may have been served: it has saved
}

SupervisorOptions SupervisorOptionsOf(const Options& options, int argc, char** argv) {
  return {.arguments = std::vector<std::string>(argv, argv + argc),
          .group = options.group,
          .listen = options.server.listen,
          .metrics_listen = options.metrics_listen,
          .health_listen = options.health_listen};
}

// Whether somebody has sent SIGHUP since the last call. It is blocked in every thread.
bool TakeHangUp() {
  constexpr timespec kAtOnce{0, 0};
  sigset_t hang_up;
  sigemptyset(&hang_up);
  sigaddset(&hang_up, SIGHUP);
  return sigtimedwait(&hang_up, nullptr, &kAtOnce) == SIGHUP;
}

// That of a rank that is not the leader.
int FollowLeader(const Options& options, ParentLink* parent) {
  telemetry::ServiceCounters counters(rpc::MethodNames());
  const auto access = StartAccess(options.tokens, &counters);
  if (!access.ok()) return Fail(access.status());
  AccessWatch access_watch(options.server.tls, *access, &counters);
  RankLaneOptions lanes{.place = options.lanes,
                        .server = {.tls = options.server.tls,
                                   .access = *access,
                                   .connections = options.server.connections,
                                   .chunk_limits = options.engine.chunk_limits,
                                   .staging_bytes = options.engine.staging_bytes,
                                   .lane_credit_bytes = options.engine.lane_credit_bytes,
                                   .max_streams = options.engine.max_streams,
                                   .leader_place = options.leader_place,
                                   .counters = &counters}};
  lanes.each_second = [&access_watch](rpc::LaneServer& server) {
    server.Tick();
    const auto end_revoked = [&server] { server.EndRevokedStreams(); };
    if (TakeHangUp()) {
      access_watch.Reload(end_revoked);
    } else {
      access_watch.Poll(end_revoked);
    }
  };
  return RunRank(options.group, options.device, options.engine.memory_limit_bytes, lanes,
                 {.health_listen = options.health_listen, .port_file = options.port_file}, parent);
}

// The process of a rank, leader or not.
int BeRank(Options options) {
  absl::StatusOr<ParentLink> parent = ParentLink::Take(options.group.process->parent);
  if (!parent.ok()) {
    telemetry::WriteLastLine(STDERR_FILENO, absl::StrCat("lossd: ", parent.status().message(), "\n"));
    return kUsageError;
  }
  prctl(PR_SET_NAME, "lossd");  // it was started by another name of the program
  options.group.credentials.token = parent->token();
  if (options.group.process->rank == 0) return Serve(std::move(options), &*parent);
  return FollowLeader(options, &*parent);
}

int Run(Options options, int argc, char** argv) {
  const std::optional<RankProcess>& process = options.group.process;
  telemetry::InitLogging(options.log_format, options.log_level,
                         process.has_value() ? std::optional<int>(process->rank) : std::nullopt);
  if (!process.has_value() && options.group.ranks() > 1) {
    return Supervise(SupervisorOptionsOf(options, argc, argv));
  }
  rpc::LogWhatGrpcSays();
  return process.has_value() ? BeRank(std::move(options)) : Serve(std::move(options), nullptr);
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) {
  lossd::BlockHangUp();
  lossd::ExitWhenOutOfMemory();
  const bool opened = lossd::OpenStandardFiles();
  if (lossd::SetUpOpenMp() || opened) lossd::StartAnew(argv);
  lossd::engine::RaiseMallocThresholds();
  lossd::rpc::KeepOpenSslToTheEnd();
  lossd::rpc::BoundReadBuffers();
  absl::StatusOr<lossd::Options> options = lossd::ReadOptions(argc, argv);
  if (!options.ok()) {
    lossd::telemetry::WriteLastLine(STDERR_FILENO, absl::StrCat("lossd: ", options.status().message(), "\n"));
    return absl::IsUnavailable(options.status()) ? lossd::kExitFailure : lossd::kUsageError;
  }
  return lossd::Run(*std::move(options), argc, argv);
}
