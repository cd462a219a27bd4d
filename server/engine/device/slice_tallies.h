// What the sum of replicas' gradients adds up to, from what each of them finds in its slices.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_

#include "absl/status/statusor.h"
#include "kernels/collectives/communicator.h"
#include "server/engine/device/head_backend.h"

namespace lossd::engine {

// What one replica finds.
struct SliceTallies {
  GradientTallies own;
  GradientTallies mirrored;  // zeros where there are no mirrors
};

// Those of all slices, at every replica. `host` moves the host's memory between them. INTERNAL at all of them
// if a slice adds up to something else where it is mirrored: then they must not step it. UNAVAILABLE if one
// was lost.
absl::StatusOr<GradientTallies> MergeSlices(const SliceTallies& own,
                                            kernels::collectives::Communicator* host);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SLICE_TALLIES_H_
