#include "client/src/weights/row_transfer.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/common/convert.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/waiting.h"

namespace lossd::internal {
namespace {

absl::Status CheckPiece(const RowTransfer& transfer, const RowPiece& piece, int64_t next_row) {
  const int64_t end = transfer.first_row + transfer.rows;
  if (piece.first_row != next_row || piece.rows < 1 || piece.rows > end - next_row) {
    return absl::InternalError(absl::StrCat("the server sent rows [", piece.first_row, ", ", piece.first_row,
                                            "+", piece.rows, "); expected some from ", next_row, " to ",
                                            end));
  }
  if (piece.dtype != ToProto(transfer.type)) {
    return absl::InternalError(absl::StrCat("the server sent rows of type ", v1::DataType_Name(piece.dtype),
                                            "; expected ", Name(transfer.type)));
  }
  const int64_t bytes = piece.rows * transfer.columns * SizeOf(transfer.type);
  if (piece.bytes.bytes != bytes) {
    return absl::InternalError(absl::StrCat("the server sent ", piece.bytes.bytes, " bytes for ", piece.rows,
                                            " rows; expected ", bytes));
  }
  const int64_t bias_bytes = transfer.with_bias ? piece.rows * SizeOf(DataType::kFloat32) : 0;
  if (static_cast<int64_t>(piece.bias.size()) != bias_bytes) {
    return absl::InternalError(absl::StrCat("the server sent ", piece.bias.size(), " bytes of bias for ",
                                            piece.rows, " rows; expected ", bias_bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadRows(const ClientOptions& options, const RowTransfer& transfer) {
  Backoff backoff(options.reconnect_timeout);
  const int64_t row_bytes = transfer.columns * SizeOf(transfer.type);
  const int64_t end = transfer.first_row + transfer.rows;
  int64_t next_row = transfer.first_row;
  std::vector<std::byte> scratch;
  absl::Status refused;  // by the consumer, which is no reason to try again
  if (transfer.progress) transfer.progress(0, transfer.rows * row_bytes);

  const RowSink sink = [&](const RowPiece& piece) {
    if (transfer.check_version) {
      if (absl::Status status = transfer.check_version(piece.weight_version); !status.ok()) return status;
    }
    if (absl::Status status = CheckPiece(transfer, piece, next_row); !status.ok()) return status;
    refused = AskedNow(options);  // pieces may come one after the other, without a wait
    if (!refused.ok()) return refused;
    std::span<std::byte> rows;
    if (transfer.target) {
      rows = transfer.target(next_row, piece.rows);
    } else {
      scratch.resize(static_cast<size_t>(piece.bytes.bytes));
      rows = scratch;
    }
    piece.bytes.CopyTo(rows);
    refused = transfer.consume(next_row, rows, std::as_bytes(std::span(piece.bias)));
    if (!refused.ok()) return refused;
    next_row += piece.rows;
    backoff.Reset();
    if (transfer.progress) {
      transfer.progress((next_row - transfer.first_row) * row_bytes, transfer.rows * row_bytes);
    }
    return absl::OkStatus();
  };

  while (next_row < end) {
    absl::Status status = transfer.attempt(next_row, sink);
    if (!refused.ok()) return refused;
    if (next_row == end) break;  // whatever became of the call's end, the rows are here
    if (status.ok()) status = absl::UnavailableError("the server ended the transfer early");
    if (!IsTransient(status)) return status;
    const auto delay = backoff.NextDelay(RetryDelayOf(status).value_or(std::chrono::milliseconds(0)));
    if (!delay) return Annotate(status, absl::StrCat("gave up at row ", next_row, " of ", end));
    if (absl::Status slept = SleepFor(options, *delay); !slept.ok()) return slept;
  }
  return absl::OkStatus();
}

absl::Status CheckBiasSize(const HeadConfig& head, size_t values, absl::string_view what) {
  return CheckBiasSize(head, values, what, head.vocab_size);
}

absl::Status CheckBiasSize(const HeadConfig& head, size_t values, absl::string_view what, int64_t rows) {
  const auto expected = static_cast<size_t>(head.bias ? rows : 0);
  if (values == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, " has ", values, " values, but head '", head.name, "' ",
      head.bias ? absl::StrCat("has a bias of ", expected, rows == head.vocab_size ? "" : " for these rows")
                : "was created without a bias"));
}

}  // namespace lossd::internal
