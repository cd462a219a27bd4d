// Where the time of chunks goes, from what each of them tells of its way.
#ifndef LOSSD_CLIENT_TOOLS_PERF_STAGES_H_
#define LOSSD_CLIENT_TOOLS_PERF_STAGES_H_

#include <optional>
#include <span>
#include <vector>

#include "lossd/client.h"

namespace lossd::perf {

// Seconds of each chunk; the five of one chunk add up to the time from its sending to its answer's arrival.
struct StageSamples {
  std::vector<double> upload = {};    // sent -> received
  std::vector<double> queue = {};     // received -> started, and on the device behind the batch before
  std::vector<double> copy = {};      // to the device and back
  std::vector<double> compute = {};   // losses and dX
  std::vector<double> download = {};  // in the server's memory -> arrived
  double clock_error = 0;             // the largest of any chunk
};
StageSamples SplitIntoStages(std::span<const ChunkTiming> timings);

// The share of all time that chunks spend in upload, copy and download during which the device computes:
// losses and dX, or dW, of any chunk in `timings`. None if there is no such time. dW of a batch is known to
// end when the next batch tells so; that of the last one is left out.
std::optional<double> HiddenShare(std::span<const ChunkTiming> timings);

}  // namespace lossd::perf

#endif  // LOSSD_CLIENT_TOOLS_PERF_STAGES_H_
