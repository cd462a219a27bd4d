#include "client/tools/perf/server_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/tools/perf/child_process.h"
#include "nlohmann/json.hpp"

namespace lossd::perf {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(10);
constexpr auto kStartLimit = std::chrono::seconds(60);
constexpr auto kStopLimit = std::chrono::seconds(40);  // more than lossd takes to drain
constexpr size_t kLogTail = 1000;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

// 0 where there is none.
constexpr size_t kMostReplicas = 8;
std::array<std::atomic<pid_t>, 2 * kMostReplicas> own_servers{};

void Exchange(pid_t from, pid_t to) {
  for (std::atomic<pid_t>& server : own_servers) {
    pid_t expected = from;
    if (server.compare_exchange_strong(expected, to)) return;
  }
}

std::string PortFile(const std::string& folder, size_t server) {
  return absl::StrCat(folder, "/ports.", server, ".json");
}

// One that nobody listens at now.
absl::StatusOr<int> FreePort() {
  const int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool found = listening >= 0 && bind(listening, generic, length) == 0 &&
                     getsockname(listening, generic, &length) == 0;
  if (listening >= 0) close(listening);
  if (!found) return absl::UnavailableError("there is no free port on loopback");
  return ntohs(address.sin_port);
}

double TicksOf(pid_t pid) {
  const std::string text = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  // The name, the second field, is in brackets and may hold blanks.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 > text.size()) return -1;
  const std::vector<std::string> fields = absl::StrSplit(text.substr(name_end + 2), ' ');
  constexpr size_t kUser = 11;  // utime and stime, fields 14 and 15 of proc(5)
  if (fields.size() < kUser + 2) return -1;
  double ticks =
      std::strtod(fields[kUser].c_str(), nullptr) + std::strtod(fields[kUser + 1].c_str(), nullptr);
  // The ranks of a server over several devices.
  std::istringstream children(ReadFile(absl::StrCat("/proc/", pid, "/task/", pid, "/children")));
  for (pid_t child = 0; children >> child;) ticks += std::max(0.0, TicksOf(child));
  return ticks;
}

}  // namespace

std::string BesideThisProgram(const std::string& name) {
  std::error_code error;
  std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  return self.replace_filename(name).string();
}

void KillOwnServer() {
  for (const std::atomic<pid_t>& server : own_servers) {
    if (server > 0) kill(server, SIGKILL);
  }
}

double CpuSecondsOf(const std::vector<pid_t>& pids) {
  double ticks = 0;
  for (const pid_t pid : pids) ticks += std::max(0.0, TicksOf(pid));
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double OwnCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(const Settings& settings) {
  std::error_code error;
  std::string folder = (std::filesystem::temp_directory_path(error) / "lossd-perf-XXXXXX").string();
  const bool fits = settings.transport != Transport::kUnix ||
                    folder.size() + sizeof("/socket") <= sizeof(sockaddr_un::sun_path);
  if (error || !fits || mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot make a folder for a socket like ", folder,
                     ": set TMPDIR to a folder with a short path that this process can write to"));
  }
  std::unique_ptr<ServerProcess> server(new ServerProcess(folder));
  if (absl::Status status = server->Spawn(settings); !status.ok()) return status;
  if (absl::Status status = server->AwaitPorts(); !status.ok()) return status;
  return server;
}

// For 127.0.0.1, and its own authority.
absl::Status ServerProcess::MakeCertificate() {
  const std::string certificate = folder_ + "/server.pem";
  if (!Succeeds({"openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                 "-days", "2", "-subj", "/CN=lossd-perf", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout",
                 folder_ + "/server.key", "-out", certificate},
                ChildOutput::kDiscard)) {
    return absl::UnavailableError(
        "--transport=tls needs the openssl program to make a certificate, and it cannot be run: install the "
        "package "
        "openssl, or name a running server with --target and --tls_ca");
  }
  tls_ = TlsOptions{.ca_certificates = certificate};
  return absl::OkStatus();
}

std::vector<std::string> ServerProcess::CommandOf(const Settings& settings) const {
  std::vector<std::string> command = {BesideThisProgram("lossd"), "--metrics_listen=127.0.0.1:0"};
  if (settings.transport == Transport::kShm || settings.transport == Transport::kCudaIpc) {
    command.emplace_back("--same_host_regions");
  }
  if (settings.transport == Transport::kTls) {
    command.push_back(absl::StrCat("--tls_certificate=", folder_, "/server.pem"));
    command.push_back(absl::StrCat("--tls_key=", folder_, "/server.key"));
  }
  command.insert(command.end(), settings.server_flags.begin(), settings.server_flags.end());
  return command;
}

absl::StatusOr<std::vector<std::vector<std::string>>> ServerProcess::ReplicaFlags(
    const Settings& settings) const {
  const absl::StatusOr<int> port = FreePort();
  if (!port.ok()) return port.status();
  const std::string token = folder_ + "/token";
  const mode_t before = umask(0077);
  std::ofstream(token) << std::hex << std::random_device()() << std::random_device()()
                       << std::random_device()() << std::random_device()() << "\n";
  umask(before);
  std::vector<std::vector<std::string>> flags;
  for (const std::string& devices : DevicesOfReplicas(settings)) {
    flags.push_back({"--listen=127.0.0.1:0", "--replica_set=lossd-perf", absl::StrCat("--devices=", devices),
                     absl::StrCat("--replicas=", settings.replicas), absl::StrCat("--replica=", flags.size()),
                     absl::StrCat("--replica_leader=127.0.0.1:", *port),
                     absl::StrCat("--group_token_file=", token),
                     absl::StrCat("--port_file=", PortFile(folder_, flags.size()))});
  }
  return flags;
}

absl::Status ServerProcess::Spawn(const Settings& settings) {
  if (settings.transport == Transport::kTls) {
    if (absl::Status status = MakeCertificate(); !status.ok()) return status;
  }
  std::vector<std::vector<std::string>> servers;
  if (settings.replicas > 1) {
    absl::StatusOr<std::vector<std::vector<std::string>>> flags = ReplicaFlags(settings);
    if (!flags.ok()) return flags.status();
    servers = *std::move(flags);
  } else {
    std::string listen = "127.0.0.1:0";
    if (settings.transport == Transport::kUnix) listen = target_ = absl::StrCat("unix:", folder_, "/socket");
    servers.push_back({absl::StrCat("--listen=", listen), absl::StrCat("--port_file=", PortFile(folder_, 0)),
                       settings.devices.empty() ? absl::StrCat("--device=", settings.device)
                                                : absl::StrCat("--devices=", settings.devices)});
  }
  for (const std::vector<std::string>& flags : servers) {
    std::vector<std::string> command = CommandOf(settings);
    command.insert(command.begin() + 1, flags.begin(), flags.end());
    if (absl::Status status = SpawnOne(std::move(command)); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status ServerProcess::SpawnOne(std::vector<std::string> command) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);

  const std::string log = folder_ + "/log";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  // A group of its own: Ctrl-C ends the measurement, which then stops the server.
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  pid_t pid = -1;
  const int failure = posix_spawn(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failure == 0) {
    Exchange(0, pid);
    pids_.push_back(pid);
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat("cannot start ", command.front(), ": ",
                                             std::generic_category().message(failure),
                                             "; name a running server with --target"));
}

absl::Status ServerProcess::AwaitPorts() {
  const auto limit = std::chrono::steady_clock::now() + kStartLimit;
  for (size_t server = 0; server < pids_.size(); ++server) {
    while (!std::filesystem::exists(PortFile(folder_, server))) {
      if (AnyEnded()) return Failure("lossd ended before it served");
      if (std::chrono::steady_clock::now() > limit) return Failure("lossd does not begin to serve");
      std::this_thread::sleep_for(kPoll);
    }
  }
  const nlohmann::json ports =
      nlohmann::json::parse(ReadFile(PortFile(folder_, 0)), nullptr, /*allow_exceptions=*/false);
  if (!ports.is_object() || !ports.contains("grpc") || !ports.contains("metrics")) {
    return Failure("the port file of lossd is not what was expected");
  }
  if (target_.empty()) target_ = absl::StrCat("127.0.0.1:", ports["grpc"].get<int>());
  metrics_ = absl::StrCat("127.0.0.1:", ports["metrics"].get<int>());
  return absl::OkStatus();
}

absl::Status ServerProcess::Failure(const std::string& what) const {
  const std::string log = ReadFile(folder_ + "/log");
  return absl::UnavailableError(
      absl::StrCat(what, "; its log ends:\n", log.substr(log.size() - std::min(log.size(), kLogTail))));
}

bool ServerProcess::AnyEnded() {
  bool any = false;
  for (pid_t& pid : pids_) {
    if (pid > 0 && waitpid(pid, nullptr, WNOHANG) == pid) {
      Exchange(pid, 0);
      pid = -1;
    }
    any = any || pid < 0;
  }
  return any;
}

bool ServerProcess::AllEnded() {
  (void)AnyEnded();
  return std::all_of(pids_.begin(), pids_.end(), [](pid_t pid) { return pid < 0; });
}

ServerProcess::~ServerProcess() {
  const auto signal_all = [this](int number) {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, number);
    }
  };
  signal_all(SIGTERM);
  const auto limit = std::chrono::steady_clock::now() + kStopLimit;
  while (!AllEnded()) {
    if (std::chrono::steady_clock::now() > limit) signal_all(SIGKILL);
    std::this_thread::sleep_for(kPoll);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace lossd::perf
