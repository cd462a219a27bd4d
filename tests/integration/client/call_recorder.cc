#include "tests/integration/client/call_recorder.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "grpcpp/support/client_interceptor.h"
#include "grpcpp/support/slice.h"

namespace lossd::testing {
namespace {

using grpc::experimental::InterceptionHookPoints;

std::atomic<CallRecorder*> current_recorder = nullptr;
thread_local bool is_paused = false;

template <typename Message>
Message Parsed(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) std::abort();
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  Message message;
  if (!message.ParseFromString(bytes)) std::abort();
  return message;
}

}  // namespace

class CallRecorder::Call final : public grpc::experimental::Interceptor {
 public:
  Call(CallRecorder* recorder, const char* method) : recorder_(recorder), method_(method) {
    method_.erase(0, method_.rfind('/') + 1);
    if (recorder_ != nullptr) recorder_->Started(method_);
  }
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (recorder_ != nullptr &&
        methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      recorder_->Sends(method_, *methods->GetSerializedSendMessage(), &lane_);
    }
    methods->Proceed();
  }

 private:
  CallRecorder* const recorder_;  // null: the call is nobody's business
  std::string method_;
  int lane_ = 0;
};

class CallRecorder::Calls final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  Calls() { grpc::experimental::RegisterGlobalClientInterceptorFactory(this); }
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo* info) override {
    return new Call(is_paused ? nullptr : current_recorder.load(), info->method());
  }
};

CallRecorder::CallRecorder() {
  static Calls calls;  // gRPC takes one in the life of a process
  if (current_recorder.exchange(this) != nullptr) std::abort();
}

CallRecorder::~CallRecorder() { current_recorder = nullptr; }

CallRecorder::Pause::Pause() { is_paused = true; }
CallRecorder::Pause::~Pause() { is_paused = false; }

CallRecorder::Observed CallRecorder::observed() const {
  const std::lock_guard lock(mutex_);
  return observed_;
}

void CallRecorder::Started(const std::string& method) {
  const std::lock_guard lock(mutex_);
  if (method == "Compute") ++observed_.streams;
  if (method == "CommitFlush") ++observed_.commits;
  if (method == "AbortFlush") ++observed_.aborts;
  if (method == "WriteWeights") ++observed_.weight_write_streams;
}

void CallRecorder::Sends(const std::string& method, const grpc::ByteBuffer& message, int* lane) {
  std::unique_lock lock(mutex_);
  if (method == "Compute") {
    const auto request = Parsed<v1::ComputeRequest>(message);
    if (request.has_start()) {
      *lane = request.start().lane();
      observed_.stream_lanes.push_back(*lane);
      return;
    }
    observed_.chunks.push_back(request.chunk());
    observed_.chunk_lanes.push_back(*lane);
    lock.unlock();
    if (before_chunk) before_chunk(*lane, request.chunk().sequence());
  } else if (method == "ReadGradient") {
    observed_.gradient_first_rows.push_back(Parsed<v1::ReadGradientRequest>(message).first_row());
  } else if (method == "WriteWeights") {
    auto request = Parsed<v1::WriteWeightsRequest>(message);
    const auto bytes = static_cast<int64_t>(request.weights().size());
    observed_.largest_weight_bytes = std::max(observed_.largest_weight_bytes, bytes);
    request.clear_weights();
    request.clear_bias();
    observed_.weight_writes.push_back(std::move(request));
  } else if (method == "ReadWeights") {
    observed_.weight_reads.push_back(Parsed<v1::ReadWeightsRequest>(message));
  } else if (method == "BeginFlush") {
    observed_.flushes.push_back(Parsed<v1::BeginFlushRequest>(message));
  } else if (method == "CreateHead") {
    observed_.creations.push_back(Parsed<v1::CreateHeadRequest>(message));
  } else if (method == "ApplyStep") {
    observed_.steps.push_back(Parsed<v1::ApplyStepRequest>(message));
  } else if (method == "GradientStats") {
    observed_.stats.push_back(Parsed<v1::GradientStatsRequest>(message));
  } else if (method == "Logits") {
    observed_.logits_rows.push_back(Parsed<v1::LogitsRequest>(message).rows());
  }
}

}  // namespace lossd::testing
