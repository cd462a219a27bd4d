// What the leader of a group has the other ranks do: what is asked of a device and of its heads, once for all
// shards. Payloads do not travel here; they go by the communicator that each of these calls then uses.
#ifndef LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_H_
#define LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/data_type.h"
#include "kernels/linear_cross_entropy.h"
#include "kernels/loss_options.h"
#include "server/engine/chunk/chunk.h"
#include "server/engine/chunk/head_config.h"
#include "server/engine/common/replica_place.h"
#include "server/engine/device/batch_key.h"
#include "server/engine/device/head_backend.h"
#include "server/engine/device/replica_connection.h"

namespace lossd::engine {

// Heads and gradients go by numbers that the leader gives once and never again; gradient 0 is a head's own.

// Replied to: takes the memory, on every rank or on none.
struct CreateHeadCommand {
  uint64_t head = 0;
  HeadConfig config;  // of the whole head
  ReplicaPlace replica = {};
};
struct DeleteHeadCommand {
  uint64_t head = 0;
};
// Replied to, in the same way. A gradient is for heads of one configuration, whose number it need not know.
struct CreateGradientCommand {
  uint64_t gradient = 0;
  HeadConfig config;
};
struct DeleteGradientCommand {
  uint64_t gradient = 0;
};

// The rows of a head, of whichever kind, that go to the leader or come from it.
enum class HeadRows { kWeights, kBias, kGradient, kBiasGradient, kState, kSum, kBiasSum };
struct ReadRowsCommand {
  uint64_t head = 0;
  HeadRows what = HeadRows::kWeights;
  kernels::DataType type = kernels::DataType::kFloat32;  // of kWeights
  uint64_t gradient = 0;                                 // of kGradient and kBiasGradient
  std::string tensor = {};                               // of kState
  int64_t first_row = 0;                                 // of the whole vocabulary
  int64_t rows = 0;
};
struct WriteRowsCommand {
  uint64_t head = 0;
  HeadRows what = HeadRows::kGradient;  // or kState
  uint64_t gradient = 0;
  bool with_bias = false;  // of kGradient
  std::string tensor = {};
  int64_t first_row = 0;
  int64_t rows = 0;
};
struct RestoreStateCommand {
  uint64_t head = 0;
};

// HeadBackend's, of another head.
struct BlendWeightsCommand {
  uint64_t head = 0;
  uint64_t source = 0;
  double decay = 0;
};
struct CopyOptimizerCommand {
  uint64_t head = 0;
  uint64_t source = 0;
};

struct ResetCommand {
  uint64_t head = 0;
  uint64_t gradient = 0;
};
struct FoldCommand {
  uint64_t head = 0;
  uint64_t from = 0;
  uint64_t to = 0;
};
struct SummarizeCommand {
  uint64_t head = 0;
  uint64_t gradient = 0;
  double scale = 1;
};
struct ApplyStepCommand {
  uint64_t head = 0;
  uint64_t gradient = 0;
  StepArguments arguments;
};

// What a head over replicas does (HeadBackend), each rank with the ranks of its number in the other groups,
// which it knows by a connection's number. That one of these is lost is no error of this rank.
struct SumSlicesCommand {
  uint64_t head = 0;
  uint64_t gradient = 0;
  uint64_t connection = 0;
};
struct AddToSumCommand {
  uint64_t head = 0;
  uint64_t gradient = 0;  // looked at where this replica is `replica`
  int32_t replica = 0;
  uint64_t connection = 0;
};
struct TallySumCommand {
  uint64_t head = 0;
  double scale = 1;
  uint64_t connection = 0;
};
struct StepSlicesCommand {
  uint64_t head = 0;
  StepArguments arguments;
};
struct GatherSlicesCommand {
  uint64_t head = 0;
  uint64_t connection = 0;
};
// Connects the rank in place of any connection before, by rounds of the group's rendezvous
// (ReplicaRendezvous) in which it also tells what becomes of it.
struct ConnectReplicasCommand {
  uint64_t connection = 0;  // ascending, from 1
  ReplicaNetwork network;
};
// This connection, whether it is there yet or not, and those before it.
struct AbortReplicasCommand {
  uint64_t connection = 0;
};

struct LogitsCommand {
  uint64_t head = 0;
  int64_t rows = 0;
  float logit_scale = 1.0f;
  float softcap = 0.0f;
  Bias bias = Bias::kIgnore;
  kernels::DataType type = kernels::DataType::kFloat32;
  bool logits = false;  // all of them are wanted
  int32_t top_k = 0;
};

// Replied to.
struct PrepareTeacherCommand {
  uint64_t head = 0;
  uint64_t teacher = 0;
};

// A chunk of a batch without its hidden states. Arrays are as they are in memory; an empty one is absent.
struct ChunkHeader {
  int64_t tokens = 0;
  std::string labels = {};  // int64 [tokens]
  int64_t ignore_index = -100;
  float gradient_scale = 1.0f;
  std::optional<float> z_gradient_scale = {};
  std::string token_weights = {};      // fp32 [tokens]
  std::string lse_gradients = {};      // fp32 [tokens]
  std::string entropy_gradients = {};  // fp32 [tokens]
  bool accumulate = true;
  bool input_gradient = false;  // dX is wanted
  uint64_t payload = 0;  // the number of its tensors at the rank that holds them (RankPayloads); 0: rank 0
};
struct StartBatchCommand {
  uint64_t head = 0;
  uint64_t teacher = 0;  // its head; 0: none
  uint64_t gradient = 0;
  BatchKey kind;  // without pointers: what they point to is told above
  std::vector<ChunkHeader> chunks;
};

// To one rank alone: nothing that comes names this payload of it any more.
struct ReleasePayloadCommand {
  uint64_t payload = 0;
};
// A round trip to the rank's device (Device::RoundTrip), and nothing else.
struct ProbeCommand {};

using GroupCommand =
    std::variant<CreateHeadCommand, DeleteHeadCommand, CreateGradientCommand, DeleteGradientCommand,
                 ReadRowsCommand, WriteRowsCommand, RestoreStateCommand, ResetCommand, FoldCommand,
                 SummarizeCommand, ApplyStepCommand, SumSlicesCommand, TallySumCommand, StepSlicesCommand,
                 GatherSlicesCommand, ConnectReplicasCommand, AbortReplicasCommand, LogitsCommand,
                 PrepareTeacherCommand, StartBatchCommand, ReleasePayloadCommand, ProbeCommand,
                 BlendWeightsCommand, CopyOptimizerCommand, AddToSumCommand>;

inline constexpr const char* kStartBatch = "StartBatch";
// What people read, in the order of the alternatives.
inline constexpr std::array kCommandNames = {
    "CreateHead",      "DeleteHead",    "CreateGradient", "DeleteGradient", "ReadRows",
    "WriteRows",       "RestoreState",  "Reset",          "Fold",           "Summarize",
    "ApplyStep",       "SumSlices",     "TallySum",       "StepSlices",     "GatherSlices",
    "ConnectReplicas", "AbortReplicas", "Logits",         "PrepareTeacher", kStartBatch,
    "ReleasePayload",  "Probe",         "BlendWeights",   "CopyOptimizer",  "AddToSum"};
static_assert(kCommandNames.size() == std::variant_size_v<GroupCommand>);
inline const char* NameOf(const GroupCommand& command) { return kCommandNames[command.index()]; }

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_H_
