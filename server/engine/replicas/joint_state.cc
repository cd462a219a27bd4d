#include "server/engine/replicas/joint_state.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "server/engine/chunk/session_marks.h"
#include "server/engine/common/replica_place.h"

namespace lossd::engine {
namespace {

using Session = AccumulationLedger::Session;
using SessionState = AccumulationLedger::SessionState;

// Pasts that several replicas have gone through are one, with the marks of all their sessions.
void AddAncestor(Ancestor ancestor, std::vector<Ancestor>* to) {
  const auto same = std::find_if(to->begin(), to->end(),
                                 [&](const Ancestor& other) { return other.past == ancestor.past; });
  if (same == to->end()) {
    to->push_back(std::move(ancestor));
    return;
  }
  for (SessionMarks& marks : ancestor.marks) {
    const bool known = std::any_of(same->marks.begin(), same->marks.end(), [&](const SessionMarks& other) {
      return other.session_id == marks.session_id;
    });
    if (!known) same->marks.push_back(std::move(marks));
  }
}

// A client that has left a session at one replica for another one at the next has one open session: the one
// that has added to the window.
void CloseTwice(std::vector<SessionCheckpoint>* sessions) {
  std::map<std::string, Session*> open;  // by client_key
  for (SessionCheckpoint& entry : *sessions) {
    if (entry.session.state != SessionState::kOpen) continue;
    const auto [other, is_new] = open.emplace(entry.session.client_key, &entry.session);
    if (is_new) continue;
    Session*& stays = other->second;
    Session* closes = &entry.session;
    if (!stays->contributed()) std::swap(stays, closes);
    closes->state = SessionState::kClosed;
  }
}

DeterministicTiles::Content EmptyTiles(const DeterministicTiles::Content& tiles) {
  return {.tile_tokens = tiles.tile_tokens, .next_tile = 0, .taken = {}, .filled = {}};
}

}  // namespace

HeadCheckpoint MergeParts(std::vector<HeadCheckpoint> parts) {
  HeadCheckpoint merged = std::move(parts.front());
  std::vector<Ancestor> ancestors;
  for (Ancestor& ancestor : merged.ancestors) AddAncestor(std::move(ancestor), &ancestors);
  for (HeadCheckpoint& part : std::span(parts).subspan(1)) {
    for (Ancestor& ancestor : part.ancestors) AddAncestor(std::move(ancestor), &ancestors);
    // That of the coordinator is the checkpoint's own.
    AddAncestor(AncestorOf(part), &ancestors);
    merged.window.tokens += part.window.tokens;
    if (merged.gradients.empty()) merged.gradients = std::move(part.gradients);
    std::move(part.sessions.begin(), part.sessions.end(), std::back_inserter(merged.sessions));
  }
  merged.ancestors = std::move(ancestors);
  CloseTwice(&merged.sessions);
  // Each replica has numbers of its own.
  uint64_t number = 0;
  for (SessionCheckpoint& entry : merged.sessions) entry.session.number = ++number;
  merged.last_session_number = std::max(merged.last_session_number, number);
  return merged;
}

void GoBackToWindowBegin(HeadCheckpoint* part) {
  part->window.tokens = part->window.next_tokens = 0;
  part->gradients.clear();
  std::erase_if(part->sessions,
                [](const SessionCheckpoint& entry) { return entry.session.state == SessionState::kClosed; });
  for (SessionCheckpoint& entry : part->sessions) {
    if (entry.tiles.has_value()) entry.tiles = EmptyTiles(*entry.tiles);
    for (AccumulationLedger::Lane& lane : entry.session.lanes) {
      lane.accepted = lane.started = lane.applied = lane.base;
      lane.next_base = 0;
      lane.added = std::min(lane.added, lane.base);
      std::erase_if(lane.rejected, [&lane](uint64_t sequence) { return sequence > lane.base; });
    }
  }
}

std::vector<RestoredPart> SplitCheckpoint(const HeadCheckpoint& state, const RestoreNumbers& numbers,
                                          std::span<const RestoringPart> replicas) {
  const auto count = static_cast<int32_t>(replicas.size());
  std::vector<Ancestor> pasts = state.ancestors;
  pasts.push_back(AncestorOf(state));
  std::vector<RestoredPart> parts;
  for (int32_t replica = 0; replica < count; ++replica) {
    HeadCheckpoint& own = parts.emplace_back(RestoredPart{state, numbers}).state;
    std::erase_if(own.sessions,
                  [&](const SessionCheckpoint& entry) { return ReplicaOf(entry.id, count) != replica; });
    if (replica != ReplicaPlace::kCoordinator) {
      own.window.state = WindowState::kOpen;
      own.window.tokens = own.window.next_tokens = 0;
      own.gradients.clear();
    }
    // What it was itself when this was saved comes last: clients of it are told so (restored_from).
    own.ancestors = pasts;
    const HeadPast then{replicas[static_cast<size_t>(replica)].incarnation, state.restores};
    const auto itself = std::find_if(own.ancestors.begin(), own.ancestors.end(),
                                     [&](const Ancestor& one) { return one.past == then; });
    if (itself != own.ancestors.end()) std::rotate(itself, itself + 1, own.ancestors.end());
    own.incarnation = own.ancestors.back().past.incarnation;
    own.restores = own.ancestors.back().past.restores;
    own.ancestors.pop_back();
  }
  return parts;
}

}  // namespace lossd::engine
