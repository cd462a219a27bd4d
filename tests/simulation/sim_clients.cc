// The clients of a simulated trainer: what the client library does about streams, repeats and generations.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/common/errors.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {
namespace {

constexpr uint64_t kMostOutstanding = 6;

std::vector<float> Floats(const void* bytes, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size) / sizeof(float));
  if (size > 0) std::memcpy(values.data(), bytes, static_cast<size_t>(size));
  return values;
}

}  // namespace

std::string Schedule::NameOf(const SessionState& session, size_t lane) const {
  return absl::StrCat(clients_[session.client].key, "/", session.id, "/", lane);
}

uint64_t Schedule::MarkOf(const std::vector<SessionMarks>& window, const std::string& id,
                          int32_t lane) const {
  for (const SessionMarks& session : window) {
    if (session.session_id != id) continue;
    for (const engine::LaneMarks& marks : session.lanes) {
      if (marks.lane == lane) return marks.accepted;
    }
  }
  const auto settled = progress_.settled.find({id, lane});
  return settled == progress_.settled.end() ? 0 : settled->second;
}

// What is in no window is to be sent again, in a session yet to be opened or behind the mark.
void Schedule::ForgetAbove(SessionState& session, size_t lane, uint64_t mark) {
  LaneState& state = session.lanes[lane];
  std::deque<Item>& pending = clients_[session.client].pending;
  for (size_t i = state.log.size(); i > mark; --i) {
    Entry& entry = state.log[i - 1];
    // A refused item that was answered has been corrected: that is an item of its own.
    if (!entry.rejected) pending.push_front(std::move(entry.item));
  }
  state.log.resize(std::min<size_t>(state.log.size(), mark));
  state.answered = std::min(state.answered, mark);
  state.accepted = std::min(state.accepted, mark);
  state.applied = std::min(state.applied, mark);
}

void Schedule::Orphan(LaneState& lane) {
  if (lane.stream != nullptr) orphans_.push_back(std::move(lane.stream));
  lane.stream = nullptr;
}

// The session is over. What of it is in the window, the server says.
void Schedule::Abandon(SessionState& session) {
  const std::vector<SessionMarks> window = WindowMarks();
  for (size_t lane = 0; lane < session.lanes.size(); ++lane) {
    Orphan(session.lanes[lane]);
    ForgetAbove(session, lane, MarkOf(window, session.id, static_cast<int32_t>(lane)));
    session.lanes[lane].accepted = session.lanes[lane].log.size();
  }
}

bool Schedule::OpenSession(ClientState& client) {
  // Every rank has to take memory.
  if (client.deterministic == engine::Deterministic::kYes && EndDoomedEpoch()) return false;
  const int32_t replica = PlaceOf(client);
  const auto opened = server_->engine(replica).OpenSession(
      kHead,
      {client.key, static_cast<int32_t>(&client - clients_.data()), client.lanes, client.deterministic});
  if (!opened.ok()) {
    Diverge(absl::StrCat("OpenSession: ", Text(opened.status())));
    return false;
  }
  const std::string& id = opened->info.session_id;
  if (client.session != nullptr && client.session->id == id) return true;
  if (client.session != nullptr) {
    // It has expired. Only once nobody is about to consume what it holds is it clear what that is.
    if (phase_ != Phase::kIdle) return false;
    Count("session replaced");
    Abandon(*client.session);
  }
  std::shared_ptr<SessionState>& session = sessions_[id];
  if (session == nullptr) {
    session = std::make_shared<SessionState>();
    session->id = id;
    session->replica = replica;
    session->client = static_cast<size_t>(&client - clients_.data());
    session->lanes.resize(static_cast<size_t>(client.lanes));
  }
  session->incarnation = server_->engine(replica).incarnation();
  client.session = session;
  client.generation = opened->info.generation;
  for (const engine::LaneMarks& marks : opened->info.lanes) {
    LaneState& lane = session->lanes[static_cast<size_t>(marks.lane)];
    if (marks.accepted > lane.log.size()) {
      Diverge(absl::StrCat(id, ": accepted is ", marks.accepted, " of ", lane.log.size(), " ever planned"));
    }
    lane.accepted = marks.accepted;
  }
  return true;
}

void Schedule::Connect(ClientState& client, size_t lane) {
  if (LostServer() || server_->head() == nullptr) return;
  if (!OpenSession(client)) return;
  SessionState& session = *client.session;
  LaneState& state = session.lanes[lane];
  const auto found = server_->engine(session.replica).FindSession(session.id, session.incarnation);
  if (!found.ok()) {
    Diverge(absl::StrCat("FindSession: ", Text(found.status())));
    return;
  }
  auto stream = std::make_shared<SimStream>(found->head, session.replica,
                                            [this](uint64_t item) { CheckApplied(item); });
  if (const absl::Status attached = stream->Attach(session.id, static_cast<int32_t>(lane)); !attached.ok()) {
    Diverge(absl::StrCat("AttachLane: ", Text(attached)));
    return;
  }
  const engine::LaneMarks& marks = stream->attachment().marks;
  Say(absl::StrCat(NameOf(session, lane), " attaches: accepted ", marks.accepted, ", applied ", marks.applied,
                   ", generation ", stream->attachment().generation));
  if (marks.accepted < state.answered || marks.accepted > state.log.size() ||
      marks.applied > marks.accepted || marks.applied < state.applied) {
    Diverge(absl::StrCat(NameOf(session, lane), ": accepted ", marks.accepted, ", applied ", marks.applied,
                         "; answered ", state.answered, ", applied before ", state.applied, ", planned ",
                         state.log.size()));
  }
  state.accepted = marks.accepted;
  client.generation = std::max(client.generation, stream->attachment().generation);
  state.next_send = 1;
  for (uint64_t i = 0; i < state.log.size(); ++i) {
    if (!state.log[i].answered) state.log[i].may_repeat = i < marks.accepted;
  }
  state.stream = std::move(stream);
  Count("stream");
}

// The next item gets a sequence.
void Schedule::Plan(ClientState& client, size_t lane) {
  SessionState& session = *client.session;
  LaneState& state = session.lanes[lane];
  if (state.log.size() >= state.answered + kMostOutstanding) return;
  Entry entry;
  if (ending_.evaluating > 0) {
    entry.item = LossOnly(MakeItem(items_++, &random_));
  } else if (client.pending.empty()) {
    return;
  } else {
    entry.item = std::move(client.pending.front());
    client.pending.pop_front();
  }
  entry.window_token = session.next_place;
  session.next_place += entry.item.tokens();
  state.log.push_back(std::move(entry));
}

void Schedule::Send(ClientState& client, size_t lane) {
  SessionState& session = *client.session;
  LaneState& state = session.lanes[lane];
  while (state.next_send <= state.log.size() && state.log[state.next_send - 1].answered) ++state.next_send;
  if (state.next_send > state.log.size()) return;
  Entry& entry = state.log[state.next_send - 1];
  engine::Chunk chunk = ToChunk(entry.item, state.next_send, client.generation);
  if (client.deterministic == engine::Deterministic::kYes && entry.item.kind != ItemKind::kLossOnly) {
    chunk.window_token = entry.window_token;
  }
  Say(absl::StrCat(NameOf(session, lane), " sends ", state.next_send, " (item ", entry.item.number,
                   ") of generation ", client.generation));
  entry.sent = true;
  state.stream->Send(std::move(chunk));
  ++state.next_send;
  Count("chunk sent");
}

void Schedule::Receive(ClientState& client, size_t lane) {
  LaneState& state = client.session->lanes[lane];
  std::optional<SimStream::Message> message = state.stream->Receive();
  if (!message.has_value()) {
    if (const auto end = state.stream->end(); end.has_value()) EndStream(client, lane, *end);
    return;
  }
  if (const auto* answer = std::get_if<engine::ChunkAnswer>(&*message)) {
    TakeAnswer(client, lane, *answer);
    return;
  }
  const uint64_t applied = std::get<uint64_t>(*message);
  if (applied < state.applied || applied > state.log.size()) {
    Diverge(absl::StrCat(NameOf(*client.session, lane), ": applied ", applied, " after ", state.applied));
  }
  state.applied = applied;
}

void Schedule::TakeAnswer(ClientState& client, size_t lane, const engine::ChunkAnswer& answer) {
  LaneState& state = client.session->lanes[lane];
  const std::string name = absl::StrCat(NameOf(*client.session, lane), " sequence ", answer.sequence);
  if (answer.sequence < 1 || answer.sequence > state.log.size()) return Diverge(name + " is answered");
  Entry& entry = state.log[answer.sequence - 1];
  const bool rejected = answer.disposition == engine::Disposition::kRejected;
  Say(absl::StrCat(name, rejected ? " is rejected" : " is answered"));
  if (rejected != (entry.item.kind == ItemKind::kRefused)) {
    return Diverge(absl::StrCat(name, " is answered: ", Text(answer.error)));
  }
  if (answer.disposition == engine::Disposition::kRepeated) {
    Count("repeated answer");
    if (!entry.may_repeat) return Diverge(name + " is REPEATED, though nobody sent it before");
  }
  if (!rejected) {
    const std::optional<Values> weights = WeightsOf(answer.weight_version);
    if (!weights.has_value()) return Diverge(absl::StrCat(name, " met weights ", answer.weight_version));
    const bool same = Floats(answer.losses.data(), static_cast<int64_t>(answer.losses.size())) ==
                          entry.item.Losses(*weights) &&
                      Floats(answer.dx.data(), answer.dx.size()) == entry.item.InputGradients(*weights);
    if (!same) return Diverge(name + ": losses or dX are others");
  }
  if (!entry.answered && rejected) {
    Count("rejected chunk");
    Item again = Corrected(entry.item);
    again.number = items_++;
    workload_[again.number] = again;
    client.pending.push_back(std::move(again));
  }
  entry.answered = true;
  entry.rejected = rejected;
  state.answered = std::max(state.answered, answer.sequence);
  state.accepted = std::max(state.accepted, answer.sequence);
}

void Schedule::EndStream(ClientState& client, size_t lane, const absl::Status& status) {
  Say(absl::StrCat(NameOf(*client.session, lane), " ends: ", Text(status)));
  Orphan(client.session->lanes[lane]);
  const auto position = engine::PositionOf(status);
  switch (engine::ReasonOf(status)) {
    case engine::RejectReason::kGeneration:
      Count("wrong generation");
      client.generation =
          position->generation == client.generation ? position->generation + 1 : position->generation;
      return;
    case engine::RejectReason::kGap:
      Count("gap");
      return;
    case engine::RejectReason::kUnknownSession:
    case engine::RejectReason::kUnknownHead:
    case engine::RejectReason::kFenced:
    case engine::RejectReason::kDraining:
      return;
    default:
      if (!absl::IsUnavailable(status) && !absl::IsAborted(status)) {
        Diverge(absl::StrCat("a stream ends: ", Text(status)));
      }
  }
}

void Schedule::Cut(ClientState& client, size_t lane) {
  Say(absl::StrCat(NameOf(*client.session, lane), " is cut"));
  Count("cut");
  Orphan(client.session->lanes[lane]);
}

// A stream whose client is gone, or that another one fenced: what was under way may still arrive.
void Schedule::TickOrphan() {
  const std::shared_ptr<SimStream> orphan = orphans_.front();
  if (orphan->CanDeliver() && !random_.OneIn(3)) {
    Count("late delivery");
    orphan->Deliver();
    return;
  }
  orphans_.pop_front();
  orphan->Detach();
}

void Schedule::CloseSession(ClientState& client) {
  SessionState& session = *client.session;
  const auto all_answered = [](const LaneState& lane) {
    return std::all_of(lane.log.begin(), lane.log.end(), [](const Entry& entry) { return entry.answered; });
  };
  if (!std::all_of(session.lanes.begin(), session.lanes.end(), all_answered) || LostServer()) return;
  const absl::Status closed = server_->engine(session.replica).CloseSession(session.id);
  if (!closed.ok()) return;  // it has expired: that shows later
  Say(absl::StrCat(session.id, " is closed"));
  Count("session closed");
  for (LaneState& lane : session.lanes) Orphan(lane);
  client.session = nullptr;
}

// Another process takes over, which has the data and asks the server how far it got. The old one lives on for
// a while.
void Schedule::RestartClient(ClientState& client) {
  Count("client restarted");
  Say(absl::StrCat(client.key, " is restarted"));
  for (size_t i = 0; i < client.session->lanes.size(); ++i) {
    LaneState& lane = client.session->lanes[i];
    if (lane.stream != nullptr && lane.next_send <= lane.log.size()) Send(client, i);  // by the old process
    Orphan(lane);
    const uint64_t settled = MarkOf({}, client.session->id, static_cast<int32_t>(i));
    for (size_t k = settled; k < lane.log.size(); ++k) {
      if (!lane.log[k].rejected) lane.log[k].answered = false;
    }
    lane.answered = std::min<uint64_t>(settled, lane.log.size());
    lane.applied = 0;
  }
}

bool Schedule::AllAnswered() const {
  return std::all_of(clients_.begin(), clients_.end(), [](const ClientState& client) {
    if (!client.pending.empty()) return false;
    if (client.session == nullptr) return true;
    return std::all_of(client.session->lanes.begin(), client.session->lanes.end(), [](const LaneState& lane) {
      return std::all_of(lane.log.begin(), lane.log.end(), [](const Entry& entry) { return entry.answered; });
    });
  });
}

}  // namespace lossd::simulation
