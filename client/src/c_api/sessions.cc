// Sessions, and the batches that are sent through them.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/batches.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"
#include "client/src/c_api/structs.h"

namespace lossd::c_api {
namespace {

absl::StatusOr<SessionOptions> OptionsOf(const lossd_session_options* given) {
  SessionOptions options;
  if (given == nullptr) return options;
  const auto read = Read(given, "options");
  if (!read.ok()) return read.status();
  if (read->lanes > LOSSD_MOST_LANES) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.lanes is ", read->lanes, "; a session has at most ", LOSSD_MOST_LANES));
  }
  options.client_key = TextOf(read->client_key);
  options.rank = read->rank;
  options.chunk_bytes = read->chunk_bytes;
  options.lanes = read->lanes;
  options.deterministic = read->deterministic != 0 ? Deterministic::kYes : Deterministic::kNo;
  options.spread_lanes = read->lanes_at_target == 0;
  options.held_hidden_bytes = read->held_hidden_bytes;
  return options;
}

}  // namespace
}  // namespace lossd::c_api

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_head_open_session(const lossd_head* head, const lossd_session_options* options,
                                      lossd_session** session) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    const auto converted = OptionsOf(options);
    if (!converted.ok()) return converted.status();
    return PutHandle(head->head.OpenSession(*converted), session);
  });
}

void lossd_session_free(lossd_session* session) { delete session; }

lossd_status* lossd_session_close(lossd_session* session) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    return session->session.Close();
  });
}

const char* lossd_session_client_key(const lossd_session* session) {
  return session == nullptr ? "" : session->session.client_key().c_str();
}

int64_t lossd_session_reconnects(const lossd_session* session) {
  return session == nullptr ? 0 : session->session.reconnects();
}

int64_t lossd_session_held_hidden_bytes(const lossd_session* session) {
  return session == nullptr ? 0 : session->session.held_hidden_bytes();
}

int32_t lossd_session_opened_in_window(const lossd_session* session) {
  return session != nullptr && session->session.opened_in_window() ? 1 : 0;
}

lossd_status* lossd_session_marks(const lossd_session* session, char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    if (absl::Status status = NotNull(json, "json"); !status.ok()) return status;
    return PutJson(absl::StatusOr<lossd::SessionMarks>(session->session.marks()), json);
  });
}

lossd_status* lossd_session_lane_places(const lossd_session* session, char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    if (absl::Status status = NotNull(json, "json"); !status.ok()) return status;
    return PutJson(absl::StatusOr<std::vector<lossd::LanePlace>>(session->session.lane_places()), json);
  });
}

lossd_status* lossd_session_resume_at(lossd_session* session, const uint64_t* sequences, size_t count) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    if (absl::Status status = NotNull(sequences, "sequences"); !status.ok()) return status;
    return session->session.ResumeAt(std::vector<uint64_t>(sequences, sequences + count));
  });
}

lossd_status* lossd_session_compute(lossd_session* session, const lossd_batch* batch,
                                    const lossd_outputs* outputs, lossd_result* result) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(session, "session"); !status.ok()) return status;
    const auto converted = BatchOf(batch);
    if (!converted.ok()) return converted.status();
    const auto wanted = OutputsOf(outputs, static_cast<int64_t>(converted->labels.size()));
    if (!wanted.ok()) return wanted.status();
    if (absl::Status status = CheckResult(result, "result"); !status.ok()) return status;
    const auto computed = session->session.Compute(*converted, *wanted);
    if (!computed.ok()) return computed.status();
    Write(ToC(*computed), result);
    return absl::OkStatus();
  });
}
