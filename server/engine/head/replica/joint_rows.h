// Rows of what the replicas of a head hold together, and each of them in part.
#ifndef LOSSD_SERVER_ENGINE_HEAD_REPLICA_JOINT_ROWS_H_
#define LOSSD_SERVER_ENGINE_HEAD_REPLICA_JOINT_ROWS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/data_type.h"
#include "kernels/slices.h"
#include "server/engine/device/weight_buffers.h"
#include "server/engine/head/replica/part_rows.h"

namespace lossd::engine {

// Rows of the weights that a caller wants, their type and their destination.
struct WantedRows {
  kernels::RowSpan rows;
  kernels::DataType type = kernels::DataType::kFloat32;
  RowsOut out;
};
// At the coordinator. Between two that are equal no replica has changed its weights.
struct WeightsPlace {
  uint64_t version = 0;
  uint64_t restores = 0;
  uint64_t ending = 0;  // GradientWindow's

  bool operator==(const WeightsPlace&) const = default;
};

struct JointRead {
  std::vector<std::vector<kernels::RowSpan>> slices;  // the rows of each (HeadBackend::SliceRows)
  PartRows rows;
  int64_t row_bytes = 0;
  // Asks the replica that has these rows: ReplicaPart::ReadRows, or Head::ReadPartRows.
  std::function<void(int32_t replica, const PartRows& piece,
                     std::function<void(absl::StatusOr<std::string>)> done)>
      read;
};

// Reads rows in their order, one piece after the other, each of at most RowsOfPiece. `take` gets one, and
// `done` is called after the last one, or with the first error (INTERNAL: an answer of another size); both by
// the threads that `read` answers by.
void ReadJointRows(JointRead read, std::function<void(const kernels::RowSpan& piece, std::string bytes)> take,
                   std::function<void(absl::Status)> done);

// INTERNAL unless this replica has answered all bytes of these rows, and no more.
absl::Status CheckSize(int32_t replica, const kernels::RowSpan& rows, int64_t row_bytes,
                       const std::string& bytes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_REPLICA_JOINT_ROWS_H_
