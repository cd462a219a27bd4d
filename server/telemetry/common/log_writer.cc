#include "server/telemetry/common/log_writer.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <utility>

namespace lossd::telemetry {
namespace {

bool AwaitRoom(int file, int milliseconds) {
  pollfd room{.fd = file, .events = POLLOUT, .revents = 0};
  return poll(&room, 1, milliseconds) > 0;
}

// False if the file takes no more.
bool WriteAll(int file, std::string_view text) {
  constexpr int kForEver = -1;
  while (!text.empty()) {
    const ssize_t written = write(file, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (written < 0 && errno == EAGAIN) {  // another process has set O_NONBLOCK
      AwaitRoom(file, kForEver);
    } else if (written == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

// Threads that are started meanwhile take no signals.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

LogWriter::LogWriter(int file, std::function<std::string(int64_t)> dropped_line)
    : file_(file), dropped_line_(std::move(dropped_line)) {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { Run(); });
}

LogWriter::~LogWriter() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void LogWriter::Write(std::string_view line) {
  {
    const std::lock_guard lock(mutex_);
    // After a dropped line no other goes before the line that tells of it.
    if (dropped_waiting_ > 0 || waiting_.size() + line.size() > kMostBytes) {
      ++dropped_waiting_;
      ++dropped_;
    } else {
      waiting_ += line;
    }
    all_written_ = false;
  }
  changed_.notify_one();
}

bool LogWriter::Take(std::string* lines) {
  std::unique_lock lock(mutex_);
  if (waiting_.empty() && dropped_waiting_ == 0) all_written_ = true;
  changed_.wait(lock, [this] { return ends_ || !waiting_.empty() || dropped_waiting_ > 0; });
  if (ends_) return false;
  lines->clear();
  std::swap(*lines, waiting_);
  if (dropped_waiting_ > 0) *lines += dropped_line_(std::exchange(dropped_waiting_, 0));
  return true;
}

void LogWriter::Run() {
  pthread_setname_np(pthread_self(), "log");
  for (std::string lines; Take(&lines);) {
    if (!WriteAll(file_, lines)) dropped_ += std::count(lines.begin(), lines.end(), '\n');
  }
}

void LogWriter::Flush(std::chrono::milliseconds patience) const {
  constexpr timespec kMillisecond{.tv_sec = 0, .tv_nsec = 1'000'000};
  for (int64_t left = patience.count(); left > 0 && !all_written_; --left) nanosleep(&kMillisecond, nullptr);
}

void WriteLastLine(int file, std::string_view line) {
  constexpr int kPatience = 1000;  // milliseconds
  if (!AwaitRoom(file, kPatience)) return;
  [[maybe_unused]] const ssize_t written =
      write(file, line.data(),
            std::min<size_t>(line.size(), PIPE_BUF));  // a pipe with room takes PIPE_BUF bytes at once
}

}  // namespace lossd::telemetry
