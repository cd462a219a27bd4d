#include "client/examples/train_lm/remote_head.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/tools/own_head.h"

namespace lossd::train_lm {

namespace {

HeadConfig ConfigOf(const std::string& name, const HeadShape& shape, HeadPrecision precision,
                    const AdamOptions& adam) {
  return {.name = name,
          .vocab_size = shape.vocabulary,
          .hidden_size = shape.hidden,
          .weight_type = precision == HeadPrecision::kBFloat16 ? DataType::kBFloat16 : DataType::kFloat32,
          .optimizer = {.kind = OptimizerKind::kAdamW,
                        .weight_decay = adam.weight_decay,
                        .beta1 = adam.beta1,
                        .beta2 = adam.beta2,
                        .eps = adam.epsilon},
          .master_weights = precision == HeadPrecision::kBFloat16};
}

absl::Status CheckUntouched(const Head& head) {
  absl::StatusOr<HeadInfo> info = head.Info();
  if (!info.ok()) return info.status();
  const std::string& name = head.config().name;
  if (info->window_tokens > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("head '", name, "' holds the gradients of ", info->window_tokens,
                     " tokens of another run: choose another name or delete it"));
  }
  if (info->optimizer_steps > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("head '", name, "' was trained for ", info->optimizer_steps,
                     " steps, which its optimizer remembers: choose another name or delete it"));
  }
  return absl::OkStatus();
}

// Says after a while what is waited for, and in the end what may help.
absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                const tools::ConnectionOptions& connection,
                                                std::chrono::seconds patience) {
  ClientOptions options{.reconnect_timeout = patience};
  connection.SetIn(options);
  const std::jthread told([&target, patience](const std::stop_token& connected) {
    constexpr std::chrono::seconds kSilence(3);
    std::mutex mutex;
    std::unique_lock lock(mutex);
    if (std::condition_variable_any().wait_for(lock, connected, kSilence,
                                               [&] { return connected.stop_requested(); })) {
      return;
    }
    std::fputs(absl::StrCat("train_lm: no answer yet from ", target, "; waiting for it up to ",
                            patience.count(), " s. Is lossd running there?\n")
                   .c_str(),
               stderr);
  });
  absl::StatusOr<std::unique_ptr<Client>> client = Client::Connect(target, options);
  if (client.ok()) return client;
  absl::Status status = tools::NameFlags(client.status());
  if (!absl::IsUnavailable(status) || absl::StrContains(status.message(), "--tls_")) return status;
  return absl::UnavailableError(
      absl::StrCat(status.message(), "\n  is lossd running at '", target,
                   "'? start it there, name its address with --server, or train without one: --local"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteHead>> RemoteHead::Open(const std::string& target,
                                                             const tools::ConnectionOptions& connection,
                                                             const std::string& name, const HeadShape& shape,
                                                             HeadPrecision precision, const AdamOptions& adam,
                                                             HeadLifetime lifetime) {
  // Long enough for a server that is just starting; a mistyped address should not look like a hang.
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(target, connection, std::chrono::seconds(20));
  if (!client.ok()) return client.status();
  absl::StatusOr<Head> head = (*client)->CreateHead(ConfigOf(name, shape, precision, adam));
  if (!head.ok()) return head.status();
  if (absl::Status untouched = CheckUntouched(*head); !untouched.ok()) return untouched;
  return std::unique_ptr<RemoteHead>(
      new RemoteHead(*std::move(client), *std::move(head), SessionOptions{}, lifetime));
}

absl::StatusOr<std::unique_ptr<RemoteHead>> RemoteHead::OpenResumable(
    const std::string& target, const tools::ConnectionOptions& connection, const std::string& name,
    const HeadShape& shape, HeadPrecision precision, const AdamOptions& adam,
    const std::optional<std::string>& tag) {
  // A server that is started again may have much to read.
  absl::StatusOr<std::unique_ptr<Client>> client = Connect(target, connection, std::chrono::seconds(120));
  if (!client.ok()) return client.status();
  if (tag.has_value()) {
    const absl::StatusOr<CheckpointInfo> restored = (*client)->RestoreCheckpoint(name, *tag);
    if (!restored.ok()) return restored.status();
  }
  absl::StatusOr<Head> head = (*client)->CreateHead(ConfigOf(name, shape, precision, adam));
  if (!head.ok()) return head.status();
  if (!tag.has_value()) {
    if (absl::Status untouched = CheckUntouched(*head); !untouched.ok()) return untouched;
  }
  // The session is the one that the checkpoint has, if it has one.
  return std::unique_ptr<RemoteHead>(new RemoteHead(
      *std::move(client), *std::move(head),
      SessionOptions{.client_key = "train_lm", .deterministic = Deterministic::kYes}, HeadLifetime::kKept));
}

RemoteHead::RemoteHead(std::unique_ptr<Client> client, Head head, SessionOptions session_options,
                       HeadLifetime lifetime)
    : client_(std::move(client)),
      head_(std::move(head)),
      session_options_(std::move(session_options)),
      lifetime_(lifetime) {}

absl::Status RemoteHead::EnsureSession() {
  if (session_.has_value()) return absl::OkStatus();
  absl::StatusOr<Session> session = head_.OpenSession(session_options_);
  if (!session.ok()) return session.status();
  session_.emplace(*std::move(session));
  return absl::OkStatus();
}

absl::Status RemoteHead::Noted(absl::Status status) {
  unreachable_ = absl::IsUnavailable(status);
  return status;
}

RemoteHead::~RemoteHead() {
  if (unreachable_ && lifetime_ == HeadLifetime::kUntilClosed) {
    std::fputs(absl::StrCat("train_lm: the server cannot be reached; if it still runs, it holds head '",
                            head_.config().name, "'\n")
                   .c_str(),
               stderr);
    return;
  }
  if (session_.has_value()) session_->Close().IgnoreError();  // best effort: it has a lease
  if (lifetime_ == HeadLifetime::kUntilClosed) {
    tools::DeleteOwnHead(*client_, head_.config().name, "train_lm");
  }
}

absl::Status RemoteHead::WriteWeights(std::span<const float> weights) {
  return head_.WriteWeights(DataType::kFloat32, weights.data()).status();
}

absl::StatusOr<double> RemoteHead::LossAndGradients(std::span<const int64_t> labels,
                                                    std::span<const float> hidden, float gradient_scale,
                                                    std::span<float> dx) {
  if (absl::Status status = EnsureSession(); !status.ok()) return status;
  const Batch batch = {.labels = labels, .hidden_states = hidden.data(), .gradient_scale = gradient_scale};
  const BatchOutputs outputs = {.losses = {}, .dx = dx.data()};
  absl::StatusOr<BatchResult> result = session_->Compute(batch, outputs);
  if (!result.ok()) return Noted(result.status());
  return result->loss_sum;
}

absl::StatusOr<double> RemoteHead::Loss(std::span<const int64_t> labels, std::span<const float> hidden) {
  if (absl::Status status = EnsureSession(); !status.ok()) return status;
  const Batch batch = {.labels = labels, .hidden_states = hidden.data(), .mode = ComputeMode::kLossOnly};
  absl::StatusOr<BatchResult> result = session_->Compute(batch, {});
  if (!result.ok()) return Noted(result.status());
  return result->loss_sum;
}

absl::Status RemoteHead::Step(double learning_rate) {
  if (absl::Status status = EnsureSession(); !status.ok()) return status;
  const SessionMarks marks = session_->marks();
  return Noted(head_.ApplyStep({.learning_rate = learning_rate}, std::span(&marks, 1)).status());
}

absl::Status RemoteHead::Save(const std::string& tag) { return head_.SaveCheckpoint(tag).status(); }

absl::StatusOr<HeadReport> RemoteHead::Report() {
  absl::StatusOr<ServerStatus> status = client_->Status();
  if (!status.ok()) return status.status();
  absl::StatusOr<ServerMemory> memory = client_->Memory();
  if (!memory.ok()) return memory.status();
  return HeadReport{status->device, memory->process_peak_bytes};
}

HeadTraffic RemoteHead::Traffic() const {
  const lossd::Traffic traffic = client_->TrafficSoFar();
  return {.sent = traffic.bytes_sent, .received = traffic.bytes_received};
}

}  // namespace lossd::train_lm
