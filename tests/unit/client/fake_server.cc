#include "tests/unit/client/fake_server.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "tests/support/wait.h"
#include "tests/unit/client/fake_values.h"

namespace lossd::testing {
namespace {

using grpc::StatusCode;

bool HasDx(const v1::Chunk& chunk) {
  return chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY &&
         chunk.mode() != v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT;
}

}  // namespace

grpc::Status FakeServer::Open(const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response) {
  const std::lock_guard lock(mutex_);
  const int lanes = std::max(1, request.lanes());
  Session& session = sessions_[request.client_key()];
  response->set_is_new(session.id.empty());
  if (session.id.empty()) session.id = "session-" + std::to_string(++observed_.sessions);
  if (session.accepted.empty()) session.accepted.resize(static_cast<size_t>(lanes));
  if (session.accepted.size() != static_cast<size_t>(lanes)) {
    return {StatusCode::INVALID_ARGUMENT, "open with another number of lanes"};
  }
  response->set_session_id(session.id);
  response->set_incarnation(incarnation_);
  response->set_generation(generation_);
  if (history_ != 0) {
    response->set_replica(0);
    response->set_history(history_);
  }
  response->set_restores(restores_);
  response->set_in_window(in_window.value_or(std::ranges::any_of(session.accepted, std::identity())));
  v1::SessionLimits* limits = response->mutable_limits();
  limits->set_max_chunk_bytes(1 << 20);
  limits->set_max_chunk_tokens(1 << 16);
  limits->set_byte_credit(1 << 22);
  limits->set_lease_seconds(60);
  for (int i = 0; i < lanes; ++i) {
    auto* marks = response->add_lanes();
    marks->set_lane(i);
    marks->set_accepted(session.accepted[static_cast<size_t>(i)]);
    marks->set_applied(session.accepted[static_cast<size_t>(i)]);
  }
  response->set_vocab_size(kVocab);
  response->set_hidden_size(kHidden);
  response->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  for (const std::string& address : lane_addresses) response->add_lane_addresses(address);
  return grpc::Status::OK;
}

// Compute

grpc::Status FakeServer::Attach(const v1::ComputeStart& start, Stream* stream, v1::ComputeReady* ready) {
  const std::lock_guard lock(mutex_);
  ++observed_.streams;
  if (loss_before_streams) LoseLocked(*std::exchange(loss_before_streams, std::nullopt));
  if (start.incarnation() != incarnation_) return PositionError(StatusCode::ABORTED, "another incarnation");
  for (auto& [key, session] : sessions_) {
    if (session.id != start.session_id()) continue;
    stream->client_key = key;
    stream->lane = start.lane();
    const uint64_t accepted = session.accepted.at(static_cast<size_t>(stream->lane));
    ready->mutable_marks()->set_lane(stream->lane);
    ready->mutable_marks()->set_accepted(accepted);
    ready->mutable_marks()->set_applied(accepted);
    ready->set_generation(generation_);
    return grpc::Status::OK;
  }
  return {StatusCode::NOT_FOUND, "no such session"};
}

bool FakeServer::TakeChunk(const v1::Chunk& chunk, const Stream& stream, Writer* writer,
                           grpc::Status* status) {
  std::unique_lock lock(mutex_);
  if (!sessions_.contains(stream.client_key)) {
    *status = grpc::Status(StatusCode::NOT_FOUND, "the session is gone");
    return false;
  }
  observed_.chunks.push_back(chunk);
  const int attempt = attempts_[{stream.client_key, stream.lane, chunk.sequence()}]++;
  const Fate fate = on_chunk ? on_chunk(chunk.sequence(), attempt) : Fate::kTake;
  if (fate == Fate::kStall) {
    Await("the end of a stall", chunk_done_, lock, [this] { return shut_down_ || stalled_until(); });
  }
  const bool goes_on = DealWith(chunk, fate, stream, writer, status);
  chunk_done_.notify_all();
  return goes_on;
}

bool FakeServer::DealWith(const v1::Chunk& chunk, Fate fate, const Stream& stream, Writer* writer,
                          grpc::Status* status) {
  *status = Cut();
  if (fate == Fate::kReplicaLost) LoseLocked(loss);
  if (fate == Fate::kReplicaLost || fate == Fate::kCutBeforeTaking) return false;

  uint64_t& accepted = sessions_.at(stream.client_key).accepted.at(static_cast<size_t>(stream.lane));
  const bool is_new = chunk.sequence() > accepted;
  if (is_new && chunk.sequence() != accepted + 1) {
    *status = PositionError(StatusCode::FAILED_PRECONDITION, "a gap in sequence");
    return false;
  }
  if (is_new && chunk.generation() != generation_) {
    *status = PositionError(StatusCode::ABORTED, "wrong generation");
    return false;
  }
  if (is_new) accepted = chunk.sequence();
  if (is_new && chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY) AddToWindow(chunk);
  if (fate == Fate::kCutBeforeAnswer) return false;
  writer->Write(Answer(chunk, is_new ? v1::DISPOSITION_ACCUMULATED : v1::DISPOSITION_REPEATED));
  v1::ComputeResponse applied;
  applied.mutable_applied()->set_applied(accepted);
  writer->Write(applied);
  return fate != Fate::kCutAfterAnswer;
}

v1::ComputeResponse FakeServer::Answer(const v1::Chunk& chunk, v1::Disposition disposition) const {
  v1::ComputeResponse response;
  v1::ChunkResult* result = response.mutable_result();
  result->set_sequence(chunk.sequence());
  result->set_disposition(disposition);
  const std::vector<float> hidden = ToFloats(chunk.hidden_dtype(), chunk.hidden_states());
  const std::vector<float> weights = ToFloats(v1::DATA_TYPE_FLOAT32, chunk.token_inputs().weights());
  std::vector<float> losses;
  std::vector<float> dx;
  for (int64_t i = 0; i < chunk.tokens(); ++i) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + i * 8, 8);
    const bool valid = label != chunk.ignore_index();
    losses.push_back(valid ? static_cast<float>(label) + hidden[static_cast<size_t>(i * kHidden)] : 0.0F);
    if (!weights.empty()) losses.back() *= weights[static_cast<size_t>(i)];
    for (int64_t j = 0; j < kHidden; ++j) {
      dx.push_back(valid ? 2 * hidden[static_cast<size_t>(i * kHidden + j)] : 0.0F);
    }
    result->set_valid_tokens(result->valid_tokens() + static_cast<int64_t>(valid));
    result->set_loss_sum(result->loss_sum() + losses.back());
  }
  result->set_first_token(chunk.first_token());
  result->set_tokens(chunk.tokens());
  result->set_weight_version(weight_version_);
  result->set_dx_dtype(chunk.dx_dtype());
  result->set_losses(FromFloats(v1::DATA_TYPE_FLOAT32, losses.data(), static_cast<int64_t>(losses.size())));
  if (HasDx(chunk)) {
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

// State

std::string FakeServer::target() const { return "127.0.0.1:" + std::to_string(port_); }

FakeServer::Observed FakeServer::observed() const {
  const std::lock_guard lock(mutex_);
  return observed_;
}

std::vector<float> FakeServer::window() const {
  const std::lock_guard lock(mutex_);
  return window_;
}

std::vector<float> FakeServer::weights() const {
  const std::lock_guard lock(mutex_);
  return weights_;
}

void FakeServer::BecomeReplica(uint64_t history, const std::string& incarnation) {
  const std::lock_guard lock(mutex_);
  history_ = history;
  incarnation_ = incarnation;
}

void FakeServer::Lose(const Loss& is) {
  const std::lock_guard lock(mutex_);
  LoseLocked(is);
}

void FakeServer::LoseLocked(const Loss& is) {
  incarnation_ = is.incarnation;
  generation_ = is.generation;
  if (is.history != 0) history_ = is.history;
  restores_ += is.restores;
  sessions_.clear();
  std::fill(window_.begin(), window_.end(), 0.0F);
}

grpc::Status FakeServer::PositionError(StatusCode code, const std::string& message,
                                       std::optional<uint64_t> restores) const {
  v1::PositionInfo position;
  if (restores) position.set_restores(*restores);
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
