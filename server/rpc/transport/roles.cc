#include "server/rpc/transport/roles.h"

#include <algorithm>

namespace lossd::rpc {
namespace {

struct Entry {
  std::string_view method;
  Role role;
};

// A method that is not here can be called by nobody while --tokens is on: a new one needs its line.
constexpr Entry kMethods[] = {
    {"grpc.health.v1.Health/Check", Role::kAnybody},
    {"grpc.health.v1.Health/Watch", Role::kAnybody},
    {"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Role::kReadOnly},

    {"StatusService/GetStatus", Role::kReadOnly},
    {"StatusService/GetMemory", Role::kReadOnly},
    {"HeadService/ListHeads", Role::kReadOnly},
    {"HeadService/GetHead", Role::kReadOnly},
    {"HeadService/ListCheckpoints", Role::kReadOnly},

    // A training creates its head, or finds the one that is there; limits bound how many and how large.
    {"HeadService/CreateHead", Role::kTrainer},
    {"HeadService/CopyHead", Role::kTrainer},  // the same
    {"HeadService/BlendHead", Role::kTrainer},
    {"HeadService/ParkHead", Role::kTrainer},  // whoever uses it has it back
    {"HeadService/BeginWrite", Role::kTrainer},
    {"HeadService/WriteWeights", Role::kTrainer},
    {"HeadService/CommitWrite", Role::kTrainer},
    {"HeadService/ReadWeights", Role::kTrainer},  // weights are what there is to steal
    {"HeadService/SaveCheckpoint", Role::kTrainer},
    {"HeadService/RestoreCheckpoint",
     Role::kTrainer},  // how a training goes back; it may overwrite weights anyway
    {"LossService/OpenSession", Role::kTrainer},
    {"LossService/CloseSession", Role::kTrainer},
    {"LossService/Compute", Role::kTrainer},
    {"LossService/Logits", Role::kTrainer},  // the model's answers give its weights away
    {"GradientService/BeginFlush", Role::kTrainer},
    {"GradientService/ReadGradient", Role::kTrainer},
    {"GradientService/CommitFlush", Role::kTrainer},
    {"GradientService/AbortFlush", Role::kTrainer},
    {"GradientService/GradientStats", Role::kTrainer},  // a pass over all of dW
    {"GradientService/ApplyStep", Role::kTrainer},
    {"RegionService/CreateRegion", Role::kTrainer},
    {"RegionService/DeleteRegion", Role::kTrainer},

    {"HeadService/DeleteHead", Role::kAdmin},
    {"HeadService/DeleteCheckpoint", Role::kAdmin},
    {"HeadService/LoadWeights", Role::kAdmin},  // whatever lies in --weights_dir
    {"StatusService/Drain", Role::kAdmin},
};

constexpr Role kTokenRoles[] = {Role::kReadOnly, Role::kTrainer, Role::kAdmin};

}  // namespace

const char* RoleName(Role role) {
  switch (role) {
    case Role::kAnybody:
      return "anybody";
    case Role::kReadOnly:
      return "read-only";
    case Role::kTrainer:
      return "trainer";
    case Role::kAdmin:
      return "admin";
  }
  return "";
}

std::optional<Role> ParseRole(std::string_view name) {
  for (const Role role : kTokenRoles) {
    if (name == RoleName(role)) return role;
  }
  return std::nullopt;
}

std::optional<Role> LeastRole(std::string_view method) {
  const auto* const found = std::find_if(std::begin(kMethods), std::end(kMethods),
                                         [&](const Entry& entry) { return entry.method == method; });
  if (found == std::end(kMethods)) return std::nullopt;
  return found->role;
}

}  // namespace lossd::rpc
