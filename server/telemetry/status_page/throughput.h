// How fast the server works just now, from samples of its counters.
#ifndef LOSSD_SERVER_TELEMETRY_STATUS_PAGE_THROUGHPUT_H_
#define LOSSD_SERVER_TELEMETRY_STATUS_PAGE_THROUGHPUT_H_

#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "server/engine/common/counters.h"
#include "server/engine/common/mutex.h"

namespace lossd::telemetry {

// Totals at one moment.
struct WorkSample {
  double seconds = 0;  // of a clock that only goes on
  double tokens = 0;
  double chunks = 0;  // of which these tokens are
  double bytes_in = 0;
  double bytes_out = 0;
};

// Per second.
struct WorkRates {
  double tokens = 0;
  double chunks = 0;
  double bytes_in = 0;
  double bytes_out = 0;
};

// The last samples, in order. Not thread-safe.
class WorkHistory {
 public:
  static constexpr size_t kMost = 121;

  void Add(const WorkSample& sample);
  // Over the last `seconds`, or as much of them as there is; zeros of fewer than two samples.
  WorkRates Rates(double seconds) const;
  // Between each two samples.
  std::vector<double> TokensPerSecond() const;

 private:
  std::deque<WorkSample> samples_;
};

// Takes a sample every second, on a thread of its own. Thread-safe.
class Throughput {
 public:
  static constexpr double kRecentSeconds = 5;

  struct Reading {
    WorkRates rates;                        // over the last kRecentSeconds
    std::vector<double> tokens_per_second;  // of the last two minutes, second by second
  };

  // `counters` outlives it.
  explicit Throughput(const engine::Counters* counters);
  ~Throughput();
  Throughput(const Throughput&) = delete;
  Throughput& operator=(const Throughput&) = delete;

  Reading Read() const;

 private:
  void Run();

  const engine::Counters* const counters_;
  mutable engine::Mutex mutex_;
  engine::CondVar stopping_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  WorkHistory history_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses all of this
};

}  // namespace lossd::telemetry

#endif  // LOSSD_SERVER_TELEMETRY_STATUS_PAGE_THROUGHPUT_H_
