// Weights in and out.
#include <algorithm>
#include <utility>

#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_head_write_weights(const lossd_head* head, int32_t dtype, const void* weights,
                                       const float* bias, lossd_progress progress, void* user,
                                       uint64_t* weight_version) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(weights, "weights"); !status.ok()) return status;
    const auto type = DataTypeOf(dtype, "dtype");
    if (!type.ok()) return type.status();
    const auto written = head->head.WriteWeights(*type, weights, SpanOf(bias, head->head.config().vocab_size),
                                                 ProgressOf(progress, user));
    return PutVersion(written, weight_version);
  });
}

lossd_status* lossd_head_read_weights(const lossd_head* head, int64_t first_row, int64_t rows, int32_t dtype,
                                      void* weights, float* bias, lossd_progress progress, void* user,
                                      uint64_t* weight_version) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(weights, "weights"); !status.ok()) return status;
    const auto type = DataTypeOf(dtype, "dtype");
    if (!type.ok()) return type.status();
    const auto read = head->head.ReadRows(first_row, rows, *type, weights,
                                          {.weight_version = weight_version == nullptr ? 0 : *weight_version,
                                           .bias = SpanOf(bias, std::max<int64_t>(rows, 0)),
                                           .progress = ProgressOf(progress, user)});
    return PutVersion(read, weight_version);
  });
}

lossd_status* lossd_head_load_weights(const lossd_head* head, const char* path, const char* tensor,
                                      const char* bias_tensor, lossd_progress progress, void* user,
                                      char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(path, "path"); !status.ok()) return status;
    const auto loaded = head->head.LoadWeights({.path = path,
                                                .tensor = TextOf(tensor),
                                                .bias_tensor = TextOf(bias_tensor),
                                                .progress = ProgressOf(progress, user)});
    return json == nullptr ? loaded.status() : PutJson(loaded, json);
  });
}

lossd_status* lossd_head_blend(const lossd_head* head, const char* source, double decay,
                               uint64_t source_version, uint64_t target_version, uint64_t* weight_version) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(source, "source"); !status.ok()) return status;
    const auto blended = head->head.Blend(
        source, {.decay = decay, .source_version = source_version, .target_version = target_version});
    return PutVersion(blended, weight_version);
  });
}

lossd_status* lossd_head_begin_write(const lossd_head* head, const char* write_key, int32_t replace,
                                     lossd_weight_write** write) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(write_key, "write_key"); !status.ok()) return status;
    if (absl::Status status = NotNull(write, "write"); !status.ok()) return status;
    return PutHandle(head->head.BeginWrite({.write_key = write_key, .replace = replace != 0}), write);
  });
}

lossd_status* lossd_weight_write_rows(const lossd_weight_write* write, int64_t first_row, int64_t rows,
                                      int32_t dtype, const void* weights, const float* bias,
                                      lossd_progress progress, void* user) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(write, "write"); !status.ok()) return status;
    if (absl::Status status = NotNull(weights, "weights"); !status.ok()) return status;
    const auto type = DataTypeOf(dtype, "dtype");
    if (!type.ok()) return type.status();
    return write->write.WriteRows(first_row, rows, *type, weights, SpanOf(bias, std::max<int64_t>(rows, 0)),
                                  ProgressOf(progress, user));
  });
}

lossd_status* lossd_weight_write_commit(const lossd_weight_write* write, uint64_t* weight_version) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(write, "write"); !status.ok()) return status;
    return PutVersion(write->write.Commit(), weight_version);
  });
}

void lossd_weight_write_free(lossd_weight_write* write) { delete write; }
