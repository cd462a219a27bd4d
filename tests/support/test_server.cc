#include "tests/support/test_server.h"

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <utility>

#include "server/engine/device/cpu/cpu_backend.h"
#include "server/rpc/calls/methods.h"

namespace lossd::testing {
namespace {

void Require(bool condition, const std::string& what) {
  if (condition) return;
  std::cerr << "test server: " << what << "\n";
  std::abort();
}

void Require(const grpc::Status& status, const std::string& what) {
  Require(status.ok(), what + ": " + status.error_message());
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace

TestServer::TestServer(const TestServerOptions& options) : counters_(rpc::MethodNames()) {
  std::unique_ptr<engine::Device> device;
  if (options.device) {
    device = options.device();
  } else {
    auto cpu = engine::CreateCpuDevice(options.workspace_bytes);
    Require(cpu.ok(), "no device");
    device = *std::move(cpu);
  }
  auto engine = engine::Engine::Create(options.engine, std::move(device));
  Require(engine.ok(), "no engine");
  engine_ = *std::move(engine);
  if (options.prepare) options.prepare(*engine_);
  rpc::ServerOptions server_options = options.server;
  if (server_options.counters == nullptr) server_options.counters = &counters_;
  auto server = rpc::Server::Start(server_options, engine_.get());
  Require(server.ok(), "no server: " + std::string(server.status().message()));
  server_ = *std::move(server);
}

TestServer::~TestServer() = default;

std::string TestServer::target() const { return "127.0.0.1:" + std::to_string(port()); }

uint64_t TestServer::rejected(engine::RejectReason reason) const {
  return engine_->counters().rejected[static_cast<size_t>(reason)];
}

std::shared_ptr<grpc::Channel> TestServer::Channel() const {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(target(), grpc::InsecureChannelCredentials(), arguments);
}

Stubs::Stubs(const std::shared_ptr<grpc::Channel>& channel)
    : heads(v1::HeadService::NewStub(channel)),
      losses(v1::LossService::NewStub(channel)),
      gradients(v1::GradientService::NewStub(channel)),
      status(v1::StatusService::NewStub(channel)),
      regions(v1::RegionService::NewStub(channel)) {}

std::vector<float> RandomFloats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = uniform(generator);
  return values;
}

std::vector<int64_t> RandomLabels(int64_t count, int64_t vocab, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int64_t> uniform(0, vocab - 1);
  std::vector<int64_t> values(static_cast<size_t>(count));
  for (int64_t& value : values) value = uniform(generator);
  return values;
}

void CreateHead(Stubs& stubs, const std::string& name, int64_t vocab, int64_t hidden) {
  v1::CreateHeadRequest create;
  v1::HeadConfig* config = create.mutable_config();
  config->set_name(name);
  config->set_vocab_size(vocab);
  config->set_hidden_size(hidden);
  config->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  v1::Head head;
  grpc::ClientContext create_context;
  Require(stubs.heads->CreateHead(&create_context, create, &head), "CreateHead");

  v1::BeginWriteRequest begin;
  begin.set_head(name);
  begin.set_write_key("test");
  v1::BeginWriteResponse write;
  grpc::ClientContext begin_context;
  Require(stubs.heads->BeginWrite(&begin_context, begin, &write), "BeginWrite");

  v1::WriteWeightsRequest rows;
  rows.set_head(name);
  rows.set_write_id(write.write_id());
  rows.set_rows(vocab);
  rows.set_dtype(v1::DATA_TYPE_FLOAT32);
  rows.set_weights(Bytes(RandomFloats(vocab * hidden, 7)));
  v1::WriteWeightsResponse written;
  grpc::ClientContext write_context;
  auto writer = stubs.heads->WriteWeights(&write_context, &written);
  writer->Write(rows);
  writer->WritesDone();
  Require(writer->Finish(), "WriteWeights");

  v1::CommitWriteRequest commit;
  commit.set_head(name);
  commit.set_write_id(write.write_id());
  v1::CommitWriteResponse committed;
  grpc::ClientContext commit_context;
  Require(stubs.heads->CommitWrite(&commit_context, commit, &committed), "CommitWrite");
}

v1::OpenSessionResponse OpenSession(Stubs& stubs, const std::string& head, const std::string& client_key,
                                    int32_t lanes) {
  v1::OpenSessionRequest request;
  request.set_head(head);
  request.set_client_key(client_key);
  request.set_lanes(lanes);
  v1::OpenSessionResponse response;
  grpc::ClientContext context;
  Require(stubs.losses->OpenSession(&context, request, &response), "OpenSession");
  return response;
}

v1::Chunk MakeChunk(uint64_t sequence, uint64_t generation, int64_t tokens, int64_t vocab, int64_t hidden,
                    uint32_t seed) {
  v1::Chunk chunk;
  chunk.set_sequence(sequence);
  chunk.set_generation(generation);
  chunk.set_tokens(tokens);
  chunk.set_hidden_dtype(v1::DATA_TYPE_FLOAT32);
  chunk.set_labels(Bytes(RandomLabels(tokens, vocab, seed)));
  chunk.set_hidden_states(Bytes(RandomFloats(tokens * hidden, seed)));
  return chunk;
}

// ComputeStream

ComputeStream::ComputeStream(Stubs& stubs, const v1::OpenSessionResponse& session, int32_t lane,
                             std::optional<std::chrono::milliseconds> timeout) {
  if (timeout.has_value()) context_.set_deadline(std::chrono::system_clock::now() + *timeout);
  stream_ = stubs.losses->Compute(&context_);
  v1::ComputeRequest start;
  start.mutable_start()->set_session_id(session.session_id());
  start.mutable_start()->set_incarnation(session.incarnation());
  start.mutable_start()->set_lane(lane);
  stream_->Write(start);
  v1::ComputeResponse response;
  if (stream_->Read(&response) && response.has_ready()) ready_ = response.ready();
  applied_ = ready_.marks().applied();
}

ComputeStream::~ComputeStream() {
  if (finished_) return;
  context_.TryCancel();
  Finish();
}

bool ComputeStream::Send(const v1::Chunk& chunk) {
  v1::ComputeRequest request;
  *request.mutable_chunk() = chunk;
  return stream_->Write(request);
}

bool ComputeStream::SendRaw(const v1::ComputeRequest& request) { return stream_->Write(request); }

std::optional<v1::ComputeResponse> ComputeStream::Read() {
  v1::ComputeResponse response;
  if (!stream_->Read(&response)) return std::nullopt;
  if (response.has_applied()) applied_ = response.applied().applied();
  return response;
}

std::optional<v1::ChunkResult> ComputeStream::ReadResult(uint64_t sequence) {
  while (std::optional<v1::ComputeResponse> response = Read()) {
    if (response->has_result() && response->result().sequence() == sequence) return response->result();
  }
  return std::nullopt;
}

bool ComputeStream::ReadApplied(uint64_t sequence) {
  while (applied_ < sequence) {
    if (!Read().has_value()) return false;
  }
  return true;
}

std::optional<v1::ChunkResult> ComputeStream::Compute(const v1::Chunk& chunk) {
  if (!Send(chunk)) return std::nullopt;
  return ReadResult(chunk.sequence());
}

grpc::Status ComputeStream::Finish() {
  while (Read().has_value()) {
  }
  finished_ = true;
  return stream_->Finish();
}

// Windows

v1::Head GetHead(Stubs& stubs, const std::string& name) {
  v1::GetHeadRequest request;
  request.set_name(name);
  v1::Head head;
  grpc::ClientContext context;
  Require(stubs.heads->GetHead(&context, request, &head), "GetHead");
  return head;
}

grpc::Status BeginFlush(Stubs& stubs, const std::string& head, v1::BeginFlushResponse* response) {
  const v1::Head info = GetHead(stubs, head);
  v1::BeginFlushRequest request;
  request.set_head(head);
  request.set_generation(info.generation());
  *request.mutable_marks() = info.sessions();
  grpc::ClientContext context;
  return stubs.gradients->BeginFlush(&context, request, response);
}

std::vector<float> ReadGradient(Stubs& stubs, const std::string& head, const std::string& flush_id) {
  v1::ReadGradientRequest request;
  request.set_head(head);
  request.set_flush_id(flush_id);
  grpc::ClientContext context;
  auto reader = stubs.gradients->ReadGradient(&context, request);
  std::vector<float> gradient;
  v1::ReadGradientResponse piece;
  while (reader->Read(&piece)) {
    const size_t have = gradient.size();
    gradient.resize(have + piece.gradient().size() / sizeof(float));
    std::memcpy(gradient.data() + have, piece.gradient().data(), piece.gradient().size());
  }
  Require(reader->Finish(), "ReadGradient");
  return gradient;
}

WindowContent PeekWindow(Stubs& stubs, const std::string& head) {
  v1::BeginFlushResponse flush;
  Require(BeginFlush(stubs, head, &flush), "BeginFlush");
  WindowContent content{ReadGradient(stubs, head, flush.flush_id()), flush.window_tokens()};
  v1::AbortFlushRequest abort;
  abort.set_head(head);
  abort.set_flush_id(flush.flush_id());
  v1::AbortFlushResponse aborted;
  grpc::ClientContext context;
  Require(stubs.gradients->AbortFlush(&context, abort, &aborted), "AbortFlush");
  return content;
}

std::vector<float> Flush(Stubs& stubs, const std::string& head) {
  v1::BeginFlushResponse flush;
  Require(BeginFlush(stubs, head, &flush), "BeginFlush");
  std::vector<float> gradient = ReadGradient(stubs, head, flush.flush_id());
  v1::CommitFlushRequest commit;
  commit.set_head(head);
  commit.set_flush_id(flush.flush_id());
  v1::CommitFlushResponse committed;
  grpc::ClientContext context;
  Require(stubs.gradients->CommitFlush(&context, commit, &committed), "CommitFlush");
  return gradient;
}

}  // namespace lossd::testing
