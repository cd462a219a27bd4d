#include "server/rpc/replicas/settling.h"

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "server/engine/replicas/window_ending.h"
#include "server/rpc/replicas/replica_wire.h"

namespace lossd::rpc {
namespace {

using engine::EndingPhase;
using engine::PartState;
using engine::Verdict;

// By head: how far each replica is. Heads that not all of them have are left out.
std::map<std::string, std::vector<PartState>> PartsOf(const std::vector<group::v1::ReplicaHello>& hellos) {
  std::map<std::string, std::vector<PartState>> parts;
  for (const group::v1::ReplicaHello& hello : hellos) {
    for (const group::v1::HeadPart& part : hello.heads()) parts[part.head()].push_back(ToEngine(part));
  }
  std::erase_if(parts, [&](const auto& head) { return head.second.size() < hellos.size(); });
  return parts;
}

std::vector<engine::ReplicaState> StatesOf(const std::vector<PartState>& parts) {
  std::vector<engine::ReplicaState> states;
  for (const PartState& part : parts) {
    states.push_back({.holds = true, .generation = part.generation, .phase = part.phase, .flush_id = ""});
  }
  return states;
}

// The step that somebody has begun to take out of the window of this generation.
std::optional<engine::JointStep> StepTaken(const std::vector<PartState>& parts, uint64_t generation) {
  for (const PartState& part : parts) {
    if (part.generation == generation + 1) return part.before;
    if (part.phase == EndingPhase::kStepping) return part.step;
  }
  return std::nullopt;
}

template <class Begin>
absl::Status Await(Begin begin) {
  std::promise<absl::Status> done;
  begin([&done](const absl::Status& status) { done.set_value(status); });
  return done.get_future().get();
}

}  // namespace

group::v1::ReplicaHello HelloOf(const engine::Engine& engine, uint64_t history) {
  group::v1::ReplicaHello hello;
  hello.set_history(history);
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    ToProto(head->config().name, head->part(), hello.add_heads());
  }
  return hello;
}

absl::StatusOr<Settling> Settling::Decide(const engine::Engine& engine, const engine::ReplicaPlace& place,
                                          const std::vector<group::v1::ReplicaHello>& hellos) {
  Settling settling;
  const std::map<std::string, std::vector<PartState>> all = PartsOf(hellos);
  for (const std::shared_ptr<engine::Head>& head : engine.Heads()) {
    Deed deed{.head = head};
    const auto parts = all.find(head->config().name);
    if (parts != all.end()) {
      const absl::StatusOr<engine::Settlement> settlement = engine::SettleReplicas(StatesOf(parts->second));
      if (!settlement.ok()) return settlement.status();
      deed.verdict = settlement->verdict;
      uint64_t low = parts->second.front().generation;
      for (const PartState& part : parts->second) low = std::min(low, part.generation);
      const std::optional<engine::JointStep> step = StepTaken(parts->second, low);
      deed.stepped = deed.verdict == Verdict::kGoOn && step.has_value();
      deed.behind = parts->second[static_cast<size_t>(place.replica)].generation == low;
      if (deed.stepped) deed.step = *step;
    }
    settling.deeds_.push_back(std::move(deed));
  }
  // What they exchange must have one order everywhere.
  std::sort(settling.deeds_.begin(), settling.deeds_.end(), [](const Deed& a, const Deed& b) {
    return a.head->config().name < b.head->config().name;
  });
  return settling;
}

absl::Status Settling::Do(const std::shared_ptr<const engine::ReplicaCommunicators>& replicas) {
  for (const Deed& deed : deeds_) {
    if (!deed.stepped) continue;
    absl::Status done;
    if (deed.behind) {
      done = Await([&](auto tell) { deed.head->StepPart(deed.step, replicas, tell); });
    } else if (!deed.step.skipped) {
      done = Await([&](auto tell) { deed.head->ServeGather(replicas, tell); });
    }
    if (!done.ok()) return done;
  }
  return absl::OkStatus();
}

void Settling::Finish() {
  for (const Deed& deed : deeds_) {
    if (deed.stepped) {
      if (deed.behind) deed.head->PublishPart(deed.step);
    } else if (deed.verdict == Verdict::kDrop) {
      deed.head->ReopenPart(engine::ReplicaLost("a replica was lost; the window is open again"));
    }
  }
}

std::vector<std::shared_ptr<engine::Head>> Settling::Summed() const {
  std::vector<std::shared_ptr<engine::Head>> summed;
  for (const Deed& deed : deeds_) {
    if (deed.verdict == Verdict::kGoOn && !deed.stepped) summed.push_back(deed.head);
  }
  return summed;
}

}  // namespace lossd::rpc
