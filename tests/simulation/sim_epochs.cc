// What happens to the ranks of a simulated group: one lags, is killed, is no longer heard, hears what an
// earlier epoch sent, or lives on when its epoch is over.
#include "absl/strings/str_cat.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {

void Schedule::RankEvent() {
  if (server_->replicas() != nullptr) return SetEvent();
  SimGroup* const group = server_->group();
  if (group == nullptr) return;
  if (rank_random_.OneIn(slow_rank_ && !calm_ ? 12 : 3)) group->Run(1 + rank_random_.Below(4));
  if (group->lag() > 0) Count("rank lags");
  LeftoverEvent();
  if (rank_random_.OneIn(10)) server_->DeliverLate();
  if (rank_random_.OneIn(400)) group->RepeatHello();
  if (!calm_ && rank_random_.OneIn(120)) KillRank();
  if (!calm_ && rank_random_.OneIn(150)) Part();
  if (rank_random_.OneIn(60)) group->Heal();
  if (rank_random_.OneIn(6)) group->Beat();
  if (!group->broken().empty()) Diverge(group->broken());
  if (group->noticed()) EndLostEpoch();
}

// Rank 1 of the last epoch goes on beside this one, until it notices that nobody leads it.
void Schedule::LeftoverEvent() {
  if (!server_->has_leftover()) return;
  Count("rank of an old epoch is there");
  if (rank_random_.OneIn(3)) server_->RunLeftover(1 + rank_random_.Below(4));
  if (rank_random_.OneIn(6)) server_->BeatLeftover();
}

// At once, or in the middle of what ranks do together.
void Schedule::KillRank() {
  if (!MayLoseServer() || server_->group()->doomed()) return;
  if (rank_random_.OneIn(2)) return server_->group()->Kill();
  Say("rank 1 will be killed in a collective");
  server_->group()->KillInCollective();
}

// One direction, or both.
void Schedule::Part() {
  if (!MayLoseServer() || server_->group()->doomed()) return;
  const int ways = rank_random_.Below(3);
  if (ways != 0) server_->group()->Part(SimControl::Way::kToLeader);
  if (ways != 1) server_->group()->Part(SimControl::Way::kToRank);
}

bool Schedule::EndLostEpoch() {
  if (server_->replicas() != nullptr) return SettleSet();
  const SimGroup* const group = server_->group();
  if (group == nullptr) return false;
  const bool failed = !server_->device_failure().ok();
  if (!failed && !group->lost()) return false;
  if (!group->broken().empty()) Diverge(group->broken());
  if (!group->lost()) {
    Diverge(absl::StrCat("the device fails with all ranks there: ", Text(server_->device_failure())));
  }
  Count(failed ? "epoch ended by a failure" : "epoch ended by silence");
  Say(failed ? absl::StrCat("the leader ends: ", Text(server_->device_failure())) : "rank 1 is silent");
  Restart();
  return true;
}

bool Schedule::EndDoomedEpoch() {
  SimGroup* const group = server_->group();
  if (group != nullptr && group->doomed()) {
    // What stands still stays so until somebody notices.
    if (group->rank_is_there() && group->stalls()) {
      group->AwaitSilence();
    } else {
      group->Kill();
    }
  }
  return EndLostEpoch();
}

// A mark has told the client that this item is applied.
void Schedule::CheckApplied(uint64_t item) {
  Count("mark checked");
  if (!server_->EveryRankHasAdded(item)) {
    Diverge(absl::StrCat("item ", item, " counts as applied, which not every rank has added"));
  }
}

}  // namespace lossd::simulation
