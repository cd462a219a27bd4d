// Heads: made, found, described, saved.
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/arguments.h"
#include "client/src/c_api/handles.h"
#include "client/src/c_api/output.h"
#include "client/src/c_api/structs.h"

namespace lossd::c_api {
namespace {

absl::StatusOr<OptimizerConfig> OptimizerOf(const lossd_optimizer_config* given) {
  OptimizerConfig config;
  if (given == nullptr) return config;
  const auto read = Read(given, "config.optimizer");
  if (!read.ok()) return read.status();
  static constexpr std::array kKinds = {OptimizerKind::kNone, OptimizerKind::kSgd, OptimizerKind::kAdam,
                                        OptimizerKind::kAdamW};
  const auto kind = EnumOf(kKinds, read->kind, "config.optimizer.kind");
  if (!kind.ok()) return kind.status();
  config.kind = *kind;
  config.weight_decay = OptionalOf(read->weight_decay);
  config.momentum = OptionalOf(read->momentum).value_or(config.momentum);
  config.dampening = OptionalOf(read->dampening).value_or(config.dampening);
  config.nesterov = read->nesterov != 0;
  config.beta1 = OptionalOf(read->beta1).value_or(config.beta1);
  config.beta2 = OptionalOf(read->beta2).value_or(config.beta2);
  config.eps = OptionalOf(read->eps).value_or(config.eps);
  config.maximize = read->maximize != 0;
  return config;
}

absl::StatusOr<HeadConfig> ConfigOf(const lossd_head_config* given) {
  const auto read = Read(given, "config");
  if (!read.ok()) return read.status();
  if (read->name == nullptr) return NullArgument("config.name");
  const auto type = DataTypeOf(read->weight_dtype, "config.weight_dtype");
  if (!type.ok()) return type.status();
  const auto optimizer = OptimizerOf(read->optimizer);
  if (!optimizer.ok()) return optimizer.status();
  HeadConfig config{.name = read->name,
                    .vocab_size = read->vocab_size,
                    .hidden_size = read->hidden_size,
                    .weight_type = *type,
                    .logit_scale = read->logit_scale,
                    .softcap = read->softcap,
                    .frozen = read->frozen != 0,
                    .bias = read->bias != 0,
                    .optimizer = *optimizer,
                    .master_weights = read->master_weights != 0,
                    .double_buffer = read->double_buffer != 0,
                    .fixed_segments = read->fixed_segments != 0,
                    .held_bytes = read->held_bytes};
  if (read->class_weights != nullptr && read->vocab_size > 0) {  // the server refuses any other size
    config.class_weights.assign(read->class_weights, read->class_weights + read->vocab_size);
  }
  return config;
}

}  // namespace
}  // namespace lossd::c_api

using namespace lossd::c_api;  // NOLINT(google-build-using-namespace): all of this file is about it

lossd_status* lossd_client_create_head(lossd_client* client, const lossd_head_config* config,
                                       lossd_head** head) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    const auto converted = ConfigOf(config);
    if (!converted.ok()) return converted.status();
    return PutHandle(client->client->CreateHead(*converted), head);
  });
}

lossd_status* lossd_client_copy_head(lossd_client* client, const char* source, const char* name,
                                     int32_t frozen, int32_t master_weights, uint64_t* weight_version,
                                     lossd_head** copy) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(source, "source"); !status.ok()) return status;
    if (absl::Status status = NotNull(name, "name"); !status.ok()) return status;
    if (absl::Status status = NotNull(copy, "copy"); !status.ok()) return status;
    auto copied =
        client->client->CopyHead(source, name,
                                 {.frozen = frozen != 0,
                                  .master_weights = master_weights != 0,
                                  .source_version = weight_version == nullptr ? 0 : *weight_version});
    if (!copied.ok()) return copied.status();
    if (weight_version != nullptr) *weight_version = copied->weight_version;
    return PutHandle(absl::StatusOr<lossd::Head>(std::move(copied->head)), copy);
  });
}

lossd_status* lossd_client_park_head(lossd_client* client, const char* name, char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(name, "name"); !status.ok()) return status;
    const absl::StatusOr<lossd::HeadInfo> info = client->client->ParkHead(name);
    return json == nullptr ? info.status() : PutJson(info, json);
  });
}

lossd_status* lossd_client_get_head(lossd_client* client, const char* name, lossd_head** head) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(client, "client"); !status.ok()) return status;
    if (absl::Status status = NotNull(name, "name"); !status.ok()) return status;
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    return PutHandle(client->client->GetHead(name), head);
  });
}

void lossd_head_free(lossd_head* head) { delete head; }

lossd_status* lossd_head_info(const lossd_head* head, char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(json, "json"); !status.ok()) return status;
    return PutJson(head->head.Info(), json);
  });
}

lossd_status* lossd_head_save_checkpoint(const lossd_head* head, const char* tag, const char* const* marks,
                                         size_t marks_count, char** json) {
  return Guarded([&]() -> absl::Status {
    if (absl::Status status = NotNull(head, "head"); !status.ok()) return status;
    if (absl::Status status = NotNull(tag, "tag"); !status.ok()) return status;
    const auto sessions = MarksOf(marks, marks_count);
    if (!sessions.ok()) return sessions.status();
    const auto saved = head->head.SaveCheckpoint(tag, *sessions);
    return json == nullptr ? saved.status() : PutJson(saved, json);
  });
}
