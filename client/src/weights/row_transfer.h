// Reading the rows of a matrix from the server, whatever the network does: each row once, in order.
#ifndef LOSSD_CLIENT_SRC_WEIGHTS_ROW_TRANSFER_H_
#define LOSSD_CLIENT_SRC_WEIGHTS_ROW_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/src/connection/connection.h"
#include "lossd/client.h"

namespace lossd::internal {

struct RowTransfer {
  int64_t first_row = 0;
  int64_t rows = 0;  // from there on
  int64_t columns = 0;
  DataType type = DataType::kFloat32;  // on the wire
  bool with_bias = false;              // each row has an element of a bias, or of its gradient, in fp32
  // One attempt from `first_row` to the last of them, e.g. Connection::ReadGradient.
  std::function<absl::Status(int64_t first_row, const RowSink& sink)> attempt;
  // Where the bytes of the rows from `first_row` on are to be put, [rows, columns] of `type`; absent: in
  // memory that is used again.
  std::function<std::span<std::byte>(int64_t first_row, int64_t rows)> target = {};
  // The next rows, where they were put, checked to be whole and of `type`; `bias` is empty without one. An
  // error, of whatever code, ends the transfer with it.
  std::function<absl::Status(int64_t first_row, std::span<const std::byte> bytes,
                             std::span<const std::byte> bias)>
      consume;
  // Optional: called with each piece's weight version before it is consumed.
  std::function<absl::Status(uint64_t weight_version)> check_version;
  Progress progress;  // in bytes; may be empty
};

// Resumes at the row reached after UNAVAILABLE, for as long as options.reconnect_timeout without progress.
// INTERNAL if the server sends rows that do not follow, or of another type or size.
absl::Status ReadRows(const ClientOptions& options, const RowTransfer& transfer);

// INVALID_ARGUMENT unless `values`, the caller's room for a bias or its gradient, are what the head needs:
// one for each entry, or each of so many `rows`, if it has a bias, otherwise none.
absl::Status CheckBiasSize(const HeadConfig& head, size_t values, absl::string_view what);
absl::Status CheckBiasSize(const HeadConfig& head, size_t values, absl::string_view what, int64_t rows);

}  // namespace lossd::internal

#endif  // LOSSD_CLIENT_SRC_WEIGHTS_ROW_TRANSFER_H_
