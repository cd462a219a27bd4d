#include "server/rpc/group/command_wire.h"

#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "lossd/group/v1/command.pb.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/convert.h"

namespace lossd::rpc {
namespace {

using engine::Bias;
using engine::ClassWeights;
using kernels::DataType;

// One Write and one Read for each command. Read returns false where a value is none of the engine's. Write
// takes larger structs apart as a whole: with a new field it does not compile until that is written.

bool Read(v1::DataType wire, DataType* type) {
  const absl::StatusOr<DataType> read = ToEngine(wire, "type");
  if (read.ok()) *type = *read;
  return read.ok();
}

template <class Enum>
bool Read(int32_t wire, Enum most, Enum* value) {
  *value = static_cast<Enum>(wire);
  return wire >= 0 && wire <= static_cast<int32_t>(most);
}

bool Read(const v1::CreateHeadRequest& wire, engine::HeadConfig* config) {
  absl::StatusOr<engine::HeadConfig> read = ToEngine(wire);
  if (!read.ok()) return false;
  *config = *std::move(read);
  return true;
}

void Write(const engine::ReplicaPlace& place, group::v1::ReplicaPlace* wire) {
  wire->set_replica(place.replica);
  wire->set_replicas(place.replicas);
}
bool Read(const group::v1::ReplicaPlace& wire, engine::ReplicaPlace* place) {
  *place = {wire.replica(), wire.replicas()};
  return place->replica >= 0 && place->replica < place->replicas;
}

bool AreRows(int64_t first, int64_t rows) { return first >= 0 && rows >= 0; }

void Write(const engine::CreateHeadCommand& command, group::v1::Command* all) {
  group::v1::CreateHead* wire = all->mutable_create_head();
  wire->set_head(command.head);
  ToProto(command.config, wire->mutable_config());
  Write(command.replica, wire->mutable_replica());
}
bool Read(const group::v1::CreateHead& wire, engine::CreateHeadCommand* command) {
  command->head = wire.head();
  return Read(wire.config(), &command->config) && Read(wire.replica(), &command->replica);
}

void Write(const engine::DeleteHeadCommand& command, group::v1::Command* all) {
  all->mutable_delete_head()->set_head(command.head);
}
bool Read(const group::v1::DeleteHead& wire, engine::DeleteHeadCommand* command) {
  command->head = wire.head();
  return true;
}

void Write(const engine::CreateGradientCommand& command, group::v1::Command* all) {
  group::v1::CreateGradient* wire = all->mutable_create_gradient();
  wire->set_gradient(command.gradient);
  ToProto(command.config, wire->mutable_config());
}
bool Read(const group::v1::CreateGradient& wire, engine::CreateGradientCommand* command) {
  command->gradient = wire.gradient();
  return Read(wire.config(), &command->config);
}

void Write(const engine::DeleteGradientCommand& command, group::v1::Command* all) {
  all->mutable_delete_gradient()->set_gradient(command.gradient);
}
bool Read(const group::v1::DeleteGradient& wire, engine::DeleteGradientCommand* command) {
  command->gradient = wire.gradient();
  return true;
}

void Write(const engine::ReadRowsCommand& command, group::v1::Command* all) {
  group::v1::ReadRows* wire = all->mutable_read_rows();
  wire->set_head(command.head);
  wire->set_what(static_cast<int32_t>(command.what));
  wire->set_type(ToProto(command.type));
  wire->set_gradient(command.gradient);
  wire->set_tensor(command.tensor);
  wire->set_first_row(command.first_row);
  wire->set_rows(command.rows);
}
bool Read(const group::v1::ReadRows& wire, engine::ReadRowsCommand* command) {
  command->head = wire.head();
  command->gradient = wire.gradient();
  command->tensor = wire.tensor();
  command->first_row = wire.first_row();
  command->rows = wire.rows();
  return Read(wire.what(), engine::HeadRows::kBiasSum, &command->what) && Read(wire.type(), &command->type) &&
         AreRows(command->first_row, command->rows);
}

void Write(const engine::WriteRowsCommand& command, group::v1::Command* all) {
  group::v1::WriteRows* wire = all->mutable_write_rows();
  wire->set_head(command.head);
  wire->set_what(static_cast<int32_t>(command.what));
  wire->set_gradient(command.gradient);
  wire->set_with_bias(command.with_bias);
  wire->set_tensor(command.tensor);
  wire->set_first_row(command.first_row);
  wire->set_rows(command.rows);
}
bool Read(const group::v1::WriteRows& wire, engine::WriteRowsCommand* command) {
  command->head = wire.head();
  command->gradient = wire.gradient();
  command->with_bias = wire.with_bias();
  command->tensor = wire.tensor();
  command->first_row = wire.first_row();
  command->rows = wire.rows();
  return Read(wire.what(), engine::HeadRows::kBiasSum, &command->what) &&
         AreRows(command->first_row, command->rows);
}

void Write(const engine::RestoreStateCommand& command, group::v1::Command* all) {
  all->mutable_restore_state()->set_head(command.head);
}
bool Read(const group::v1::RestoreState& wire, engine::RestoreStateCommand* command) {
  command->head = wire.head();
  return true;
}

void Write(const engine::BlendWeightsCommand& command, group::v1::Command* all) {
  group::v1::BlendWeights* wire = all->mutable_blend_weights();
  wire->set_head(command.head);
  wire->set_source(command.source);
  wire->set_decay(command.decay);
}
bool Read(const group::v1::BlendWeights& wire, engine::BlendWeightsCommand* command) {
  *command = {.head = wire.head(), .source = wire.source(), .decay = wire.decay()};
  return command->decay >= 0 && command->decay < 1;
}

void Write(const engine::CopyOptimizerCommand& command, group::v1::Command* all) {
  all->mutable_copy_optimizer()->set_head(command.head);
  all->mutable_copy_optimizer()->set_source(command.source);
}
bool Read(const group::v1::CopyOptimizer& wire, engine::CopyOptimizerCommand* command) {
  *command = {.head = wire.head(), .source = wire.source()};
  return true;
}

void Write(const engine::ResetCommand& command, group::v1::Command* all) {
  all->mutable_reset()->set_head(command.head);
  all->mutable_reset()->set_gradient(command.gradient);
}
bool Read(const group::v1::Reset& wire, engine::ResetCommand* command) {
  *command = {.head = wire.head(), .gradient = wire.gradient()};
  return true;
}

void Write(const engine::FoldCommand& command, group::v1::Command* all) {
  group::v1::Fold* wire = all->mutable_fold();
  wire->set_head(command.head);
  wire->set_from(command.from);
  wire->set_to(command.to);
}
bool Read(const group::v1::Fold& wire, engine::FoldCommand* command) {
  *command = {.head = wire.head(), .from = wire.from(), .to = wire.to()};
  return true;
}

void Write(const engine::SummarizeCommand& command, group::v1::Command* all) {
  group::v1::Summarize* wire = all->mutable_summarize();
  wire->set_head(command.head);
  wire->set_gradient(command.gradient);
  wire->set_scale(command.scale);
}
bool Read(const group::v1::Summarize& wire, engine::SummarizeCommand* command) {
  *command = {.head = wire.head(), .gradient = wire.gradient(), .scale = wire.scale()};
  return true;
}

void Write(const engine::StepArguments& arguments, group::v1::StepArguments* wire) {
  const auto& [learning_rate, gradient_scale, optimizer, step] = arguments;
  wire->set_learning_rate(learning_rate);
  wire->set_gradient_scale(gradient_scale);
  ToProto(optimizer, wire->mutable_optimizer());
  wire->set_step(step);
}
bool Read(const group::v1::StepArguments& wire, engine::StepArguments* arguments) {
  const absl::StatusOr<engine::OptimizerConfig> optimizer = ToEngine(wire.optimizer());
  if (!optimizer.ok()) return false;
  *arguments = {.learning_rate = wire.learning_rate(),
                .gradient_scale = wire.gradient_scale(),
                .optimizer = *optimizer,
                .step = wire.step()};
  return true;
}

void Write(const engine::ApplyStepCommand& command, group::v1::Command* all) {
  group::v1::ApplyStep* wire = all->mutable_apply_step();
  wire->set_head(command.head);
  wire->set_gradient(command.gradient);
  Write(command.arguments, wire->mutable_arguments());
}
bool Read(const group::v1::ApplyStep& wire, engine::ApplyStepCommand* command) {
  command->head = wire.head();
  command->gradient = wire.gradient();
  return Read(wire.arguments(), &command->arguments);
}

void Write(const engine::SumSlicesCommand& command, group::v1::Command* all) {
  group::v1::SumSlices* wire = all->mutable_sum_slices();
  wire->set_head(command.head);
  wire->set_gradient(command.gradient);
  wire->set_connection(command.connection);
}
bool Read(const group::v1::SumSlices& wire, engine::SumSlicesCommand* command) {
  *command = {.head = wire.head(), .gradient = wire.gradient(), .connection = wire.connection()};
  return true;
}

void Write(const engine::TallySumCommand& command, group::v1::Command* all) {
  group::v1::TallySum* wire = all->mutable_tally_sum();
  wire->set_head(command.head);
  wire->set_scale(command.scale);
  wire->set_connection(command.connection);
}
bool Read(const group::v1::TallySum& wire, engine::TallySumCommand* command) {
  *command = {.head = wire.head(), .scale = wire.scale(), .connection = wire.connection()};
  return true;
}

void Write(const engine::StepSlicesCommand& command, group::v1::Command* all) {
  group::v1::StepSlices* wire = all->mutable_step_slices();
  wire->set_head(command.head);
  Write(command.arguments, wire->mutable_arguments());
}
bool Read(const group::v1::StepSlices& wire, engine::StepSlicesCommand* command) {
  command->head = wire.head();
  return Read(wire.arguments(), &command->arguments);
}

void Write(const engine::GatherSlicesCommand& command, group::v1::Command* all) {
  group::v1::GatherSlices* wire = all->mutable_gather_slices();
  wire->set_head(command.head);
  wire->set_connection(command.connection);
}
bool Read(const group::v1::GatherSlices& wire, engine::GatherSlicesCommand* command) {
  *command = {.head = wire.head(), .connection = wire.connection()};
  return true;
}

void Write(const engine::ConnectReplicasCommand& command, group::v1::Command* all) {
  group::v1::ConnectReplicas* wire = all->mutable_connect_replicas();
  wire->set_connection(command.connection);
  Write(command.network.place, wire->mutable_place());
  wire->set_interface(command.network.interface);
  wire->set_timeout_ms(command.network.timeout.count());
  wire->set_connect_timeout_ms(command.network.connect_timeout.count());
}
bool Read(const group::v1::ConnectReplicas& wire, engine::ConnectReplicasCommand* command) {
  command->connection = wire.connection();
  command->network.interface = wire.interface();
  command->network.timeout = std::chrono::milliseconds(wire.timeout_ms());
  command->network.connect_timeout = std::chrono::milliseconds(wire.connect_timeout_ms());
  return Read(wire.place(), &command->network.place);
}

void Write(const engine::AbortReplicasCommand& command, group::v1::Command* all) {
  all->mutable_abort_replicas()->set_connection(command.connection);
}
bool Read(const group::v1::AbortReplicas& wire, engine::AbortReplicasCommand* command) {
  command->connection = wire.connection();
  return true;
}

void Write(const engine::LogitsCommand& command, group::v1::Command* all) {
  group::v1::Logits* wire = all->mutable_logits();
  wire->set_head(command.head);
  wire->set_rows(command.rows);
  wire->set_logit_scale(command.logit_scale);
  wire->set_softcap(command.softcap);
  wire->set_bias(command.bias == Bias::kUse);
  wire->set_type(ToProto(command.type));
  wire->set_logits(command.logits);
  wire->set_top_k(command.top_k);
}
bool Read(const group::v1::Logits& wire, engine::LogitsCommand* command) {
  command->head = wire.head();
  command->rows = wire.rows();
  command->logit_scale = wire.logit_scale();
  command->softcap = wire.softcap();
  command->bias = wire.bias() ? Bias::kUse : Bias::kIgnore;
  command->logits = wire.logits();
  command->top_k = wire.top_k();
  return Read(wire.type(), &command->type) && command->rows > 0 && command->top_k >= 0;
}

void Write(const engine::PrepareTeacherCommand& command, group::v1::Command* all) {
  all->mutable_prepare_teacher()->set_head(command.head);
  all->mutable_prepare_teacher()->set_teacher(command.teacher);
}
bool Read(const group::v1::PrepareTeacher& wire, engine::PrepareTeacherCommand* command) {
  *command = {.head = wire.head(), .teacher = wire.teacher()};
  return true;
}

void WriteTeacher(const engine::StartBatchCommand& command, group::v1::Teacher* wire) {
  const auto& [backend, head_number, hidden_size, weight_type, hidden_type, distillation] =
      command.kind.teacher;
  wire->set_head(command.teacher);
  wire->set_hidden_size(hidden_size);
  wire->set_weight_type(ToProto(weight_type));
  wire->set_hidden_type(ToProto(hidden_type));
  ToProto(distillation, wire->mutable_loss());
}
bool ReadTeacher(const group::v1::Teacher& wire, engine::StartBatchCommand* command) {
  engine::TeacherKind& teacher = command->kind.teacher;
  command->teacher = wire.head();
  teacher.head_number = wire.head();
  teacher.hidden_size = wire.hidden_size();
  const absl::StatusOr<kernels::Distillation> loss = ToEngine(wire.loss());
  if (loss.ok()) teacher.distillation = *loss;
  return loss.ok() && Read(wire.weight_type(), &teacher.weight_type) &&
         Read(wire.hidden_type(), &teacher.hidden_type);
}

// Not its pointers, which the command tells as numbers, nor what no group takes: lists, and what is held.
void WriteKind(const engine::BatchKey& kind, group::v1::BatchKind* wire) {
  const auto& [hidden_type, dx_type, mode, options, class_weights, bias, returns, entropy_gradients, holds,
               lists, teacher, segments, gradient, holder] = kind;
  wire->set_hidden_type(ToProto(hidden_type));
  wire->set_dx_type(ToProto(dx_type));
  wire->set_mode(static_cast<int32_t>(mode));
  ToProto(options, wire->mutable_loss());
  wire->set_class_weights(class_weights == ClassWeights::kUse);
  wire->set_bias(bias == Bias::kUse);
  ToProto(returns, wire->mutable_returns());
  wire->set_entropy_gradients(entropy_gradients);
  wire->set_fixed_segments(segments == kernels::Segments::kFixed);
  wire->set_holder(holder);
}
bool ReadKind(const group::v1::BatchKind& wire, engine::BatchKey* kind) {
  kind->options = ToEngine(wire.loss());
  kind->class_weights = wire.class_weights() ? ClassWeights::kUse : ClassWeights::kIgnore;
  kind->bias = wire.bias() ? Bias::kUse : Bias::kIgnore;
  kind->returns = ToEngine(wire.returns());
  kind->segments = wire.fixed_segments() ? kernels::Segments::kFixed : kernels::Segments::kOfRanks;
  kind->holder = wire.holder();
  kind->entropy_gradients = wire.entropy_gradients();
  return Read(wire.hidden_type(), &kind->hidden_type) && Read(wire.dx_type(), &kind->dx_type) &&
         Read(wire.mode(), engine::ComputeMode::kWeightGradientOnly, &kind->mode) && kind->holder >= 0;
}

void Write(const engine::StartBatchCommand& command, group::v1::Command* all) {
  group::v1::StartBatch* wire = all->mutable_start_batch();
  wire->set_head(command.head);
  wire->set_gradient(command.gradient);
  WriteKind(command.kind, wire->mutable_kind());
  if (command.teacher != 0) WriteTeacher(command, wire->mutable_kind()->mutable_teacher());
  for (const engine::ChunkHeader& chunk : command.chunks) {
    group::v1::ChunkHeader* header = wire->add_chunks();
    header->set_tokens(chunk.tokens);
    header->set_ignore_index(chunk.ignore_index);
    header->set_gradient_scale(chunk.gradient_scale);
    if (chunk.z_gradient_scale.has_value()) header->set_z_gradient_scale(*chunk.z_gradient_scale);
    header->set_accumulate(chunk.accumulate);
    header->set_input_gradient(chunk.input_gradient);
    header->set_payload(chunk.payload);
    header->set_labels(chunk.labels);
    header->set_token_weights(chunk.token_weights);
    header->set_lse_gradients(chunk.lse_gradients);
    header->set_entropy_gradients(chunk.entropy_gradients);
  }
}

bool HasItsArrays(const engine::ChunkHeader& chunk) {
  // That of the labels bounds the number of tokens, whatever it says.
  const size_t tokens = chunk.labels.size() / sizeof(int64_t);
  const auto is_array = [tokens](const std::string& bytes) {
    return bytes.empty() || bytes.size() == tokens * sizeof(float);
  };
  return chunk.tokens > 0 && static_cast<uint64_t>(chunk.tokens) == tokens &&
         chunk.labels.size() == tokens * sizeof(int64_t) && is_array(chunk.token_weights) &&
         is_array(chunk.lse_gradients) && is_array(chunk.entropy_gradients);
}

bool Read(const group::v1::StartBatch& wire, engine::StartBatchCommand* command) {
  command->head = wire.head();
  command->gradient = wire.gradient();
  if (!ReadKind(wire.kind(), &command->kind)) return false;
  if (wire.kind().has_teacher() && !ReadTeacher(wire.kind().teacher(), command)) return false;
  for (const group::v1::ChunkHeader& header : wire.chunks()) {
    engine::ChunkHeader& chunk = command->chunks.emplace_back();
    chunk.tokens = header.tokens();
    chunk.labels = header.labels();
    chunk.ignore_index = header.ignore_index();
    chunk.gradient_scale = header.gradient_scale();
    if (header.has_z_gradient_scale()) chunk.z_gradient_scale = header.z_gradient_scale();
    chunk.token_weights = header.token_weights();
    chunk.lse_gradients = header.lse_gradients();
    chunk.entropy_gradients = header.entropy_gradients();
    chunk.accumulate = header.accumulate();
    chunk.input_gradient = header.input_gradient();
    chunk.payload = header.payload();
    if (!HasItsArrays(chunk)) return false;
  }
  return true;
}

void Write(const engine::ReleasePayloadCommand& command, group::v1::Command* all) {
  all->mutable_release_payload()->set_payload(command.payload);
}
bool Read(const group::v1::ReleasePayload& wire, engine::ReleasePayloadCommand* command) {
  command->payload = wire.payload();
  return true;
}
void Write(const engine::ProbeCommand& /*command*/, group::v1::Command* all) { all->mutable_probe(); }

bool ReadCommand(const group::v1::Command& wire, engine::GroupCommand* command) {
  using group::v1::Command;
  switch (wire.command_case()) {
    case Command::kCreateHead:
      return Read(wire.create_head(), &command->emplace<engine::CreateHeadCommand>());
    case Command::kDeleteHead:
      return Read(wire.delete_head(), &command->emplace<engine::DeleteHeadCommand>());
    case Command::kCreateGradient:
      return Read(wire.create_gradient(), &command->emplace<engine::CreateGradientCommand>());
    case Command::kDeleteGradient:
      return Read(wire.delete_gradient(), &command->emplace<engine::DeleteGradientCommand>());
    case Command::kReadRows:
      return Read(wire.read_rows(), &command->emplace<engine::ReadRowsCommand>());
    case Command::kWriteRows:
      return Read(wire.write_rows(), &command->emplace<engine::WriteRowsCommand>());
    case Command::kRestoreState:
      return Read(wire.restore_state(), &command->emplace<engine::RestoreStateCommand>());
    case Command::kBlendWeights:
      return Read(wire.blend_weights(), &command->emplace<engine::BlendWeightsCommand>());
    case Command::kCopyOptimizer:
      return Read(wire.copy_optimizer(), &command->emplace<engine::CopyOptimizerCommand>());
    case Command::kReset:
      return Read(wire.reset(), &command->emplace<engine::ResetCommand>());
    case Command::kFold:
      return Read(wire.fold(), &command->emplace<engine::FoldCommand>());
    case Command::kSummarize:
      return Read(wire.summarize(), &command->emplace<engine::SummarizeCommand>());
    case Command::kApplyStep:
      return Read(wire.apply_step(), &command->emplace<engine::ApplyStepCommand>());
    case Command::kSumSlices:
      return Read(wire.sum_slices(), &command->emplace<engine::SumSlicesCommand>());
    case Command::kTallySum:
      return Read(wire.tally_sum(), &command->emplace<engine::TallySumCommand>());
    case Command::kStepSlices:
      return Read(wire.step_slices(), &command->emplace<engine::StepSlicesCommand>());
    case Command::kGatherSlices:
      return Read(wire.gather_slices(), &command->emplace<engine::GatherSlicesCommand>());
    case Command::kConnectReplicas:
      return Read(wire.connect_replicas(), &command->emplace<engine::ConnectReplicasCommand>());
    case Command::kAbortReplicas:
      return Read(wire.abort_replicas(), &command->emplace<engine::AbortReplicasCommand>());
    case Command::kLogits:
      return Read(wire.logits(), &command->emplace<engine::LogitsCommand>());
    case Command::kPrepareTeacher:
      return Read(wire.prepare_teacher(), &command->emplace<engine::PrepareTeacherCommand>());
    case Command::kStartBatch:
      return Read(wire.start_batch(), &command->emplace<engine::StartBatchCommand>());
    case Command::kReleasePayload:
      return Read(wire.release_payload(), &command->emplace<engine::ReleasePayloadCommand>());
    case Command::kProbe:
      command->emplace<engine::ProbeCommand>();
      return true;
    case Command::COMMAND_NOT_SET:
      break;
  }
  return false;
}

}  // namespace

std::string SerializeCommand(const engine::GroupCommand& command) {
  group::v1::Command wire;
  std::visit([&wire](const auto& one) { Write(one, &wire); }, command);
  return wire.SerializeAsString();
}

absl::StatusOr<engine::GroupCommand> ParseCommand(absl::string_view bytes) {
  group::v1::Command wire;
  engine::GroupCommand command;
  if (wire.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) && ReadCommand(wire, &command)) {
    return command;
  }
  return engine::MakeError(absl::StatusCode::kInvalidArgument, engine::RejectReason::kMalformed, "command",
                           absl::StrCat("the ", bytes.size(), " bytes of a command make no sense here"));
}

}  // namespace lossd::rpc
