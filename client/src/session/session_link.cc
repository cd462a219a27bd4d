#include "client/src/session/session_link.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/src/connection/grpc_status.h"
#include "client/src/connection/trace.h"
#include "client/src/session/chunk_times.h"

namespace lossd::internal {
namespace {

// A lane for every KiB of a row of hidden states: what a training step moves grows with its rows, and one
// connection carries as much as one core can read and write. The same on every machine: a restarted process
// must ask for as many.
constexpr int64_t kRowBytesOfALane = 1024;
constexpr int64_t kMostDefaultLanes = 8;

int32_t DefaultLanes(const HeadConfig& head) {
  const int64_t row_bytes = head.hidden_size * SizeOf(head.weight_type);
  return static_cast<int32_t>(std::clamp<int64_t>(row_bytes / kRowBytesOfALane, 1, kMostDefaultLanes));
}

// A head may have been deleted and created again since the handle was made.
absl::Status CheckKind(const HeadConfig& made, const v1::OpenSessionResponse& now) {
  const auto changed = [&made](absl::string_view is, absl::string_view was) {
    return absl::FailedPreconditionError(
        absl::StrCat("head '", made.name, "' is now ", is, "; this handle was made when it was ", was));
  };
  const auto with = [](bool has, absl::string_view what) {
    return absl::StrCat("one ", has ? "with" : "without", " ", what);
  };
  if (now.has_class_weights() != made.has_class_weights) {
    return changed(with(now.has_class_weights(), "class weights"),
                   with(made.has_class_weights, "class weights"));
  }
  if (now.has_bias() != made.bias) return changed(with(now.has_bias(), "a bias"), with(made.bias, "a bias"));
  const auto frozen = [](bool is) { return is ? "frozen" : "trained"; };
  if (now.frozen() != made.frozen) return changed(frozen(now.frozen()), frozen(made.frozen));
  return absl::OkStatus();
}

}  // namespace

SessionLink::SessionLink(std::shared_ptr<HeadContext> head, SessionOptions options)
    : head_(std::move(head)), options_(std::move(options)) {
  // A tile of a deterministic session wants the rows of several chunks in one place.
  if (!options_.spread_lanes || options_.deterministic == Deterministic::kYes) places_.KeepHome();
}

absl::StatusOr<v1::OpenSessionResponse> SessionLink::Open() {
  trace_ = TraceNow(head_->options().trace);
  lanes_ = options_.lanes > 0 ? options_.lanes : DefaultLanes(head_->config());
  if (options_.lanes > 0 || lanes_ == 1) return Ask(lanes_, WhenFull::kWait);
  auto response = Ask(lanes_, WhenFull::kReturn);
  const bool too_many = absl::IsResourceExhausted(response.status()) ||  // --staging_bytes
                        absl::IsInvalidArgument(response.status());      // --max_lanes
  if (!too_many) return response;
  lanes_ = 1;
  return Ask(lanes_, WhenFull::kWait);
}

absl::StatusOr<v1::OpenSessionResponse> SessionLink::Reopen(const absl::Status& cause) {
  auto response = Ask(lanes_, WhenFull::kWait);
  if (!response.ok()) return ExplainMissing(response.status());
  if (!absl::IsAborted(cause) || response->incarnation() != incarnation_) {
    // It may have been updated, or set back, and keeps its incarnation over a drain: what it can do is asked
    // again.
    const TraceScope scope(&trace_);
    const auto status = head_->connection().Call(&v1::StatusService::Stub::AsyncGetStatus, {});
    if (!status.ok()) return status.status();
  }
  if (absl::Status kept = CheckRestored(*response); !kept.ok()) return kept;
  return response;
}

absl::Status SessionLink::CheckRestored(const v1::OpenSessionResponse& response) {
  const std::lock_guard lock(mutex_);
  const bool same_server = response.incarnation() == incarnation_;
  const uint64_t before = IsSameLifeLocked(response) ? restores_ : 0;
  if (session_id_.empty() || response.restores() == before) return absl::OkStatus();
  const bool of_this_past = response.has_restored_from() && response.restored_from() == restores_;
  const uint64_t known = std::max(GenerationLocked(), set_back_from_);
  if (!same_server || !of_this_past || response.session_id() != session_id_ ||
      response.generation() != known) {
    return LostByRestore(response.generation());
  }
  // All the same if it was restored to where the session stands: its lanes find out.
  life_ = ServerLife::Of(response);
  restores_ = response.restores();
  restored_ = true;
  head_->NoteLife(life_, restores_);
  return absl::OkStatus();
}

bool SessionLink::IsSameLifeLocked(const v1::OpenSessionResponse& response) const {
  return response.incarnation() == incarnation_ || ServerLife::Of(response) == life_;
}

bool SessionLink::restored() const {
  const std::lock_guard lock(mutex_);
  return restored_;
}

void SessionLink::NoteStands() {
  const std::lock_guard lock(mutex_);
  life_of_marks_ = life_;
  restores_of_marks_ = restores_;
}

uint64_t SessionLink::restores_of_marks() const {
  const std::lock_guard lock(mutex_);
  return restores_of_marks_;
}

uint64_t SessionLink::generation_of_marks() const {
  const std::lock_guard lock(mutex_);
  return std::max(generation_, head_->GenerationIn(life_of_marks_, restores_of_marks_));
}

absl::Status SessionLink::LostByRestore(uint64_t generation) const {
  return WindowLostError(head_->config().name, generation, "the head was restored from a checkpoint");
}

absl::StatusOr<v1::OpenSessionResponse> SessionLink::Ask(int32_t lanes, WhenFull when_full) {
  const HeadConfig& config = head_->config();
  v1::OpenSessionRequest request;
  request.set_head(config.name);
  request.set_client_key(options_.client_key);
  request.set_rank(options_.rank);
  request.set_lanes(lanes);
  request.set_deterministic(options_.deterministic == Deterministic::kYes);
  // Deterministic sessions are placed by their rank.
  const bool regions = !head_->regions().empty() && options_.deterministic == Deterministic::kNo;
  request.set_at_this_replica(here_ || regions);
  request.set_held_hidden_bytes(options_.held_hidden_bytes);
  const TraceScope scope(&trace_);
  std::shared_ptr<ServerChannel> server;
  auto response = head_->connection().Call(&v1::LossService::Stub::AsyncOpenSession, request,
                                           {.when_full = when_full, .answered_by = &server});
  if (!response.ok()) return response;
  if (response->vocab_size() != config.vocab_size || response->hidden_size() != config.hidden_size) {
    return absl::FailedPreconditionError(
        absl::StrCat("head '", config.name, "' is now ", response->vocab_size(), "x", response->hidden_size(),
                     "; this handle was made when it was ", config.vocab_size, "x", config.hidden_size));
  }
  if (absl::Status same = CheckKind(config, *response); !same.ok()) return same;
  NotePlaces(*server, *response);
  const std::lock_guard lock(mutex_);
  limits_ = response->limits();
  held_hidden_bytes_ = response->held_hidden_bytes();
  return response;
}

void SessionLink::NotePlaces(const ServerChannel& server, const v1::OpenSessionResponse& response) {
  const std::vector<std::string> addresses = {response.lane_addresses().begin(),
                                              response.lane_addresses().end()};
  if (!response.has_replica()) return places_.Take(server.target(), addresses);
  const bool names_itself = addresses.empty() || ResolveLaneAddress("", addresses.front()).empty();
  if (!names_itself && server.incarnation() != response.incarnation()) {
    return places_.Take(server.target(), addresses, std::nullopt);
  }
  // By a name that all replicas have another connection would come to any of them.
  const std::string here = ReplicaChannels::PlaceOf(server);
  places_.Take(here.empty() ? server.target() : here, addresses, here);
}

bool SessionLink::IsSame(const v1::OpenSessionResponse& response) const {
  return response.session_id() == session_id_ && response.incarnation() == incarnation_;
}

absl::Status SessionLink::CheckReplaceable(const v1::OpenSessionResponse& response) {
  const std::lock_guard lock(mutex_);
  if (session_id_.empty() || !ContributedLocked()) return absl::OkStatus();
  const bool same_life = IsSameLifeLocked(response);
  if (same_life && response.generation() > contributed_generation_) return absl::OkStatus();
  if (response.incarnation() != incarnation_) {
    return WindowLostError(
        head_->config().name, contributed_generation_,
        same_life ? "the replica that had the session was lost" : "the server was restarted");
  }
  if (!response.in_window()) {
    return WindowLostError(head_->config().name, contributed_generation_,
                           "it came from a checkpoint, and was dropped when another replica was lost");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "session ", session_id_, " has expired at the server (its lease is ", limits_.lease_seconds(),
      " s); what it added to generation ", contributed_generation_,
      " is still in the window: open a new session, and name the marks of both (HeadInfo::sessions) when "
      "flushing"));
}

void SessionLink::Adopt(const v1::OpenSessionResponse& response) {
  const std::lock_guard lock(mutex_);
  session_id_ = response.session_id();
  incarnation_ = response.incarnation();
  generation_ = response.generation();
  opened_in_window_ = !response.frozen() && response.in_window();
  contributed_generation_ = opened_in_window_ ? response.generation() : 0;
  contributions_ = opened_in_window_ ? 1 : 0;
  next_places_.clear();
  clock_offset_ = ClockOffset();  // it may be another server
  life_ = life_of_marks_ = ServerLife::Of(response);
  restores_ = restores_of_marks_ = response.restores();
  restored_ = false;
  set_back_from_ = 0;
  head_->NoteLife(life_, restores_);
}

// A restarted server has no heads, so it answers OpenSession with NOT_FOUND: say what that means.
absl::Status SessionLink::ExplainMissing(const absl::Status& status) {
  if (!absl::IsNotFound(status)) return status;
  const auto server = head_->connection().Call(&v1::StatusService::Stub::AsyncGetStatus, {});
  const std::lock_guard lock(mutex_);
  if (!server.ok() || !ServerLife::Of(*server).IsAnotherThan(life_)) return status;
  if (ContributedLocked()) {
    return WindowLostError(head_->config().name, contributed_generation_,
                           "the server was restarted without this head");
  }
  return Annotate(status, "the server was restarted");
}

// Chunks are numbered, so sending again is always safe; the question is only whether it can help.
absl::Status SessionLink::CheckRecoverable(const absl::Status& cause) const {
  if (IsWindowLost(cause)) return cause;
  switch (cause.code()) {
    case absl::StatusCode::kOk:           // the server ended the call while answers were missing
    case absl::StatusCode::kUnavailable:  // the network, or a server that goes away
    case absl::StatusCode::kNotFound:     // the session's lease ended, or the server is another one
      return absl::OkStatus();
    case absl::StatusCode::kFailedPrecondition:  // chunks travel whole then (LaneRun)
      if (const auto position = PositionOf(cause); position && position->hidden_states_gone()) {
        return absl::OkStatus();
      }
      return cause;
    case absl::StatusCode::kAborted:
      if (PositionOf(cause)) return absl::OkStatus();
      return Annotate(
          cause, absl::StrCat("session ", session_id_, " was taken over by another stream with client_key '",
                              options_.client_key, "'"));
    default:
      return IsTransient(cause) ? absl::OkStatus() : cause;
  }
}

void SessionLink::FollowPosition(const v1::PositionInfo& position) {
  if (position.incarnation() != incarnation_) return;  // Reopen finds out what that means
  const std::lock_guard lock(mutex_);
  // What was known here is over: somebody aborted a flush, or the head is as it was before.
  if (position.generation() < named_generation_) {
    set_back_from_ = std::max(set_back_from_, GenerationLocked());
    head_->NoteSetBack(position.generation());
  }
  // Refused although the generation is the server's own: the window is frozen, and the next one waits for its
  // commit, or is taken. Should the flush be aborted instead, the server refuses that one and names the
  // present one again.
  generation_ =
      position.generation() == named_generation_ ? position.generation() + 1 : position.generation();
}

void SessionLink::NoteGeneration(uint64_t generation) {
  const std::lock_guard lock(mutex_);
  // Never back: while a window is frozen, `ready` may still name it although a chunk was told to go to the
  // next one.
  generation_ = std::max(generation_, generation);
  set_back_from_ = 0;
}

uint64_t SessionLink::generation() {
  const std::lock_guard lock(mutex_);
  // What is only true until an abort is not kept.
  return std::max(GenerationLocked(), head_->NextGeneration(life_));
}

void SessionLink::NoteNamed(uint64_t generation) {
  const std::lock_guard lock(mutex_);
  named_generation_ = generation;
}

uint64_t SessionLink::GenerationLocked() {
  generation_ = std::max(generation_, head_->CommittedGeneration(life_));
  return generation_;
}

bool SessionLink::ContributedLocked() {
  return contributions_ > 0 && contributed_generation_ >= GenerationLocked();
}

void SessionLink::NoteTakenBefore(uint64_t generation) {
  NoteContribution(generation);
  const std::lock_guard lock(mutex_);
  opened_in_window_ = true;
}

bool SessionLink::opened_in_window() const {
  const std::lock_guard lock(mutex_);
  return opened_in_window_;
}

bool SessionLink::contributed() {
  const std::lock_guard lock(mutex_);
  return ContributedLocked();
}

void SessionLink::NoteContribution(uint64_t generation) {
  const std::lock_guard lock(mutex_);
  if (generation != contributed_generation_) {
    contributed_generation_ = generation;
    contributions_ = 0;
  }
  ++contributions_;
  marks_told_ = false;
}

void SessionLink::NoteWithdrawal(uint64_t generation) {
  const std::lock_guard lock(mutex_);
  if (generation == contributed_generation_) --contributions_;
}

int64_t SessionLink::PlaceBatch(uint64_t generation, std::optional<int64_t> place, int64_t tokens) {
  const std::lock_guard lock(mutex_);
  // A window that an abort has opened again goes on where it was, and nothing was placed in the one behind
  // it.
  next_places_.erase(next_places_.upper_bound(generation), next_places_.end());
  int64_t& next = next_places_[generation];
  const int64_t first = place.value_or(next);
  next = first + tokens;
  while (next_places_.size() > 2) next_places_.erase(next_places_.begin());
  return first;
}

void SessionLink::NoteServerTime(int64_t server_time_us, Time sent, Time arrived) {
  const std::lock_guard lock(mutex_);
  clock_offset_.NoteToServer(Microseconds(sent), server_time_us);
  clock_offset_.NoteFromServer(server_time_us, Microseconds(arrived));
}

void SessionLink::NoteTiming(const v1::ChunkTiming& timing, Time sent, Time arrived) {
  const std::lock_guard lock(mutex_);
  internal::NoteTiming(timing, sent, arrived, &clock_offset_);
}

ClockOffset SessionLink::clock_offset() const {
  const std::lock_guard lock(mutex_);
  return clock_offset_;
}

absl::Status SessionLink::GaveUp(const absl::Status& cause) const {
  return absl::UnavailableError(absl::StrCat(
      "session ", session_id_, ": gave up reconnecting after ", head_->options().reconnect_timeout.count(),
      " ms; last error: ", cause.ok() ? "the server ended the stream" : cause.message()));
}

absl::Status SessionLink::TakenByAnother(int32_t lane, uint64_t sequence) const {
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", sequence, " of lane ", lane, " of session ", session_id_,
                   " was taken before this process sent it: another one uses client_key '",
                   options_.client_key, "', and what this one sent is in no window"));
}

int64_t SessionLink::held_hidden_bytes() const {
  const std::lock_guard lock(mutex_);
  return held_hidden_bytes_;
}

bool SessionLink::all_lanes_home() const {
  for (int32_t lane = 0; lane < lanes_; ++lane) {
    if (places_.Of(lane) != places_.home()) return false;
  }
  return true;
}

v1::SessionLimits SessionLink::limits() const {
  const std::lock_guard lock(mutex_);
  return limits_;
}

}  // namespace lossd::internal
