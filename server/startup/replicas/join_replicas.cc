#include "server/startup/replicas/join_replicas.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/collectives/nccl_communicator.h"
#include "server/startup/group/network_interface.h"
#include "server/version.h"

namespace lossd {
namespace {

void TellEngine(rpc::ReplicaSet* set, engine::EngineOptions* engine) {
  engine->place = set->place();
  if (!engine->place.coordinates()) return;
  engine->end_together = [set](std::shared_ptr<engine::Head> head, engine::WindowEnd end) {
    set->EndTogether(std::move(head), std::move(end));
  };
  engine->find_part = [set](const engine::Head& head, int32_t replica) {
    return set->FindPart(head, replica);
  };
  engine->find_replicas = [set](const engine::Head& head) { return set->FindReplicas(head); };
  engine->publish_together = [set](std::shared_ptr<engine::Head> head,
                                   std::shared_ptr<engine::StagedWrite> write) {
    set->PublishTogether(std::move(head), std::move(write));
  };
  engine->create_together = [set](const engine::HeadConfig& config) { return set->CreateTogether(config); };
  engine->copy_together = [set](const engine::HeadCopy& copy, absl::FunctionRef<absl::Status()> copy_here) {
    return set->CopyTogether(copy, copy_here);
  };
  engine->delete_together = [set](const std::string& name, engine::Head::DiscardGradient discard,
                                  absl::FunctionRef<absl::Status()> delete_here) {
    return set->DeleteTogether(name, discard, delete_here);
  };
}

}  // namespace

absl::StatusOr<std::unique_ptr<rpc::ReplicaSet>> JoinReplicas(const ReplicaOptions& options,
                                                              ReplicaLikeness likeness,
                                                              engine::EngineOptions* engine) {
  std::string address = options.leader;
  if (options.place.coordinates() && !options.interface.empty()) {
    absl::StatusOr<std::string> own = ControlAddress(options.interface, options.leader, "--replica_leader");
    if (!own.ok()) return own.status();
    address = *std::move(own);
  }
  // While no other thread reads the environment.
  if (likeness.device_kind != "cpu") kernels::collectives::PrepareNccl(options.interface);
  likeness.agreed["replica_set"] = options.set;
  likeness.agreed["replicas"] = absl::StrCat(options.place.replicas);
  likeness.agreed["devices"] = absl::StrCat(likeness.ranks);
  likeness.agreed["replica_timeout"] = absl::FormatDuration(options.timeout);
  std::unique_ptr<rpc::ReplicaSet> set =
      rpc::ReplicaSet::Create({.place = options.place,
                               .address = std::move(address),
                               .credentials = options.credentials,
                               .identity = {.version = kVersion,
                                            .device_kind = std::move(likeness.device_kind),
                                            .agreed = std::move(likeness.agreed)},
                               .replica_timeout = options.timeout,
                               .interface = options.interface});
  TellEngine(set.get(), engine);
  return set;
}

}  // namespace lossd
