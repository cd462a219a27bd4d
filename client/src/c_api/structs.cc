#include "client/src/c_api/structs.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "lossd/client.h"

namespace lossd::c_api {
namespace {

constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

double Seconds(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

absl::Status CheckSize(absl::string_view name, size_t given, size_t known) {
  // Every version of a struct ends at a multiple of its alignment.
  if (given >= 2 * sizeof(given) && given <= known && given % alignof(size_t) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, ".struct_size is ", given, "; this library (version ", lossd_version(), ") knows ",
                   known, " bytes of it: ",
                   given > known ? "the program was compiled for a newer library, so load that one"
                                 : "have the struct's ..._init function fill it in"));
}

template <>
lossd_client_options Defaults() {
  const ClientOptions options;
  lossd_client_options defaults{};
  defaults.call_timeout_seconds = Seconds(options.call_timeout);
  defaults.reconnect_timeout_seconds = Seconds(options.reconnect_timeout);
  defaults.transfer_bytes = options.transfer_bytes;
  return defaults;
}

template <>
lossd_optimizer_config Defaults() {
  lossd_optimizer_config defaults{};
  defaults.kind = LOSSD_OPTIMIZER_NONE;
  defaults.weight_decay = kUnset;
  defaults.momentum = kUnset;
  defaults.dampening = kUnset;
  defaults.beta1 = kUnset;
  defaults.beta2 = kUnset;
  defaults.eps = kUnset;
  return defaults;
}

template <>
lossd_head_config Defaults() {
  const HeadConfig config;
  lossd_head_config defaults{};
  defaults.weight_dtype = LOSSD_BFLOAT16;
  defaults.logit_scale = config.logit_scale;
  defaults.softcap = config.softcap;
  return defaults;
}

template <>
lossd_session_options Defaults() {
  return {};
}

template <>
lossd_distillation Defaults() {
  const Distillation distillation;
  lossd_distillation defaults{};
  defaults.hidden_dtype = LOSSD_FLOAT32;
  defaults.divergence = LOSSD_FORWARD_KL;
  defaults.beta = distillation.beta;
  defaults.temperature = distillation.temperature;
  defaults.weight = distillation.weight;
  defaults.label_weight = distillation.label_weight;
  return defaults;
}

template <>
lossd_target_lists Defaults() {
  const TargetLists targets;
  lossd_target_lists defaults{};
  defaults.weight = targets.weight;
  defaults.label_weight = targets.label_weight;
  return defaults;
}

template <>
lossd_batch Defaults() {
  const Batch batch;
  lossd_batch defaults{};
  defaults.hidden_dtype = LOSSD_FLOAT32;
  defaults.mode = LOSSD_LOSS_AND_GRADIENTS;
  defaults.reduction = LOSSD_SUM;
  defaults.ignore_index = batch.ignore_index;
  defaults.gradient_scale = batch.gradient_scale;
  defaults.logit_scale = kUnset;
  defaults.softcap = kUnset;
  defaults.z_gradient_scale = kUnset;
  defaults.class_weights = LOSSD_OF_HEAD;
  defaults.bias = LOSSD_OF_HEAD;
  defaults.normalizer = kUnset;
  defaults.z_normalizer = kUnset;
  defaults.window_token = -1;
  return defaults;
}

template <>
lossd_outputs Defaults() {
  lossd_outputs defaults{};
  defaults.dx_dtype = LOSSD_FLOAT32;
  return defaults;
}

template <>
lossd_result Defaults() {
  return {};
}

template <>
lossd_flush_options Defaults() {
  lossd_flush_options defaults{};
  defaults.dtype = LOSSD_FLOAT32;
  defaults.gradient_scale = FlushOptions().gradient_scale;
  return defaults;
}

template <>
lossd_flush_result Defaults() {
  return {};
}

template <>
lossd_gradient_stats Defaults() {
  return {};
}

template <>
lossd_step_options Defaults() {
  lossd_step_options defaults{};
  defaults.gradient_scale = StepOptions().gradient_scale;
  defaults.weight_decay = kUnset;
  defaults.momentum = kUnset;
  defaults.beta1 = kUnset;
  defaults.beta2 = kUnset;
  return defaults;
}

template <>
lossd_step_result Defaults() {
  return {};
}

template <>
lossd_logits Defaults() {
  lossd_logits defaults{};
  defaults.hidden_dtype = LOSSD_FLOAT32;
  defaults.bias = LOSSD_OF_HEAD;
  defaults.logit_scale = kUnset;
  defaults.softcap = kUnset;
  defaults.dtype = LOSSD_FLOAT32;
  return defaults;
}

}  // namespace lossd::c_api

using lossd::c_api::Initialize;

void lossd_client_options_init(lossd_client_options* options, size_t struct_size) {
  Initialize(options, struct_size);
}
void lossd_optimizer_config_init(lossd_optimizer_config* config, size_t struct_size) {
  Initialize(config, struct_size);
}
void lossd_head_config_init(lossd_head_config* config, size_t struct_size) {
  Initialize(config, struct_size);
}
void lossd_session_options_init(lossd_session_options* options, size_t struct_size) {
  Initialize(options, struct_size);
}
void lossd_distillation_init(lossd_distillation* distillation, size_t struct_size) {
  Initialize(distillation, struct_size);
}
void lossd_target_lists_init(lossd_target_lists* target_lists, size_t struct_size) {
  Initialize(target_lists, struct_size);
}
void lossd_batch_init(lossd_batch* batch, size_t struct_size) { Initialize(batch, struct_size); }
void lossd_outputs_init(lossd_outputs* outputs, size_t struct_size) { Initialize(outputs, struct_size); }
void lossd_result_init(lossd_result* result, size_t struct_size) { Initialize(result, struct_size); }
void lossd_flush_options_init(lossd_flush_options* options, size_t struct_size) {
  Initialize(options, struct_size);
}
void lossd_flush_result_init(lossd_flush_result* result, size_t struct_size) {
  Initialize(result, struct_size);
}
void lossd_gradient_stats_init(lossd_gradient_stats* stats, size_t struct_size) {
  Initialize(stats, struct_size);
}
void lossd_step_options_init(lossd_step_options* options, size_t struct_size) {
  Initialize(options, struct_size);
}
void lossd_step_result_init(lossd_step_result* result, size_t struct_size) {
  Initialize(result, struct_size);
}
void lossd_logits_init(lossd_logits* logits, size_t struct_size) { Initialize(logits, struct_size); }
