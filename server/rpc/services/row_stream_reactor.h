// Streams rows of a matrix that lives on the device, and of the bias beside it. While gRPC sends one piece,
// the next one is read; a slow reader costs two pieces of memory, and what gRPC holds of a third.
#ifndef LOSSD_SERVER_RPC_SERVICES_ROW_STREAM_REACTOR_H_
#define LOSSD_SERVER_RPC_SERVICES_ROW_STREAM_REACTOR_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "server/engine/common/mutex.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/weight_buffers.h"
#include "server/engine/memory/payload.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/row_messages.h"

namespace lossd::rpc {

// Bytes of a row of the bias, or of its gradient, as they travel.
inline int64_t BiasRowBytes(const engine::HeadConfig& head) {
  return head.bias ? kernels::SizeOf(kernels::DataType::kFloat32) : 0;
}

// Owns itself until gRPC is done.
class RowStreamReactor final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  struct Source {
    engine::Device* device = nullptr;  // whose memory pieces lie in if it has such
    RowRange range;
    int64_t row_bytes = 0;
    int64_t bias_row_bytes = 0;  // 0: there is none
    int64_t message_bytes = kRowMessageBytes;
    // Fills `out` (rows * row_bytes bytes and rows * bias_row_bytes) and calls `done` once, on any thread.
    std::function<void(int64_t first_row, int64_t rows, engine::RowsOut out,
                       std::function<void(absl::Status)> done)>
        read;
    // The message of a piece; the rows are referred to until it is dropped.
    std::function<grpc::ByteBuffer(int64_t first_row, int64_t rows, const grpc::Slice& data,
                                   std::string bias)>
        encode;
    std::function<grpc::Status(const absl::Status&)> translate;
    // Engine::TakeRowStream's, for MostBytes; given back when gRPC is done with the call.
    std::shared_ptr<const void> room = nullptr;
  };

  // What a stream of `source` may hold while its client does not read: two pieces, and the one that gRPC has.
  static int64_t MostBytes(const Source& source);

  explicit RowStreamReactor(Source source);
  // Ends at once.
  explicit RowStreamReactor(const grpc::Status& status);

  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  // The calls to make once the mutex is released. A thread that has none to make must not touch the object
  // any more: another thread may end the call, and gRPC delete the object, as soon as the mutex is released.
  struct Actions {
    bool write = false;                  // the piece in `sent_`
    bool read = false;                   // the next piece; it keeps the object alive until OnReadDone
    std::optional<grpc::Status> finish;  // last: the object may be gone when Finish returns
    bool Any() const { return write || read || finish.has_value(); }
  };

  void StartRead();
  void OnReadDone(int64_t rows, const absl::Status& status);
  // Decides where the state changed that it is decided by.
  Actions AdvanceLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Without the mutex: any of them may call back at once.
  void Do(const Actions& actions) ABSL_LOCKS_EXCLUDED(mutex_);

  const Source source_;
  int64_t row_ = 0;  // the first one that is not read yet
  // The content of the piece that is read; the reading thread's until OnReadDone.
  engine::ResultBytes data_;
  std::string bias_;
  grpc::ByteBuffer sent_;

  engine::Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::ByteBuffer> next_ ABSL_GUARDED_BY(mutex_);
  grpc::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVICES_ROW_STREAM_REACTOR_H_
