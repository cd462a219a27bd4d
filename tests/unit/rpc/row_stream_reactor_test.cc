// RowStreamReactor between the device's threads and gRPC's, over a real connection.
#include "server/rpc/services/row_stream_reactor.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "lossd/v1/head.grpc.pb.h"
#include "proto/wire/row_wire.h"
#include "tests/support/wait.h"

namespace lossd::rpc::row_stream_reactor_test {
namespace {

// Runs on this thread behind the next mutex that it unlocks, once.
thread_local std::function<void()>
    after_unlock;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

constexpr int64_t kRowBytes = int64_t{2} << 20;  // a piece of its own

// ReadWeights that streams two rows from `source`.
class Service final : public v1::HeadService::WithRawCallbackMethod_ReadWeights<v1::HeadService::Service> {
 public:
  explicit Service(RowStreamReactor::Source source) : source_(std::move(source)) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadWeights(grpc::CallbackServerContext* /*context*/,
                                                          const grpc::ByteBuffer* /*request*/) override {
    return new RowStreamReactor(std::exchange(source_, {}));
  }

 private:
  RowStreamReactor::Source source_;
};

// While the thread that read the last piece is between its lock and what it does next, the client takes both
// pieces and the call ends: nothing of the call may be touched after that (AddressSanitizer tells).
TEST(RowStreamReactor, ReadingThreadLeavesACallAloneThatEndsBesideIt) {
  auto alive = std::make_shared<int>(0);  // goes with the reactor
  const std::weak_ptr<int> reactor = alive;
  std::promise<void> locked;  // by the thread that has read the last piece
  std::thread last_reader;
  bool ended_beside_it = false;

  RowStreamReactor::Source source;
  source.range = {.first_row = 0, .rows = 2};
  source.row_bytes = kRowBytes;
  source.read = [&](int64_t first_row, int64_t /*rows*/, const engine::RowsOut& /*out*/,
                    std::function<void(absl::Status)> done) {
    if (first_row == 0) return done(absl::OkStatus());
    last_reader = std::thread([done = std::move(done)] { done(absl::OkStatus()); });
    // gRPC does not know the reactor yet, so the first piece cannot have been sent before that thread has the
    // lock.
    lossd::testing::Await("the lock", locked);
  };
  source.encode = [&, alive = std::move(alive)](int64_t first_row, int64_t rows, const grpc::Slice& data,
                                                const std::string& /*bias*/) {
    v1::ReadWeightsResponse header;
    header.set_first_row(first_row);
    header.set_rows(rows);
    if (first_row == 1) locked.set_value();
    grpc::ByteBuffer message = wire::Encode(header, data);
    if (first_row == 1) {
      after_unlock = [&] {
        for (int i = 0; i < 1000 && !reactor.expired(); ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
        ended_beside_it = reactor.expired();
      };
    }
    return message;
  };
  source.translate = [](const absl::Status&) { return grpc::Status(grpc::StatusCode::INTERNAL, "read"); };

  Service service(std::move(source));
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const auto stub = v1::HeadService::NewStub(
      grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));  // against hangs
  const auto reader = stub->ReadWeights(&context, {});
  v1::ReadWeightsResponse piece;
  int64_t rows = 0;
  while (reader->Read(&piece)) rows += piece.rows();
  const grpc::Status status = reader->Finish();
  if (last_reader.joinable()) last_reader.join();

  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(rows, 2);
  EXPECT_TRUE(ended_beside_it);
}

}  // namespace
}  // namespace lossd::rpc::row_stream_reactor_test

// In the place of the C library's: widens the gap behind a lock from within a test.
extern "C" int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  using Unlock = int (*)(pthread_mutex_t*);
  static const auto unlock = reinterpret_cast<Unlock>(dlsym(RTLD_NEXT, "pthread_mutex_unlock"));
  const int result = unlock(mutex);
  auto& hook = lossd::rpc::row_stream_reactor_test::after_unlock;
  if (hook) std::exchange(hook, nullptr)();
  return result;
}
