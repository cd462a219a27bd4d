// Streams rows of a matrix that lives on the device, and of the bias beside it: read a piece, write it, read
// the next.
#ifndef LOSSD_SERVER_RPC_ROW_STREAM_REACTOR_H_
#define LOSSD_SERVER_RPC_ROW_STREAM_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "server/engine/weight_buffers.h"
#include "server/rpc/convert.h"

namespace lossd::rpc {

// Bytes of a row of the bias, or of its gradient, as they travel.
inline int64_t BiasRowBytes(const engine::HeadConfig& head) {
  return head.bias ? kernels::SizeOf(kernels::DataType::kFloat32) : 0;
}

// Owns itself until gRPC is done. One piece is under way at a time, so a slow reader costs one piece of
// memory.
template <typename Response>
class RowStreamReactor final : public grpc::ServerWriteReactor<Response> {
 public:
  struct Source {
    RowRange range;
    int64_t row_bytes = 0;
    int64_t bias_row_bytes = 0;  // 0: there is none
    // Fills `out` (rows * row_bytes bytes and rows * bias_row_bytes) and calls `done` once, on any thread.
    std::function<void(int64_t first_row, int64_t rows, engine::RowsOut out,
                       std::function<void(absl::Status)> done)>
        read;
    // Puts a piece into the message, taking the data.
    std::function<void(int64_t first_row, int64_t rows, std::string data, std::string bias,
                       Response* response)>
        fill;
    std::function<grpc::Status(const absl::Status&)> translate;
  };

  explicit RowStreamReactor(Source source) : source_(std::move(source)), row_(source_.range.first_row) {
    ReadPiece();
  }

  // Ends at once.
  explicit RowStreamReactor(const grpc::Status& status) { this->Finish(status); }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      this->Finish(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"));
      return;
    }
    ReadPiece();
  }

  void OnDone() override { delete this; }

 private:
  // Below the 4 MiB that gRPC clients accept by default.
  static constexpr int64_t kPieceBytes = int64_t{2} << 20;

  void ReadPiece() {
    const int64_t end = source_.range.first_row + source_.range.rows;
    if (row_ == end) {
      this->Finish(grpc::Status::OK);
      return;
    }
    const int64_t row_bytes = source_.row_bytes + source_.bias_row_bytes;
    const int64_t rows = std::min(std::max<int64_t>(1, kPieceBytes / row_bytes), end - row_);
    data_.resize(static_cast<size_t>(rows * source_.row_bytes));
    bias_.resize(static_cast<size_t>(rows * source_.bias_row_bytes));
    auto* bias = bias_.empty() ? nullptr : reinterpret_cast<float*>(bias_.data());
    source_.read(row_, rows, {data_.data(), bias}, [this, rows](const absl::Status& status) {
      if (!status.ok()) {
        this->Finish(source_.translate(status));
        return;
      }
      response_.Clear();
      source_.fill(row_, rows, std::exchange(data_, {}), std::exchange(bias_, {}), &response_);
      row_ += rows;
      this->StartWrite(&response_);
    });
  }

  Source source_;
  int64_t row_ = 0;
  std::string data_;
  std::string bias_;
  Response response_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_ROW_STREAM_REACTOR_H_
