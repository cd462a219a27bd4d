// A whole lossd in the test's own process, reached through real gRPC on loopback, and the few calls that
// tests make of it.
#ifndef LOSSD_TESTS_SUPPORT_TEST_SERVER_H_
#define LOSSD_TESTS_SUPPORT_TEST_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lossd/v1/gradient.grpc.pb.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/region.grpc.pb.h"
#include "lossd/v1/status.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/server.h"
#include "server/telemetry/common/service_counters.h"

namespace lossd::testing {

struct TestServerOptions {
  engine::EngineOptions engine;
  int64_t workspace_bytes = 8 << 20;
  rpc::ServerOptions server = {.listen = "127.0.0.1:0"};
  std::function<std::unique_ptr<engine::Device>()> device = nullptr;  // null: the CPU
  std::function<void(engine::Engine&)> prepare = nullptr;             // called before anybody can reach it
};

// Aborts the test process if it cannot start.
class TestServer {
 public:
  explicit TestServer(const TestServerOptions& options = {});
  ~TestServer();

  int port() const { return server_->port(); }
  std::string target() const;
  engine::Engine& engine() { return *engine_; }
  rpc::Server& server() { return *server_; }
  uint64_t rejected(engine::RejectReason reason) const;
  telemetry::ServiceCounters& counters() { return counters_; }

  std::shared_ptr<grpc::Channel> Channel() const;  // a connection of its own

 private:
  telemetry::ServiceCounters counters_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<rpc::Server> server_;
};

// The services over one connection.
struct Stubs {
  explicit Stubs(const std::shared_ptr<grpc::Channel>& channel);
  std::unique_ptr<v1::HeadService::Stub> heads;
  std::unique_ptr<v1::LossService::Stub> losses;
  std::unique_ptr<v1::GradientService::Stub> gradients;
  std::unique_ptr<v1::StatusService::Stub> status;
  std::unique_ptr<v1::RegionService::Stub> regions;
};

// Seeded values in (-1, 1), and labels in [0, vocab).
std::vector<float> RandomFloats(int64_t count, uint32_t seed);
std::vector<int64_t> RandomLabels(int64_t count, int64_t vocab, uint32_t seed);

// Creates an fp32 head and publishes seeded weights.
void CreateHead(Stubs& stubs, const std::string& name, int64_t vocab, int64_t hidden);

v1::OpenSessionResponse OpenSession(Stubs& stubs, const std::string& head, const std::string& client_key,
                                    int32_t lanes = 1);

// A valid chunk with seeded content.
v1::Chunk MakeChunk(uint64_t sequence, uint64_t generation, int64_t tokens, int64_t vocab, int64_t hidden,
                    uint32_t seed);

// A Compute stream, one call after the other.
class ComputeStream {
 public:
  ComputeStream(Stubs& stubs, const v1::OpenSessionResponse& session, int32_t lane = 0,
                std::optional<std::chrono::milliseconds> timeout = std::nullopt);
  ~ComputeStream();

  // False once the stream has ended.
  bool Send(const v1::Chunk& chunk);
  bool SendRaw(const v1::ComputeRequest& request);
  // The next answer; none once the stream has ended.
  std::optional<v1::ComputeResponse> Read();
  // Reads on to the answer of this sequence.
  std::optional<v1::ChunkResult> ReadResult(uint64_t sequence);
  // Reads on until everything up to `sequence` is applied.
  bool ReadApplied(uint64_t sequence);
  // Sends one chunk and reads its answer.
  std::optional<v1::ChunkResult> Compute(const v1::Chunk& chunk);
  const v1::ComputeReady& ready() const { return ready_; }

  void WritesDone() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }
  // Reads to the end and returns the stream's status. Once.
  grpc::Status Finish();

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ComputeRequest, v1::ComputeResponse>> stream_;
  v1::ComputeReady ready_;
  uint64_t applied_ = 0;
  bool finished_ = false;
};

// The marks a flush of this head has to name, as the server reports them.
v1::Head GetHead(Stubs& stubs, const std::string& name);
grpc::Status BeginFlush(Stubs& stubs, const std::string& head, v1::BeginFlushResponse* response);
std::vector<float> ReadGradient(Stubs& stubs, const std::string& head, const std::string& flush_id);
// The window's gradient, and its tokens; the window is open again afterwards.
struct WindowContent {
  std::vector<float> gradient;
  uint64_t tokens = 0;
  bool operator==(const WindowContent&) const = default;
};
WindowContent PeekWindow(Stubs& stubs, const std::string& head);
// BeginFlush, read, CommitFlush.
std::vector<float> Flush(Stubs& stubs, const std::string& head);

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_TEST_SERVER_H_
