// What happens to the replicas of a simulated head: they are cut from each other, or one is killed, and all
// meet again.
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/simulation/schedule.h"

namespace lossd::simulation {
namespace {

constexpr int kEventsMeanwhile = 200;

}  // namespace

void Schedule::SetEvent() {
  SimReplicas& set = *server_->replicas();
  if (!calm_ && set_random_.OneIn(80)) set.Cut(set_random_);
  if (!calm_ && set_random_.OneIn(300)) KillReplica(AnyReplica());
  set.Go(set_random_);
  if (!set.broken().empty()) Diverge(set.broken());
}

int32_t Schedule::AnyReplica() {
  return server_->replicas() == nullptr ? 0 : set_random_.Below(SimReplicas::kReplicas);
}

void Schedule::KillReplica(int32_t replica) {
  Say(absl::StrCat("kill -9 of replica ", replica));
  KillStreamsOf(replica);
  if (replica == 0) {
    ForgetWrite();
    ending_.begun = nullptr;
    ending_.stepped = nullptr;
    ending_.fated = nullptr;
  }
  server_->replicas()->Kill(replica);
}

void Schedule::RunCall(const std::function<void()>& call) {
  if (server_->replicas() == nullptr) return server_->Run(call);
  server_->replicas()->Call(call);
  GoOnUntil([this] { return !server_->replicas()->calling(); });
}

void Schedule::GoOnUntil(const std::function<bool()>& is_done) {
  for (int i = 0; i < kEventsMeanwhile && !is_done() && !Diverged(); ++i) {
    SetEvent();
    Event();
  }
  if (!server_->replicas()->GoUntil(is_done)) Diverge("a call to the replicas does not end");
}

// One replica is.
bool Schedule::SetIsSettled() {
  const SimReplicas* const set = server_->replicas();
  return set == nullptr || (set->whole() && !set->is_cut() && !set->calling());
}

bool Schedule::SettleSet() {
  if (SetIsSettled()) return !SameServer();
  if (!server_->replicas()->GoUntil([this] { return SetIsSettled(); })) {
    Diverge("the replicas do not meet");
    return true;
  }
  return !SameServer();
}

int32_t Schedule::PlaceOf(const ClientState& client) {
  for (int32_t replica = 0; replica < server_->replica_count(); ++replica) {
    const std::shared_ptr<engine::Head> head = server_->head(replica);
    if (head != nullptr && head->HasSession(client.key)) return replica;
  }
  return AnyReplica();
}

std::vector<engine::SessionMarks> Schedule::WindowMarks() const {
  std::vector<SessionMarks> all;
  for (int32_t replica = 0; replica < server_->replica_count(); ++replica) {
    const std::shared_ptr<engine::Head> head = server_->head(replica);
    if (head == nullptr) continue;
    for (SessionMarks& marks : head->Info().window_marks) all.push_back(std::move(marks));
  }
  return all;
}

std::vector<std::string> Schedule::Incarnations() const {
  std::vector<std::string> all;
  for (int32_t replica = 0; replica < server_->replica_count(); ++replica) {
    all.push_back(server_->engine(replica).incarnation());
  }
  return all;
}

}  // namespace lossd::simulation
