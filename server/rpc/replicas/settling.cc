#include "server/rpc/replicas/settling.h"

#include <algorithm>
#include <future>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "server/engine/replicas/window_ending.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/replicas/replica_wire.h"
#include "server/telemetry/common/logging.h"

namespace lossd::rpc {
namespace {

using engine::EndingPhase;
using engine::PartState;
using engine::RestorePhase;
using engine::Verdict;
using telemetry::Log;
using telemetry::LogLevel;

// What one head is at all replicas.
struct Everywhere {
  v1::CreateHeadRequest config;
  std::vector<std::optional<PartState>> parts;
  bool unfilled = false;  // at one of those that have none, which is not empty
};

// By name. Heads that not all have who have anything are left out, but for those that they could not be
// filled with.
std::map<std::string, Everywhere> HeadsOf(const std::vector<group::v1::ReplicaHello>& hellos,
                                          const std::vector<bool>& empty) {
  std::map<std::string, Everywhere> heads;
  for (size_t replica = 0; replica < hellos.size(); ++replica) {
    if (empty[replica]) continue;
    for (const group::v1::HeadPart& part : hellos[replica].heads()) {
      Everywhere& head = heads[part.config().config().name()];
      head.config = part.config();
      head.parts.resize(hellos.size());
      head.parts[replica] = ToEngine(part);
    }
  }
  const auto lacks = [&](const Everywhere& head, size_t replica) {
    return !empty[replica] && !head.parts[replica].has_value();
  };
  const auto unfilled = [&](const std::string& name, size_t replica) {
    const auto& names = hellos[replica].unfilled();
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (auto it = heads.begin(); it != heads.end();) {
    bool everywhere = true;
    for (size_t replica = 0; replica < hellos.size(); ++replica) {
      if (!lacks(it->second, replica)) continue;
      everywhere &= unfilled(it->first, replica);
      it->second.unfilled = true;
    }
    it = everywhere ? std::next(it) : heads.erase(it);
  }
  return heads;
}

std::vector<engine::ReplicaState> StatesOf(const std::vector<std::optional<PartState>>& parts) {
  std::vector<engine::ReplicaState> states(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].has_value()) continue;
    states[i].holds = true;
    states[i].generation = parts[i]->generation;
    states[i].phase = parts[i]->phase;
    if (!parts[i]->end.has_value()) continue;
    states[i].flush_id = engine::FlushIdOf(parts[i]->end->by);
    // Nothing comes of a look.
    const bool looks = std::holds_alternative<engine::LookEnd>(parts[i]->end->by);
    if (looks && states[i].phase == EndingPhase::kSummed) states[i].phase = EndingPhase::kSealed;
  }
  return states;
}

// What a replica with nothing has when it is filled: what the one has that is the furthest. Who has heard
// that all hold a flush is further than who has not.
PartState Furthest(const std::vector<std::optional<PartState>>& parts) {
  const std::optional<PartState>* furthest = nullptr;
  for (const std::optional<PartState>& part : parts) {
    if (!part.has_value()) continue;
    const auto place = [](const PartState& state) {
      return std::tuple(state.generation, state.weight_version, state.flush.has_value());
    };
    if (furthest == nullptr || place(*part) > place(**furthest)) furthest = &part;
  }
  return **furthest;
}

// A window that is open again has nothing that ends it. If some know that its flush is to be aborted, the
// call for that may be made again.
void Open(const std::vector<std::optional<PartState>>& parts, PartState* part) {
  for (const std::optional<PartState>& one : parts) {
    if (!one.has_value() || one->phase != EndingPhase::kAborting || !one->end.has_value()) continue;
    part->aborted = {engine::FlushIdOf(one->end->by), one->generation};
  }
  part->end.reset();
  part->flush.reset();
}

// If it is not committed yet.
void Commit(const std::string& flush_id, uint64_t generation, PartState* part) {
  if (part->generation == generation) return;
  part->generation = generation;
  part->committed = {flush_id, generation};
  part->phase = EndingPhase::kOpen;
  part->end.reset();
  part->flush.reset();
}

// The step that somebody has begun to take out of the window of this generation.
std::optional<engine::JointStep> StepTaken(const std::vector<std::optional<PartState>>& parts,
                                           uint64_t generation) {
  for (const std::optional<PartState>& part : parts) {
    if (!part.has_value()) continue;
    if (part->generation == generation + 1) return part->before();
    if (part->phase == EndingPhase::kStepping) return part->step;
  }
  return std::nullopt;
}

// What was said before that end a write comes to nothing, or that all publish what some have published.
absl::StatusOr<bool> WriteEnds(const std::vector<std::optional<PartState>>& parts,
                               const PartState& furthest) {
  bool publishes = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::optional<PartState>& part = parts[i];
    if (!part.has_value() || part->generation != furthest.generation) continue;
    if (part->weight_version == furthest.weight_version) continue;
    if (part->prepared_write.empty() || part->weight_version + 1 != furthest.weight_version) {
      return absl::InternalError(absl::StrCat("the weights of replica ", i, " are of version ",
                                              part->weight_version, ", those of others of ",
                                              furthest.weight_version, ", in one window"));
    }
    publishes = true;
  }
  return publishes;
}

// INTERNAL unless all of them are of one past: those that have all of a checkpoint, and those that count as
// it already, are.
absl::Status CheckRestored(const std::vector<std::optional<PartState>>& parts) {
  const std::optional<PartState>* first = nullptr;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::optional<PartState>& part = parts[i];
    if (!part.has_value()) continue;
    if (first == nullptr) first = &part;
    const bool whole = part->restoring != RestorePhase::kOverwritten;
    if (whole && part->restores == (*first)->restores) continue;
    return absl::InternalError(absl::StrCat("a restore broke off before replica ", i,
                                            " had all of the checkpoint: restore it again"));
  }
  return absl::OkStatus();
}

// Whether a window that leans on all replicas lacks what one of them had: one is empty, or was when the
// others met last, and only some have heard that the window is dropped.
bool LacksOne(const std::vector<std::optional<PartState>>& parts) {
  const auto empty = [](const auto& one) { return !one.has_value(); };
  const auto leans = [](const auto& one) { return one.has_value() && one->leans; };
  if (std::none_of(parts.begin(), parts.end(), leans)) return false;
  return std::any_of(parts.begin(), parts.end(), empty) || !std::all_of(parts.begin(), parts.end(), leans);
}

// A flush that holds a window which leans on a replica that is lost: an abort would open it again without
// what that replica had of others' sessions, and they would not hear of it. So it ends now, and the window
// with it.
bool ReopensIncomplete(const std::vector<std::optional<PartState>>& parts,
                       const engine::Settlement& settlement) {
  const bool held = settlement.verdict == Verdict::kGoOn && !settlement.flush_id.empty();
  return held && LacksOne(parts);
}

template <class Begin>
absl::Status Await(Begin begin) {
  std::promise<absl::Status> done;
  begin([&done](const absl::Status& status) { done.set_value(status); });
  return done.get_future().get();
}

// What comes only of a head that was deleted meanwhile.
void Told(const absl::Status& status) {
  if (status.ok()) return;
  Log(LogLevel::kWarning, "a flush was not ended here", {{"reason", std::string(status.message())}});
}

}  // namespace

group::v1::ReplicaHello HelloOf(const engine::Engine& engine, const std::set<std::string>& unfilled) {
  group::v1::ReplicaHello hello;
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    if (!head->IsBeingFilled()) ToProto(head->config(), head->part(), hello.add_heads());
  }
  for (const std::string& head : unfilled) hello.add_unfilled(head);
  return hello;
}

absl::StatusOr<Settling::Deed> Settling::DeedOf(const Parts& parts, const engine::ReplicaPlace& place) {
  if (absl::Status restored = CheckRestored(parts); !restored.ok()) return restored;
  const absl::StatusOr<engine::Settlement> settlement = engine::SettleReplicas(StatesOf(parts));
  if (!settlement.ok()) return settlement.status();
  if (settlement->verdict == Verdict::kRestore) {
    return absl::FailedPreconditionError(
        "two neighbouring replicas have started anew: a slice of the optimizer's state is lost; start all "
        "replicas anew, and restore a checkpoint");
  }
  Deed deed{.head = nullptr, .verdict = settlement->verdict, .flush_id = settlement->flush_id};
  if (ReopensIncomplete(parts, *settlement)) {
    deed.verdict = Verdict::kDrop;
    deed.flush_id.clear();
  }
  PartState part = Furthest(parts);
  const std::optional<PartState>& own = parts[static_cast<size_t>(place.replica)];
  deed.installs = own.has_value() && own->restoring == RestorePhase::kReady;
  deed.drops_window = deed.verdict == Verdict::kDrop && own.has_value() && own->leans && LacksOne(parts);
  uint64_t low = part.generation;
  for (const std::optional<PartState>& one : parts) {
    if (one.has_value()) low = std::min(low, one->generation);
  }
  const std::optional<engine::JointStep> step = StepTaken(parts, low);
  deed.stepped = deed.verdict == Verdict::kGoOn && step.has_value();
  if (deed.stepped) deed.step = *step;
  deed.filled = !own.has_value();
  deed.behind = (own.has_value() ? own->generation : part.generation) == low;
  const bool any_filled =
      std::find(settlement->refilled.begin(), settlement->refilled.end(), true) != settlement->refilled.end();
  if (any_filled) {
    // A step of a window without a token has none.
    const bool summed = part.step.window_tokens > 0 || !deed.flush_id.empty();
    const bool sums = deed.verdict == Verdict::kGoOn && !deed.stepped && summed;
    deed.refill = {.empty = settlement->refilled, .sums = sums};
  }
  const absl::StatusOr<bool> publishes = WriteEnds(parts, part);
  if (!publishes.ok()) return publishes.status();
  const bool prepared = own.has_value() && !own->prepared_write.empty();
  deed.publishes = prepared && *publishes && own->weight_version != part.weight_version;
  deed.drops_write = prepared && !deed.publishes;
  if (deed.verdict == Verdict::kDrop) Open(parts, &part);
  if (deed.verdict == Verdict::kCommit) Commit(deed.flush_id, settlement->generation, &part);
  deed.part = std::move(part);
  return deed;
}

absl::StatusOr<Settling> Settling::Decide(engine::Engine& engine, const engine::ReplicaPlace& place,
                                          const std::vector<group::v1::ReplicaHello>& hellos,
                                          const std::vector<bool>& empty) {
  Settling settling;
  std::set<std::string> left;
  for (const auto& [name, everywhere] : HeadsOf(hellos, empty)) {
    absl::StatusOr<Deed> deed = DeedOf(everywhere.parts, place);
    // No reason to keep the other heads, nor is it that one is lost which some could not be filled with.
    if (absl::IsInternal(deed.status()) || (everywhere.unfilled && !deed.ok())) {
      Log(LogLevel::kError, "the replicas of a head contradict each other: its windows do not end",
          {{"head", name}, {"reason", std::string(deed.status().message())}});
      left.insert(name);
      if (!everywhere.parts[static_cast<size_t>(place.replica)].has_value()) settling.unfilled_.insert(name);
      continue;
    }
    if (!deed.ok()) return deed.status();
    if (deed->filled) {
      const absl::StatusOr<engine::HeadConfig> config = ToEngine(everywhere.config);
      if (!config.ok()) return config.status();
      absl::StatusOr<std::shared_ptr<engine::Head>> head = engine.CreateHeadToFill(*config);
      if (!head.ok()) return head.status();
      deed->head = *std::move(head);
    } else {
      absl::StatusOr<std::shared_ptr<engine::Head>> head = engine.FindHead(name);
      if (!head.ok()) return head.status();
      deed->head = *std::move(head);
    }
    settling.deeds_.push_back(*std::move(deed));
  }
  std::set<std::string> said;
  for (const group::v1::HeadPart& part : hellos[static_cast<size_t>(place.replica)].heads()) {
    said.insert(part.config().config().name());
  }
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    const std::string& name = head->config().name;
    const bool known = std::any_of(settling.deeds_.begin(), settling.deeds_.end(),
                                   [&](const Deed& deed) { return deed.head == head; });
    if (known) continue;
    // Half filled, or not at all: who has just created one has said nothing of it, and goes on to do so at
    // all.
    if (head->IsBeingFilled() || (said.contains(name) && !left.contains(name))) engine.DropHead(name);
  }
  return settling;
}

absl::Status Settling::Do(const std::shared_ptr<const engine::ReplicaCommunicators>& replicas) {
  for (Deed& deed : deeds_) {
    engine::Head& head = *deed.head;
    // Before all know that all have done it: afterwards some are open already.
    if (deed.verdict == Verdict::kDrop) head.DropSums();
    const bool fills = !deed.refill.empty.empty();
    absl::Status done;
    // Before others are filled with what is published.
    if (deed.publishes) {
      done = Await([&](auto tell) {
        head.PublishPrepared([tell](const absl::StatusOr<uint64_t>& version) { tell(version.status()); });
      });
    }
    if (done.ok() && deed.verdict == Verdict::kCommit && deed.behind && !deed.filled) {
      done = head.DecidePart(deed.flush_id, engine::FlushFate::kCommit);
    }
    if (done.ok() && deed.stepped && deed.behind && !deed.filled) {
      done = Await([&](auto tell) { head.StepPart(deed.step, nullptr, tell); });
    }
    if (done.ok() && fills) {
      done = Await([&](auto tell) { head.RefillPart(deed.refill, replicas, tell); });
    }
    if (done.ok() && (fills || (deed.stepped && !deed.step.skipped))) {
      done = Await([&](auto tell) { head.ServeGather(replicas, tell); });
    }
    if (!done.ok()) return done;
  }
  return absl::OkStatus();
}

void Settling::Finish(engine::Engine& engine) {
  for (const Deed& deed : deeds_) {
    if (deed.drops_write) {
      deed.head->DropPrepared(absl::UnavailableError(
          "a replica was lost before all could publish the weights; commit them again"));
    }
    if (deed.installs) engine.InstallRestored(*deed.head);
    if (deed.drops_window) {
      engine.DropWindow(*deed.head, absl::UnavailableError(
                                        "a replica was lost in a window that was restored, of which all "
                                        "have a part: open the session again, and send its chunks again"));
    }
    if (deed.filled) deed.head->InstallPart(deed.part);
    if (deed.verdict == Verdict::kCommit) {
      if (deed.behind && !deed.filled) Told(deed.head->EndFlushPart(deed.flush_id));
    } else if (deed.stepped) {
      if (deed.behind) deed.head->PublishPart(deed.step);
    } else if (deed.verdict == Verdict::kDrop && !deed.filled) {
      deed.head->ReopenPart(engine::ReplicaLost("a replica was lost; the window is open again"));
    }
  }
  // The coordinator's own are its calls'.
  if (engine.options().place.coordinates()) return;
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) head->CancelDeletion();
}

std::vector<std::shared_ptr<engine::Head>> Settling::Summed() const {
  std::vector<std::shared_ptr<engine::Head>> summed;
  for (const Deed& deed : deeds_) {
    if (deed.verdict == Verdict::kGoOn && !deed.stepped) summed.push_back(deed.head);
  }
  return summed;
}

}  // namespace lossd::rpc
