// The fake server's services.
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "tests/unit/client/fake_server.h"
#include "tests/unit/client/fake_values.h"

namespace lossd::testing {
namespace {

using grpc::StatusCode;

v1::DataType OrFloat32(v1::DataType type) {
  return type == v1::DATA_TYPE_UNSPECIFIED ? v1::DATA_TYPE_FLOAT32 : type;
}

grpc::Status UnknownWrite() { return {StatusCode::NOT_FOUND, "no such write is under way"}; }

// As lossd marks its own errors.
grpc::Status Refused(StatusCode code, const std::string& message) {
  v1::RichStatus rich;
  rich.set_code(code);
  return {code, message, rich.SerializeAsString()};
}

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
    fake_->has_head_ = true;
    fake_->FillHead(head);
    return grpc::Status::OK;
  }

  grpc::Status GetHead(grpc::ServerContext*, const v1::GetHeadRequest*, v1::Head* head) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
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
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
    fake_->has_head_ = false;
    if (fake_->lost_deletions > 0) {
      --fake_->lost_deletions;
      return Cut();
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
    fake_->observed_.begun_writes.push_back(*request);
    if (fake_->others_write && !request->replace()) return {StatusCode::FAILED_PRECONDITION, "another's"};
    response->set_write_id("id of " + request->write_key());
    return grpc::Status::OK;
  }

  grpc::Status WriteWeights(grpc::ServerContext*, grpc::ServerReader<v1::WriteWeightsRequest>* reader,
                            v1::WriteWeightsResponse* response) override {
    {
      const std::lock_guard lock(fake_->mutex_);
      ++fake_->observed_.weight_write_streams;
    }
    v1::WriteWeightsRequest request;
    while (reader->Read(&request)) {
      const std::lock_guard lock(fake_->mutex_);
      const int message = fake_->weight_write_messages_++;
      if (fake_->rows_forgotten && fake_->ForgetsWrite()) return UnknownWrite();
      if (fake_->cut_weight_write && fake_->cut_weight_write(message)) return Cut();
      const std::vector<float> rows = ToFloats(request.dtype(), request.weights());
      std::copy(rows.begin(), rows.end(), fake_->weights_.begin() + request.first_row() * kHidden);
      const std::vector<float> bias = ToFloats(v1::DATA_TYPE_FLOAT32, request.bias());
      std::copy(bias.begin(), bias.end(), fake_->bias_.begin() + request.first_row());
      response->set_rows_received(response->rows_received() + request.rows());
      fake_->observed_.largest_weight_bytes =
          std::max(fake_->observed_.largest_weight_bytes, static_cast<int64_t>(request.weights().size()));
      request.clear_weights();
      request.clear_bias();
      fake_->observed_.weight_writes.push_back(request);
    }
    return grpc::Status::OK;
  }

  grpc::Status CommitWrite(grpc::ServerContext*, const v1::CommitWriteRequest*,
                           v1::CommitWriteResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->rows_forgotten && fake_->ForgetsWrite()) return UnknownWrite();
    response->set_weight_version(++fake_->weight_version_);
    return grpc::Status::OK;
  }

  grpc::Status ReadWeights(grpc::ServerContext*, const v1::ReadWeightsRequest* request,
                           grpc::ServerWriter<v1::ReadWeightsResponse>* writer) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->observed_.weight_reads.push_back(*request);
    const int64_t end = request->rows() == 0 ? kVocab : request->first_row() + request->rows();
    for (int64_t row = request->first_row(); row < end;) {
      const RowFate fate =
          fake_->on_weight_rows ? fake_->on_weight_rows(fake_->weight_messages_) : RowFate::kSend;
      ++fake_->weight_messages_;
      if (fate == RowFate::kCut) {
        if (fake_->change_weights_on_cut) {
          ++fake_->weight_version_;
          for (float& weight : fake_->weights_) weight += 100;
        }
        return Cut();
      }
      v1::ReadWeightsResponse response;
      response.set_weight_version(fake_->weight_version_);
      response.set_first_row(row);
      response.set_rows(std::min(kRowsPerMessage, end - row));
      response.set_dtype(request->dtype());
      response.set_weights(
          FromFloats(request->dtype(), fake_->weights_.data() + row * kHidden, response.rows() * kHidden));
      if (fake_->has_bias) {
        response.set_bias(FromFloats(v1::DATA_TYPE_FLOAT32, fake_->bias_.data() + row, response.rows()));
      }
      writer->Write(response);
      row += response.rows();
    }
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

class FakeServer::LossService final : public v1::LossService::Service {
 public:
  explicit LossService(FakeServer* fake) : fake_(fake) {}

  grpc::Status Logits(grpc::ServerContext*, const v1::LogitsRequest* request,
                      v1::LogitsResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    std::vector<int64_t>& calls = fake_->observed_.logits_rows;
    calls.push_back(request->rows());
    const auto number = static_cast<int>(calls.size());
    if (number == fake_->restart_before_logits) fake_->incarnation_ = "incarnation-2";
    if (number == fake_->restore_before_logits) ++fake_->restores_;
    response->set_weight_version(fake_->weight_version_);
    response->set_incarnation(fake_->incarnation_);
    response->set_restores(fake_->restores_);
    response->set_rows(request->rows());
    const float logit = fake_->incarnation_ == "incarnation-1" && fake_->restores_ == 0 ? 1.0F : 2.0F;
    const std::vector<float> logits(static_cast<size_t>(request->rows() * kVocab), logit);
    response->set_logits(logits.data(), logits.size() * sizeof(float));
    return grpc::Status::OK;
  }

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    FakeServer* const at = fake_->sessions_at;
    {
      const std::lock_guard lock(fake_->mutex_);
      fake_->observed_.openings.push_back(*request);
    }
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
      if (!fake_->TakeChunk(request.chunk(), &stream, writer, &status)) return status;
    }
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

class FakeServer::GradientService final : public v1::GradientService::Service {
 public:
  explicit GradientService(FakeServer* fake) : fake_(fake) {}

  grpc::Status BeginFlush(grpc::ServerContext*, const v1::BeginFlushRequest* request,
                          v1::BeginFlushResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
    fake_->observed_.flushes.push_back(*request);
    for (const auto& marks : request->marks()) {
      const bool known =
          std::any_of(fake_->sessions_.begin(), fake_->sessions_.end(), [&](const auto& entry) {
            if (entry.second.id != marks.session_id()) return false;
            return std::all_of(marks.lanes().begin(), marks.lanes().end(), [&](const auto& lane) {
              return entry.second.accepted.at(static_cast<size_t>(lane.lane())) == lane.accepted();
            });
          });
      if (!known) return {StatusCode::FAILED_PRECONDITION, "marks differ"};
    }
    fake_->frozen_ = true;
    response->set_flush_id("flush-" + std::to_string(fake_->generation_));
    response->set_rows(kVocab);
    response->set_columns(kHidden);
    response->set_norm(1.5);
    response->set_checksum(XXH3_64bits(fake_->window_.data(), fake_->window_.size() * sizeof(float)));
    if (fake_->has_bias) {
      const std::vector<float> bias = fake_->BiasWindow();
      response->set_bias_norm(2.5);
      response->set_bias_checksum(XXH3_64bits(bias.data(), bias.size() * sizeof(float)));
    }
    return grpc::Status::OK;
  }

  grpc::Status ReadGradient(grpc::ServerContext*, const v1::ReadGradientRequest* request,
                            grpc::ServerWriter<v1::ReadGradientResponse>* writer) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
    fake_->observed_.gradient_first_rows.push_back(request->first_row());
    for (int64_t row = request->first_row(); row < kVocab;) {
      const RowFate fate =
          fake_->on_gradient_rows ? fake_->on_gradient_rows(fake_->gradient_messages_) : RowFate::kSend;
      ++fake_->gradient_messages_;
      if (fate == RowFate::kCut) return Cut();
      v1::ReadGradientResponse response;
      response.set_first_row(fate == RowFate::kWrongRow ? row + 1 : row);
      response.set_rows(std::min(kRowsPerMessage, kVocab - row));
      response.set_dtype(OrFloat32(request->dtype()));
      std::string bytes =
          FromFloats(response.dtype(), fake_->window_.data() + row * kHidden, response.rows() * kHidden);
      if (fate == RowFate::kCorrupt) bytes[0] = static_cast<char>(bytes[0] ^ 1);
      response.set_gradient(bytes);
      if (fake_->has_bias) {
        std::vector<float> bias = fake_->BiasWindow();
        if (fake_->corrupt_bias_gradient) bias[static_cast<size_t>(row)] += 1;
        response.set_bias_gradient(FromFloats(v1::DATA_TYPE_FLOAT32, bias.data() + row, response.rows()));
      }
      writer->Write(response);
      row += response.rows();
    }
    return grpc::Status::OK;
  }

  grpc::Status CommitFlush(grpc::ServerContext*, const v1::CommitFlushRequest* request,
                           v1::CommitFlushResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    ++fake_->observed_.commits;
    if (fake_->unreached_commits > 0) {
      --fake_->unreached_commits;
      return {fake_->unreached_commit_code, "cut by the test"};
    }
    if (request->flush_id() != fake_->last_committed_) {
      if (!fake_->frozen_) return {StatusCode::ABORTED, "no such flush"};
      fake_->CommitWindow();
    }
    if (fake_->lost_commits > 0) {
      --fake_->lost_commits;
      return Cut();
    }
    response->set_generation(fake_->generation_);
    return grpc::Status::OK;
  }

  grpc::Status AbortFlush(grpc::ServerContext*, const v1::AbortFlushRequest*,
                          v1::AbortFlushResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    if (fake_->refused_aborts > 0) {
      --fake_->refused_aborts;
      return Refused(StatusCode::INTERNAL, "refused by the test");
    }
    ++fake_->observed_.aborts;
    fake_->ReopenWindow();
    response->set_generation(fake_->generation_);
    return grpc::Status::OK;
  }

  grpc::Status GradientStats(grpc::ServerContext*, const v1::GradientStatsRequest* request,
                             v1::GradientStatsResponse*) override {
    const std::lock_guard lock(fake_->mutex_);
    fake_->observed_.stats.push_back(*request);
    return grpc::Status::OK;
  }

  grpc::Status ApplyStep(grpc::ServerContext*, const v1::ApplyStepRequest* request,
                         v1::ApplyStepResponse* response) override {
    std::unique_lock lock(fake_->mutex_);
    if (std::exchange(fake_->restart_before_steps, false)) fake_->Restart(/*keep_head=*/true);
    if (fake_->marks_of_another_past) {
      return fake_->PositionError(StatusCode::ABORTED, "marks of another server", fake_->restores_);
    }
    fake_->observed_.steps.push_back(*request);
    if (request->generation() != fake_->last_step_.generation()) {
      if (request->generation() != fake_->generation_) {
        return fake_->PositionError(StatusCode::ABORTED, "wrong generation");
      }
      fake_->CommitWindow();
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
    if (fake_->lost_steps > 0) {
      --fake_->lost_steps;
      return Cut();
    }
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
    if (fake_->unavailable_status > 0) {
      --fake_->unavailable_status;
      return Cut();
    }
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
      next_window_(kVocab * kHidden, 0.0F),
      weights_(kVocab * kHidden, 0.0F),
      bias_(kVocab, 0.0F),
      head_service_(std::make_unique<HeadService>(this)),
      loss_service_(std::make_unique<LossService>(this)),
      gradient_service_(std::make_unique<GradientService>(this)),
      status_service_(std::make_unique<StatusService>(this)) {
  limits.set_max_chunk_bytes(1 << 20);
  limits.set_max_chunk_tokens(1 << 16);
  limits.set_byte_credit(1 << 22);
  limits.set_lease_seconds(60);
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
    committed_.notify_all();
    chunk_done_.notify_all();
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

}  // namespace lossd::testing
