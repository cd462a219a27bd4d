#include "tests/unit/client/fake_server.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "tests/unit/client/fake_values.h"

namespace lossd::testing {
namespace {

using grpc::StatusCode;

bool HasDx(const v1::Chunk& chunk) {
  return chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY &&
         chunk.mode() != v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT;
}

int64_t PayloadBytes(const v1::Chunk& chunk) {
  const int64_t dx =
      HasDx(chunk) ? chunk.tokens() * FakeServer::kHidden * SizeOf(TypeOf(chunk.dx_dtype())) : 0;
  return static_cast<int64_t>(chunk.labels().size() + chunk.hidden_states().size()) + chunk.tokens() * 4 + dx;
}

}  // namespace

bool FakeServer::ForgetsWrite() {
  if (forgotten_writes == 0) return false;
  --forgotten_writes;
  if (forgotten_are_published) ++weight_version_;
  return true;
}

grpc::Status FakeServer::Open(const v1::OpenSessionRequest& request, v1::OpenSessionResponse* response) {
  const std::lock_guard lock(mutex_);
  if (!has_head_) return {StatusCode::NOT_FOUND, "no such head"};
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
  *response->mutable_limits() = limits;
  for (int i = 0; i < lanes; ++i) {
    auto* marks = response->add_lanes();
    marks->set_lane(i);
    marks->set_accepted(session.accepted[static_cast<size_t>(i)]);
    marks->set_applied(session.accepted[static_cast<size_t>(i)]);
  }
  response->set_vocab_size(kVocab);
  response->set_hidden_size(kHidden);
  response->set_weight_dtype(v1::DATA_TYPE_FLOAT32);
  response->set_has_bias(has_bias);
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
    observed_.stream_lanes.push_back(stream->lane);
    const uint64_t accepted = session.accepted.at(static_cast<size_t>(stream->lane));
    ready->mutable_marks()->set_lane(stream->lane);
    ready->mutable_marks()->set_accepted(accepted);
    ready->mutable_marks()->set_applied(accepted);
    ready->set_generation(generation_);
    return grpc::Status::OK;
  }
  return {StatusCode::NOT_FOUND, "no such session"};
}

bool FakeServer::TakeChunk(const v1::Chunk& chunk, Stream* stream, Writer* writer, grpc::Status* status) {
  std::unique_lock lock(mutex_);
  if (!sessions_.contains(stream->client_key)) {
    *status = grpc::Status(StatusCode::NOT_FOUND, "the session is gone");
    return false;
  }
  observed_.chunks.push_back(chunk);
  observed_.chunk_lanes.push_back(stream->lane);
  const int attempt = attempts_[{stream->client_key, stream->lane, chunk.sequence()}]++;
  Fate fate = Fate::kTake;
  if (on_lane_chunk) {
    fate = on_lane_chunk(stream->lane, chunk.sequence(), attempt);
  } else if (on_chunk) {
    fate = on_chunk(chunk.sequence(), attempt);
  }
  if (fate == Fate::kStall) {
    chunk_done_.wait(lock, [this] { return shut_down_ || stalled_until(observed_); });
  }
  const bool goes_on = DealWith(chunk, fate, &lock, stream, writer, status);
  chunk_done_.notify_all();
  return goes_on;
}

bool FakeServer::DealWith(const v1::Chunk& chunk, Fate fate, std::unique_lock<std::mutex>* lock,
                          Stream* stream, Writer* writer, grpc::Status* status) {
  *status = Cut();
  switch (fate) {
    case Fate::kCutBeforeTaking:
      return false;
    case Fate::kEndBeforeTaking:
      *status = grpc::Status::OK;
      return false;
    case Fate::kRestartKeepHead:
    case Fate::kRestartLoseHead:
      Restart(fate == Fate::kRestartKeepHead);
      return false;
    case Fate::kReplicaLost:
      LoseLocked(loss);
      return false;
    case Fate::kAbortBefore:
      ReopenWindow();
      break;
    case Fate::kRestoreBefore:
      generation_ = 1;
      ++restores_;
      break;
    case Fate::kOvertaken:
      AcceptedOf(*stream) += 100;
      return false;
    case Fate::kTakenBySomeoneElse:
      AcceptedOf(*stream) = chunk.sequence();
      break;
    default:
      break;
  }

  v1::Disposition disposition = v1::DISPOSITION_ACCUMULATED;
  if (!Admit(chunk, *stream, lock, &disposition, status)) return false;
  if (disposition == v1::DISPOSITION_ACCUMULATED && chunk.mode() != v1::COMPUTE_MODE_LOSS_ONLY) {
    AddToWindow(chunk);
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
  applied.mutable_applied()->set_applied(AcceptedOf(*stream));
  writer->Write(applied);
  *status = Cut();
  return fate != Fate::kCutAfterAnswer;
}

bool FakeServer::Admit(const v1::Chunk& chunk, const Stream& stream, std::unique_lock<std::mutex>* lock,
                       v1::Disposition* disposition, grpc::Status* status) {
  if (chunk.sequence() <= AcceptedOf(stream)) {
    *disposition = v1::DISPOSITION_REPEATED;
    return true;
  }
  if (chunk.sequence() != AcceptedOf(stream) + 1) {
    *status = PositionError(StatusCode::FAILED_PRECONDITION, "a gap in sequence");
    return false;
  }
  const bool next = double_buffer && frozen_ && chunk.generation() == generation_ + 1;
  if (!next) {
    committed_.wait(*lock, [&] { return !frozen_ || chunk.generation() != generation_ + 1 || shut_down_; });
  }
  if (!next && (frozen_ || chunk.generation() != generation_)) {
    *status = PositionError(StatusCode::ABORTED, "wrong generation");
    return false;
  }
  AcceptedOf(stream) = chunk.sequence();
  *disposition = v1::DISPOSITION_ACCUMULATED;
  return true;
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
  FillReturns(chunk, result);
  return response;
}

void FakeServer::FillReturns(const v1::Chunk& chunk, v1::ChunkResult* result) const {
  const v1::WantedReturns& wanted = chunk.options().returns();
  v1::TokenReturns* returns = result->mutable_returns();
  if (wanted.log_sum_exp()) returns->set_log_sum_exp(chunk.token_inputs().lse_gradients());
  const auto append = [](auto value, std::string* bytes) {
    bytes->append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  for (int64_t i = 0; i < chunk.tokens() - static_cast<int64_t>(short_returns); ++i) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + i * 8, 8);
    const auto value = static_cast<float>(label);
    const auto token = static_cast<int32_t>(label);
    if (wanted.entropies()) append(value, returns->mutable_entropies());
    if (wanted.predictions()) append(token, returns->mutable_predictions());
    if (wanted.divergences()) append(value / 2, returns->mutable_divergences());
    for (int32_t k = 0; k < wanted.top_k(); ++k) {
      append(token + k, returns->mutable_top_tokens());
      append(value, returns->mutable_top_log_probabilities());
    }
  }
  const auto valid = static_cast<double>(result->valid_tokens());
  if (chunk.options().has_distillation()) {
    result->mutable_sums()->set_divergence(valid / 2);
    result->set_teacher_weight_version(result->weight_version() + 6);
  }
  if (wanted.predictions()) result->mutable_sums()->set_correct_tokens(result->valid_tokens());
}

void FakeServer::AddToWindow(const v1::Chunk& chunk) {
  const std::vector<float> hidden = ToFloats(chunk.hidden_dtype(), chunk.hidden_states());
  for (int64_t i = 0; i < chunk.tokens(); ++i) {
    int64_t label = 0;
    std::memcpy(&label, chunk.labels().data() + i * 8, 8);
    if (label == chunk.ignore_index()) continue;
    for (int64_t j = 0; j < kHidden; ++j) {
      (frozen_ ? next_window_ : window_)[static_cast<size_t>(label * kHidden + j)] +=
          chunk.gradient_scale() * hidden[static_cast<size_t>(i * kHidden + j)];
    }
  }
}

std::vector<float> FakeServer::BiasWindow() const {
  std::vector<float> bias;
  for (int64_t row = 0; row < kVocab; ++row) {
    bias.push_back(window_[static_cast<size_t>(row * kHidden)] / 2);
  }
  return bias;
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

std::vector<float> FakeServer::bias() const {
  const std::lock_guard lock(mutex_);
  return bias_;
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

void FakeServer::CommitWindow() {
  last_committed_ = "flush-" + std::to_string(generation_);
  ++generation_;
  frozen_ = false;
  window_ = next_window_;
  std::fill(next_window_.begin(), next_window_.end(), 0.0F);
  committed_.notify_all();
}

void FakeServer::ReopenWindow() {
  frozen_ = false;
  for (size_t i = 0; i < window_.size(); ++i) window_[i] += std::exchange(next_window_[i], 0.0F);
  committed_.notify_all();
}

FakeServer::Session* FakeServer::FindSession(const std::string& client_key) {
  return &sessions_.at(client_key);
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
  head->mutable_config()->set_bias(has_bias);
  head->mutable_config()->set_double_buffer(double_buffer);
  head->set_weight_version(weight_version_);
  head->set_max_logits_bytes(1 << 20);
  head->set_max_logits_rows(2);
  head->set_generation(generation_);
}

}  // namespace lossd::testing
