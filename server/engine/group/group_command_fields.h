// The members of what the ranks of a group say to each other, by name (common/fields.h).
#ifndef LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_FIELDS_H_
#define LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "server/engine/chunk/chunk_fields.h"
#include "server/engine/common/fields.h"
#include "server/engine/group/answered_chunk.h"
#include "server/engine/group/group_command.h"

namespace lossd::engine {

template <class Visit>
void Fields(Visit& visit, Is<ReplicaPlace> auto& place) {
  auto& [replica, replicas] = place;
  visit("replica", replica, "replicas", replicas);
}
inline const char* FaultOf(const ReplicaPlace& place) {
  return place.replica >= 0 && place.replica < place.replicas ? nullptr : "is none of its replicas";
}

template <class Visit>
void Fields(Visit& visit, Is<CreateHeadCommand> auto& command) {
  auto& [head, config, replica] = command;
  visit("head", head, "config", config, "replica", replica);
}

template <class Visit>
void Fields(Visit& visit, Is<DeleteHeadCommand> auto& command) {
  auto& [head] = command;
  visit("head", head);
}

template <class Visit>
void Fields(Visit& visit, Is<CreateGradientCommand> auto& command) {
  auto& [gradient, config] = command;
  visit("gradient", gradient, "config", config);
}

template <class Visit>
void Fields(Visit& visit, Is<DeleteGradientCommand> auto& command) {
  auto& [gradient] = command;
  visit("gradient", gradient);
}

inline const char* FaultOfRows(int64_t first_row, int64_t rows) {
  return first_row >= 0 && rows >= 0 ? nullptr : "has a first_row or rows below 0";
}

template <class Visit>
void Fields(Visit& visit, Is<ReadRowsCommand> auto& command) {
  auto& [head, what, type, gradient, tensor, first_row, rows] = command;
  visit("head", head, "what", what, "type", type, "gradient", gradient, "tensor", tensor, "first_row",
        first_row, "rows", rows);
}
inline const char* FaultOf(const ReadRowsCommand& command) {
  return FaultOfRows(command.first_row, command.rows);
}

template <class Visit>
void Fields(Visit& visit, Is<WriteRowsCommand> auto& command) {
  auto& [head, what, gradient, with_bias, tensor, first_row, rows] = command;
  visit("head", head, "what", what, "gradient", gradient, "with_bias", with_bias, "tensor", tensor,
        "first_row", first_row, "rows", rows);
}
inline const char* FaultOf(const WriteRowsCommand& command) {
  return FaultOfRows(command.first_row, command.rows);
}

template <class Visit>
void Fields(Visit& visit, Is<RestoreStateCommand> auto& command) {
  auto& [head] = command;
  visit("head", head);
}

template <class Visit>
void Fields(Visit& visit, Is<BlendWeightsCommand> auto& command) {
  auto& [head, source, decay] = command;
  visit("head", head, "source", source, "decay", decay);
}
inline const char* FaultOf(const BlendWeightsCommand& command) {
  return command.decay >= 0 && command.decay < 1 ? nullptr : "has a decay that is not in [0, 1)";
}

template <class Visit>
void Fields(Visit& visit, Is<CopyOptimizerCommand> auto& command) {
  auto& [head, source] = command;
  visit("head", head, "source", source);
}

template <class Visit>
void Fields(Visit& visit, Is<ResetCommand> auto& command) {
  auto& [head, gradient] = command;
  visit("head", head, "gradient", gradient);
}

template <class Visit>
void Fields(Visit& visit, Is<FoldCommand> auto& command) {
  auto& [head, from, to] = command;
  visit("head", head, "from", from, "to", to);
}

template <class Visit>
void Fields(Visit& visit, Is<SummarizeCommand> auto& command) {
  auto& [head, gradient, scale] = command;
  visit("head", head, "gradient", gradient, "scale", scale);
}

template <class Visit>
void Fields(Visit& visit, Is<StepArguments> auto& arguments) {
  auto& [learning_rate, gradient_scale, optimizer, step] = arguments;
  visit("learning_rate", learning_rate, "gradient_scale", gradient_scale, "optimizer", optimizer, "step",
        step);
}

template <class Visit>
void Fields(Visit& visit, Is<ApplyStepCommand> auto& command) {
  auto& [head, gradient, arguments] = command;
  visit("head", head, "gradient", gradient, "arguments", arguments);
}

template <class Visit>
void Fields(Visit& visit, Is<SumSlicesCommand> auto& command) {
  auto& [head, gradient, connection] = command;
  visit("head", head, "gradient", gradient, "connection", connection);
}

template <class Visit>
void Fields(Visit& visit, Is<AddToSumCommand> auto& command) {
  auto& [head, gradient, replica, connection] = command;
  visit("head", head, "gradient", gradient, "replica", replica, "connection", connection);
}

template <class Visit>
void Fields(Visit& visit, Is<TallySumCommand> auto& command) {
  auto& [head, scale, connection] = command;
  visit("head", head, "scale", scale, "connection", connection);
}

template <class Visit>
void Fields(Visit& visit, Is<StepSlicesCommand> auto& command) {
  auto& [head, arguments] = command;
  visit("head", head, "arguments", arguments);
}

template <class Visit>
void Fields(Visit& visit, Is<GatherSlicesCommand> auto& command) {
  auto& [head, connection] = command;
  visit("head", head, "connection", connection);
}

template <class Visit>
void Fields(Visit& visit, Is<ReplicaNetwork> auto& network) {
  auto& [place, interface, timeout, connect_timeout] = network;
  visit("place", place, "interface", interface, "timeout", timeout, "connect_timeout", connect_timeout);
}

template <class Visit>
void Fields(Visit& visit, Is<ConnectReplicasCommand> auto& command) {
  auto& [connection, network] = command;
  visit("connection", connection, "network", network);
}

template <class Visit>
void Fields(Visit& visit, Is<AbortReplicasCommand> auto& command) {
  auto& [connection] = command;
  visit("connection", connection);
}

template <class Visit>
void Fields(Visit& visit, Is<LogitsCommand> auto& command) {
  auto& [head, rows, logit_scale, softcap, bias, type, logits, top_k] = command;
  visit("head", head, "rows", rows, "logit_scale", logit_scale, "softcap", softcap, "bias", bias, "type",
        type, "logits", logits, "top_k", top_k);
}
inline const char* FaultOf(const LogitsCommand& command) {
  return command.rows > 0 && command.top_k >= 0 ? nullptr : "has no rows, or a top_k below 0";
}

template <class Visit>
void Fields(Visit& visit, Is<PrepareTeacherCommand> auto& command) {
  auto& [head, teacher] = command;
  visit("head", head, "teacher", teacher);
}

// Without its pointer, which StartBatchCommand tells as a number.
template <class Visit>
void Fields(Visit& visit, Is<TeacherKind> auto& teacher) {
  auto& [backend, head_number, hidden_size, weight_type, hidden_type, distillation] = teacher;
  visit("head_number", head_number, "hidden_size", hidden_size, "weight_type", weight_type, "hidden_type",
        hidden_type, "distillation", distillation);
}

// Without its pointer, which StartBatchCommand tells as a number, and without what no group takes: lists, and
// what is held.
template <class Visit>
void Fields(Visit& visit, Is<BatchKey> auto& key) {
  auto& [hidden_type, dx_type, mode, options, class_weights, bias, returns, entropy_gradients, holds, lists,
         teacher, segments, gradient, holder] = key;
  visit("hidden_type", hidden_type, "dx_type", dx_type, "mode", mode, "options", options, "class_weights",
        class_weights, "bias", bias, "returns", returns, "entropy_gradients", entropy_gradients, "teacher",
        teacher, "segments", segments, "holder", holder);
}
inline const char* FaultOf(const BatchKey& key) { return key.holder >= 0 ? nullptr : "has a holder below 0"; }

template <class Visit>
void Fields(Visit& visit, Is<ChunkHeader> auto& chunk) {
  auto& [tokens, labels, ignore_index, gradient_scale, z_gradient_scale, token_weights, lse_gradients,
         entropy_gradients, accumulate, input_gradient, payload] = chunk;
  visit("tokens", tokens, "labels", labels, "ignore_index", ignore_index, "gradient_scale", gradient_scale,
        "z_gradient_scale", z_gradient_scale, "token_weights", token_weights, "lse_gradients", lse_gradients,
        "entropy_gradients", entropy_gradients, "accumulate", accumulate, "input_gradient", input_gradient,
        "payload", payload);
}
// Arrays that are shorter than `tokens` says would be read beyond their ends.
inline const char* FaultOf(const ChunkHeader& chunk) {
  // That of the labels bounds the number of tokens, whatever it says.
  const size_t tokens = chunk.labels.size() / sizeof(int64_t);
  if (chunk.tokens <= 0 || !std::cmp_equal(chunk.tokens, tokens) ||
      chunk.labels.size() != tokens * sizeof(int64_t)) {
    return "has no tokens, or more or fewer labels than tokens";
  }
  for (const std::string* array : {&chunk.token_weights, &chunk.lse_gradients, &chunk.entropy_gradients}) {
    if (!array->empty() && array->size() != tokens * sizeof(float)) {
      return "has an array of more or fewer values than tokens";
    }
  }
  return nullptr;
}

template <class Visit>
void Fields(Visit& visit, Is<StartBatchCommand> auto& command) {
  auto& [head, teacher, gradient, kind, chunks] = command;
  visit("head", head, "teacher", teacher, "gradient", gradient, "kind", kind, "chunks", chunks);
}
inline const char* FaultOf(const StartBatchCommand& command) {
  const bool none = command.teacher == 0 && command.kind.teacher != TeacherKind();
  return none ? "says of a teacher how it is, and not which" : nullptr;
}

template <class Visit>
void Fields(Visit& visit, Is<ReleasePayloadCommand> auto& command) {
  auto& [payload] = command;
  visit("payload", payload);
}

template <class Visit>
void Fields(Visit& visit, Is<ProbeCommand> auto& /*command*/) {
  visit();
}

template <class Visit>
void Fields(Visit& visit, Is<AnsweredChunk> auto& answered) {
  auto& [batch, chunk, losses, returns] = answered;
  visit("batch", batch, "chunk", chunk, "losses", losses, "returns", returns);
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_GROUP_GROUP_COMMAND_FIELDS_H_
