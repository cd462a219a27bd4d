#include "client/tools/perf/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
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
std::array<std::atomic<pid_t>, 2> own_servers{};

void Exchange(pid_t from, pid_t to) {
  for (std::atomic<pid_t>& server : own_servers) {
    pid_t expected = from;
    if (server.compare_exchange_strong(expected, to)) return;
  }
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

double CpuSecondsOf(pid_t pid) { return TicksOf(pid) / static_cast<double>(sysconf(_SC_CLK_TCK)); }

double OwnCpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(const Settings& settings) {
  std::error_code error;
  std::string folder = (std::filesystem::temp_directory_path(error) / "lossd-perf-XXXXXX").string();
  if (error || mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot make a folder like ", folder));
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

absl::Status ServerProcess::Spawn(const Settings& settings) {
  const std::string program = BesideThisProgram("lossd");
  std::string listen = "127.0.0.1:0";
  if (settings.transport == Transport::kUnix) listen = target_ = absl::StrCat("unix:", folder_, "/socket");
  std::vector<std::string> command = {
      program, absl::StrCat("--listen=", listen), "--metrics_listen=127.0.0.1:0",
      absl::StrCat("--port_file=", folder_, "/ports.json"),
      settings.devices.empty() ? absl::StrCat("--device=", settings.device)
                               : absl::StrCat("--devices=", settings.devices)};
  if (settings.transport == Transport::kShm || settings.transport == Transport::kCudaIpc) {
    command.emplace_back("--same_host_regions");
  }
  if (settings.transport == Transport::kTls) {
    if (absl::Status status = MakeCertificate(); !status.ok()) return status;
    command.push_back(absl::StrCat("--tls_certificate=", folder_, "/server.pem"));
    command.push_back(absl::StrCat("--tls_key=", folder_, "/server.key"));
  }
  command.insert(command.end(), settings.server_flags.begin(), settings.server_flags.end());
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
  const int failure = posix_spawn(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failure == 0) {
    Exchange(0, pid_);
    return absl::OkStatus();
  }
  pid_ = -1;
  return absl::UnavailableError(absl::StrCat("cannot start ", program, ": ",
                                             std::generic_category().message(failure),
                                             "; name a running server with --target"));
}

absl::Status ServerProcess::AwaitPorts() {
  const auto limit = std::chrono::steady_clock::now() + kStartLimit;
  const std::string path = folder_ + "/ports.json";
  while (!std::filesystem::exists(path)) {
    if (Ended()) return Failure("lossd ended before it served");
    if (std::chrono::steady_clock::now() > limit) return Failure("lossd does not begin to serve");
    std::this_thread::sleep_for(kPoll);
  }
  const nlohmann::json ports = nlohmann::json::parse(ReadFile(path), nullptr, /*allow_exceptions=*/false);
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

bool ServerProcess::Ended() {
  if (pid_ > 0 && waitpid(pid_, nullptr, WNOHANG) == pid_) {
    Exchange(pid_, 0);
    pid_ = -1;
  }
  return pid_ < 0;
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) kill(pid_, SIGTERM);
  const auto limit = std::chrono::steady_clock::now() + kStopLimit;
  while (!Ended()) {
    if (std::chrono::steady_clock::now() > limit) kill(pid_, SIGKILL);
    std::this_thread::sleep_for(kPoll);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

}  // namespace lossd::perf
