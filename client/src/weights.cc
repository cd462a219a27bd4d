// Head::WriteWeights and Head::ReadWeights.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/src/backoff.h"
#include "client/src/convert.h"
#include "client/src/data_type.h"
#include "client/src/grpc_status.h"
#include "client/src/head_impl.h"
#include "client/src/random_key.h"
#include "client/src/row_transfer.h"
#include "lossd/client.h"

namespace lossd {
namespace {

// The server confirms rows only at the end of a stream, so a cut one is sent again whole: end it now and
// then.
constexpr int64_t kStreamBytes = int64_t{64} << 20;
constexpr int kMostRestarts = 8;

// Weights as they are staged at the server: [next_row, rows) is not confirmed yet.
class WeightWriter {
 public:
  WeightWriter(internal::HeadContext& head, std::string write_id, DataType type, const void* weights,
               std::span<const float> bias, const Progress& progress)
      : head_(head),
        write_id_(std::move(write_id)),
        type_(type),
        weights_(static_cast<const std::byte*>(weights)),
        bias_(bias),
        progress_(progress),
        row_bytes_(head.config().hidden_size * SizeOf(head.config().weight_type)) {}

  absl::Status WriteAll() {
    internal::Backoff backoff(head_.options().reconnect_timeout);
    Report(0);
    for (int64_t row = 0; row < head_.config().vocab_size;) {
      const int64_t end =
          std::min(head_.config().vocab_size, row + std::max<int64_t>(1, kStreamBytes / row_bytes_));
      absl::Status status = WriteStream(row, end);
      if (status.ok()) {
        row = end;
        backoff.Reset();
        continue;
      }
      if (!internal::IsTransient(status)) return status;
      if (!backoff.Wait(internal::RetryDelayOf(status).value_or(std::chrono::milliseconds(0)))) {
        return internal::Annotate(status,
                                  absl::StrCat("gave up at row ", row, " of ", head_.config().vocab_size));
      }
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
    request->set_first_row(row);
    request->set_rows(rows);
    request->set_dtype(internal::ToProto(config.weight_type));
    std::string* bytes = request->mutable_weights();
    bytes->resize(static_cast<size_t>(rows * row_bytes_));
    internal::ConvertElements(type_, weights_ + row * config.hidden_size * SizeOf(type_), config.weight_type,
                              bytes->data(), rows * config.hidden_size);
    if (bias_.empty()) return;
    const auto bias = std::as_bytes(bias_.subspan(static_cast<size_t>(row), static_cast<size_t>(rows)));
    request->mutable_bias()->assign(reinterpret_cast<const char*>(bias.data()), bias.size());
  }

  // With the row's element of a bias.
  int64_t RowBytesOnWire() const { return row_bytes_ + (bias_.empty() ? 0 : SizeOf(DataType::kFloat32)); }

  void Report(int64_t rows) const {
    if (progress_) progress_(rows * row_bytes_, head_.config().vocab_size * row_bytes_);
  }

  internal::HeadContext& head_;
  const std::string write_id_;
  const DataType type_;
  const std::byte* const weights_;
  const std::span<const float> bias_;
  const Progress& progress_;
  const int64_t row_bytes_;
};

}  // namespace

absl::StatusOr<uint64_t> Head::WriteWeights(DataType type, const void* weights,
                                            const Progress& progress) const {
  return WriteWeights(type, weights, {}, progress);
}

absl::StatusOr<uint64_t> Head::WriteWeights(DataType type, const void* weights, std::span<const float> bias,
                                            const Progress& progress) const {
  internal::HeadContext& head = *impl_->context;
  if (weights == nullptr) return absl::InvalidArgumentError("weights is null");
  if (absl::Status size = internal::CheckBiasSize(config(), bias.size(), "bias"); !size.ok()) return size;

  v1::BeginWriteRequest begin;
  begin.set_head(config().name);
  begin.set_write_key(internal::RandomKey("write"));
  begin.set_replace(true);  // what a writer that went away left unfinished must not be in the way for ever
  const auto begun = head.connection().BeginWrite(begin);
  if (!begun.ok()) return begun.status();

  WeightWriter writer(head, begun->write_id(), type, weights, bias, progress);
  if (absl::Status status = writer.WriteAll(); !status.ok()) return status;

  v1::CommitWriteRequest commit;
  commit.set_head(config().name);
  commit.set_write_id(begun->write_id());
  const auto committed = head.connection().CommitWrite(commit);
  if (!committed.ok()) return committed.status();
  return committed->weight_version();
}

absl::StatusOr<uint64_t> Head::ReadWeights(DataType type, void* weights, const Progress& progress) const {
  return ReadWeights(type, weights, {}, progress);
}

absl::StatusOr<uint64_t> Head::ReadWeights(DataType type, void* weights, std::span<float> bias,
                                           const Progress& progress) const {
  internal::HeadContext& head = *impl_->context;
  if (weights == nullptr) return absl::InvalidArgumentError("weights is null");
  if (absl::Status size = internal::CheckBiasSize(config(), bias.size(), "bias"); !size.ok()) return size;
  // Widening is exact, so it is done here, after the network.
  const DataType wire = type == DataType::kFloat32 ? config().weight_type : type;
  const int64_t columns = config().hidden_size;
  auto* target = static_cast<std::byte*>(weights);

  const auto target_of_bias = [bias](int64_t first_row) {
    return std::as_writable_bytes(bias.empty() ? bias : bias.subspan(static_cast<size_t>(first_row)));
  };

  std::optional<uint64_t> version;
  bool version_changed = false;
  const internal::RowTransfer transfer{
      .rows = config().vocab_size,
      .columns = columns,
      .type = wire,
      .with_bias = config().bias,
      .attempt =
          [&](int64_t first_row, const internal::RowSink& sink) {
            v1::ReadWeightsRequest request;
            request.set_head(config().name);
            request.set_first_row(first_row);
            request.set_dtype(internal::ToProto(wire));
            return head.connection().ReadWeights(request, sink);
          },
      .consume =
          [&](int64_t first_row, std::span<const std::byte> bytes, std::span<const std::byte> of_bias) {
            const auto elements = static_cast<int64_t>(bytes.size()) / SizeOf(wire);
            internal::ConvertElements(wire, bytes.data(), type, target + first_row * columns * SizeOf(type),
                                      elements);
            std::ranges::copy(of_bias, target_of_bias(first_row).begin());
            return absl::OkStatus();
          },
      .check_version =
          [&](uint64_t piece_version) {
            version_changed = version.has_value() && *version != piece_version;
            if (version_changed) {
              return absl::AbortedError(absl::StrCat("the weights of head '", config().name,
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
    version_changed = false;
    const absl::Status status = internal::ReadRows(head.options(), transfer);
    if (status.ok()) return version.value_or(0);
    if (!version_changed || restarts == kMostRestarts) return status;
  }
}

}  // namespace lossd
