// Chunks and their answers: between Compute messages and the engine.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/common/errors.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/slices.h"

namespace lossd::rpc {
namespace {

using engine::Payload;
using engine::RejectReason;
using kernels::DataType;

constexpr int64_t kDefaultIgnoreIndex = -100;
// A payload may keep this many times its own size in memory; what would keep more is copied.
constexpr int64_t kMostKept = 2;

// The hidden states, which `received` gives up: they share an owner, whose memory is counted once.
void TakePayloads(wire::ReceivedRequest& received, engine::Chunk* chunk) {
  const bool gather = received.kept_bytes > kMostKept * (received.large.bytes + received.extra.bytes);
  const bool alone = received.large.bytes == 0;  // in a region, say
  const int64_t of_extra = alone ? received.kept_bytes : received.extra.bytes;
  const auto take = [&](wire::Tensor& tensor, int64_t kept_bytes) -> Payload {
    if (tensor.bytes == 0) return {};
    Payload payload(std::move(tensor.parts), received.owner, kept_bytes);
    return gather ? payload.Gathered() : payload;
  };
  chunk->hidden_states = take(received.large, std::max(received.large.bytes, received.kept_bytes - of_extra));
  chunk->teacher_hidden = take(received.extra, of_extra);
  received.owner.reset();
}

// Takes the places that the chunk names instead of payloads.
absl::Status TakeRefs(const v1::Chunk& proto, engine::Chunk* chunk) {
  using Field = std::optional<engine::TensorRef>;
  const auto take = [](const v1::TensorRef& ref, absl::string_view field, Field* out) {
    const absl::StatusOr<engine::RegionHandle> handle = engine::RegionHandle::Parse(ref.handle(), field);
    if (handle.ok()) *out = engine::TensorRef{*handle, ref.offset()};
    return handle.status();
  };
  absl::Status status;
  if (proto.has_hidden_states_region()) {
    status = take(proto.hidden_states_region(), "hidden_states_region", &chunk->hidden_region);
  }
  const v1::Distillation& distillation = proto.options().distillation();
  if (status.ok() && distillation.has_hidden_states_region()) {
    status = take(distillation.hidden_states_region(), "options.distillation.hidden_states_region",
                  &chunk->teacher_hidden_region);
  }
  if (status.ok() && proto.has_dx_region()) status = take(proto.dx_region(), "dx_region", &chunk->dx_region);
  return status;
}

template <typename T>
std::optional<T> If(bool is_set, T value) {
  return is_set ? std::optional<T>(value) : std::nullopt;
}

static_assert(sizeof(kernels::LossOptions) == sizeof(float) * std::size(kernels::kLossOptions),
              "kernels::kLossOptions lists every loss option");
using LossFields = std::array<const google::protobuf::FieldDescriptor*, std::size(kernels::kLossOptions)>;

// Those that kernels::kLossOptions lists, by their names: convert_chunk_test looks that all are there.
const LossFields& FieldsOfLoss() {
  static const LossFields fields = [] {
    LossFields found{};
    std::transform(std::begin(kernels::kLossOptions), std::end(kernels::kLossOptions), found.begin(),
                   [](const kernels::LossOption& option) {
                     return v1::LossOptions::descriptor()->FindFieldByName(option.name);
                   });
    return found;
  }();
  return fields;
}

// Calls `set` with each number that `proto` has: an optional one may be unset.
template <typename Set>
void TakeNumbers(const v1::LossOptions& proto, const Set& set) {
  const LossFields& fields = FieldsOfLoss();
  const google::protobuf::Reflection& reflection = *proto.GetReflection();
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i]->has_presence() && !reflection.HasField(proto, fields[i])) continue;
    set(kernels::kLossOptions[i].value, reflection.GetFloat(proto, fields[i]));
  }
}

}  // namespace

void ToProto(engine::TokenReturns returns, v1::TokenReturns* proto) {
  proto->set_log_sum_exp(std::move(returns.log_sum_exp));
  proto->set_z_losses(std::move(returns.z_losses));
  proto->set_log_probabilities(std::move(returns.log_probabilities));
  proto->set_entropies(std::move(returns.entropies));
  proto->set_predictions(std::move(returns.predictions));
  proto->set_target_ranks(std::move(returns.target_ranks));
  proto->set_divergences(std::move(returns.divergences));
  proto->set_top_tokens(std::move(returns.top_tokens));
  proto->set_top_log_probabilities(std::move(returns.top_log_probabilities));
}

engine::WantedReturns ToEngine(const v1::WantedReturns& wanted) {
  return {.log_sum_exp = wanted.log_sum_exp(),
          .z_loss = wanted.z_losses(),
          .log_probability = wanted.log_probabilities(),
          .entropy = wanted.entropies(),
          .prediction = wanted.predictions(),
          .target_rank = wanted.target_ranks(),
          .divergence = wanted.divergences(),
          .top_k = wanted.top_k()};
}

namespace {

engine::ChunkOptions OptionsToEngine(const v1::LossOptions& proto) {
  engine::ChunkOptions options;
  // An optional one that is not set stays the head's.
  TakeNumbers(proto, [&options](kernels::LossValue option, float value) { options.Set(option, value); });
  options.class_weights =
      If(proto.has_class_weights(),
         proto.class_weights() ? engine::ClassWeights::kUse : engine::ClassWeights::kIgnore);
  options.bias = If(proto.has_bias(), proto.bias() ? engine::Bias::kUse : engine::Bias::kIgnore);
  options.z_gradient_scale = If(proto.has_z_gradient_scale(), proto.z_gradient_scale());
  options.weight_version = If(proto.has_weight_version(), uint64_t{proto.weight_version()});
  options.returns = ToEngine(proto.returns());
  return options;
}

void TakeList(v1::TokenLists& proto, engine::ChunkLists* lists) {
  lists->offsets = std::move(*proto.mutable_offsets());
  lists->tokens = std::move(*proto.mutable_ids());
}

// One of the two that may be there: CheckLists refuses both.
engine::ChunkLists TakeLists(v1::TokenInputs& inputs) {
  engine::ChunkLists lists;
  if (inputs.has_target_lists()) {
    v1::TargetLists& targets = *inputs.mutable_target_lists();
    lists.use = engine::ChunkLists::Use::kTargets;
    TakeList(*targets.mutable_lists(), &lists);
    lists.probabilities = std::move(*targets.mutable_probabilities());
    lists.weight = targets.weight();
    lists.label_weight = targets.label_weight();
  } else if (inputs.has_kept_tokens()) {
    lists.use = engine::ChunkLists::Use::kKept;
    TakeList(*inputs.mutable_kept_tokens(), &lists);
  }
  return lists;
}

absl::Status CheckLists(const v1::Chunk& proto) {
  const v1::TokenInputs& inputs = proto.token_inputs();
  if (!inputs.has_kept_tokens() || !inputs.has_target_lists()) return absl::OkStatus();
  constexpr char kField[] = "token_inputs.kept_tokens";
  return engine::Invalid(RejectReason::kOption, kField,
                         absl::StrCat(kField,
                                      " is set; it must be unset together with "
                                      "token_inputs.target_lists"));
}

constexpr std::pair<v1::Divergence, kernels::Divergence> kDivergences[] = {
    {v1::DIVERGENCE_FORWARD_KL, kernels::Divergence::kForwardKl},
    {v1::DIVERGENCE_REVERSE_KL, kernels::Divergence::kReverseKl},
    {v1::DIVERGENCE_JENSEN_SHANNON, kernels::Divergence::kJensenShannon}};

absl::Status TakeDistillation(const v1::Chunk& proto, engine::Chunk* chunk) {
  if (!proto.options().has_distillation()) return absl::OkStatus();
  const v1::Distillation& distillation = proto.options().distillation();
  const absl::StatusOr<DataType> type =
      rpc::ToEngine(distillation.hidden_dtype(), "options.distillation.hidden_dtype");
  if (!type.ok()) return type.status();
  const absl::StatusOr<kernels::Distillation> loss = rpc::ToEngine(distillation);
  if (!loss.ok()) return loss.status();
  chunk->options.distillation = {.teacher = distillation.teacher(), .hidden_type = *type, .loss = *loss};
  return absl::OkStatus();
}

void ToProto(const engine::ChunkAnswer& answer, v1::TokenSums* sums) {
  sums->set_z_loss(answer.z_loss_sum);
  sums->set_correct_tokens(answer.correct_tokens);
  sums->set_class_weights(answer.class_weight_sum);
  sums->set_divergence(answer.divergence_sum);
}

void ToProto(const engine::ChunkTimes& times, v1::ChunkTiming* proto) {
  const auto since = [&times](absl::Time time) { return absl::ToInt64Microseconds(time - times.received); };
  proto->set_received(absl::ToUnixMicros(times.received));
  proto->set_accepted(since(times.accepted));
  proto->set_started(since(times.started));
  proto->set_input_ready(since(times.input_ready));
  proto->set_compute_started(since(times.compute_started));
  proto->set_computed(since(times.computed));
  proto->set_output_ready(since(times.output_ready));
  proto->set_answered(since(absl::Now()));
  if (times.earlier_done.has_value()) proto->set_earlier_done(since(*times.earlier_done));
}

}  // namespace

absl::StatusOr<kernels::Distillation> ToEngine(const v1::Distillation& proto) {
  kernels::Distillation loss{.beta = proto.beta(),
                             .temperature = proto.temperature() != 0 ? proto.temperature() : 1.0f,
                             .weight = proto.weight(),
                             .label_weight = proto.label_weight()};
  for (const auto& [wire, ours] : kDivergences) {
    loss.divergence = ours;
    if (wire == proto.divergence()) return loss;
  }
  constexpr char kField[] = "options.distillation.divergence";
  return engine::MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, kField,
                           absl::StrCat(kField, " is ", static_cast<int>(proto.divergence()),
                                        "; it must be DIVERGENCE_FORWARD_KL (1), "
                                        "DIVERGENCE_REVERSE_KL (2) or DIVERGENCE_JENSEN_SHANNON (3)"));
}

engine::Chunk ToEngine(wire::ReceivedRequest request) {
  const v1::Chunk& proto = request.message.chunk();
  engine::Chunk chunk;
  chunk.received = absl::Now();
  chunk.sequence = proto.sequence();
  chunk.generation = proto.generation();
  chunk.first_token = proto.first_token();
  chunk.tokens = proto.tokens();
  chunk.ignore_index = proto.has_ignore_index() ? proto.ignore_index() : kDefaultIgnoreIndex;
  chunk.gradient_scale = proto.has_gradient_scale() ? proto.gradient_scale() : 1.0f;
  chunk.labels.resize(static_cast<size_t>(request.small.bytes));
  request.small.CopyTo(std::as_writable_bytes(std::span(chunk.labels)));
  if (proto.has_options()) chunk.options = OptionsToEngine(proto.options());
  if (proto.has_token_inputs()) {
    v1::TokenInputs& inputs = *request.message.mutable_chunk()->mutable_token_inputs();
    chunk.token_weights = std::move(*inputs.mutable_weights());
    chunk.lse_gradients = std::move(*inputs.mutable_lse_gradients());
    chunk.entropy_gradients = std::move(*inputs.mutable_entropy_gradients());
    chunk.lists = TakeLists(inputs);
  }
  if (proto.has_hold()) {
    chunk.hold = {.number = proto.hold().number(), .first = proto.hold().first_token()};
    chunk.holds_hidden = proto.hold().hidden_states();
  }
  chunk.window_token = If(proto.has_window_token(), int64_t{proto.window_token()});
  TakePayloads(request, &chunk);

  const absl::StatusOr<DataType> hidden_type = ToEngine(proto.hidden_dtype(), "hidden_dtype");
  if (!hidden_type.ok()) {
    chunk.decode_status = hidden_type.status();
    return chunk;
  }
  chunk.hidden_type = *hidden_type;
  const absl::StatusOr<DataType> dx_type = ToEngine(proto.dx_dtype(), "dx_dtype", *hidden_type);
  if (!dx_type.ok()) {
    chunk.decode_status = dx_type.status();
    return chunk;
  }
  chunk.dx_type = *dx_type;
  chunk.decode_status = TakeRefs(proto, &chunk);
  if (!chunk.decode_status.ok()) return chunk;
  chunk.decode_status = CheckLists(proto);
  if (!chunk.decode_status.ok()) return chunk;
  chunk.decode_status = TakeDistillation(proto, &chunk);
  if (!chunk.decode_status.ok()) return chunk;
  switch (proto.mode()) {
    case v1::COMPUTE_MODE_UNSPECIFIED:
    case v1::COMPUTE_MODE_LOSS_AND_GRADIENTS:
      chunk.mode = engine::ComputeMode::kLossAndGradients;
      break;
    case v1::COMPUTE_MODE_LOSS_ONLY:
      chunk.mode = engine::ComputeMode::kLossOnly;
      break;
    case v1::COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT:
      chunk.mode = engine::ComputeMode::kLossAndWeightGradient;
      break;
    default:
      chunk.decode_status =
          engine::MakeError(absl::StatusCode::kInvalidArgument, RejectReason::kOption, "mode",
                            absl::StrCat("mode is ", static_cast<int>(proto.mode()),
                                         "; it must be COMPUTE_MODE_LOSS_AND_GRADIENTS (1), "
                                         "COMPUTE_MODE_LOSS_ONLY (2) or "
                                         "COMPUTE_MODE_LOSS_AND_WEIGHT_GRADIENT (3)"));
  }
  return chunk;
}

grpc::ByteBuffer ToWire(engine::ChunkAnswer answer) {
  v1::ChunkResult result;
  result.set_sequence(answer.sequence);
  result.set_first_token(answer.first_token);
  result.set_tokens(answer.tokens);
  switch (answer.disposition) {
    case engine::Disposition::kAccumulated:
      result.set_disposition(v1::DISPOSITION_ACCUMULATED);
      break;
    case engine::Disposition::kRepeated:
      result.set_disposition(v1::DISPOSITION_REPEATED);
      break;
    case engine::Disposition::kRejected:
      result.set_disposition(v1::DISPOSITION_REJECTED);
      result.mutable_error()->set_code(static_cast<int>(answer.error.code()));
      result.mutable_error()->set_message(std::string(answer.error.message()));
      result.mutable_error()->set_field(engine::FieldOf(answer.error));
      return wire::Encode(result, {}, {});
  }
  result.set_valid_tokens(answer.valid_tokens);
  result.set_loss_sum(answer.loss_sum);
  result.set_weight_version(answer.weight_version);
  result.set_teacher_weight_version(answer.teacher_weight_version);
  result.set_hidden_states_held(answer.hidden_held);
  result.set_dx_dtype(ToProto(answer.dx_type));
  if (answer.returns.bytes() > 0) ToProto(std::move(answer.returns), result.mutable_returns());
  if (answer.z_loss_sum != 0 || answer.correct_tokens != 0 || answer.class_weight_sum != 0 ||
      answer.divergence_sum != 0) {
    ToProto(answer, result.mutable_sums());
  }
  if (answer.times.has_value()) ToProto(*answer.times, result.mutable_timing());
  return wire::Encode(result, std::as_bytes(std::span(answer.losses)), SliceOf(answer.dx));
}

}  // namespace lossd::rpc
