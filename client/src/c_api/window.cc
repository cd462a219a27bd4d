// The gradient window: flushed, looked at, consumed by a step.
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"
#include "client/src/c_api/structs.h"

namespace lossd::c_api {
namespace {

absl::StatusOr<FlushOptions> OptionsOf(const lossd_flush_options& given) {
  const auto type = DataTypeOf(given.dtype, "options.dtype");
  if (!type.ok()) return type.status();
  FlushOptions options{.dtype = *type,
                       .gradient_scale = given.gradient_scale,
                       .progress = ProgressOf(given.progress, given.user),
                       .commit = given.leave_frozen == 0};
  if (given.sink != nullptr) {
    options.sink = [sink = given.sink, user = given.user](int64_t first_row, int64_t rows,
                                                          const void* gradient,
                                                          std::span<const float> bias_gradient) {
      const float* bias = bias_gradient.empty() ? nullptr : bias_gradient.data();
      const int32_t answer = sink(user, first_row, rows, gradient, bias);
      return answer == 0 ? absl::OkStatus() : absl::CancelledError(absl::StrCat("it returned ", answer));
    };
  }
  if (given.on_frozen != nullptr) {
    options.on_frozen = [on_frozen = given.on_frozen, user = given.user] { on_frozen(user); };
  }
  if (given.confirm != nullptr) {
    options.confirm = [confirm = given.confirm, user = given.user] { return confirm(user) == 1; };
  }
  return options;
}

absl::StatusOr<lossd_flush_result> ToC(const FlushResult& result) {
  lossd_flush_result converted{.struct_size = 0,
                               .flush_id = {},
                               .generation = result.generation,
                               .rows = result.rows,
                               .columns = result.columns,
                               .norm = result.norm,
                               .bias_norm = result.bias_norm,
                               .window_tokens = result.window_tokens,
                               .non_finite = result.non_finite};
  if (result.flush_id.size() >= sizeof(converted.flush_id)) {
    return absl::InternalError(absl::StrCat("the server's flush_id '", result.flush_id, "' has more than ",
                                            sizeof(converted.flush_id) - 1, " bytes"));
  }
  std::ranges::copy(result.flush_id, converted.flush_id);
  return converted;
}

absl::Status Tell(const absl::StatusOr<FlushResult>& flushed, lossd_flush_result* result) {
  const std::optional<FlushResult> flush = flushed.ok() ? *flushed : FlushOf(flushed.status());
  if (!flush.has_value()) return flushed.status();
  const auto told = ToC(*flush);
  if (!told.ok()) return flushed.ok() ? told.status() : flushed.status();
  Write(*told, result);
  return flushed.status();
}

// A flush that is left frozen can be ended only by those who get to know its id.
absl::Status CheckIdIsTold(const lossd_flush_options& options, const lossd_flush_result* result) {
  constexpr size_t kNeeded =
      offsetof(lossd_flush_result, flush_id) + sizeof(std::declval<lossd_flush_result>().flush_id);
  if (options.leave_frozen == 0 || (result != nullptr && result->struct_size >= kNeeded)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("options.leave_frozen is ", options.leave_frozen, ", but result ",
                   result == nullptr ? "is NULL" : "has no room for flush_id",
                   ": pass a lossd_flush_result, whose flush_id ends the flush"));
}

absl::StatusOr<StepOptions> OptionsOf(const lossd_step_options* given) {
  const auto read = Read(given, "options");
  if (!read.ok()) return read.status();
  StepOptions options{.learning_rate = read->learning_rate,
                      .gradient_scale = read->gradient_scale,
                      .skip_non_finite = read->skip_non_finite != 0,
                      .weight_decay = OptionalOf(read->weight_decay),
                      .momentum = OptionalOf(read->momentum),
                      .beta1 = OptionalOf(read->beta1),
                      .beta2 = OptionalOf(read->beta2)};
  if (read->has_generation != 0) options.generation = read->generation;
  return options;
}

lossd_step_result ToC(const StepResult& result) {
  return {.struct_size = 0,
          .generation = result.generation,
          .weight_version = result.weight_version,
          .step = result.step,
          .skipped = static_cast<int32_t>(result.skipped),
          .reserved = 0,
          .norm = result.norm,
          .bias_norm = result.bias_norm,
          .non_finite = result.non_finite,
          .window_tokens = result.window_tokens};
}

}  // namespace
}  // namespace lossd::c_api

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_head_flush(const lossd_head* head, const lossd_flush_options* options,
                               const char* const* marks, size_t marks_count, lossd_flush_result* result) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    const auto read = Read(options, "options");
    if (!read.ok()) return read.status();
    const auto converted = OptionsOf(*read);
    if (!converted.ok()) return converted.status();
    const auto sessions = MarksOf(marks, marks_count);
    if (!sessions.ok()) return sessions.status();
    if (absl::Status status = CheckResult(result, "result"); !status.ok()) return status;
    if (absl::Status status = CheckIdIsTold(*read, result); !status.ok()) return status;
    return Tell(head->head.Flush(*converted, *sessions, read->gradient,
                                 SpanOf(read->bias_gradient, head->head.config().vocab_size)),
                result);
  });
}

lossd_status* lossd_head_discard(const lossd_head* head, const char* const* marks, size_t marks_count,
                                 lossd_flush_result* result) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    const auto sessions = MarksOf(marks, marks_count);
    if (!sessions.ok()) return sessions.status();
    if (absl::Status status = CheckResult(result, "result"); !status.ok()) return status;
    return Tell(head->head.Discard(*sessions), result);
  });
}

lossd_status* lossd_head_commit_flush(const lossd_head* head, const char* flush_id) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(flush_id, "flush_id"); !status.ok()) return status;
    return head->head.CommitFlush(flush_id);
  });
}

lossd_status* lossd_head_abort_flush(const lossd_head* head, const char* flush_id) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(flush_id, "flush_id"); !status.ok()) return status;
    return head->head.AbortFlush(flush_id);
  });
}

lossd_status* lossd_head_gradient_stats(const lossd_head* head, const char* const* marks, size_t marks_count,
                                        double gradient_scale, lossd_gradient_stats* stats) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(stats, "stats"); !status.ok()) return status;
    if (absl::Status status = CheckResult(stats, "stats"); !status.ok()) return status;
    const auto sessions = MarksOf(marks, marks_count);
    if (!sessions.ok()) return sessions.status();
    const auto read = head->head.GradientStats(*sessions, gradient_scale);
    if (!read.ok()) return read.status();
    Write(lossd_gradient_stats{.struct_size = 0,
                               .norm = read->norm,
                               .bias_norm = read->bias_norm,
                               .largest = read->largest,
                               .non_finite = read->non_finite,
                               .window_tokens = read->window_tokens},
          stats);
    return absl::OkStatus();
  });
}

lossd_status* lossd_head_apply_step(const lossd_head* head, const lossd_step_options* options,
                                    const char* const* marks, size_t marks_count, lossd_step_result* result) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    const auto converted = OptionsOf(options);
    if (!converted.ok()) return converted.status();
    const auto sessions = MarksOf(marks, marks_count);
    if (!sessions.ok()) return sessions.status();
    if (absl::Status status = CheckResult(result, "result"); !status.ok()) return status;
    const auto step = head->head.ApplyStep(*converted, *sessions);
    if (!step.ok()) return step.status();
    Write(ToC(*step), result);
    return absl::OkStatus();
  });
}
