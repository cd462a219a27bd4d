// How fast a head's gradient can be read.
#ifndef LOSSD_CLIENT_TOOLS_PERF_FLUSHES_H_
#define LOSSD_CLIENT_TOOLS_PERF_FLUSHES_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "lossd/client.h"

namespace lossd::perf {

// Flushes of one dtype.
struct FlushTimes {
  DataType type = DataType::kFloat32;
  int64_t bytes = 0;  // of each: [V, H] of `type`
  double norm = 0;    // Frobenius norm of dW
  // From the call until the last row has arrived: the freeze and the server's pass for the norm are in it.
  std::vector<double> seconds = {};
};

// Reads the gradient `count` times as fp32 and `count` times as bf16, in turn, after one of each that does
// not count, into a buffer of each, and leaves the window as it was. What arrives is checked: fp32 by the
// client library against the server's checksum, bf16 by its norm (DATA_LOSS).
absl::StatusOr<std::vector<FlushTimes>> TimeFlushes(const Head& head, int64_t count,
                                                    const std::atomic<bool>& interrupted);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_FLUSHES_H_
