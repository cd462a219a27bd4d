// lossd: flags and wiring only.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/access_watch.h"
#include "server/engine/engine.h"
#include "server/engine/process_memory.h"
#include "server/exposure.h"
#include "server/options.h"
#include "server/restart.h"
#include "server/rpc/access.h"
#include "server/rpc/grpc_log.h"
#include "server/rpc/health_server.h"
#include "server/rpc/methods.h"
#include "server/rpc/server.h"
#include "server/start_heads.h"
#include "server/telemetry/logging.h"
#include "server/telemetry/metrics.h"
#include "server/telemetry/service_counters.h"
#include "server/version.h"

namespace lossd {
namespace {

using telemetry::Log;
using telemetry::LogLevel;

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// Signals are waited for by the main thread alone; every other thread inherits the block.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGRTMIN);  // of Drain
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file-size limit is an error like a full disk, not a death
  return signals;
}

// 0: there is none.
struct Ports {
  int grpc = 0;
  int metrics = 0;
  int health = 0;
};

// Whole or not at all: a reader never sees half a file. A device or a pipe of that name is left alone: the
// rename would put a file in its place.
bool WritePortFile(const std::string& path, const Ports& ports) {
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) return false;
  const std::string temporary = absl::StrCat(path, ".tmp", getpid());
  std::ofstream file(temporary);
  file << nlohmann::json{{"grpc", ports.grpc}, {"metrics", ports.metrics}, {"health", ports.health}} << "\n";
  file.close();
  if (file && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  unlink(temporary.c_str());
  return false;
}

absl::Status PortFileError(const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("cannot write --port_file ", path, "; it must be a regular file in a writable folder"));
}

// Before anything is done that a start which fails must not do.
bool CanWritePortFile(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  return access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) == 0;
}

// OpenMP's threads spin between products by default, and take the processors from the clients beside the
// server. The run time reads the variable while it is loaded, so the program starts itself once more with it.
// If that cannot be done, it goes on as it is.
void WaitPassively(char** argv) {
  if (getenv("OMP_WAIT_POLICY") != nullptr) return;
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error || setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  execv(self.c_str(), argv);
}

// What somebody should know who listens on an address that others can reach.
void WarnOfExposure(const Exposure& exposure) {
  for (const ExposureWarning& warning : WarningsOf(exposure)) {
    Log(LogLevel::kWarning, warning.event, {{"listen", warning.listen}, {"remedy", warning.remedy}});
  }
}

// Until a signal to stop, or until the device failed.
void WaitForEnd(const sigset_t& signals, const std::atomic<bool>& device_failed, engine::Engine& engine,
                rpc::Server& server, AccessWatch& access_watch) {
  const timespec tick{1, 0};
  while (!device_failed) {
    const int signal_number = sigtimedwait(&signals, nullptr, &tick);
    if (signal_number > 0) {
      Log(LogLevel::kInfo, "draining", {{"signal", signal_number}});
      return;
    }
    engine.ExpireSessions();
    server.Tick();
    access_watch.Poll(server);
  }
}

int Fail(const absl::Status& status) {
  Log(LogLevel::kError, "cannot start", {{"reason", std::string(status.message())}});
  return kExitFailure;
}

// Whether a signal waits that is to be answered by an end.
bool ToldToEnd() {
  sigset_t pending;
  sigemptyset(&pending);
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

int Stopped() {
  Log(LogLevel::kInfo, "stopped before it served");
  return 0;
}

// Connections, regions and what the process needs itself have to find room in what it may open.
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
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    const engine::HeadInfo info = head->Info();
    if (info.window_marks.empty()) continue;
    Log(LogLevel::kWarning, "a gradient window was not flushed and ends with the process",
        {{"head", info.config.name}, {"generation", info.generation}, {"tokens", info.window_tokens}});
  }
}

// Null if none is wanted.
absl::StatusOr<std::unique_ptr<rpc::HealthServer>> StartHealth(const std::string& listen) {
  if (listen.empty()) return nullptr;
  return rpc::HealthServer::Start(listen);
}

int Serve(Options options) {
  FitOpenFiles(options.engine);
  sigset_t signals = BlockSignals();
  std::atomic<bool> device_failed = false;
  options.engine.on_device_failure = [&device_failed](const absl::Status& status) {
    Log(LogLevel::kError, "the device failed", {{"reason", std::string(status.message())}});
    device_failed = true;
  };
  absl::StatusOr<engine::ChosenDevice> chosen = engine::CreateDevice(options.device);
  if (!chosen.ok()) return Fail(chosen.status());
  if (!chosen->why_cpu.empty()) Log(LogLevel::kInfo, "using the CPU", {{"reason", chosen->why_cpu}});
  if (options.engine.memory_limit_bytes == 0) {
    options.engine.memory_limit_bytes = chosen->device->AvailableMemory();
  }
  absl::StatusOr<std::unique_ptr<rpc::HealthServer>> health_started = StartHealth(options.health_listen);
  if (!health_started.ok()) return Fail(health_started.status());
  const std::unique_ptr<rpc::HealthServer> health = *std::move(health_started);
  absl::StatusOr<Restart> restart =
      Restart::Open(options.checkpoint_dir, options.restore ? Restore::kYes : Restore::kNo);
  if (!restart.ok()) return Fail(restart.status());
  options.engine.checkpoints = restart->store();
  options.engine.incarnation = restart->incarnation();
  const absl::StatusOr<std::unique_ptr<engine::Engine>> engine =
      engine::Engine::Create(options.engine, std::move(chosen->device));
  if (!engine.ok()) return Fail(engine.status());
  if (absl::Status restored = restart->RestoreHeads(**engine); !restored.ok()) return Fail(restored);
  const absl::Status heads = StartHeads(options.heads, options.server.weights_dir, ToldToEnd, engine->get());
  if (absl::IsCancelled(heads) && ToldToEnd()) return Stopped();
  if (!heads.ok()) return Fail(heads);
  telemetry::ServiceCounters counters(rpc::MethodNames());
  options.server.counters = &counters;
  if (!options.tokens.empty()) {
    auto access = rpc::AccessControl::Create(options.tokens, &counters);
    if (!access.ok()) return Fail(access.status());
    options.server.access = *std::move(access);
  }
  AccessWatch access_watch(options.server, &counters);
  std::unique_ptr<telemetry::MetricsServer> metrics;
  if (!options.metrics_listen.empty()) {
    absl::StatusOr<std::unique_ptr<telemetry::MetricsServer>> started =
        telemetry::MetricsServer::Start(options.metrics_listen, engine->get(), &counters);
    if (!started.ok()) return Fail(started.status());
    metrics = *std::move(started);
  }
  options.server.on_drain = [] { kill(getpid(), SIGRTMIN); };
  if (!options.port_file.empty() && !CanWritePortFile(options.port_file)) {
    return Fail(PortFileError(options.port_file));
  }
  // Whoever starts after this one must not go on from where this one went on.
  if (absl::Status taken = restart->Take(); !taken.ok()) return Fail(taken);
  const absl::StatusOr<std::unique_ptr<rpc::Server>> server =
      rpc::Server::Start(options.server, engine->get());
  if (!server.ok()) {
    restart->GiveBack();
    return Fail(server.status());
  }
  const Ports ports{.grpc = (*server)->port(),
                    .metrics = metrics == nullptr ? 0 : metrics->port(),
                    .health = health == nullptr ? 0 : health->port()};
  if (health != nullptr) health->Set(rpc::HealthServer::Ready::kYes);
  if (!options.port_file.empty() && !WritePortFile(options.port_file, ports)) {
    return Fail(PortFileError(options.port_file));
  }
  Log(LogLevel::kInfo, "serving",
      {{"version", kVersion},
       {"listen", options.server.listen},
       {"port", ports.grpc},
       {"metrics_port", ports.metrics},
       {"health_port", ports.health},
       {"device", (*engine)->device().description()},
       {"memory_limit_bytes", options.engine.memory_limit_bytes},
       {"incarnation", (*engine)->incarnation()}});
  if ((*engine)->regions().enabled()) {
    Log(LogLevel::kInfo, "sharing memory with clients on this host",
        {{"socket", (*server)->region_socket_path()}, {"region_bytes", options.engine.regions.total_bytes}});
  }
  access_watch.LogStart();
  WarnOfExposure(options.exposure);

  WaitForEnd(signals, device_failed, **engine, **server, access_watch);
  if (health != nullptr) health->Set(rpc::HealthServer::Ready::kNo);
  sigdelset(&signals, SIGRTMIN);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);  // a second signal ends the process at once
  const bool saves = options.engine.checkpoints != nullptr && !device_failed;
  if (!saves) WarnOfLostWindows(**engine);
  // Half of the time is for the disk.
  const absl::Duration patience = saves ? options.drain_timeout / 2 : options.drain_timeout;
  (*server)->Drain(device_failed ? absl::ZeroDuration() : patience);
  const bool saved = !saves || SaveForRestart(**engine);
  Log(LogLevel::kInfo, "stopped", {{"chunks", (*engine)->counters().chunks_accumulated.load()}});
  return device_failed || !saved ? kExitFailure : 0;
}

}  // namespace
}  // namespace lossd

int main(int argc, char** argv) {
  lossd::WaitPassively(argv);
  lossd::engine::RaiseMallocThresholds();
  absl::StatusOr<lossd::Options> options = lossd::ReadOptions(argc, argv);
  if (!options.ok()) {
    std::cerr << "lossd: " << options.status().message() << "\n";
    return lossd::kExitUsage;
  }
  lossd::telemetry::InitLogging(options->log_format, options->log_level);
  lossd::rpc::LogWhatGrpcSays();
  return lossd::Serve(*std::move(options));
}
