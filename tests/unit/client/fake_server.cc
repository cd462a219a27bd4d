#include "tests/unit/client/fake_server.h"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "client/src/convert.h"
#include "client/src/data_type.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

namespace lossd::testing {
namespace {

using grpc::StatusCode;

grpc::Status Cut() { return {StatusCode::UNAVAILABLE, "cut by the test"}; }

DataType TypeOf(v1::DataType type) { return internal::FromProto(type).value_or(DataType::kFloat32); }

std::vector<float> ToFloats(v1::DataType type, const std::string& bytes) {
  const auto count = static_cast<int64_t>(bytes.size()) / SizeOf(TypeOf(type));
  std::vector<float> values(static_cast<size_t>(count));
  internal::ConvertElements(TypeOf(type), bytes.data(), DataType::kFloat32, values.data(), count);
  return values;
}

std::string FromFloats(v1::DataType type, const float* values, int64_t count) {
  std::string bytes(static_cast<size_t>(count * SizeOf(TypeOf(type))), '\0');
  internal::ConvertElements(DataType::kFloat32, values, TypeOf(type), bytes.data(), count);
  return bytes;
}

int64_t PayloadBytes(const v1::Chunk& chunk) {
  const int64_t dx = chunk.mode() == v1::COMPUTE_MODE_LOSS_ONLY
                         ? 0
                         : chunk.tokens() * FakeServer::kHidden * SizeOf(TypeOf(chunk.dx_dtype()));
  return static_cast<int64_t>(chunk.labels().size() + chunk.hidden_states().size()) + chunk.tokens() * 4 + dx;
}

v1::DataType OrFloat32(v1::DataType type) {
  return type == v1::DATA_TYPE_UNSPECIFIED ? v1::DATA_TYPE_FLOAT32 : type;
}

}  // namespace

// --- Services
// -----------------------------------------------------------------------------------------------------------

class FakeServer::HeadService final : public v1::HeadService::Service {
 public:
  explicit HeadService(FakeServer* fake) : fake_(fake) {}

  grpc::Status CreateHead(grpc::ServerContext*, const v1::CreateHeadRequest*, v1::Head* head) override {
    const std::lock_guard lock(fake_->mutex_);
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

  grpc::Status BeginWrite(grpc::ServerContext*, const v1::BeginWriteRequest* request,
                          v1::BeginWriteResponse* response) override {
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
      if (fake_->cut_weight_write && fake_->cut_weight_write(message)) return Cut();
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
    for (int64_t row = request->first_row(); row < kVocab;) {
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
      response.set_rows(std::min(fake_->rows_per_message, kVocab - row));
      response.set_dtype(request->dtype());
      response.set_weights(
          FromFloats(request->dtype(), fake_->weights_.data() + row * kHidden, response.rows() * kHidden));
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

  grpc::Status OpenSession(grpc::ServerContext*, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
    Session& session = fake_->sessions_[request->client_key()];
    if (session.id.empty()) session.id = "session-" + std::to_string(++fake_->observed_.sessions);
    response->set_session_id(session.id);
    response->set_incarnation(fake_->incarnation_);
    response->set_generation(fake_->generation_);
    *response->mutable_limits() = fake_->limits;
    auto* marks = response->add_lanes();
    marks->set_accepted(session.accepted);
    marks->set_applied(session.accepted);
    response->set_vocab_size(kVocab);
    response->set_hidden_size(kHidden);
    response->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
    return grpc::Status::OK;
  }

  grpc::Status CloseSession(grpc::ServerContext*, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse*) override {
    const std::lock_guard lock(fake_->mutex_);
    std::erase_if(fake_->sessions_,
                  [&](const auto& entry) { return entry.second.id == request->session_id(); });
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
    for (const auto& marks : request->marks()) {
      const bool known =
          std::any_of(fake_->sessions_.begin(), fake_->sessions_.end(), [&](const auto& entry) {
            return entry.second.id == marks.session_id() &&
                   entry.second.accepted == marks.lanes(0).accepted();
          });
      if (!known) return {StatusCode::FAILED_PRECONDITION, "marks differ"};
    }
    fake_->frozen_ = true;
    response->set_flush_id("flush-" + std::to_string(fake_->generation_));
    response->set_rows(kVocab);
    response->set_columns(kHidden);
    response->set_norm(1.5);
    response->set_checksum(XXH3_64bits(fake_->window_.data(), fake_->window_.size() * sizeof(float)));
    return grpc::Status::OK;
  }

  grpc::Status ReadGradient(grpc::ServerContext*, const v1::ReadGradientRequest* request,
                            grpc::ServerWriter<v1::ReadGradientResponse>* writer) override {
    const std::lock_guard lock(fake_->mutex_);
    if (!fake_->has_head_) return {StatusCode::NOT_FOUND, "no such head"};
    ++fake_->observed_.gradient_calls;
    fake_->observed_.gradient_first_rows.push_back(request->first_row());
    for (int64_t row = request->first_row(); row < kVocab;) {
      const RowFate fate =
          fake_->on_gradient_rows ? fake_->on_gradient_rows(fake_->gradient_messages_) : RowFate::kSend;
      ++fake_->gradient_messages_;
      if (fate == RowFate::kCut) return Cut();
      v1::ReadGradientResponse response;
      response.set_first_row(fate == RowFate::kWrongRow ? row + 1 : row);
      response.set_rows(std::min(fake_->rows_per_message, kVocab - row));
      response.set_dtype(OrFloat32(request->dtype()));
      std::string bytes =
          FromFloats(response.dtype(), fake_->window_.data() + row * kHidden, response.rows() * kHidden);
      if (fate == RowFate::kCorrupt) bytes[0] = static_cast<char>(bytes[0] ^ 1);
      response.set_gradient(bytes);
      writer->Write(response);
      row += response.rows();
    }
    return grpc::Status::OK;
  }

  grpc::Status CommitFlush(grpc::ServerContext*, const v1::CommitFlushRequest* request,
                           v1::CommitFlushResponse* response) override {
    const std::lock_guard lock(fake_->mutex_);
    ++fake_->observed_.commits;
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
      return {StatusCode::INTERNAL, "refused by the test"};
    }
    ++fake_->observed_.aborts;
    fake_->frozen_ = false;
    fake_->committed_.notify_all();
    response->set_generation(fake_->generation_);
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
    response->set_state(v1::SERVER_STATE_SERVING);
    return grpc::Status::OK;
  }

 private:
  FakeServer* const fake_;
};

// --- Compute
// ------------------------------------------------------------------------------------------------------------

grpc::Status FakeServer::Attach(const v1::ComputeStart& start, Stream* stream, v1::ComputeReady* ready) {
  const std::lock_guard lock(mutex_);
  ++observed_.streams;
  if (start.incarnation() != incarnation_) return PositionError(StatusCode::ABORTED, "another incarnation");
  for (auto& [key, session] : sessions_) {
    if (session.id != start.session_id()) continue;
    stream->client_key = key;
    ready->mutable_marks()->set_accepted(session.accepted);
    ready->mutable_marks()->set_applied(session.accepted);
    ready->set_generation(generation_);
    return grpc::Status::OK;
  }
  return {StatusCode::NOT_FOUND, "no such session"};
}

bool FakeServer::TakeChunk(const v1::Chunk& chunk, Stream* stream, Writer* writer, grpc::Status* status) {
  std::unique_lock lock(mutex_);
  observed_.chunks.push_back(chunk);
  const Fate fate = on_chunk ? on_chunk(chunk.sequence(), attempts_[chunk.sequence()]++) : Fate::kTake;
  *status = Cut();
  switch (fate) {
    case Fate::kCutBeforeTaking:
      return false;
    case Fate::kEndBeforeTaking:
      *status = grpc::Status::OK;
      return false;
    case Fate::kFence:
      *status = grpc::Status(StatusCode::ABORTED, "another stream took lane 0");
      return false;
    case Fate::kRestartKeepHead:
    case Fate::kRestartLoseHead:
      Restart(fate == Fate::kRestartKeepHead);
      return false;
    case Fate::kExpireSession:
      sessions_.erase(stream->client_key);
      *status = grpc::Status(StatusCode::NOT_FOUND, "the session has expired");
      return false;
    case Fate::kFlushBefore:
      CommitWindow();
      break;
    case Fate::kTakenBySomeoneElse:
      FindSession(stream->client_key)->accepted = chunk.sequence();
      break;
    default:
      break;
  }

  Session* session = FindSession(stream->client_key);
  v1::Disposition disposition = v1::DISPOSITION_ACCUMULATED;
  if (!Admit(chunk, session, &lock, &disposition, status)) return false;
  if (disposition == v1::DISPOSITION_ACCUMULATED) {
    if (fate == Fate::kReject) {
      disposition = v1::DISPOSITION_REJECTED;
    } else if (chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY) {
      AddToWindow(chunk);
    }
  }
  if (fate == Fate::kCutBeforeAnswer) {
    *status = Cut();
    return false;
  }
  stream->outstanding_bytes += PayloadBytes(chunk);
  observed_.peak_outstanding_bytes = std::max(observed_.peak_outstanding_bytes, stream->outstanding_bytes);
  stream->held.push_back(Answer(chunk, disposition));
  stream->held_bytes.push_back(PayloadBytes(chunk));
  if (fate == Fate::kWrongSize) stream->held.back().mutable_result()->mutable_dx()->resize(1);

  // All at once as soon as the client cannot send more; otherwise it would wait for ever.
  const bool all_sent = static_cast<int>(observed_.chunks.size()) >= hold_answers_until_chunks;
  if (!all_sent && stream->outstanding_bytes + PayloadBytes(chunk) <= limits.byte_credit()) return true;
  for (size_t i = 0; i < stream->held.size(); ++i) {
    stream->outstanding_bytes -= stream->held_bytes[i];
    writer->Write(stream->held[i]);
  }
  stream->held.clear();
  stream->held_bytes.clear();
  v1::ComputeResponse applied;
  applied.mutable_applied()->set_applied(session->accepted);
  writer->Write(applied);
  *status = Cut();
  return fate != Fate::kCutAfterAnswer;
}

bool FakeServer::Admit(const v1::Chunk& chunk, Session* session, std::unique_lock<std::mutex>* lock,
                       v1::Disposition* disposition, grpc::Status* status) {
  if (chunk.sequence() <= session->accepted) {
    *disposition = v1::DISPOSITION_REPEATED;
    return true;
  }
  if (chunk.sequence() != session->accepted + 1) {
    *status = PositionError(StatusCode::FAILED_PRECONDITION, "a gap in sequence");
    return false;
  }
  committed_.wait(*lock, [&] { return !frozen_ || chunk.generation() != generation_ + 1 || shut_down_; });
  if (frozen_ || chunk.generation() != generation_) {
    *status = PositionError(StatusCode::ABORTED, "wrong generation");
    return false;
  }
  session->accepted = chunk.sequence();
  *disposition = v1::DISPOSITION_ACCUMULATED;
  return true;
}

v1::ComputeResponse FakeServer::Answer(const v1::Chunk& chunk, v1::Disposition disposition) const {
  v1::ComputeResponse response;
  v1::ChunkResult* result = response.mutable_result();
  result->set_sequence(chunk.sequence());
  result->set_disposition(disposition);
  if (disposition == v1::DISPOSITION_REJECTED) {
    result->mutable_error()->set_code(StatusCode::INVALID_ARGUMENT);
    result->mutable_error()->set_message("hidden_states has 1 element that is not finite");
    result->mutable_error()->set_field("hidden_states");
    return response;
  }
  const std::vector<float> hidden = ToFloats(chunk.hidden_dtype(), chunk.hidden_states());
  std::vector<float> losses;
  std::vector<float> dx;
  for (int64_t i = 0; i < chunk.tokens(); ++i) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + i * 8, 8);
    const bool valid = label != chunk.ignore_index();
    losses.push_back(valid ? static_cast<float>(label) + hidden[static_cast<size_t>(i * kHidden)] : 0.0F);
    for (int64_t j = 0; j < kHidden; ++j)
      dx.push_back(valid ? 2 * hidden[static_cast<size_t>(i * kHidden + j)] : 0.0F);
    result->set_valid_tokens(result->valid_tokens() + static_cast<int64_t>(valid));
    result->set_loss_sum(result->loss_sum() + losses.back());
  }
  result->set_first_token(chunk.first_token());
  result->set_tokens(chunk.tokens());
  result->set_weight_version(weight_version_);
  result->set_dx_dtype(chunk.dx_dtype());
  result->set_losses(FromFloats(v1::DATA_TYPE_FLOAT32, losses.data(), static_cast<int64_t>(losses.size())));
  if (chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY) {
    result->set_dx(FromFloats(chunk.dx_dtype(), dx.data(), static_cast<int64_t>(dx.size())));
  }
  return response;
}

void FakeServer::AddToWindow(const v1::Chunk& chunk) {
  const std::vector<float> hidden = ToFloats(chunk.hidden_dtype(), chunk.hidden_states());
  for (int64_t i = 0; i < chunk.tokens(); ++i) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + i * 8, 8);
    if (label == chunk.ignore_index()) continue;
    for (int64_t j = 0; j < kHidden; ++j) {
      window_[static_cast<size_t>(label * kHidden + j)] +=
          chunk.gradient_scale() * hidden[static_cast<size_t>(i * kHidden + j)];
    }
  }
}

// --- State
// --------------------------------------------------------------------------------------------------------------

FakeServer::FakeServer()
    : window_(kVocab * kHidden, 0.0F),
      weights_(kVocab * kHidden, 0.0F),
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

FakeServer::~FakeServer() {
  {
    const std::lock_guard lock(mutex_);
    shut_down_ = true;
    committed_.notify_all();
  }
  server_->Shutdown(std::chrono::system_clock::now());
}

std::string FakeServer::target() const { return "127.0.0.1:" + std::to_string(port_); }

FakeServer::Observed FakeServer::observed() const {
  const std::lock_guard lock(mutex_);
  return observed_;
}

std::vector<float> FakeServer::window() const {
  const std::lock_guard lock(mutex_);
  return window_;
}

uint64_t FakeServer::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

v1::WindowState FakeServer::window_state() const {
  const std::lock_guard lock(mutex_);
  return frozen_ ? v1::WINDOW_STATE_FROZEN : v1::WINDOW_STATE_OPEN;
}

std::vector<float> FakeServer::weights() const {
  const std::lock_guard lock(mutex_);
  return weights_;
}

void FakeServer::set_weights(std::vector<float> weights) {
  const std::lock_guard lock(mutex_);
  weights_ = std::move(weights);
}

void FakeServer::Restart(bool keep_head) {
  incarnation_ = "incarnation-2";
  has_head_ = keep_head;
  generation_ = 1;
  frozen_ = false;
  sessions_.clear();
  std::fill(window_.begin(), window_.end(), 0.0F);
}

void FakeServer::CommitWindow() {
  last_committed_ = "flush-" + std::to_string(generation_);
  ++generation_;
  frozen_ = false;
  std::fill(window_.begin(), window_.end(), 0.0F);
  committed_.notify_all();
}

FakeServer::Session* FakeServer::FindSession(const std::string& client_key) {
  return &sessions_.at(client_key);
}

grpc::Status FakeServer::PositionError(StatusCode code, const std::string& message) const {
  v1::PositionInfo position;
  position.set_incarnation(incarnation_);
  position.set_generation(generation_);
  v1::RichStatus rich;
  rich.set_code(code);
  rich.set_message(message);
  rich.add_details()->PackFrom(position);
  return {code, message, rich.SerializeAsString()};
}

void FakeServer::FillHead(v1::Head* head) const {
  head->mutable_config()->set_name(kName);
  head->mutable_config()->set_vocab_size(kVocab);
  head->mutable_config()->set_hidden_size(kHidden);
  head->mutable_config()->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  head->set_weight_version(weight_version_);
  head->set_generation(generation_);
}

}  // namespace lossd::testing
