// Rows of a head's weights, to the server and back, whatever the network does.
#ifndef LOSSD_CLIENT_SRC_WEIGHTS_WEIGHT_ROWS_H_
#define LOSSD_CLIENT_SRC_WEIGHTS_WEIGHT_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/src/common/head_context.h"
#include "lossd/client.h"

namespace lossd::internal {

// Some rows of the caller's: [rows, H] of `type`, and [rows] of a bias, or empty.
struct WrittenRows {
  int64_t first_row = 0;
  int64_t rows = 0;
  DataType type = DataType::kFloat32;
  const void* weights = nullptr;
  std::span<const float> bias = {};
};
struct ReadInto {
  int64_t first_row = 0;
  int64_t rows = 0;
  DataType type = DataType::kFloat32;
  void* weights = nullptr;
  std::span<float> bias = {};
  uint64_t weight_version = 0;  // 0: any
};

// INVALID_ARGUMENT unless these rows are some of the head's and there is as much of a bias as they need.
absl::Status CheckRows(const HeadConfig& head, int64_t first_row, int64_t rows, const void* weights,
                       size_t bias_values);

// Sends the rows into a staged write. INVALID_ARGUMENT, before anything is sent, for what does not fit the
// head.
absl::Status WriteWeightRows(HeadContext& head, const std::string& write_id, const WrittenRows& from,
                             const Progress& progress);
// Reads the rows, all of one version, which is returned. From the start again if the weights change
// meanwhile, a few times.
absl::StatusOr<uint64_t> ReadWeightRows(HeadContext& head, const ReadInto& into, const Progress& progress);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_WEIGHTS_WEIGHT_ROWS_H_
