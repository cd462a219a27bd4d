// When the next batch is due, for all clients together.
#ifndef LOSSD_CLIENT_TOOLS_PERF_PACER_H_
#define LOSSD_CLIENT_TOOLS_PERF_PACER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace lossd::perf {

using Clock = std::chrono::steady_clock;

// How much is to be done: so many batches if `batches` is not 0, else what begins within `duration` seconds.
struct Amount {
  double duration = 0;
  int64_t batches = 0;
};

// Arrivals of a Poisson process of `rate` per second, in seconds from its start, ascending. The same for the
// same arguments on every machine.
std::vector<double> PoissonArrivals(double rate, const Amount& amount, uint64_t seed);

// Thread-safe once started.
class Pacer {
 public:
  // rate 0: closed loop, a batch is due as soon as a client asks. Else open loop: batches are due when they
  // arrive, whether or not a client is free.
  Pacer(double rate, const Amount& amount, uint64_t seed);

  void Start(Clock::time_point start);
  // Waits until the next batch is due and returns when that was; latency counts from there. Empty at the end.
  std::optional<Clock::time_point> Next();
  // Next() returns empty from now on. Safe in a signal handler.
  void Stop() { stopped_ = true; }

  Clock::time_point start() const { return start_; }
  // How much of the whole run is over, 0..1, as far as it can be told.
  double Progress(Clock::time_point now) const;
  // Open loop: arrivals that no client took although they were due, because the end came first. The end comes
  // when the last arrival has waited for as long again as arrivals came, at least ten seconds.
  std::vector<double> WaitedInVain(Clock::time_point now) const;

 private:
  Clock::time_point At(double seconds) const;

  const double rate_;
  const Amount amount_;
  const std::vector<double> arrivals_;
  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> taken_{0};
  Clock::time_point start_;
  Clock::time_point end_;
};

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_PACER_H_
