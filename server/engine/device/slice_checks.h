// What a replica refuses of its slices, the same on every device.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_SLICE_CHECKS_H_
#define LOSSD_SERVER_ENGINE_DEVICE_SLICE_CHECKS_H_

#include "absl/status/status.h"
#include "kernels/slices.h"
#include "server/engine/device/head_shard.h"
#include "server/engine/device/replica_communicators.h"

namespace lossd::engine {

// INTERNAL if one of `rows` is none that is stepped here.
absl::Status CheckStepped(const kernels::RowSpan& rows, const kernels::RowSpan& stepped);
// INTERNAL if these do not connect the replicas of the shard's head, of which this is one.
absl::Status CheckReplicas(const HeadShard& shard, const ReplicaCommunicators& replicas);
// INTERNAL: what takes the sum of the replicas' gradients is called where there is none.
absl::Status NotSummed();
// INTERNAL: ApplyStep, of a head over replicas.
absl::Status SteppedBySlices();

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_SLICE_CHECKS_H_
