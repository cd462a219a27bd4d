#include "tests/gpu/cuda_engine.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <utility>

#include "server/engine/device/cuda/cuda_device.h"
#include "tests/support/wait.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::engine {

using kernels::SizeOf;
using kernels::testing::Problem;

std::unique_ptr<CudaEngine> CudaEngine::Create(const Problem& problem, EngineOptions options,
                                               int64_t pinned_bytes, int64_t held_bytes) {
  absl::StatusOr<std::unique_ptr<Device>> device =
      CreateCudaDevice(0, {.pinned_bytes = pinned_bytes, .chunk_limits = options.chunk_limits});
  if (device.status().code() == absl::StatusCode::kFailedPrecondition) return nullptr;  // no GPU
  EXPECT_TRUE(device.ok()) << device.status();
  options.memory_limit_bytes = (*device)->AvailableMemory();
  std::unique_ptr<CudaEngine> cuda(new CudaEngine(problem));
  cuda->device = device->get();
  cuda->engine = *Engine::Create(std::move(options), *std::move(device));
  HeadConfig config{"h", problem.shape.vocab, problem.shape.hidden, problem.weight_type};
  config.held_bytes = held_bytes;
  absl::StatusOr<std::shared_ptr<Head>> head = cuda->engine->CreateHead(config);
  EXPECT_TRUE(head.ok()) << head.status();
  cuda->head = *std::move(head);
  cuda->WriteWeights();
  return cuda;
}

void CudaEngine::WriteWeights() const {
  static int writes = 0;
  const std::string number = std::to_string(++writes);
  const std::string write = *head->BeginWrite("w" + number, Head::Replace::kNo, "write " + number);
  const std::string rows(reinterpret_cast<const char*>(problem_.weight.data()), problem_.weight.size());
  EXPECT_TRUE((*head->FindWrite(write))->Write(0, problem_.shape.vocab, problem_.weight_type, rows).ok());
  head->CommitWrite(
      write, [](const absl::StatusOr<uint64_t>& version) { EXPECT_TRUE(version.ok()) << version.status(); });
  engine->WaitIdle();
}

Stream CudaEngine::Open(const std::string& client_key) const {
  Stream stream{std::make_shared<RecordingListener>(), {}};
  const absl::StatusOr<OpenedSession> opened = engine->OpenSession("h", {client_key, 0, 1});
  EXPECT_TRUE(opened.ok()) << opened.status();
  stream.lane = *head->AttachLane(opened->info.session_id, 0, stream.listener);
  return stream;
}

Chunk CudaEngine::Cut(uint64_t sequence, int64_t first, int64_t tokens) const {
  Chunk chunk;
  chunk.sequence = sequence;
  chunk.generation = head->Info().generation;
  chunk.first_token = first;
  chunk.tokens = tokens;
  chunk.hidden_type = problem_.hidden_type;
  chunk.gradient_scale = problem_.gradient_scale;
  const int64_t row_bytes = problem_.shape.hidden * SizeOf(problem_.hidden_type);
  chunk.labels.assign(reinterpret_cast<const char*>(problem_.labels.data() + first),
                      static_cast<size_t>(tokens) * sizeof(int64_t));
  // In two pieces, the second of which starts in the middle of an element, as slices from the wire may.
  const ByteSpan rows(reinterpret_cast<const std::byte*>(problem_.hidden_states.data() + first * row_bytes),
                      static_cast<size_t>(tokens * row_bytes));
  const size_t cut = rows.size() / 2 + 1;
  chunk.hidden_states = Payload({rows.first(cut), rows.subspan(cut)}, nullptr, tokens * row_bytes);
  return chunk;
}

void CudaEngine::Submit(const Stream& stream, Chunk chunk) const {
  chunk.hidden_states = engine->Staged(std::move(chunk.hidden_states));
  const absl::StatusOr<Head::Submission> submission = head->Submit(stream.lane, chunk, [] {});
  ASSERT_TRUE(submission.ok()) << submission.status();
  EXPECT_EQ(*submission, Head::Submission::kTaken);
}

std::vector<float> CudaEngine::TakeGradient() const {
  std::promise<absl::StatusOr<FlushInfo>> begun;
  const HeadInfo info = head->Info();
  head->BeginFlush(info.generation, info.window_marks, 1.0f,
                   [&](absl::StatusOr<FlushInfo> flush) { begun.set_value(std::move(flush)); });
  const absl::StatusOr<FlushInfo> flush = lossd::testing::Await("the flush to begin", begun);
  EXPECT_TRUE(flush.ok()) << flush.status();
  if (!flush.ok()) return {};
  std::vector<float> gradient(static_cast<size_t>(info.config.elements()));
  std::promise<absl::Status> read;
  head->ReadGradient(flush->flush_id, 0, info.config.vocab_size, kernels::DataType::kFloat32,
                     {gradient.data()}, [&](absl::Status status) { read.set_value(std::move(status)); });
  const absl::Status status = lossd::testing::Await("the gradient", read);
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(CommitFlush(*head, flush->flush_id).ok());
  return gradient;
}

std::vector<float> LossesOf(const ChunkAnswer& answer) {
  std::vector<float> losses(answer.losses.size() / sizeof(float));
  std::memcpy(losses.data(), answer.losses.data(), answer.losses.size());
  return losses;
}

std::vector<float> InputGradientsOf(const ChunkAnswer& answer) {
  std::vector<float> dx(static_cast<size_t>(answer.dx.size() / SizeOf(answer.dx_type)));
  kernels::Convert(answer.dx_type, answer.dx.data(), kernels::DataType::kFloat32, dx.data(),
                   static_cast<int64_t>(dx.size()));
  return dx;
}

}  // namespace lossd::engine
