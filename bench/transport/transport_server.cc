#include "bench/transport/transport_server.h"

#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "proto/wire/compute_wire.h"
#include "server/engine/memory/payload.h"

namespace lossd::transport {
namespace {

using grpc::ByteBuffer;

// Answers that wait to be written, at most.
constexpr size_t kMostWaiting = 4;

class EchoReactor final : public grpc::ServerBidiReactor<ByteBuffer, ByteBuffer> {
 public:
  explicit EchoReactor(Codec codec) : codec_(codec) { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      const std::lock_guard lock(mutex_);
      half_closed_ = true;
      if (answers_.empty()) Finish(grpc::Status::OK);
      return;
    }
    ByteBuffer answer = codec_ == Codec::kSlices ? AnswerBySlices() : AnswerByGenerated();
    const std::lock_guard lock(mutex_);
    answers_.push_back(std::move(answer));
    if (answers_.size() == 1) StartWrite(&answers_.front());
    paused_ = answers_.size() >= kMostWaiting;
    if (!paused_) StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    const std::lock_guard lock(mutex_);
    answers_.pop_front();
    if (!answers_.empty() && ok) StartWrite(&answers_.front());
    if (std::exchange(paused_, false)) StartRead(&request_);
    if (answers_.empty() && half_closed_) Finish(grpc::Status::OK);
  }

  void OnDone() override { delete this; }

 private:
  ByteBuffer AnswerBySlices() {
    wire::ReceivedRequest received;
    if (!wire::Decode(&request_, &received)) return {};
    device_.resize(static_cast<size_t>(received.large.bytes));
    received.large.CopyTo(device_);
    received.Clear();
    engine::ResultBytes dx(static_cast<int64_t>(device_.size()));
    std::memcpy(dx.data(), device_.data(), device_.size());
    using Owner = std::shared_ptr<std::byte[]>;
    auto owner = std::make_unique<Owner>(dx.owner());
    const grpc::Slice slice(
        dx.data(), device_.size(),
        [](void* held) { std::unique_ptr<Owner>(static_cast<Owner*>(held)).reset(); }, owner.release());
    return wire::Encode(v1::ChunkResult(), {}, slice);
  }

  // As before proto/wire: parsed into strings, which the engine held and filled.
  ByteBuffer AnswerByGenerated() {
    v1::ComputeRequest request;
    grpc::SerializationTraits<v1::ComputeRequest>::Deserialize(&request_, &request);
    const std::string hidden = std::move(*request.mutable_chunk()->mutable_hidden_states());
    device_.resize(hidden.size());
    std::memcpy(device_.data(), hidden.data(), hidden.size());
    std::string dx;
    dx.resize(hidden.size());
    std::memcpy(dx.data(), device_.data(), dx.size());
    v1::ComputeResponse response;
    response.mutable_result()->set_dx(std::move(dx));
    ByteBuffer answer;
    bool own_buffer = false;
    grpc::SerializationTraits<v1::ComputeResponse>::Serialize(response, &answer, &own_buffer);
    return answer;
  }

  const Codec codec_;
  ByteBuffer request_;
  std::vector<std::byte> device_;
  std::mutex mutex_;
  std::deque<ByteBuffer> answers_;  // the first one is being written
  bool paused_ = false;
  bool half_closed_ = false;
};

}  // namespace

grpc::ServerBidiReactor<ByteBuffer, ByteBuffer>* TransportService::Compute(
    grpc::CallbackServerContext* /*context*/) {
  return std::make_unique<EchoReactor>(codec_).release();
}

}  // namespace lossd::transport
