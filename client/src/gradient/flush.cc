// Head::Flush and what belongs to it: freeze the window, read it, check it, end it; or reopen it whole.
#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/common/convert.h"
#include "client/src/common/head_impl.h"
#include "client/src/common/safetensors_type.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/waiting.h"
#include "client/src/gradient/open_commit.h"
#include "client/src/gradient/open_freeze.h"
#include "client/src/gradient/window_call.h"
#include "client/src/weights/row_transfer.h"
#include "lossd/client.h"
#include "proto/safetensors/safetensors.h"

namespace lossd {
namespace {

// The rows of dW, and of db, empty without a bias.
using RowConsumer = std::function<absl::Status(
    int64_t first_row, int64_t rows, std::span<const std::byte> bytes, std::span<const std::byte> bias)>;

using RowTarget = std::function<std::span<std::byte>(int64_t first_row, int64_t rows)>;

constexpr char kGradientTensor[] = "lm_head.weight.grad";
constexpr char kBiasGradientTensor[] = "lm_head.bias.grad";

// One flush of one head, from BeginFlush to its end. If that is not reached, because a callback has thrown an
// exception or there was no memory, the window is reopened.
class FlushRun {
 public:
  FlushRun(internal::HeadContext& head, const FlushOptions& options)
      : head_(head), options_(options), window_(head) {}
  FlushRun(const FlushRun&) = delete;
  FlushRun& operator=(const FlushRun&) = delete;
  ~FlushRun() {
    if (!holds_window_) return;
    try {
      (void)Abort(absl::OkStatus());
    } catch (...) {  // there may be no memory for this either; what is under way already is of more use
    }
  }

  absl::Status Begin(std::span<const SessionMarks> marks) {
    marks_ = internal::KeyOf(marks);
    if (absl::Status begun = window_.Begin(); !begun.ok()) return begun;
    internal::OpenFreeze freeze{.generation = window_.generation(),
                                .gradient_scale = options_.gradient_scale,
                                .marks = {marks.begin(), marks.end()},
                                .life = window_.life()};
    auto begun = head_.connection().Call(&v1::GradientService::Stub::AsyncBeginFlush,
                                         internal::RequestOf(head_, freeze), internal::kWorkCall);
    if (!begun.ok()) {
      if (internal::MayBeDone(begun.status())) head_.unanswered().SetFreeze(std::move(freeze));
      return window_.Explain(begun.status());
    }
    frozen_ = *std::move(begun);
    holds_window_ = true;
    if (frozen_.rows() != head_.config().vocab_size || frozen_.columns() != head_.config().hidden_size) {
      return absl::InternalError(absl::StrCat("the server froze a gradient of ", frozen_.rows(), "x",
                                              frozen_.columns(), "; the head is ", head_.config().vocab_size,
                                              "x", head_.config().hidden_size));
    }
    head_.NoteFrozen(window_.generation() + 1);
    if (options_.on_frozen) options_.on_frozen();
    return absl::OkStatus();
  }

  // Every row once, in order, put where `target` says.
  absl::Status Read(const RowConsumer& consume, const RowTarget& target = {}) {
    const internal::RowTransfer transfer{
        .rows = frozen_.rows(),
        .columns = frozen_.columns(),
        .type = options_.dtype,
        .with_bias = head_.config().bias,
        .attempt =
            [&](int64_t first_row, const internal::RowSink& sink) {
              v1::ReadGradientRequest request;
              request.set_head(head_.config().name);
              request.set_flush_id(frozen_.flush_id());
              request.set_first_row(first_row);
              request.set_dtype(internal::ToProto(options_.dtype));
              return head_.connection().ReadGradient(request, sink);
            },
        .target = target,
        .consume =
            [&](int64_t first_row, std::span<const std::byte> bytes, std::span<const std::byte> bias) {
              const int64_t row_bytes = head_.config().hidden_size * SizeOf(options_.dtype);
              return consume(first_row, static_cast<int64_t>(bytes.size()) / row_bytes, bytes, bias);
            },
        .check_version = nullptr,
        .progress = options_.progress,
    };
    return window_.Explain(internal::ReadRows(head_.options(), transfer));
  }

  // Ends the window. `done`: what there was to be done before.
  absl::StatusOr<FlushResult> Commit(absl::string_view done) {
    holds_window_ = false;
    v1::CommitFlushRequest request;
    request.set_head(head_.config().name);
    request.set_flush_id(frozen_.flush_id());
    const auto committed =
        head_.connection().Call(&v1::GradientService::Stub::AsyncCommitFlush, request, internal::kWorkCall);
    if (committed.ok()) {
      head_.NoteCommit(committed->generation());
      return Result();
    }
    const absl::Status status = window_.Explain(committed.status());
    const std::string flush =
        absl::StrCat("flush ", frozen_.flush_id(), " of generation ", window_.generation());
    if (internal::SaysWhatBecameOfIt(status)) {
      return internal::Annotate(status, absl::StrCat(done, ", but ", flush, " is not committed"));
    }
    head_.unanswered().SetCommit({.flush = Result(), .life = window_.life(), .marks = marks_});
    return internal::WithFlush(
        internal::Annotate(status, absl::StrCat(done, ", but the commit of ", flush,
                                                " is not confirmed; repeat the call, or CommitFlush")),
        Result());
  }

  // Reopens the window after `reason`, which is returned, with a note if even that failed.
  absl::Status Abort(const absl::Status& reason) {
    holds_window_ = false;
    if (IsWindowLost(reason)) return reason;
    v1::AbortFlushRequest request;
    request.set_head(head_.config().name);
    request.set_flush_id(frozen_.flush_id());
    const auto aborted =
        AskForAbort(request, internal::WasInterrupted(reason) || absl::IsDeadlineExceeded(reason));
    if (aborted.ok()) {
      head_.NoteReopened();
      return reason;
    }
    return internal::Annotate(
        reason, absl::StrCat("flush ", frozen_.flush_id(), " failed and the window stays frozen (",
                             aborted.status().message(), ")"));
  }

  // `in_haste`: the caller wants to wait no longer, and the server may be one that does not answer.
  absl::StatusOr<v1::AbortFlushResponse> AskForAbort(const v1::AbortFlushRequest& request, bool in_haste) {
    constexpr auto kMethod = &v1::GradientService::Stub::AsyncAbortFlush;
    if (!in_haste) return head_.connection().Call(kMethod, request);
    const internal::Question none = [] { return absl::OkStatus(); };
    const internal::AskInstead asks(&none);
    return head_.connection().Call(
        kMethod, request, {.patience = internal::Patience::kLastWord, .repeat = internal::Repeat::kNo});
  }

  // After `read`, which is Read's or what became of the rows since: reopens the window, or ends it as the
  // options say.
  absl::StatusOr<FlushResult> End(const absl::Status& read) {
    if (!read.ok()) return Abort(read);
    if (options_.confirm && !options_.confirm()) {
      return Abort(absl::CancelledError("the gradient was read whole, but confirm did not agree to it"));
    }
    if (options_.commit) return Commit("the gradient was read whole");
    holds_window_ = false;
    return Result();
  }

  std::map<std::string, std::string> Metadata() const {
    std::map<std::string, std::string> metadata{
        {"format", "lossd"},
        {"head", head_.config().name},
        {"generation", absl::StrCat(window_.generation())},
        {"norm", absl::StrCat(frozen_.norm())},
        {"window_tokens", absl::StrCat(frozen_.window_tokens())},
        {"non_finite", absl::StrCat(frozen_.non_finite())},
    };
    if (head_.config().bias) metadata["bias_norm"] = absl::StrCat(frozen_.bias_norm());
    return metadata;
  }

 private:
  FlushResult Result() const {
    return {.flush_id = frozen_.flush_id(),
            .generation = window_.generation(),
            .rows = frozen_.rows(),
            .columns = frozen_.columns(),
            .norm = frozen_.norm(),
            .bias_norm = frozen_.bias_norm(),
            .window_tokens = frozen_.window_tokens(),
            .non_finite = frozen_.non_finite()};
  }

  internal::HeadContext& head_;
  const FlushOptions& options_;
  internal::WindowCall window_;
  std::string marks_;
  v1::BeginFlushResponse frozen_;
  bool holds_window_ = false;
};

// Called before a flush that reads. Settles a commit that is open, and returns it to the caller as an error.
absl::Status CheckNothingOpen(internal::HeadContext& head) {
  const auto settled = internal::SettleCommit(head);
  if (!settled.ok()) return settled.status();
  return settled->has_value() ? internal::SettledError(**settled) : absl::OkStatus();
}

// Either the sink or the caller's memory.
absl::Status CheckReceiver(const HeadConfig& config, const FlushOptions& options, const void* gradient,
                           std::span<const float> bias_gradient) {
  if (!options.sink) {
    if (gradient == nullptr) return absl::InvalidArgumentError("gradient is null, and there is no sink");
    return internal::CheckBiasSize(config, bias_gradient.size(), "bias_gradient");
  }
  if (gradient != nullptr) return absl::InvalidArgumentError("gradient is not null, but there is a sink");
  if (!bias_gradient.empty()) {
    return absl::InvalidArgumentError("bias_gradient is given, but there is a sink, which gets it");
  }
  return absl::OkStatus();
}

RowConsumer ConsumerOf(const GradientSink& sink) {
  return [&sink, values = std::vector<float>()](int64_t first_row, int64_t rows,
                                                std::span<const std::byte> bytes,
                                                std::span<const std::byte> bias) mutable {
    values.resize(bias.size() / sizeof(float));
    std::ranges::copy(bias, std::as_writable_bytes(std::span(values)).begin());
    absl::Status taken = sink(first_row, rows, bytes.data(), values);
    if (taken.ok()) return taken;
    return absl::CancelledError(absl::StrCat("the sink ended the flush at row ", first_row, ": ",
                                             absl::StatusCodeToString(taken.code()), ": ", taken.message()));
  };
}

}  // namespace

absl::StatusOr<FlushResult> Head::Flush(const FlushOptions& options, std::span<const SessionMarks> marks,
                                        void* gradient, std::span<float> bias_gradient) const {
  if (absl::Status status = CheckReceiver(config(), options, gradient, bias_gradient); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckNothingOpen(*impl_->context); !status.ok()) return status;
  FlushRun run(*impl_->context, options);
  if (absl::Status status = run.Begin(marks); !status.ok()) return status;
  if (options.sink) return run.End(run.Read(ConsumerOf(options.sink)));
  auto* target = static_cast<std::byte*>(gradient);
  const int64_t row_bytes = config().hidden_size * SizeOf(options.dtype);
  const std::span<std::byte> bias_target = std::as_writable_bytes(bias_gradient);
  return run.End(run.Read(
      [&](int64_t first_row, int64_t /*rows*/, std::span<const std::byte> /*bytes*/,
          std::span<const std::byte> bias) {
        if (bias.empty()) return absl::OkStatus();
        std::ranges::copy(bias, bias_target.subspan(static_cast<size_t>(first_row) * sizeof(float)).begin());
        return absl::OkStatus();
      },
      [&](int64_t first_row, int64_t rows) {
        return std::span(target + first_row * row_bytes, static_cast<size_t>(rows * row_bytes));
      }));
}

absl::StatusOr<FlushResult> Head::FlushToFile(const FlushOptions& options,
                                              std::span<const SessionMarks> marks,
                                              const std::string& path) const {
  if (options.sink) return absl::InvalidArgumentError("sink is set, but the gradient goes into a file");
  if (absl::Status status = CheckNothingOpen(*impl_->context); !status.ok()) return status;
  FlushRun run(*impl_->context, options);
  if (absl::Status status = run.Begin(marks); !status.ok()) return status;
  std::vector<SafetensorsTensor> tensors = {{.name = kGradientTensor,
                                             .dtype = internal::ToSafetensors(options.dtype),
                                             .shape = {config().vocab_size, config().hidden_size}}};
  if (config().bias) tensors.push_back({.name = kBiasGradientTensor, .shape = {config().vocab_size}});
  auto writer = SafetensorsWriter::Create(path, std::move(tensors), run.Metadata());
  if (!writer.ok()) return run.End(writer.status());
  std::vector<std::byte> bias_gradient;  // which comes with the rows and stands behind all of them
  absl::Status status = run.Read([&](int64_t /*first_row*/, int64_t /*rows*/,
                                     std::span<const std::byte> bytes, std::span<const std::byte> bias) {
    bias_gradient.insert(bias_gradient.end(), bias.begin(), bias.end());
    return writer->Append(bytes);
  });
  if (status.ok()) status = writer->Append(bias_gradient);
  if (status.ok()) status = writer->Finish();
  return run.End(status);
}

absl::StatusOr<FlushResult> Head::Discard(std::span<const SessionMarks> marks) const {
  const auto settled = internal::SettleCommit(*impl_->context);
  if (!settled.ok()) return settled.status();
  if (settled->has_value()) {
    if ((*settled)->marks == internal::KeyOf(marks)) return (*settled)->flush;  // the same call again
    return internal::SettledError(**settled);
  }
  const FlushOptions options;
  FlushRun run(*impl_->context, options);
  if (absl::Status status = run.Begin(marks); !status.ok()) return status;
  return run.Commit("the window is frozen to be dropped");
}

absl::Status Head::CommitFlush(const std::string& flush_id) const {
  v1::CommitFlushRequest request;
  request.set_head(config().name);
  request.set_flush_id(flush_id);
  const auto committed = impl_->context->connection().Call(&v1::GradientService::Stub::AsyncCommitFlush,
                                                           request, internal::kWorkCall);
  if (committed.ok()) impl_->context->NoteCommit(committed->generation());
  if (internal::SaysWhatBecameOfIt(committed.status())) impl_->context->unanswered().ForgetCommit(flush_id);
  return committed.status();
}

absl::Status Head::AbortFlush(const std::string& flush_id) const {
  v1::AbortFlushRequest request;
  request.set_head(config().name);
  request.set_flush_id(flush_id);
  const auto aborted =
      impl_->context->connection().Call(&v1::GradientService::Stub::AsyncAbortFlush, request);
  if (aborted.ok()) {
    impl_->context->NoteReopened();
    impl_->context->unanswered().ForgetCommit(flush_id);
  }
  return aborted.status();
}

}  // namespace lossd
