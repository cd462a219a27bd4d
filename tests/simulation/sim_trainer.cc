// The simulated trainer's windows: ended by flushes or steps, whose calls may be cut, lost and repeated; and
// what the oracle says about them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "tests/simulation/schedule.h"
#include "tests/unit/engine/end_flush.h"

namespace lossd::simulation {

using engine::RejectReason;

namespace {

// So often the trainer finds its evaluation still under way before it asks for its step again.
constexpr int kEvaluationTicks = 60;
constexpr size_t kMostPasts = 3;

// What sequences after `first`, up to `last`, add to a window.
void Add(const std::vector<Entry>& log, uint64_t first, uint64_t last, Values* content) {
  for (uint64_t i = first; i < last && i < log.size(); ++i) log[i].item.AddTo(content);
}

}  // namespace

// The marks that the clients know, of all sessions that have something to be consumed.
std::vector<engine::SessionMarks> Schedule::KnownMarks() const {
  std::vector<SessionMarks> all;
  for (const auto& [id, session] : sessions_) {
    const std::string& incarnation = incarnations_[static_cast<size_t>(session->replica)];
    SessionMarks marks{id, {}, {incarnation, restores_}, generation_};
    bool contributed = false;
    for (size_t i = 0; i < session->lanes.size(); ++i) {
      const auto lane = static_cast<int32_t>(i);
      marks.lanes.push_back({lane, session->lanes[i].accepted, 0});
      contributed = contributed || session->lanes[i].accepted > MarkOf({}, id, lane);
    }
    if (contributed) all.push_back(std::move(marks));
  }
  return all;
}

Values Schedule::ContentOf(const std::vector<SessionMarks>& marks) const {
  Values content;
  for (const SessionMarks& session : marks) {
    const SessionState& state = *sessions_.at(session.session_id);
    for (const engine::LaneMarks& lane : session.lanes) {
      const uint64_t settled = MarkOf({}, session.session_id, lane.lane);
      Add(state.lanes[static_cast<size_t>(lane.lane)].log, settled, lane.accepted, &content);
    }
  }
  return content;
}

Values Schedule::ContentIn(const Past& past, const std::vector<SessionMarks>& marks) {
  Values content;
  for (const SessionMarks& session : marks) {
    const auto logs = past.logs.find(session.session_id);
    if (logs == past.logs.end()) continue;
    for (const engine::LaneMarks& lane : session.lanes) {
      const auto settled = past.settled.find({session.session_id, lane.lane});
      Add(logs->second[static_cast<size_t>(lane.lane)], settled == past.settled.end() ? 0 : settled->second,
          lane.accepted, &content);
    }
  }
  return content;
}

// A step may be taken before the trainer hears of it.
std::optional<Values> Schedule::WeightsOf(uint64_t version) const {
  const auto known = versions_.find(version);
  if (known != versions_.end()) return known->second;
  if (phase_ == Phase::kEnding && ending_.by_step && version == version_ + 1) {
    Values weights = progress_.weights;
    weights.Add(ContentOf(ending_.marks), -ending_.scale);
    return weights;
  }
  // A write that was lost may have been published at one replica, whose answers come late.
  const auto maybe = maybe_published_.find(version);
  return maybe == maybe_published_.end() ? std::nullopt : std::optional(maybe->second);
}

void Schedule::Tick() {
  if (LostServer() || server_->head() == nullptr || committing_) return;
  switch (phase_) {
    case Phase::kIdle:
      return BeginEnding();
    case Phase::kEnding:
      if (ending_.begun != nullptr && ending_.begun->has_value()) return TakeBegun();
      if (ending_.stepped != nullptr && ending_.stepped->has_value()) {
        return !calm_ && random_.OneIn(4) ? LoseAnswer() : TakeStepped();
      }
      if (ending_.begun == nullptr && ending_.stepped == nullptr) {
        if (calm_ || ending_.evaluating == 0) return Call();
        --ending_.evaluating;
        return;
      }
      if (!calm_ && random_.OneIn(10)) LoseAnswer();
      return;
    case Phase::kReading:
      if (!calm_ && random_.OneIn(20)) {
        phase_ = Phase::kAborting;
        return;
      }
      if (!calm_ && !random_.OneIn(4)) return;  // it takes its time
      return ReadRows();
    case Phase::kCommitting:
      return CommitFlush();
    case Phase::kAborting:
      return AbortFlush();
  }
}

void Schedule::BeginEnding() {
  if (calm_ && !AllAnswered()) return;
  const engine::HeadInfo info = server_->head()->Info();
  ending_ = {};
  ending_.generation = info.generation;
  ending_.by_step = server_options_.head.optimizer.kind != engine::OptimizerKind::kNone && !random_.OneIn(3);
  ending_.scale = static_cast<float>(ending_.by_step ? 1 + random_.Below(2) : 1);
  const bool by_server = !calm_ && random_.OneIn(2);
  ending_.marks = by_server ? WindowMarks() : KnownMarks();
  if (!calm_ && random_.OneIn(8) && !ending_.marks.empty()) {  // a wrong one
    Count("wrong marks");
    const size_t which = static_cast<size_t>(random_.Below(static_cast<int>(ending_.marks.size())));
    if (random_.OneIn(2)) {
      ending_.marks.erase(ending_.marks.begin() + static_cast<int64_t>(which));
    } else {
      ++ending_.marks[which].lanes[0].accepted;
    }
  }
  phase_ = Phase::kEnding;
}

// That of the call under way.
void Schedule::LoseAnswer() {
  Count("answer lost");
  ending_.begun = nullptr;
  ending_.stepped = nullptr;
  ending_.unanswered = true;
  if (ending_.by_step && random_.OneIn(2)) Evaluate();
}

// What was not sent yet has to wait for losses alone.
void Schedule::Evaluate() {
  Count("evaluation");
  ending_.evaluating = kEvaluationTicks;
  for (ClientState& client : clients_) {
    if (client.session == nullptr || client.deterministic == engine::Deterministic::kYes) continue;
    for (LaneState& lane : client.session->lanes) {
      while (!lane.log.empty() && !lane.log.back().sent) {
        client.pending.push_front(std::move(lane.log.back().item));
        lane.log.pop_back();
      }
      lane.next_send = std::min<uint64_t>(lane.next_send, lane.log.size() + 1);
    }
  }
}

// A trainer that has had losses computed before it calls again names what its lanes have come to.
void Schedule::MoveMarks() {
  bool moved = false;
  for (SessionMarks& session : ending_.marks) {
    const SessionState& state = *sessions_.at(session.session_id);
    for (engine::LaneMarks& mark : session.lanes) {
      const LaneState& lane = state.lanes[static_cast<size_t>(mark.lane)];
      if (mark.accepted >= lane.accepted) continue;
      const auto begin = lane.log.begin() + static_cast<int64_t>(mark.accepted);
      const bool looks = std::none_of(begin, lane.log.end(), [](const Entry& entry) {
        return entry.sent && entry.item.kind == ItemKind::kGood;
      });
      if (!looks) continue;
      mark.accepted = lane.accepted;
      moved = true;
    }
  }
  if (moved) Count("marks moved by losses");
  ending_.moved = ending_.moved || moved;
}

void Schedule::Call() {
  if (ending_.by_step && ending_.unanswered) MoveMarks();
  Say(absl::StrCat(ending_.by_step ? "ApplyStep" : "BeginFlush", " of generation ", ending_.generation));
  if (ending_.by_step) {
    Count("ApplyStep");
    auto answer = std::make_shared<std::optional<absl::StatusOr<engine::StepResult>>>();
    ending_.stepped = answer;
    server_->head()->ApplyStep(
        ending_.generation, ending_.marks, {.learning_rate = 1, .gradient_scale = ending_.scale},
        [answer](absl::StatusOr<engine::StepResult> result) { *answer = std::move(result); });
    return;
  }
  Count("BeginFlush");
  auto answer = std::make_shared<std::optional<absl::StatusOr<engine::FlushInfo>>>();
  ending_.begun = answer;
  server_->head()->BeginFlush(
      ending_.generation, ending_.marks, 1,
      [answer](absl::StatusOr<engine::FlushInfo> result) { *answer = std::move(result); });
}

void Schedule::TakeBegun() {
  const absl::StatusOr<engine::FlushInfo> answer = **std::exchange(ending_.begun, nullptr);
  if (answer.ok()) {
    ending_.flush = *answer;
    phase_ = Phase::kReading;
    Say(absl::StrCat("sealed as ", answer->flush_id));
    const int64_t tokens = ContentOf(ending_.marks).tokens;
    if (static_cast<int64_t>(answer->window_tokens) != tokens) {
      Diverge(absl::StrCat("the window has ", answer->window_tokens, " tokens; expected ", tokens));
    }
    return;
  }
  Say(absl::StrCat("BeginFlush: ", Text(answer.status())));
  if (absl::IsUnavailable(answer.status())) return;  // called again
  if (HearsOfAbort(answer.status())) return;
  if (engine::ReasonOf(answer.status()) != RejectReason::kMarks) {
    Diverge(absl::StrCat("BeginFlush: ", Text(answer.status())));
  }
  Count("marks refused");
  BackToIdle();
}

void Schedule::TakeStepped() {
  if (EndLostEpoch()) return;
  const absl::StatusOr<engine::StepResult> answer = **std::exchange(ending_.stepped, nullptr);
  if (!answer.ok()) {
    Say(absl::StrCat("ApplyStep: ", Text(answer.status())));
    if (absl::IsUnavailable(answer.status())) return;
    if (engine::ReasonOf(answer.status()) != RejectReason::kMarks) {
      // The coordinator has not noticed yet that its call with other marks was cut off.
      const bool is_moved = server_->replicas() != nullptr && ending_.moved;
      if (is_moved && absl::IsFailedPrecondition(answer.status())) return;
      Diverge(absl::StrCat("ApplyStep: ", Text(answer.status())));
    }
    Count("marks refused");
    return BackToIdle();
  }
  CheckStepped(*answer);
  Count("step");
  const Values content = ContentOf(ending_.marks);
  progress_.weights.Add(content, -ending_.scale);
  version_ = answer->weight_version;
  versions_[version_] = progress_.weights;
  const Values weights = server_->Weights();
  const bool readable = server_->device_failure().ok();
  if (readable && !(weights == progress_.weights)) {
    Diverge(absl::StrCat("after the step of generation ", ending_.generation, " the weights are others"));
  }
  old_call_ = OldCall{ending_, answer->generation, *answer, incarnations_, restores_};
  if (ending_.moved) old_call_ = std::nullopt;  // which marks the step was taken with is not known
  Consume();
}

void Schedule::CheckStepped(const engine::StepResult& result) {
  const int64_t tokens = ContentOf(ending_.marks).tokens;
  // A window without a token is no step.
  if (result.generation != ending_.generation + 1 || result.skipped != (tokens == 0) ||
      result.weight_version != version_ + (tokens == 0 ? 0 : 1) ||
      static_cast<int64_t>(result.window_tokens) != tokens) {
    Diverge(absl::StrCat("ApplyStep of generation ", ending_.generation, " at weights ", version_,
                         " answers generation ", result.generation, ", weights ", result.weight_version,
                         result.skipped ? ", skipped, " : ", ", result.window_tokens, " tokens; expected ",
                         tokens));
  }
}

void Schedule::ReadRows() {
  if (EndLostEpoch()) return;
  const int64_t rows = std::min<int64_t>(kVocab - ending_.rows_read, 1 + random_.Below(kVocab));
  const auto answer = std::make_shared<std::optional<absl::Status>>();
  server_->head()->ReadGradient(ending_.flush->flush_id, ending_.rows_read, rows, kernels::DataType::kFloat32,
                                {ending_.read.matrix.data() + ending_.rows_read * kHidden,
                                 ending_.read.bias.data() + ending_.rows_read},
                                [answer](const absl::Status& read) { *answer = read; });
  server_->WaitUntil([&answer] { return answer->has_value(); });
  const absl::Status status = answer->value_or(absl::UnknownError("no answer"));
  if (EndLostEpoch()) return;
  if (HearsOfAbort(status)) return;
  if (!status.ok()) {
    Diverge(absl::StrCat("ReadGradient: ", Text(status)));
    return;
  }
  ending_.rows_read += rows;
  if (ending_.rows_read < kVocab) return;
  if (!(ending_.read == ContentOf(ending_.marks))) {
    Diverge(absl::StrCat("the gradient of generation ", ending_.generation, " is another one"));
  }
  phase_ = Phase::kCommitting;
}

std::optional<absl::StatusOr<uint64_t>> Schedule::EndFlush(engine::FlushFate fate) {
  if (ending_.fated == nullptr) {
    const auto answer = std::make_shared<std::optional<absl::StatusOr<uint64_t>>>();
    ending_.fated = answer;
    const auto done = [answer](const absl::StatusOr<uint64_t>& generation) { *answer = generation; };
    const bool commits = fate == engine::FlushFate::kCommit;
    Count(commits ? "CommitFlush" : "AbortFlush");
    if (commits) {
      server_->head()->CommitFlush(ending_.flush->flush_id, done);
    } else {
      server_->head()->AbortFlush(ending_.flush->flush_id, done);
    }
  }
  if (!ending_.fated->has_value()) {
    // Its answer is lost, and the call made again.
    if (calm_ || !set_random_.OneIn(10)) return std::nullopt;
    Count("answer lost");
    ending_.fated = nullptr;
    if (fate == engine::FlushFate::kCommit) ending_.rows_read = -1;
    return std::nullopt;
  }
  return *std::exchange(ending_.fated, nullptr);
}

void Schedule::CommitFlush() {
  if (ending_.fated == nullptr && !calm_ && random_.OneIn(6)) {
    phase_ = Phase::kAborting;
    return;
  }
  const auto answer = EndFlush(engine::FlushFate::kCommit);
  if (!answer.has_value() || EndLostEpoch()) return;
  const absl::StatusOr<uint64_t>& generation = *answer;
  Say(absl::StrCat("CommitFlush: ", generation.ok() ? "done" : Text(generation.status())));
  if (ReplicaWasLost(generation.status())) {
    ending_.rows_read = -1;  // as if the answer were lost
    return;
  }
  if (HearsOfAbort(generation.status())) return;
  if (!generation.ok() || *generation != ending_.generation + 1) {
    return Diverge(absl::StrCat("CommitFlush: ", Text(generation.status())));
  }
  if (!calm_ && random_.OneIn(3)) {  // the answer is lost, and the call repeated
    Count("answer lost");
    ending_.rows_read = -1;
    return;
  }
  old_call_ = OldCall{ending_, generation, std::nullopt, incarnations_, restores_};
  Consume();
}

void Schedule::AbortFlush() {
  // Not behind a commit whose answer was lost.
  if (ending_.rows_read < 0) {
    phase_ = Phase::kCommitting;
    return;
  }
  const auto answer = EndFlush(engine::FlushFate::kAbort);
  if (!answer.has_value() || EndLostEpoch()) return;
  const absl::StatusOr<uint64_t>& generation = *answer;
  Say(absl::StrCat("AbortFlush: ", generation.ok() ? "done" : Text(generation.status())));
  if (ReplicaWasLost(generation.status())) return;
  if (!generation.ok() || *generation != ending_.generation) {
    return Diverge(absl::StrCat("AbortFlush: ", Text(generation.status())));
  }
  if (!calm_ && random_.OneIn(3)) {
    Count("answer lost");
    return;
  }
  BackToIdle();
}

void Schedule::Consume() {
  Count("window");
  for (const SessionMarks& session : ending_.marks) {
    const SessionState& state = *sessions_.at(session.session_id);
    for (const engine::LaneMarks& lane : session.lanes) {
      const std::vector<Entry>& log = state.lanes[static_cast<size_t>(lane.lane)].log;
      for (uint64_t i = MarkOf({}, session.session_id, lane.lane); i < lane.accepted; ++i) {
        const Item& item = log[i].item;
        if (item.kind == ItemKind::kGood && !progress_.consumed.insert(item.number).second) {
          Diverge(absl::StrCat("item ", item.number, " is consumed twice"));
        }
      }
      progress_.settled[{session.session_id, lane.lane}] = lane.accepted;
    }
  }
  generation_ = ending_.generation + 1;
  for (ClientState& client : clients_) client.generation = std::max(client.generation, generation_);
  BackToIdle();
}

// Somebody else's calls while the trainer's is under way: all of them are refused, and change nothing.
void Schedule::CallAsRival() {
  const bool under_way = (ending_.begun != nullptr && !ending_.begun->has_value()) ||
                         (ending_.stepped != nullptr && !ending_.stepped->has_value());
  if (!ending_.aborted_by_operator.empty()) return;  // the window is open again
  if ((!under_way && phase_ != Phase::kReading) || LostServer()) return;
  Count("rival call");
  const auto refused = std::make_shared<int>(0);
  const auto check = [this, refused](const absl::Status& status) {
    ++*refused;
    // Replicas are asked whether the trainer's step, which is repeated, was taken: the rival comes behind it.
    const bool behind = server_->replicas() != nullptr && absl::IsAborted(status);
    if (!absl::IsFailedPrecondition(status) && !behind) {
      Diverge(absl::StrCat("a rival's call: ", Text(status)));
    }
  };
  server_->head()->BeginFlush(
      ending_.generation, ending_.marks, 3,
      [check](const absl::StatusOr<engine::FlushInfo>& result) { check(result.status()); });
  server_->head()->ApplyStep(
      ending_.generation, ending_.marks, {.learning_rate = 3},
      [check](const absl::StatusOr<engine::StepResult>& result) { check(result.status()); });
  if (*refused != 2) Diverge("a rival's call is taken");
}

// Whatever flush holds the window is ended by its id, which the server tells, as `lossctl flush --abort`
// does.
void Schedule::AbortAsOperator() {
  if (LostServer() || server_->head() == nullptr || ending_.fated != nullptr) return;
  if (server_->replicas() != nullptr && SettleSet()) return;
  const engine::HeadInfo info = server_->head()->Info();
  if (info.flush_id.empty()) return;
  Count("aborted by an operator");
  const auto answer = std::make_shared<std::optional<absl::StatusOr<uint64_t>>>();
  server_->head()->AbortFlush(info.flush_id,
                              [answer](const absl::StatusOr<uint64_t>& aborted) { *answer = aborted; });
  if (server_->replicas() != nullptr) server_->WaitUntil([&answer] { return answer->has_value(); });
  const absl::StatusOr<uint64_t> generation = answer->value_or(absl::UnknownError("there is no answer"));
  Say(absl::StrCat("an operator aborts ", info.flush_id, ": ", Text(generation.status())));
  // Its trainer's commit may be under way, cut off.
  if (server_->replicas() != nullptr && absl::IsUnavailable(generation.status())) return;
  if (!generation.ok() || *generation != info.generation) {
    Diverge(absl::StrCat("AbortFlush of an operator: ", Text(generation.status())));
  }
  ending_.aborted_by_operator = info.flush_id;
}

bool Schedule::HearsOfAbort(const absl::Status& status) {
  if (ending_.aborted_by_operator.empty()) return false;
  if (engine::ReasonOf(status) != RejectReason::kUnknownFlush) return false;
  if (ending_.flush.has_value() && ending_.flush->flush_id != ending_.aborted_by_operator) return false;
  Count("abort heard of");
  BackToIdle();
  return true;
}

// GradientStats, of marks that the server has just told.
void Schedule::ReadStats() {
  if (LostServer() || server_->head() == nullptr) return;
  // Where the window begins is known but while the answer of a call that ends it may be under way, or lost.
  if (phase_ != Phase::kIdle && phase_ != Phase::kReading) return;
  if (EndLostEpoch()) return;
  const engine::HeadInfo info = server_->head()->Info();
  const std::vector<SessionMarks> marks = WindowMarks();
  const absl::StatusOr<engine::Head::WindowStats> stats = StatsOf(info.generation, marks);
  if (EndLostEpoch()) return;
  if (!stats.ok()) {
    // The window is being ended, or was.
    if (!absl::IsFailedPrecondition(stats.status()) && !absl::IsAborted(stats.status())) {
      Diverge(absl::StrCat("GradientStats: ", Text(stats.status())));
    }
    return;
  }
  Count("stats");
  CheckStats(*stats, ContentOf(marks));
}

absl::StatusOr<engine::Head::WindowStats> Schedule::StatsOf(uint64_t generation,
                                                            const std::vector<SessionMarks>& marks) {
  using Stats = absl::StatusOr<engine::Head::WindowStats>;
  const auto done = std::make_shared<std::optional<Stats>>();
  server_->head()->ReadStats(generation, marks, 1, [done](const Stats& stats) { *done = stats; });
  server_->WaitUntil([&done] { return done->has_value(); });
  return done->value_or(absl::InternalError("GradientStats is not answered"));
}

void Schedule::CheckStats(const engine::Head::WindowStats& stats, const Values& content) {
  double squares = 0;
  for (const float value : content.matrix) squares += static_cast<double>(value) * value;
  if (static_cast<int64_t>(stats.window_tokens) != content.tokens ||
      std::abs(stats.gradient.norm - std::sqrt(squares)) > 1e-6 * std::sqrt(squares)) {
    Diverge(absl::StrCat("GradientStats: ", stats.window_tokens, " tokens, norm ", stats.gradient.norm,
                         "; expected ", content.tokens, ", ", std::sqrt(squares)));
  }
}

void Schedule::KeepPast() {
  // As in ReadStats.
  if (phase_ != Phase::kIdle && phase_ != Phase::kReading) return;
  pasts_.push_back({incarnations_, restores_, generation_, TakeLogs(), progress_.settled});
  if (pasts_.size() > kMostPasts) pasts_.pop_front();
  CallOfAnotherPast(pasts_.back(), KnownMarks());
}

void Schedule::CallOfAnotherPast() {
  if (pasts_.empty() || LostServer() || server_->head() == nullptr) return;
  if (EndLostEpoch()) return;
  const Past& past = pasts_[static_cast<size_t>(random_.Below(static_cast<int>(pasts_.size())))];
  std::vector<SessionMarks> marks = WindowMarks();
  for (SessionMarks& session : marks) {
    const int32_t replica = sessions_.at(session.session_id)->replica;
    session.past = {past.incarnations[static_cast<size_t>(replica)], past.restores};
    session.generation = past.generation;
  }
  CallOfAnotherPast(past, marks);
}

// By a trainer that has not heard of a restore. It is refused, whatever numbers the window has come to since,
// unless the window has all that they stood for.
void Schedule::CallOfAnotherPast(const Past& past, const std::vector<SessionMarks>& marks) {
  if (marks.empty()) return;
  const std::shared_ptr<engine::Head> head = server_->head();
  if (head->Info().window_state != engine::WindowState::kOpen) return;
  const uint64_t generation = head->Info().generation;
  const absl::StatusOr<engine::Head::WindowStats> stats = StatsOf(generation, marks);
  if (stats.ok()) {
    Count("call of an earlier past");
    CheckStats(*stats, ContentIn(past, marks));
    return;
  }
  if (!server_->device_failure().ok()) return;
  Count("call of another past");
  const auto refused = std::make_shared<int>(0);
  const auto check = [this, refused](const absl::Status& status) {
    ++*refused;
    const RejectReason reason = engine::ReasonOf(status);
    // The past may be right where the marks are not all.
    if (reason != RejectReason::kIncarnation && reason != RejectReason::kMarks) {
      Diverge(absl::StrCat("a call of another past: ", Text(status)));
    }
  };
  // One after the other: another replica may be the one that refuses.
  const auto await = [this, refused](int calls) {
    if (server_->replicas() != nullptr) server_->WaitUntil([&] { return *refused == calls; });
    if (*refused != calls) Diverge("a call of another past is taken");
  };
  check(stats.status());
  head->BeginFlush(generation, marks, 1,
                   [check](const absl::StatusOr<engine::FlushInfo>& result) { check(result.status()); });
  await(2);
  if (server_options_.head.optimizer.kind == engine::OptimizerKind::kNone) return;
  head->ApplyStep(generation, marks, {.learning_rate = 1},
                  [check](const absl::StatusOr<engine::StepResult>& result) { check(result.status()); });
  await(3);
}

// A call that was answered arrives once more. It answers the same, or that its time is over; nothing changes.
void Schedule::RepeatOldCall() {
  if (!old_call_.has_value() || LostServer() || server_->head() == nullptr) return;
  if (old_call_->incarnations != incarnations_ || old_call_->restores != restores_) return;
  if (server_->replicas() != nullptr && SettleSet()) return;
  const Ending& call = old_call_->ending;
  Count("old call repeated");
  if (!old_call_->step.has_value()) {
    const absl::StatusOr<uint64_t> again = engine::CommitFlush(*server_->head(), call.flush->flush_id);
    const bool same = again.ok() ? *again == *old_call_->generation
                                 : engine::ReasonOf(again.status()) == RejectReason::kUnknownFlush;
    if (!same) Diverge(absl::StrCat("CommitFlush again: ", Text(again.status())));
    return;
  }
  const auto repeated = std::make_shared<std::optional<absl::StatusOr<engine::StepResult>>>();
  server_->head()->ApplyStep(
      call.generation, call.marks, {.learning_rate = 1, .gradient_scale = call.scale},
      [repeated](const absl::StatusOr<engine::StepResult>& result) { *repeated = result; });
  if (server_->replicas() != nullptr) server_->WaitUntil([&repeated] { return repeated->has_value(); });
  const std::optional<absl::StatusOr<engine::StepResult>>& again = *repeated;
  // Nobody may have another step of a generation that was consumed.
  std::optional<absl::StatusOr<engine::StepResult>> other;
  server_->head()->ApplyStep(call.generation, call.marks, {.learning_rate = 2, .gradient_scale = call.scale},
                             [&other](const absl::StatusOr<engine::StepResult>& result) { other = result; });
  if (!other.has_value() || other->ok()) Diverge("ApplyStep with other arguments is not refused");
  const bool same =
      again.has_value() && (again->ok() ? (*again)->weight_version == old_call_->step->weight_version &&
                                              (*again)->generation == old_call_->step->generation
                                        : engine::ReasonOf(again->status()) == RejectReason::kGeneration);
  if (!same) Diverge("ApplyStep, repeated, answers something else");
}

}  // namespace lossd::simulation
