// The fake server's services.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/fake_values.h"

namespace lossd::testing {
namespace {

using grpc::StatusCode;

// A server that has too much to do for now.
grpc::Status Busy(std::chrono::milliseconds delay) {
  v1::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(delay.count() / 1000);
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(delay.count() % 1000 * 1000000));
  v1::RichStatus rich;
  rich.add_details()->PackFrom(info);
  return {StatusCode::RESOURCE_EXHAUSTED, "try again later", rich.SerializeAsString()};
}

}  // namespace

class FakeServer::HeadService final : public v1::HeadService::Service {
 public:
  explicit HeadService(FakeServer* fake) : fake_(fake) {}

  grpc::Status CreateHead(grpc::ServerContext*, const v1::CreateHeadRequest* request,
                          v1::Head* head) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->observed_.creations.push_back(*request);
    fake_->FillHead(head);
    return grpc::Status::OK;
  }

  grpc::Status GetHead(grpc::ServerContext*, const v1::GetHeadRequest*, v1::Head* head) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->FillHead(head);
    return grpc::Status::OK;
  }

  grpc::Status DeleteHead(grpc::ServerContext*, const v1::DeleteHeadRequest*,
                          v1::DeleteHeadResponse*) override {
    const std::lock_guard lock(fake_->mutex_);
    if (fake_->busy_deletions > 0) {
      --fake_->busy_deletions;
      ++fake_->observed_.refused_deletions;
      return Busy(fake_->busy_delay);
    }
    return grpc::Status::OK;
  }

  grpc::Status SaveCheckpoint(grpc::ServerContext*, const v1::SaveCheckpointRequest* request,
                              v1::SaveCheckpointResponse*) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->observed_.saves.push_back(*request);
    return grpc::Status::OK;
  }

  grpc::Status BeginWrite(grpc::ServerContext*, const v1::BeginWriteRequest* request,
                          v1::BeginWriteResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    response->set_write_id("id of " + request->write_key());
    return grpc::Status::OK;
  }

  grpc::Status WriteWeights(grpc::ServerContext*, grpc::ServerReader<v1::WriteWeightsRequest>* reader,
                            v1::WriteWeightsResponse* response) override {
    v1::WriteWeightsRequest request;
    while (reader->Read(&request)) {
      const std::lock_guard lock(fake_->mutex_);
      const std::vector<float> rows = ToFloats(request.dtype(), request.weights());
      std::copy(rows.begin(), rows.end(), fake_->weights_.begin() + request.first_row() * kHidden);
      response->set_rows_received(response->rows_received() + request.rows());
    }
    return grpc::Status::OK;
  }

  grpc::Status CommitWrite(grpc::ServerContext*, const v1::CommitWriteRequest*,
                           v1::CommitWriteResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    response->set_weight_version(++fake_->weight_version_);
    return grpc::Status::OK;
  }

  grpc::Status ReadWeights(grpc::ServerContext*, const v1::ReadWeightsRequest* request,
                           grpc::ServerWriter<v1::ReadWeightsResponse>* writer) override {
    const std::lock_guard lock(fake_->mutex_);
    v1::ReadWeightsResponse response;
    response.set_weight_version(fake_->weight_version_);
    response.set_rows(kVocab);
    response.set_dtype(request->dtype());
    response.set_weights(FromFloats(request->dtype(), fake_->weights_.data(), kVocab * kHidden));
    writer->Write(response);
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

class FakeServer::LossService final : public v1::LossService::Service {
 public:
  explicit LossService(FakeServer* fake) : fake_(fake) {}

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    FakeServer* const at = fake_->sessions_at;
    if (at == nullptr || request->at_this_replica()) return fake_->Open(*request, response);
    const grpc::Status opened = at->Open(*request, response);
    if (response->lane_addresses().empty()) response->add_lane_addresses(at->target());
    return opened;
  }

  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse*) override {
    FakeServer* const at = fake_->sessions_at != nullptr ? fake_->sessions_at : fake_;
    const std::lock_guard lock(at->mutex_);
    ++at->observed_.closed_sessions;
    std::erase_if(at->sessions_, [&](const auto& entry) { return entry.second.id == request->session_id(); });
    return grpc::Status::OK;
  }

  grpc::Status Compute(grpc::ServerContext*, Writer* writer) override {
    v1::ComputeRequest request;
    if (!writer->Read(&request) || !request.has_start()) return {StatusCode::INVALID_ARGUMENT, "no start"};
    Stream stream;
    v1::ComputeResponse ready;
    grpc::Status status = fake_->Attach(request.start(), &stream, ready.mutable_ready());
    if (!status.ok()) return status;
    writer->Write(ready);
    while (writer->Read(&request)) {
      if (!fake_->TakeChunk(request.chunk(), stream, writer, &status)) return status;
    }
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

class FakeServer::GradientService final : public v1::GradientService::Service {
 public:
  explicit GradientService(FakeServer* fake) : fake_(fake) {}

  grpc::Status GradientStats(grpc::ServerContext*, const v1::GradientStatsRequest* request,
                             v1::GradientStatsResponse*) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->observed_.stats.push_back(*request);
    return grpc::Status::OK;
  }

  grpc::Status ApplyStep(grpc::ServerContext*, const v1::ApplyStepRequest* request,
                         v1::ApplyStepResponse* response) override {
    std::unique_lock lock(fake_->mutex_);
    if (fake_->marks_of_another_past) {
      return fake_->PositionError(StatusCode::ABORTED, "marks of another server", fake_->restores_);
    }
    fake_->observed_.steps.push_back(*request);
    if (request->generation() != fake_->last_step_.generation()) {
      if (request->generation() != fake_->generation_) {
        return fake_->PositionError(StatusCode::ABORTED, "wrong generation");
      }
      ++fake_->generation_;
      std::fill(fake_->window_.begin(), fake_->window_.end(), 0.0F);
      fake_->last_step_ = *request;
      fake_->last_step_answer_.set_generation(fake_->generation_);
      fake_->last_step_answer_.set_weight_version(++fake_->weight_version_);
      fake_->last_step_answer_.set_step(fake_->last_step_answer_.step() + 1);
      fake_->last_step_answer_.set_norm(1.5);
      fake_->last_step_answer_.set_window_tokens(5);
    } else if (request->SerializeAsString() != fake_->last_step_.SerializeAsString()) {
      return {StatusCode::FAILED_PRECONDITION, "a step was applied with other arguments"};
    }
    *response = fake_->last_step_answer_;
    if (fake_->slow_steps > 0) {
      --fake_->slow_steps;
      return {StatusCode::DEADLINE_EXCEEDED, ""};
    }
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

class FakeServer::StatusService final : public v1::StatusService::Service {
 public:
  explicit StatusService(FakeServer* fake) : fake_(fake) {}

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    response->set_incarnation(fake_->incarnation_);
    response->set_history(fake_->history_);
    response->set_state(v1::SERVER_STATE_SERVING);
    response->set_version("0.0.7");
    for (const std::string& feature : fake_->features) response->add_features(feature);
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

FakeServer::FakeServer()
    : window_(kVocab * kHidden, 0.0F),
      weights_(kVocab * kHidden, 0.0F),
      head_service_(std::make_unique<HeadService>(this)),
      loss_service_(std::make_unique<LossService>(this)),
      gradient_service_(std::make_unique<GradientService>(this)),
      status_service_(std::make_unique<StatusService>(this)) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(head_service_.get());
  builder.RegisterService(loss_service_.get());
  builder.RegisterService(gradient_service_.get());
  builder.RegisterService(status_service_.get());
  server_ = builder.BuildAndStart();
}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Stop() {
  {
    const std::lock_guard lock(mutex_);
    shut_down_ = true;
    chunk_done_.notify_all();
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

}  // namespace lossd::testing
