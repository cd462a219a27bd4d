#include "client/src/weights/weight_rows.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/common/convert.h"
#include "client/src/common/data_type.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/waiting.h"
#include "client/src/weights/row_transfer.h"

namespace lossd::internal {
namespace {

// The server confirms rows only at the end of a stream, so a cut one is sent again whole: end it now and
// then.
constexpr int64_t kStreamBytes = int64_t{64} << 20;
constexpr int kMostRestarts = 8;

// Weights as they are staged at the server, row by row.
class WeightWriter {
 public:
  WeightWriter(HeadContext& head, std::string write_id, const WrittenRows& from, const Progress& progress)
      : head_(head),
        write_id_(std::move(write_id)),
        from_(from),
        progress_(progress),
        staged_(StagedType(head.config())),
        row_bytes_(head.config().hidden_size * SizeOf(staged_)) {}

  absl::Status WriteAll() {
    Backoff backoff(head_.options().reconnect_timeout);
    Report(0);
    for (int64_t row = 0; row < from_.rows;) {  // those before it are confirmed
      const int64_t end = std::min(from_.rows, row + std::max<int64_t>(1, kStreamBytes / row_bytes_));
      absl::Status status = WriteStream(row, end);
      if (status.ok()) {
        row = end;
        backoff.Reset();
        continue;
      }
      if (!IsTransient(status)) return status;
      const auto delay = backoff.NextDelay(RetryDelayOf(status).value_or(std::chrono::milliseconds(0)));
      if (!delay) return Annotate(status, absl::StrCat("gave up at row ", row, " of ", from_.rows));
      if (absl::Status slept = SleepFor(head_.options(), *delay); !slept.ok()) return slept;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status WriteStream(int64_t begin, int64_t end) {
    int64_t row = begin;
    const auto confirmed = head_.connection().WriteWeights([&](v1::WriteWeightsRequest* request) {
      Report(row);
      if (row == end) return false;
      const int64_t rows =
          std::min(end - row, std::max<int64_t>(1, head_.options().transfer_bytes / RowBytesOnWire()));
      Fill(row, rows, request);
      row += rows;
      return true;
    });
    if (!confirmed.ok()) return confirmed.status();
    if (*confirmed != end - begin) {
      return absl::InternalError(
          absl::StrCat("the server confirmed ", *confirmed, " rows of weights of ", end - begin, " sent"));
    }
    return absl::OkStatus();
  }

  void Fill(int64_t row, int64_t rows, v1::WriteWeightsRequest* request) const {
    const HeadConfig& config = head_.config();
    request->set_head(config.name);
    request->set_write_id(write_id_);
    request->set_first_row(from_.first_row + row);
    request->set_rows(rows);
    request->set_dtype(ToProto(staged_));
    std::string* bytes = request->mutable_weights();
    bytes->resize(static_cast<size_t>(rows * row_bytes_));
    const auto* weights = static_cast<const std::byte*>(from_.weights);
    ConvertElements(from_.type, weights + row * config.hidden_size * SizeOf(from_.type), staged_,
                    bytes->data(), rows * config.hidden_size);
    if (from_.bias.empty()) return;
    const auto bias = std::as_bytes(from_.bias.subspan(static_cast<size_t>(row), static_cast<size_t>(rows)));
    request->mutable_bias()->assign(reinterpret_cast<const char*>(bias.data()), bias.size());
  }

  // With the row's element of a bias.
  int64_t RowBytesOnWire() const {
    return row_bytes_ + (from_.bias.empty() ? 0 : SizeOf(DataType::kFloat32));
  }

  void Report(int64_t rows) const {
    if (progress_) progress_(rows * row_bytes_, from_.rows * row_bytes_);
  }

  HeadContext& head_;
  const std::string write_id_;
  const WrittenRows& from_;
  const Progress& progress_;
  const DataType staged_;
  const int64_t row_bytes_;
};

}  // namespace

absl::Status CheckRows(const HeadConfig& head, int64_t first_row, int64_t rows, const void* weights,
                       size_t bias_values) {
  if (weights == nullptr) return absl::InvalidArgumentError("weights is null");
  if (first_row < 0 || first_row > head.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_row is ", first_row, "; head '", head.name, "' has ", head.vocab_size, " rows"));
  }
  if (rows < 0 || rows > head.vocab_size - first_row) {
    return absl::InvalidArgumentError(absl::StrCat("rows is ", rows, "; from first_row ", first_row,
                                                   " on there are ", head.vocab_size - first_row));
  }
  return CheckBiasSize(head, bias_values, "bias", rows);
}

absl::Status WriteWeightRows(HeadContext& head, const std::string& write_id, const WrittenRows& from,
                             const Progress& progress) {
  absl::Status status = CheckRows(head.config(), from.first_row, from.rows, from.weights, from.bias.size());
  if (!status.ok()) return status;
  return WeightWriter(head, write_id, from, progress).WriteAll();
}

absl::StatusOr<uint64_t> ReadWeightRows(HeadContext& head, const ReadInto& into, const Progress& progress) {
  const HeadConfig& config = head.config();
  absl::Status checked = CheckRows(config, into.first_row, into.rows, into.weights, into.bias.size());
  if (!checked.ok()) return checked;
  if (into.rows == 0) return absl::InvalidArgumentError("rows is 0; it must be at least 1");
  // Widening is exact, so it is done here, after the network.
  const DataType wire = into.type == DataType::kFloat32 ? StagedType(config) : into.type;
  const int64_t columns = config.hidden_size;
  auto* target = static_cast<std::byte*>(into.weights);
  const auto target_of_bias = [&into](int64_t row) {
    return std::as_writable_bytes(into.bias.empty() ? into.bias
                                                    : into.bias.subspan(static_cast<size_t>(row)));
  };

  std::optional<uint64_t> version;
  const RowTransfer transfer{
      .first_row = into.first_row,
      .rows = into.rows,
      .columns = columns,
      .type = wire,
      .with_bias = config.bias,
      .attempt =
          [&](int64_t first_row, const RowSink& sink) {
            v1::ReadWeightsRequest request;
            request.set_head(config.name);
            request.set_first_row(first_row);
            request.set_rows(into.first_row + into.rows - first_row);
            request.set_dtype(ToProto(wire));
            request.set_weight_version(into.weight_version);
            return head.connection().ReadWeights(request, sink);
          },
      .consume =
          [&](int64_t first_row, std::span<const std::byte> bytes, std::span<const std::byte> of_bias) {
            const int64_t row = first_row - into.first_row;
            const auto elements = static_cast<int64_t>(bytes.size()) / SizeOf(wire);
            ConvertElements(wire, bytes.data(), into.type, target + row * columns * SizeOf(into.type),
                            elements);
            std::ranges::copy(of_bias, target_of_bias(row).begin());
            return absl::OkStatus();
          },
      .check_version =
          [&](uint64_t piece_version) {
            if (version.has_value() && *version != piece_version) {
              return absl::AbortedError(absl::StrCat("the weights of head '", config.name,
                                                     "' changed from version ", *version, " to ",
                                                     piece_version, " while they were read"));
            }
            version = piece_version;
            return absl::OkStatus();
          },
      .progress = progress,
  };
  for (int restarts = 0;; ++restarts) {
    version.reset();
    const absl::Status status = ReadRows(head.options(), transfer);
    if (status.ok()) return version.value_or(0);
    // ABORTED: the server has seen the version change within one stream, or check_version between two.
    if (!absl::IsAborted(status) || restarts == kMostRestarts) return status;
  }
}

}  // namespace lossd::internal
