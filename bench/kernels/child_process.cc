#include "bench/kernels/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace lossd::bench {
namespace {

using Clock = std::chrono::steady_clock;

int Spawn(const std::vector<std::string>& command, int output, const std::string& log, pid_t* pid) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  const int error = posix_spawnp(pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

enum class End { kClosed, kTimeout };

End ReadAll(int fd, Clock::time_point deadline, std::string* output) {
  std::array<char, 1 << 16> buffer{};
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return End::kTimeout;
    pollfd wait{fd, POLLIN, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (ready <= 0) continue;
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return End::kClosed;
    output->append(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

ChildResult RunChild(const std::vector<std::string>& command, const std::string& log,
                     std::chrono::seconds timeout) {
  ChildResult result;
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    result.problem = std::string("no pipe: ") + std::strerror(errno);
    return result;
  }
  pid_t pid = 0;
  const int error = Spawn(command, ends[1], log, &pid);
  close(ends[1]);
  if (error != 0) {
    close(ends[0]);
    result.problem = "cannot start " + command[0] + ": " + std::strerror(error);
    return result;
  }
  const End end = ReadAll(ends[0], Clock::now() + timeout, &result.output);
  close(ends[0]);
  if (end == End::kTimeout) kill(pid, SIGKILL);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (end == End::kTimeout) {
    result.problem = "took longer than " + std::to_string(timeout.count()) + " s";
  } else if (WIFSIGNALED(status)) {
    const int signal_number = WTERMSIG(status);
    result.problem = std::string("ended by ") + strsignal(signal_number);
    if (signal_number == SIGKILL) result.problem += ", as the system does where memory runs out";
  } else {
    result.exit_status = WEXITSTATUS(status);
  }
  return result;
}

std::string OwnPath() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

}  // namespace lossd::bench
