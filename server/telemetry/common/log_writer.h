// Writes lines to a file descriptor that may block: a pipe without a reader, a stopped terminal, a full disk.
#ifndef LOSSD_SERVER_TELEMETRY_COMMON_LOG_WRITER_H_
#define LOSSD_SERVER_TELEMETRY_COMMON_LOG_WRITER_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace lossd::telemetry {

// Lines are queued, and a thread writes them. O_NONBLOCK is no way to do that: every process that has the
// same terminal or pipe would get it, too. The thread takes no signals. Thread-safe.
class LogWriter {
 public:
  static constexpr size_t kMostBytes = size_t{1} << 20;  // that wait for the thread

  // `dropped_line`: the line that tells how many lines were dropped; called by the thread.
  LogWriter(int file, std::function<std::string(int64_t)> dropped_line);
  // Waits for the write under way.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Returns at once. Drops the line if too much is waiting.
  void Write(std::string_view line);

  // Waits until all lines are written, but no longer than `patience`. Safe in a signal handler.
  void Flush(std::chrono::milliseconds patience) const;

  // Lines that were not written, since there was no room or the write failed.
  int64_t dropped() const { return dropped_; }

 private:
  void Run();
  // Waits for lines. False at the end.
  bool Take(std::string* lines);

  const int file_;
  const std::function<std::string(int64_t)> dropped_line_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string waiting_;          // guarded by mutex_
  int64_t dropped_waiting_ = 0;  // lines after `waiting_`, not yet told; guarded by mutex_
  bool ends_ = false;            // guarded by mutex_
  std::atomic<bool> all_written_ = true;
  std::atomic<int64_t> dropped_ = 0;
  std::thread thread_;  // last: it uses the others
};

// Writes the last line of a process directly, at most 4,096 bytes of it. Waits up to a second for room. Safe
// in a signal handler and without memory.
void WriteLastLine(int file, std::string_view line);

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_COMMON_LOG_WRITER_H_
