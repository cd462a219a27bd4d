#include "server/rpc/row_stream_reactor.h"

#include <algorithm>
#include <utility>

#include "server/engine/staging.h"
#include "server/rpc/slices.h"

namespace lossd::rpc {
namespace {

// Below the 4 MiB that gRPC clients accept by default.
constexpr int64_t kPieceBytes = int64_t{2} << 20;

}  // namespace

RowStreamReactor::RowStreamReactor(Source source)
    : source_(std::move(source)), row_(source_.range.first_row) {
  reading_ = true;
  StartRead();
}

RowStreamReactor::RowStreamReactor(const grpc::Status& status) { Finish(status); }

void RowStreamReactor::StartRead() {
  const int64_t end = source_.range.first_row + source_.range.rows;
  const int64_t row_bytes = source_.row_bytes + source_.bias_row_bytes;
  const int64_t rows = std::min(std::max<int64_t>(1, kPieceBytes / row_bytes), end - row_);
  data_ = engine::StagedResult(rows * source_.row_bytes, source_.device);
  bias_.resize(static_cast<size_t>(rows * source_.bias_row_bytes));
  auto* bias = bias_.empty() ? nullptr : reinterpret_cast<float*>(bias_.data());
  source_.read(row_, rows, {data_.data(), bias},
               [this, rows](const absl::Status& status) { OnReadDone(rows, status); });
}

void RowStreamReactor::OnReadDone(int64_t rows, const absl::Status& status) {
  {
    const std::lock_guard lock(mutex_);
    reading_ = false;
    if (status.ok()) {
      next_ = source_.encode(row_, rows, SliceOf(std::exchange(data_, {})), std::exchange(bias_, {}));
      row_ += rows;
    } else if (error_.ok()) {
      error_ = source_.translate(status);
    }
  }
  Advance();
}

void RowStreamReactor::OnWriteDone(bool ok) {
  {
    const std::lock_guard lock(mutex_);
    writing_ = false;
    if (!ok && error_.ok()) error_ = grpc::Status(grpc::StatusCode::CANCELLED, "the client went away");
  }
  Advance();
}

void RowStreamReactor::Advance() {
  bool write = false;
  bool read = false;
  std::optional<grpc::Status> end;
  {
    const std::lock_guard lock(mutex_);
    if (finished_ || writing_) return;
    if (!error_.ok()) {
      if (reading_) return;  // the device still writes into what is ours
      end = error_;
    } else if (next_.has_value()) {
      sent_ = *std::exchange(next_, std::nullopt);
      writing_ = write = true;
      read = !reading_ && row_ < source_.range.first_row + source_.range.rows;
      reading_ = reading_ || read;
    } else if (!reading_) {
      end = grpc::Status::OK;
    }
    finished_ = end.has_value();
  }
  // The piece that is read keeps this alive: nothing ends before it is there.
  if (write) StartWrite(&sent_);
  if (read) StartRead();
  if (end.has_value()) Finish(*end);
}

}  // namespace lossd::rpc
