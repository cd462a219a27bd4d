#include "client/src/gradient/open_commit.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/gradient/window_call.h"
#include "lossd/v1/gradient.pb.h"

namespace lossd {
namespace {
constexpr char kFlushUrl[] = "type.lossd/Flush";  // a BeginFlushResponse
constexpr char kGenerationUrl[] = "type.lossd/FlushGeneration";
}  // namespace

std::optional<FlushResult> FlushOf(const absl::Status& status) {
  const auto bytes = status.GetPayload(kFlushUrl);
  const auto generation = status.GetPayload(kGenerationUrl);
  v1::BeginFlushResponse flush;
  FlushResult result;
  if (!bytes || !generation || !flush.ParseFromString(std::string(*bytes)) ||
      !absl::SimpleAtoi(std::string(*generation), &result.generation)) {
    return std::nullopt;
  }
  result.flush_id = flush.flush_id();
  result.rows = flush.rows();
  result.columns = flush.columns();
  result.norm = flush.norm();
  result.bias_norm = flush.bias_norm();
  result.window_tokens = flush.window_tokens();
  result.non_finite = flush.non_finite();
  return result;
}

namespace internal {

std::string KeyOf(std::span<const SessionMarks> marks) {
  std::string key;
  for (const SessionMarks& session : marks) {
    absl::StrAppend(&key, session.session_id.size(), ":", session.session_id);
    for (const LaneMarks& lane : session.lanes) absl::StrAppend(&key, " ", lane.lane, "=", lane.accepted);
    key += ';';
  }
  return key;
}

bool SaysWhatBecameOfIt(const absl::Status& commit) {
  return commit.ok() || IsWindowLost(commit) || absl::IsAborted(commit) || absl::IsNotFound(commit);
}

absl::StatusOr<std::optional<OpenCommit>> SettleCommit(HeadContext& head) {
  std::optional<OpenCommit> open = head.unanswered().commit();
  if (!open) return open;
  WindowCall window(head);
  window.Resume(open->life, open->flush.generation);
  v1::CommitFlushRequest request;
  request.set_head(head.config().name);
  request.set_flush_id(open->flush.flush_id);
  const auto committed =
      head.connection().Call(&v1::GradientService::Stub::AsyncCommitFlush, request, kWorkCall);
  const absl::Status status = committed.ok() ? absl::OkStatus() : window.Explain(committed.status());
  if (SaysWhatBecameOfIt(status)) head.unanswered().ForgetCommit(open->flush.flush_id);
  if (status.ok()) {
    head.NoteCommit(committed->generation());
    return open;
  }
  const std::string flush =
      absl::StrCat("flush ", open->flush.flush_id, " of generation ", open->flush.generation);
  if (SaysWhatBecameOfIt(status)) {
    return Annotate(status,
                    absl::StrCat("the commit of ", flush, " was never confirmed and no longer can be"));
  }
  return WithFlush(Annotate(status, absl::StrCat("the commit of ", flush,
                                                 " is still not confirmed, and nothing else was done; repeat "
                                                 "the call")),
                   open->flush);
}

absl::Status SettledError(const OpenCommit& commit) {
  return WithFlush(
      absl::AlreadyExistsError(absl::StrCat(
          "flush ", commit.flush.flush_id, " of generation ", commit.flush.generation,
          ", whose commit had no answer, is committed now: what the call before read of it is the gradient. "
          "Nothing was done to the window behind it; make this call again if it is meant")),
      commit.flush);
}

absl::Status WithFlush(absl::Status status, const FlushResult& flush) {
  v1::BeginFlushResponse told;
  told.set_flush_id(flush.flush_id);
  told.set_rows(flush.rows);
  told.set_columns(flush.columns);
  told.set_norm(flush.norm);
  told.set_bias_norm(flush.bias_norm);
  told.set_window_tokens(flush.window_tokens);
  told.set_non_finite(flush.non_finite);
  status.SetPayload(kFlushUrl, absl::Cord(told.SerializeAsString()));
  status.SetPayload(kGenerationUrl, absl::Cord(absl::StrCat(flush.generation)));
  return status;
}

}  // namespace internal
}  // namespace lossd
