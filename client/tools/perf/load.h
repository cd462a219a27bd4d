// Clients that send batches at a head's server and take the time.
#ifndef LOSSD_CLIENT_TOOLS_PERF_LOAD_H_
#define LOSSD_CLIENT_TOOLS_PERF_LOAD_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/tools/perf/pacer.h"
#include "client/tools/perf/problem.h"
#include "client/tools/perf/settings.h"
#include "lossd/client.h"

namespace lossd::perf {

struct LoadResult {
  double seconds = 0;  // from the start of the measurement to its last answer
  int64_t batches = 0;
  int64_t tokens = 0;
  int64_t chunks = 0;
  std::vector<double> latencies = {};       // seconds, of each batch that was answered
  std::vector<ChunkTiming> timings = {};    // of each chunk that was answered, if the server tells
  std::vector<double> waited_in_vain = {};  // open loop: of arrivals never sent, up to the end
  // These count what the warm-up met as well.
  std::map<absl::StatusCode, int64_t> errors = {};
  std::string first_error = {};
  int64_t wrong_results = 0;
  int64_t reconnects = 0;
  int64_t lanes = 0;                             // of the session that had most
  std::map<std::string, int64_t> lanes_at = {};  // of all sessions, when they ended: how many are where
};

// So far, for whoever watches.
struct LoadProgress {
  enum class Phase { kWarmUp, kMeasuring };
  Phase phase = Phase::kWarmUp;
  double fraction = 0;
  double seconds = 0;
  int64_t batches = 0;
  int64_t failures = 0;
};

struct LoadHooks {
  // After the warm-up, right before the measurement, and right after it.
  std::function<void()> before = [] {};
  std::function<void()> after = [] {};
  // A few times a second, from the thread that called RunLoad.
  std::function<void(const LoadProgress&)> progress = [](const LoadProgress&) {};
};

// Once `*interrupted` is set, no further batch begins.
LoadResult RunLoad(const Settings& settings, Client& client, const Head& head, const LoadHooks& hooks,
                   const std::atomic<bool>& interrupted);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_LOAD_H_
