#include "tests/support/call_recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <set>

#include "grpcpp/client_context.h"
#include "grpcpp/support/client_interceptor.h"
#include "grpcpp/support/slice.h"
#include "lossd/v1/types.pb.h"
#include "tests/support/wait.h"

namespace lossd::testing {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;

std::atomic<CallRecorder*> current_recorder = nullptr;
thread_local int pauses = 0;

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

grpc::ByteBuffer Serialized(const google::protobuf::MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

}  // namespace

grpc::Status Refused(grpc::StatusCode code, const google::protobuf::Message* detail) {
  v1::RichStatus rich;
  rich.set_code(code);
  if (detail != nullptr) rich.add_details()->PackFrom(*detail);
  return {code, "refused by the test", rich.SerializeAsString()};
}

// One call. What it must not do at once it does in a thread, and keeps the operation until then.
class CallRecorder::Call final : public grpc::experimental::Interceptor {
 public:
  // `recorder`: null if the call is nobody's business.
  Call(CallRecorder* recorder, grpc::experimental::ClientRpcInfo* info)
      : recorder_(recorder),
        context_(info->client_context()),
        has_one_answer_(info->type() == grpc::experimental::ClientRpcInfo::Type::UNARY),
        method_(info->method()) {
    method_.erase(0, method_.rfind('/') + 1);
    if (recorder_ != nullptr) recorder_->Started(method_);
  }

  void Intercept(InterceptorBatchMethods* methods) override {
    const auto is_at = [methods](InterceptionHookPoints point) {
      return methods->QueryInterceptionHookPoint(point);
    };
    if (recorder_ != nullptr) {
      if (is_at(InterceptionHookPoints::PRE_SEND_MESSAGE) && !Send(methods)) return;
      void* received = is_at(InterceptionHookPoints::POST_RECV_MESSAGE) ? methods->GetRecvMessage() : nullptr;
      if (received != nullptr && !Receive(received, methods)) return;
      if (is_at(InterceptionHookPoints::POST_RECV_STATUS)) End(methods->GetRecvStatus());
    }
    methods->Proceed();
  }

 private:
  // These are false if the operation goes on later.
  bool Send(InterceptorBatchMethods* methods) {
    const grpc::ByteBuffer& message = *methods->GetSerializedSendMessage();
    if (method_ == "Compute") return SendOnStream(Parsed<v1::ComputeRequest>(message), methods);
    if (method_ == "WriteWeights" && recorder_->CutsWeightWrite()) {
      Cut(Broken());
      return true;
    }
    recorder_->Note(method_, message);
    if (method_ == "ReadGradient") ReachRow(Parsed<v1::ReadGradientRequest>(message).first_row());
    if (method_ == "ReadWeights") ReachRow(Parsed<v1::ReadWeightsRequest>(message).first_row());
    if (!has_one_answer_) return true;
    const int number = recorder_->CountCall(method_);
    if (recorder_->before_call) recorder_->before_call(method_, number);
    if (const auto refused = recorder_->TakeFault(&recorder_->refused_, method_)) Cut(*refused);
    return true;
  }

  bool SendOnStream(const v1::ComputeRequest& request, InterceptorBatchMethods* methods) {
    if (request.has_start()) {
      lane_ = request.start().lane();
      session_id_ = request.start().session_id();
      recorder_->NoteStream(lane_);
      return true;
    }
    if (WillBreak()) {
      recorder_->RunInThread([this, methods] {
        Await("the stream to break", [this] { return IsOver(); });
        methods->Proceed();
      });
      return false;
    }
    const uint64_t sequence = request.chunk().sequence();
    recorder_->NoteChunk(lane_, request.chunk());
    const Fate fate = recorder_->FateOf(session_id_, lane_, sequence);
    const bool breaks = fate == Fate::kCutBeforeTaking || fate == Fate::kEndBeforeTaking;
    Remember(sequence, fate);
    const auto before = recorder_->before_chunk;
    if (!before && !breaks) {
      NoteSent();
      return true;
    }
    recorder_->RunInThread([this, sequence, fate, breaks, before, methods] {
      if (before) before(lane_, sequence);
      if (breaks) {
        Await("the answers to the chunks before", [this] { return IsOver() || AllAnswered(); });
        Cut(fate == Fate::kEndBeforeTaking ? grpc::Status::OK : Broken());
      } else {
        NoteSent();
      }
      methods->Proceed();
    });
    return false;
  }

  bool Receive(void* message, InterceptorBatchMethods* methods) {
    if (method_ == "Compute") return ReceiveAnswer(static_cast<grpc::ByteBuffer*>(message), methods);
    if (method_ == "ReadGradient") {
      ReceiveRows<v1::ReadGradientResponse>(static_cast<grpc::ByteBuffer*>(message));
    } else if (method_ == "ReadWeights") {
      ReceiveRows<v1::ReadWeightsResponse>(static_cast<grpc::ByteBuffer*>(message));
    } else if (const Change change = recorder_->EditOf(method_); change && has_one_answer_) {
      change(static_cast<google::protobuf::MessageLite*>(message));
    }
    return true;
  }

  bool ReceiveAnswer(grpc::ByteBuffer* bytes, InterceptorBatchMethods* methods) {
    auto answer = Parsed<v1::ComputeResponse>(*bytes);
    if (const Change change = recorder_->EditOf(method_)) {
      change(&answer);
      *bytes = Serialized(answer);
    }
    if (!answer.has_result()) return true;
    const uint64_t sequence = answer.result().sequence();
    if (IsLost(sequence)) *bytes = Serialized(v1::ComputeResponse());  // which says nothing
    if (BreaksBehind(sequence)) Cut(Broken());
    const auto before = recorder_->before_answer;
    if (!before) {
      NoteAnswered();
      return true;
    }
    recorder_->RunInThread([this, sequence, before, methods] {
      before(lane_, sequence);
      NoteAnswered();
      methods->Proceed();
    });
    return false;
  }

  template <class Response>
  void ReceiveRows(grpc::ByteBuffer* bytes) {
    auto rows = Parsed<Response>(*bytes);
    const int64_t next_row = rows.first_row() + rows.rows();
    if (const Change change = recorder_->EditOf(method_)) {
      change(&rows);
      *bytes = Serialized(rows);
    }
    ReachRow(next_row);
  }

  void ReachRow(int64_t row) {
    if (!recorder_->CutsRows(row)) return;
    if (recorder_->on_row_cut) recorder_->on_row_cut();
    Cut(Broken());
  }

  void End(grpc::Status* status) {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
      if (cut_) *status = *cut_;
      if (cut_) return;
    }
    if (method_ == "Compute") recorder_->NoteStreamEnd(*status);
    if (!status->ok() || !has_one_answer_) return;
    if (const auto lost = recorder_->TakeFault(&recorder_->lost_, method_)) *status = *lost;
  }

  // The call ends with this.
  void Cut(const grpc::Status& status) {
    {
      const std::lock_guard lock(mutex_);
      cut_ = status;
    }
    context_->TryCancel();
  }

  void Remember(uint64_t sequence, Fate fate) {
    const std::lock_guard lock(mutex_);
    if (fate == Fate::kCutBeforeAnswer || fate == Fate::kCutAfterAnswer) breaks_behind_ = sequence;
    if (fate == Fate::kCutBeforeAnswer || fate == Fate::kLoseAnswer) lost_.insert(sequence);
  }
  bool WillBreak() const {
    const std::lock_guard lock(mutex_);
    return breaks_behind_.has_value();
  }
  bool BreaksBehind(uint64_t sequence) const {
    const std::lock_guard lock(mutex_);
    return breaks_behind_ == sequence;
  }
  bool IsLost(uint64_t sequence) const {
    const std::lock_guard lock(mutex_);
    return lost_.contains(sequence);
  }
  bool IsOver() const {
    const std::lock_guard lock(mutex_);
    return cut_ || ended_;
  }
  bool AllAnswered() const {
    const std::lock_guard lock(mutex_);
    return outstanding_ == 0;
  }
  void NoteSent() {
    const std::lock_guard lock(mutex_);
    recorder_->NoteOutstanding(++outstanding_);
  }
  void NoteAnswered() {
    const std::lock_guard lock(mutex_);
    --outstanding_;
  }

  CallRecorder* const recorder_;
  grpc::ClientContext* const context_;
  const bool has_one_answer_;
  std::string method_;
  // These are of a stream of chunks.
  int lane_ = 0;
  std::string session_id_;

  mutable std::mutex mutex_;
  bool ended_ = false;
  std::optional<grpc::Status> cut_;
  std::optional<uint64_t> breaks_behind_;
  std::set<uint64_t> lost_;
  int64_t outstanding_ = 0;
};

class CallRecorder::Calls final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  Calls() { grpc::experimental::RegisterGlobalClientInterceptorFactory(this); }
  grpc::experimental::Interceptor* CreateClientInterceptor(grpc::experimental::ClientRpcInfo* info) override {
    return new Call(pauses > 0 ? nullptr : current_recorder.load(), info);
  }
};

CallRecorder::CallRecorder() {
  static Calls calls;  // gRPC takes one in the life of a process
  if (current_recorder.exchange(this) != nullptr) std::abort();
}

CallRecorder::~CallRecorder() {
  current_recorder = nullptr;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  for (const int64_t row : row_cuts) ADD_FAILURE() << "no stream was cut at row " << row;
  for (const auto* faults : {&refused_, &lost_}) {
    for (const auto& [method, fault] : *faults) {
      EXPECT_EQ(fault.calls, 0) << "calls of " << method << " that were to fail, and were not made";
    }
  }
}

CallRecorder::Pause::Pause() { ++pauses; }
CallRecorder::Pause::~Pause() { --pauses; }

CallRecorder::Observed CallRecorder::observed() const {
  const std::lock_guard lock(mutex_);
  return observed_;
}

void CallRecorder::LoseAnswers(const std::string& method, int calls, const grpc::Status& with) {
  const std::lock_guard lock(mutex_);
  lost_[method] = {calls, with};
}

void CallRecorder::Refuse(const std::string& method, int calls, const grpc::Status& with) {
  const std::lock_guard lock(mutex_);
  refused_[method] = {calls, with};
}

void CallRecorder::Started(const std::string& method) {
  const std::lock_guard lock(mutex_);
  if (method == "Compute") ++observed_.streams;
  if (method == "CommitFlush") ++observed_.commits;
  if (method == "AbortFlush") ++observed_.aborts;
  if (method == "WriteWeights") ++observed_.weight_write_streams;
}

void CallRecorder::NoteStreamEnd(const grpc::Status& status) {
  const std::lock_guard lock(mutex_);
  observed_.stream_ends.push_back(std::to_string(status.error_code()) + ": " + status.error_message());
}

void CallRecorder::Note(const std::string& method, const grpc::ByteBuffer& message) {
  const std::lock_guard lock(mutex_);
  if (method == "ReadGradient") {
    observed_.gradient_first_rows.push_back(Parsed<v1::ReadGradientRequest>(message).first_row());
  } else if (method == "BeginWrite") {
    observed_.begun_writes.push_back(Parsed<v1::BeginWriteRequest>(message));
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

void CallRecorder::NoteStream(int lane) {
  const std::lock_guard lock(mutex_);
  observed_.stream_lanes.push_back(lane);
}

void CallRecorder::NoteChunk(int lane, const v1::Chunk& chunk) {
  const std::lock_guard lock(mutex_);
  observed_.chunks.push_back(chunk);
  observed_.chunk_lanes.push_back(lane);
}

void CallRecorder::NoteOutstanding(int64_t chunks) {
  const std::lock_guard lock(mutex_);
  observed_.peak_outstanding = std::max(observed_.peak_outstanding, chunks);
}

Fate CallRecorder::FateOf(const std::string& session_id, int lane, uint64_t sequence) {
  if (!on_chunk) return Fate::kTake;
  int attempt = 0;
  {
    const std::lock_guard lock(mutex_);
    attempt = attempts_[{session_id, lane, sequence}]++;
  }
  return on_chunk(lane, sequence, attempt);
}

bool CallRecorder::CutsRows(int64_t next_row) {
  const std::lock_guard lock(mutex_);
  if (row_cuts.empty() || row_cuts.front() != next_row) return false;
  row_cuts.pop_front();
  return true;
}

bool CallRecorder::CutsWeightWrite() {
  int message = 0;
  {
    const std::lock_guard lock(mutex_);
    message = weight_write_messages_++;
  }
  return cut_weight_write && cut_weight_write(message);
}

int CallRecorder::CountCall(const std::string& method) {
  const std::lock_guard lock(mutex_);
  return ++calls_[method];
}

std::optional<grpc::Status> CallRecorder::TakeFault(std::map<std::string, Fault>* faults,
                                                    const std::string& method) {
  const std::lock_guard lock(mutex_);
  const auto fault = faults->find(method);
  if (fault == faults->end() || fault->second.calls == 0) return std::nullopt;
  --fault->second.calls;
  return fault->second.with;
}

CallRecorder::Change CallRecorder::EditOf(const std::string& method) const {
  const std::lock_guard lock(mutex_);
  const auto edit = edits_.find(method);
  return edit == edits_.end() ? nullptr : edit->second;
}

void CallRecorder::RunInThread(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  threads_.emplace_back(std::move(work));
}

}  // namespace lossd::testing
