// Head::Flush and what belongs to it: freeze the window, read it, check it, end it; or reopen it whole.
#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/checksum.h"
#include "client/src/convert.h"
#include "client/src/grpc_status.h"
#include "client/src/head_impl.h"
#include "client/src/row_transfer.h"
#include "client/src/safetensors.h"
#include "lossd/client.h"

namespace lossd {
namespace {

using RowConsumer = std::function<absl::Status(int64_t first_row, std::span<const std::byte> bytes)>;

constexpr char kGradientTensor[] = "lm_head.weight.grad";

// One flush of one head, from BeginFlush to its end.
class FlushRun {
 public:
  FlushRun(internal::HeadContext& head, const FlushOptions& options) : head_(head), options_(options) {}

  absl::Status Begin(std::span<const SessionMarks> marks) {
    // A server that was restarted since answers with heads, sessions or generations that are not ours.
    incarnation_ = head_.incarnation();
    if (incarnation_.empty()) {
      const auto server = head_.connection().GetStatus({});
      if (!server.ok()) return server.status();
      incarnation_ = server->incarnation();
    }
    v1::GetHeadRequest get;
    get.set_name(head_.config().name);
    const auto head = head_.connection().GetHead(get);
    if (!head.ok()) return Explain(head.status());
    generation_ = head->generation();

    v1::BeginFlushRequest request;
    request.set_head(head_.config().name);
    request.set_generation(generation_);
    if (options_.gradient_scale != 1) request.set_gradient_scale(options_.gradient_scale);
    for (const SessionMarks& session : marks) *request.add_marks() = internal::ToProto(session);
    auto begun = head_.connection().BeginFlush(request);
    if (!begun.ok()) return Explain(begun.status());
    frozen_ = *std::move(begun);
    if (frozen_.rows() != head_.config().vocab_size || frozen_.columns() != head_.config().hidden_size) {
      return absl::InternalError(absl::StrCat("the server froze a gradient of ", frozen_.rows(), "x",
                                              frozen_.columns(), "; the head is ", head_.config().vocab_size,
                                              "x", head_.config().hidden_size));
    }
    return absl::OkStatus();
  }

  // Every row once, in order. fp32 rows are checked against the checksum of the whole.
  absl::Status Read(const RowConsumer& consume) {
    internal::Checksum checksum;
    const internal::RowTransfer transfer{
        .rows = frozen_.rows(),
        .columns = frozen_.columns(),
        .type = options_.dtype,
        .attempt =
            [&](int64_t first_row, const internal::RowSink& sink) {
              v1::ReadGradientRequest request;
              request.set_head(head_.config().name);
              request.set_flush_id(frozen_.flush_id());
              request.set_first_row(first_row);
              request.set_dtype(internal::ToProto(options_.dtype));
              return head_.connection().ReadGradient(request, sink);
            },
        .consume =
            [&](int64_t first_row, std::span<const std::byte> bytes) {
              checksum.Add(bytes);
              return consume(first_row, bytes);
            },
        .check_version = nullptr,
        .progress = options_.progress,
    };
    if (absl::Status status = internal::ReadRows(head_.options(), transfer); !status.ok()) {
      return Explain(status);
    }
    if (options_.dtype == DataType::kFloat32 && checksum.Value() != frozen_.checksum()) {
      return absl::DataLossError(absl::StrCat("the gradient's checksum is ", absl::Hex(checksum.Value()),
                                              " after the transfer; the server's is ",
                                              absl::Hex(frozen_.checksum())));
    }
    return absl::OkStatus();
  }

  absl::Status Commit() {
    v1::CommitFlushRequest request;
    request.set_head(head_.config().name);
    request.set_flush_id(frozen_.flush_id());
    const auto committed = head_.connection().CommitFlush(request);
    if (committed.ok()) {
      head_.NoteCommit(committed->generation());
      return absl::OkStatus();
    }
    return internal::Annotate(Explain(committed.status()),
                              absl::StrCat("the gradient was read whole, but the commit of flush ",
                                           frozen_.flush_id(), " is not confirmed; repeat CommitFlush"));
  }

  // Reopens the window after `reason`, which is returned, with a note if even that failed.
  absl::Status Abort(const absl::Status& reason) {
    if (IsWindowLost(reason)) return reason;
    v1::AbortFlushRequest request;
    request.set_head(head_.config().name);
    request.set_flush_id(frozen_.flush_id());
    const auto aborted = head_.connection().AbortFlush(request);
    if (aborted.ok()) return reason;
    return internal::Annotate(
        reason, absl::StrCat("flush ", frozen_.flush_id(), " failed and the window stays frozen (",
                             aborted.status().message(), ")"));
  }

  FlushResult Result() const {
    return {.flush_id = frozen_.flush_id(),
            .generation = generation_,
            .rows = frozen_.rows(),
            .columns = frozen_.columns(),
            .norm = frozen_.norm(),
            .window_tokens = frozen_.window_tokens(),
            .non_finite = frozen_.non_finite()};
  }

  std::map<std::string, std::string> Metadata() const {
    std::map<std::string, std::string> metadata{
        {"format", "lossd"},
        {"head", head_.config().name},
        {"generation", absl::StrCat(generation_)},
        {"norm", absl::StrCat(frozen_.norm())},
        {"window_tokens", absl::StrCat(frozen_.window_tokens())},
        {"non_finite", absl::StrCat(frozen_.non_finite())},
        // Of the fp32 gradient, so of this file's tensor only if that is fp32.
        {"xxh3_64_float32", absl::StrCat(absl::Hex(frozen_.checksum(), absl::kZeroPad16))},
    };
    return metadata;
  }

 private:
  // The status as it is, or "window lost" if its cause is that the server was restarted.
  absl::Status Explain(const absl::Status& status) const {
    if (!absl::IsNotFound(status) && !absl::IsAborted(status) && !absl::IsFailedPrecondition(status)) {
      return status;
    }
    const auto server = head_.connection().GetStatus({});
    if (!server.ok() || server->incarnation() == incarnation_) return status;
    return internal::WindowLostError(head_.config().name, generation_,
                                     "the server was restarted before the flush");
  }

  internal::HeadContext& head_;
  const FlushOptions& options_;
  std::string incarnation_;
  uint64_t generation_ = 0;
  v1::BeginFlushResponse frozen_;
};

}  // namespace

absl::StatusOr<FlushResult> Head::Flush(const FlushOptions& options, std::span<const SessionMarks> marks,
                                        void* gradient) const {
  if (gradient == nullptr) return absl::InvalidArgumentError("gradient is null");
  FlushRun run(*impl_->context, options);
  if (absl::Status status = run.Begin(marks); !status.ok()) return status;
  auto* target = static_cast<std::byte*>(gradient);
  const int64_t row_bytes = config().hidden_size * SizeOf(options.dtype);
  absl::Status status = run.Read([&](int64_t first_row, std::span<const std::byte> bytes) {
    std::copy(bytes.begin(), bytes.end(), target + first_row * row_bytes);
    return absl::OkStatus();
  });
  if (!status.ok()) return run.Abort(status);
  if (options.commit) {
    if (status = run.Commit(); !status.ok()) return status;
  }
  return run.Result();
}

absl::StatusOr<FlushResult> Head::FlushToFile(const FlushOptions& options,
                                              std::span<const SessionMarks> marks,
                                              const std::string& path) const {
  FlushRun run(*impl_->context, options);
  if (absl::Status status = run.Begin(marks); !status.ok()) return status;
  auto writer = SafetensorsWriter::Create(path,
                                          {{.name = kGradientTensor,
                                            .dtype = options.dtype,
                                            .shape = {config().vocab_size, config().hidden_size}}},
                                          run.Metadata());
  if (!writer.ok()) return run.Abort(writer.status());
  absl::Status status = run.Read(
      [&](int64_t /*first_row*/, std::span<const std::byte> bytes) { return writer->Append(bytes); });
  if (status.ok()) status = writer->Finish();
  if (!status.ok()) return run.Abort(status);
  if (options.commit) {
    if (status = run.Commit(); !status.ok()) return status;
  }
  return run.Result();
}

absl::Status Head::CommitFlush(const std::string& flush_id) const {
  v1::CommitFlushRequest request;
  request.set_head(config().name);
  request.set_flush_id(flush_id);
  const auto committed = impl_->context->connection().CommitFlush(request);
  if (committed.ok()) impl_->context->NoteCommit(committed->generation());
  return committed.status();
}

absl::Status Head::AbortFlush(const std::string& flush_id) const {
  v1::AbortFlushRequest request;
  request.set_head(config().name);
  request.set_flush_id(flush_id);
  return impl_->context->connection().AbortFlush(request).status();
}

}  // namespace lossd
