#include "server/engine/replicas/settle_replicas.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/slices.h"
#include "server/engine/common/errors.h"

namespace lossd::engine {
namespace {

using States = std::span<const ReplicaState>;

absl::Status Contradiction(size_t one, const std::string& says, size_t other, const std::string& what) {
  return absl::InternalError(absl::StrCat("replica ", one, " says that ", says, ", and replica ", other,
                                          " that ", what, ": both cannot be"));
}

bool HasSums(const ReplicaState& state) {
  return state.phase == EndingPhase::kSummed || state.phase == EndingPhase::kStepping ||
         state.phase == EndingPhase::kCommitting;
}

// What the slices of an empty replica are filled from.
bool EverySliceIsHeld(States states) {
  const kernels::SliceLayout layout(0, static_cast<int32_t>(states.size()));
  for (int32_t slice = 0; slice < layout.replicas(); ++slice) {
    if (states[static_cast<size_t>(slice)].holds) continue;
    if (!states[static_cast<size_t>(layout.MirrorOf(slice))].holds) return false;
  }
  return true;
}

// Those that have kept something.
std::vector<size_t> HoldersIn(States states) {
  std::vector<size_t> holders;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].holds) holders.push_back(i);
  }
  return holders;
}

absl::Status CheckHistory(States states, const std::vector<size_t>& holders) {
  const size_t first = holders.front();
  for (const size_t other : holders) {
    if (states[other].history == states[first].history) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, RejectReason::kConflict, "replica",
        absl::StrCat("replicas ", first, " and ", other,
                     " have windows and weights of different pasts; restart the one that is to be filled"));
  }
  return absl::OkStatus();
}

// How far the holders are. Whoever is a generation ahead has ended the window of the others.
struct Progress {
  uint64_t low = 0;
  bool ahead = false;         // somebody is
  bool all_have_sums = true;  // of those that are not
  bool decided = false;       // somebody has begun what nothing undoes
  std::string flush_id = {};  // of the flush that ends the window; empty: a step
};

absl::StatusOr<Progress> ProgressOf(States states, const std::vector<size_t>& holders) {
  const auto by_generation = [&](size_t a, size_t b) { return states[a].generation < states[b].generation; };
  const size_t lowest = *std::min_element(holders.begin(), holders.end(), by_generation);
  const size_t highest = *std::max_element(holders.begin(), holders.end(), by_generation);
  Progress progress{.low = states[lowest].generation};
  progress.ahead = states[highest].generation > progress.low;
  if (states[highest].generation - progress.low > 1) {
    return Contradiction(lowest, absl::StrCat("its window is ", progress.low), highest,
                         absl::StrCat("its is ", states[highest].generation));
  }
  const ReplicaState* with_sums = nullptr;
  for (const size_t i : holders) {
    const ReplicaState& state = states[i];
    if (state.generation != progress.low) {
      if (state.phase == EndingPhase::kOpen) continue;
      return Contradiction(i, "it ends a window", lowest, "the one before is not over");
    }
    if (!HasSums(state)) {
      progress.all_have_sums = false;
      continue;
    }
    if (with_sums != nullptr && with_sums->flush_id != state.flush_id) {
      return Contradiction(static_cast<size_t>(with_sums - states.data()),
                           absl::StrCat("flush '", with_sums->flush_id, "' ends the window"), i,
                           absl::StrCat("flush '", state.flush_id, "' does"));
    }
    with_sums = &state;
    progress.decided |= state.phase != EndingPhase::kSummed;
    progress.flush_id = state.flush_id;
  }
  if ((progress.ahead || progress.decided) && !progress.all_have_sums) {
    return absl::InternalError(
        absl::StrCat("the window of generation ", progress.low,
                     " was ended at one replica, while another one has no sum for it"));
  }
  return progress;
}

std::vector<bool> FencedBy(States states) {
  std::vector<bool> fenced(states.size());
  for (const ReplicaState& state : states) {
    if (!state.holds) continue;
    for (const int32_t replica : state.took_sessions_of) {
      const auto place = static_cast<size_t>(replica);
      // One that is empty has no window.
      if (replica >= 0 && place < fenced.size() && states[place].holds) fenced[place] = true;
    }
  }
  return fenced;
}

}  // namespace

absl::StatusOr<Settlement> SettleReplicas(States states) {
  Settlement settlement;
  settlement.refilled.resize(states.size());
  settlement.fenced.resize(states.size());
  if (!EverySliceIsHeld(states)) {
    settlement.verdict = Verdict::kRestore;
    return settlement;
  }
  const std::vector<size_t> holders = HoldersIn(states);
  if (absl::Status checked = CheckHistory(states, holders); !checked.ok()) return checked;
  const absl::StatusOr<Progress> progress = ProgressOf(states, holders);
  if (!progress.ok()) return progress.status();

  for (size_t i = 0; i < states.size(); ++i) settlement.refilled[i] = !states[i].holds;
  settlement.fenced = FencedBy(states);
  settlement.generation = progress->low;
  const bool flush = !progress->flush_id.empty();
  if (progress->ahead || progress->decided) {
    settlement.verdict = flush ? Verdict::kCommit : Verdict::kGoOn;
    ++settlement.generation;
  } else if (progress->all_have_sums) {
    settlement.verdict = Verdict::kGoOn;
    if (!flush) ++settlement.generation;
  }
  if (settlement.verdict != Verdict::kDrop) settlement.flush_id = progress->flush_id;
  const bool fences =
      std::find(settlement.fenced.begin(), settlement.fenced.end(), true) != settlement.fenced.end();
  if (fences && settlement.verdict != Verdict::kDrop) {
    return absl::InternalError("a replica has taken sessions of another one's window, which all have summed");
  }
  return settlement;
}

}  // namespace lossd::engine
