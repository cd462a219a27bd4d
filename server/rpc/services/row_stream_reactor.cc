#include "server/rpc/services/row_stream_reactor.h"

#include <algorithm>
#include <utility>

#include "server/engine/device/staging.h"
#include "server/rpc/convert/slices.h"

namespace lossd::rpc {
namespace {

constexpr int64_t kMostPieces = 3;  // sent, read, and being read

int64_t RowBytes(const RowStreamReactor::Source& source) { return source.row_bytes + source.bias_row_bytes; }

int64_t RowsOfPiece(const RowStreamReactor::Source& source) {
  return std::max<int64_t>(1, source.message_bytes / RowBytes(source));
}

}  // namespace

int64_t RowStreamReactor::MostBytes(const Source& source) {
  return std::min(source.range.rows, kMostPieces * RowsOfPiece(source)) * RowBytes(source);
}

RowStreamReactor::RowStreamReactor(Source source)
    : source_(std::move(source)), row_(source_.range.first_row) {
  reading_ = true;
  StartRead();
}

RowStreamReactor::RowStreamReactor(const grpc::Status& status) { Finish(status); }

void RowStreamReactor::StartRead() {
  const int64_t end = source_.range.first_row + source_.range.rows;
  const int64_t rows = std::min(RowsOfPiece(source_), end - row_);
  data_ = engine::StagedResult(rows * source_.row_bytes, source_.device);
  bias_.resize(static_cast<size_t>(rows * source_.bias_row_bytes));
  auto* bias = bias_.empty() ? nullptr : reinterpret_cast<float*>(bias_.data());
  // The piece may be there, sent, and the whole call over, before `read` returns: what runs then must not be
  // ours.
  const auto read = source_.read;
  read(row_, rows, {data_.data(), bias},
       [this, rows](const absl::Status& status) { OnReadDone(rows, status); });
}

void RowStreamReactor::OnReadDone(int64_t rows, const absl::Status& status) {
  Actions actions;
  {
    const engine::MutexLock lock(mutex_);
    reading_ = false;
    if (status.ok()) {
      next_ = source_.encode(row_, rows, SliceOf(std::exchange(data_, {})), std::exchange(bias_, {}));
      row_ += rows;
    } else if (error_.ok()) {
      error_ = source_.translate(status);
    }
    actions = AdvanceLocked();
  }
  // gRPC holds no reference for this thread: with nothing to do, the object may be gone by now.
  if (!actions.Any()) return;
  Do(actions);
}

void RowStreamReactor::OnWriteDone(bool ok) {
  Actions actions;
  {
    const engine::MutexLock lock(mutex_);
    writing_ = false;
    if (!ok && error_.ok()) error_ = grpc::Status(grpc::StatusCode::CANCELLED, "the client went away");
    actions = AdvanceLocked();
  }
  Do(actions);
}

RowStreamReactor::Actions RowStreamReactor::AdvanceLocked() {
  Actions actions;
  if (finished_ || writing_) return actions;
  if (!error_.ok()) {
    if (reading_) return actions;  // the device still writes into what is ours
    actions.finish = error_;
  } else if (next_.has_value()) {
    sent_ = *std::exchange(next_, std::nullopt);
    writing_ = actions.write = true;
    actions.read = !reading_ && row_ < source_.range.first_row + source_.range.rows;
    reading_ = reading_ || actions.read;
  } else if (!reading_) {
    actions.finish = grpc::Status::OK;
  }
  finished_ = actions.finish.has_value();
  return actions;
}

void RowStreamReactor::Do(const Actions& actions) {
  if (actions.write) StartWrite(&sent_);
  if (actions.read) StartRead();
  if (actions.finish.has_value()) Finish(*actions.finish);
}

}  // namespace lossd::rpc
