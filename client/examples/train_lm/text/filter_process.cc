#include "client/examples/train_lm/text/filter_process.h"

#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lossd::train_lm {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { Close(); }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& command, int fd) {
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fd, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, fd, STDOUT_FILENO);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return absl::InternalError(absl::StrCat("cannot start ", command[0], ": ", std::strerror(error)));
  }
  return pid;
}

// Stops early, without an error, when the other side no longer reads: its answer or its exit says why.
void SendAll(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    // A socket rather than a pipe, because writing to one can be kept from raising SIGPIPE.
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

std::string ReceiveAll(int fd) {
  std::string received;
  std::array<char, 1 << 16> buffer{};
  for (;;) {
    const ssize_t got = recv(fd, buffer.data(), buffer.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return received;
    received.append(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

absl::StatusOr<std::string> RunFilter(const std::vector<std::string>& command, std::string_view input) {
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return absl::InternalError(absl::StrCat("cannot make a socket pair: ", std::strerror(errno)));
  }
  const FileDescriptor ours(ends[0]);
  FileDescriptor theirs(ends[1]);
  const absl::StatusOr<pid_t> pid = Spawn(command, theirs.get());
  theirs.Close();
  if (!pid.ok()) return pid.status();
  SendAll(ours.get(), input);
  shutdown(ours.get(), SHUT_WR);
  std::string output = ReceiveAll(ours.get());
  int status = 0;
  while (waitpid(*pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) {
    return absl::InternalError(absl::StrCat(command[0], " was ended by signal ", WTERMSIG(status)));
  }
  if (output.empty()) return absl::InternalError(absl::StrCat(command[0], " answered nothing"));
  return output;
}

}  // namespace lossd::train_lm
