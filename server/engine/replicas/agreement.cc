#include "server/engine/replicas/agreement.h"

#include <algorithm>
#include <set>

namespace lossd::engine {
namespace {

bool AllHave(std::span<const MetReplica> replicas, const std::string& name) {
  const auto first = replicas.front().heads.find(name);
  if (first == replicas.front().heads.end() || first->second.part.broken) return false;
  return std::all_of(replicas.begin(), replicas.end(), [&](const MetReplica& replica) {
    const auto head = replica.heads.find(name);
    return head != replica.heads.end() && head->second == first->second;
  });
}

bool HasWeights(std::span<const MetReplica> replicas, const std::string& name) {
  return std::any_of(replicas.begin(), replicas.end(), [&](const MetReplica& replica) {
    const auto head = replica.heads.find(name);
    return head != replica.heads.end() && head->second.part.place.weight_version > 0;
  });
}

}  // namespace

Agreement Agree(std::span<const MetReplica> replicas, uint64_t new_history) {
  const uint64_t history = replicas.front().history;
  const bool together = std::all_of(replicas.begin(), replicas.end(),
                                    [&](const MetReplica& one) { return one.history == history; });
  const bool settled = together && history != 0;
  Agreement agreement{.history = settled ? history : new_history, .alike = {}, .go_back = {}, .empty = {}};
  std::set<std::string> names;
  for (const MetReplica& replica : replicas) {
    for (const auto& [name, head] : replica.heads) names.insert(name);
  }
  for (const std::string& name : names) {
    const bool alike = together && AllHave(replicas, name);
    (alike ? agreement.alike : agreement.go_back).push_back(name);
    if (!alike && !HasWeights(replicas, name)) agreement.empty.insert(name);
  }
  return agreement;
}

}  // namespace lossd::engine
