// The tally of a gradient from the tallies of its parts.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// Adds the tallies of all ranks of `host`, which moves the host's memory, in their order: the same sum at
// every rank. UNAVAILABLE if one was lost.
absl::StatusOr<GradientTallies> MergeTallies(const GradientTallies& own,
                                             kernels::collectives::Communicator* host);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_
