// Weights of a head in and out: Head::WriteWeights and ReadWeights, the same by rows, Blend and LoadWeights.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <utility>

#include "client/src/common/data_type.h"
#include "client/src/common/head_impl.h"
#include "client/src/common/random_key.h"
#include "client/src/connection/backoff.h"
#include "client/src/connection/trace.h"
#include "client/src/connection/waiting.h"
#include "client/src/weights/weight_rows.h"
#include "lossd/client.h"

namespace lossd {

class WeightWrite::Impl {
 public:
  Impl(std::shared_ptr<internal::HeadContext> shared, std::string write_id)
      : head(std::move(shared)), id(std::move(write_id)) {}

  const std::shared_ptr<internal::HeadContext> head;
  const std::string id;
};

WeightWrite::WeightWrite(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightWrite::~WeightWrite() = default;
WeightWrite::WeightWrite(WeightWrite&&) noexcept = default;
WeightWrite& WeightWrite::operator=(WeightWrite&&) noexcept = default;

const std::string& WeightWrite::id() const { return impl_->id; }

absl::Status WeightWrite::WriteRows(int64_t first_row, int64_t rows, DataType type, const void* weights,
                                    std::span<const float> bias, const Progress& progress) const {
  const internal::WrittenRows from{
      .first_row = first_row, .rows = rows, .type = type, .weights = weights, .bias = bias};
  return internal::WriteWeightRows(*impl_->head, impl_->id, from, progress);
}

absl::StatusOr<uint64_t> WeightWrite::Commit() const {
  v1::CommitWriteRequest request;
  request.set_head(impl_->head->config().name);
  request.set_write_id(impl_->id);
  const auto committed =
      impl_->head->connection().Call(&v1::HeadService::Stub::AsyncCommitWrite, request, internal::kWorkCall);
  if (!committed.ok()) return committed.status();
  return committed->weight_version();
}

absl::StatusOr<WeightWrite> Head::BeginWrite(const WeightWriteOptions& options) const {
  v1::BeginWriteRequest request;
  request.set_head(config().name);
  request.set_write_key(options.write_key);
  request.set_replace(options.replace);
  const auto begun = impl_->context->connection().Call(&v1::HeadService::Stub::AsyncBeginWrite, request);
  if (!begun.ok()) return begun.status();
  return WeightWrite(std::make_unique<WeightWrite::Impl>(impl_->context, begun->write_id()));
}

namespace {

struct CommitAnswer {
  absl::StatusOr<uint64_t> version;
  bool forgotten = false;  // the server knows nothing of the write, and has published nothing of it
};

// A commit whose answer was lost may have been done: a server that was drained remembers it and answers
// again, but one that others have made a version of since, or that was killed, does not. Where the version is
// another one it must not be done twice, over what may have come behind it.
CommitAnswer CommitOf(const Head& head, const WeightWrite& write) {
  const auto before = head.Info();
  if (!before.ok()) return {.version = before.status()};
  CommitAnswer answer{.version = write.Commit()};
  if (!absl::IsNotFound(answer.version.status())) return answer;
  const auto after = head.Info();
  answer.forgotten = after.ok() && after->weight_version == before->weight_version;
  return answer;
}

}  // namespace

absl::StatusOr<uint64_t> Head::WriteWeights(DataType type, const void* weights,
                                            const Progress& progress) const {
  return WriteWeights(type, weights, {}, progress);
}

absl::StatusOr<uint64_t> Head::WriteWeights(DataType type, const void* weights, std::span<const float> bias,
                                            const Progress& progress) const {
  // Before an unfinished write is dropped for one that cannot be made.
  absl::Status status = internal::CheckRows(config(), 0, config().vocab_size, weights, bias.size());
  if (!status.ok()) return status;
  internal::Backoff backoff(impl_->context->options().reconnect_timeout);
  for (absl::Status lost;;) {
    // What a writer that went away left unfinished must not be in the way for ever. One that has come since
    // this call began is not such a one.
    const auto write = BeginWrite({.write_key = internal::RandomKey("write"), .replace = lost.ok()});
    if (!write.ok()) return absl::IsFailedPrecondition(write.status()) && !lost.ok() ? lost : write.status();
    status = write->WriteRows(0, config().vocab_size, type, weights, bias, progress);
    if (status.ok()) {
      const CommitAnswer answer = CommitOf(*this, *write);
      if (!answer.forgotten) return answer.version;
      status = answer.version.status();
    }
    // Rows that are staged go with their server; here they all still are.
    if (!absl::IsNotFound(status)) return status;
    const auto delay = backoff.NextDelay();
    if (!delay) return status;
    lost = status;
    status = internal::SleepFor(impl_->context->options(), *delay);
    if (!status.ok()) return status;
  }
}

absl::StatusOr<uint64_t> Head::ReadWeights(DataType type, void* weights, const Progress& progress) const {
  return ReadWeights(type, weights, {}, progress);
}

absl::StatusOr<uint64_t> Head::ReadWeights(DataType type, void* weights, std::span<float> bias,
                                           const Progress& progress) const {
  return ReadRows(0, config().vocab_size, type, weights, {.bias = bias, .progress = progress});
}

absl::StatusOr<uint64_t> Head::ReadRows(int64_t first_row, int64_t rows, DataType type, void* weights,
                                        const ReadRowsOptions& options) const {
  const internal::ReadInto into{.first_row = first_row,
                                .rows = rows,
                                .type = type,
                                .weights = weights,
                                .bias = options.bias,
                                .weight_version = options.weight_version};
  return internal::ReadWeightRows(*impl_->context, into, options.progress);
}

absl::StatusOr<uint64_t> Head::Blend(const std::string& source, const BlendOptions& options) const {
  v1::BlendHeadRequest request;
  request.set_head(config().name);
  request.set_source(source);
  request.set_decay(options.decay);
  request.set_source_version(options.source_version);
  request.set_target_version(options.target_version);
  request.set_blend_id(internal::RandomKey("blend"));
  const auto blended =
      impl_->context->connection().Call(&v1::HeadService::Stub::AsyncBlendHead, request, internal::kWorkCall);
  if (!blended.ok()) return blended.status();
  return blended->weight_version();
}

absl::StatusOr<LoadedWeights> Head::LoadWeights(const LoadWeightsOptions& options) const {
  constexpr auto kPollInterval = std::chrono::milliseconds(200);
  v1::LoadWeightsRequest request;
  request.set_head(config().name);
  request.set_path(options.path);
  request.set_tensor(options.tensor);
  request.set_bias_tensor(options.bias_tensor);
  // The call says nothing before it ends; how far it is the head tells. It belongs to the trace of this
  // thread, of which the other one knows nothing.
  const TraceContext trace = internal::TraceNow(impl_->context->options().trace);
  std::atomic<bool> is_cut = false;
  const internal::Question question = [&is_cut] {
    return is_cut ? absl::CancelledError("the call was interrupted") : absl::OkStatus();
  };
  auto loading = std::async(std::launch::async, [this, &request, &trace, &question] {
    const internal::TraceScope scope(&trace);
    const internal::AskInstead asks(&question);
    return impl_->context->connection().Call(
        &v1::HeadService::Stub::AsyncLoadWeights, request,
        {.patience = internal::Patience::kEndless, .repeat = internal::Repeat::kNo});
  });
  const int64_t row_bytes = config().hidden_size * SizeOf(internal::StagedType(config()));
  const auto report = [&](int64_t rows) {
    if (options.progress) options.progress(rows * row_bytes, config().vocab_size * row_bytes);
  };
  report(0);
  absl::Status asked;
  for (auto next_report = std::chrono::steady_clock::now() + kPollInterval;
       loading.wait_for(internal::kWaitSlice) != std::future_status::ready;) {
    asked = internal::Asked(impl_->context->options());
    if (!asked.ok()) {
      is_cut = true;
      break;
    }
    if (!options.progress || std::chrono::steady_clock::now() < next_report) continue;
    next_report += kPollInterval;
    const auto info = Info();
    if (info.ok()) report(info->staged_rows);
  }
  const auto loaded = loading.get();
  if (!asked.ok()) return asked;
  if (!loaded.ok()) return loaded.status();
  report(config().vocab_size);
  return LoadedWeights{.weight_version = loaded->weight_version(), .tensor = loaded->tensor()};
}

}  // namespace lossd
