#include "client/src/c_api/json.h"

#include <chrono>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/src/c_api/status.h"
#include "client/src/c_api/status_json.h"

namespace lossd::c_api {
namespace {

Json ToJson(const MemoryItem& item) { return {{"purpose", item.purpose}, {"bytes", item.bytes}}; }

Json ToJson(const std::vector<MemoryItem>& items) {
  Json json = Json::array();
  for (const MemoryItem& item : items) json.push_back(ToJson(item));
  return json;
}

Json ToJson(const OptimizerConfig& optimizer) {
  if (optimizer.kind == OptimizerKind::kNone) return nullptr;
  return {{"kind", Name(optimizer.kind)},   {"weight_decay", optimizer.weight_decay.value_or(0)},
          {"momentum", optimizer.momentum}, {"dampening", optimizer.dampening},
          {"nesterov", optimizer.nesterov}, {"beta1", optimizer.beta1},
          {"beta2", optimizer.beta2},       {"eps", optimizer.eps},
          {"maximize", optimizer.maximize}};
}

Json ToJson(const HeadConfig& config) {
  return {{"name", config.name},
          {"vocab_size", config.vocab_size},
          {"hidden_size", config.hidden_size},
          {"weight_type", Name(config.weight_type)},
          {"logit_scale", config.logit_scale},
          {"softcap", config.softcap},
          {"frozen", config.frozen},
          {"bias", config.bias},
          {"optimizer", ToJson(config.optimizer)},
          {"master_weights", config.master_weights},
          {"double_buffer", config.double_buffer},
          {"fixed_segments", config.fixed_segments},
          {"held_bytes", config.held_bytes},
          {"has_class_weights", config.has_class_weights}};
}

// nlohmann would turn any number into any other.
template <typename Number>
absl::StatusOr<Number> CountOf(const Json& json, const char* field) {
  const Json& value = json.at(field);
  if (value.is_number_unsigned() && value.get<uint64_t>() <= std::numeric_limits<Number>::max()) {
    return value.get<Number>();
  }
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", TextOf(value), "; expected a count"));
}

absl::StatusOr<SessionMarks> MarksOf(const Json& json) {
  SessionMarks marks{.session_id = json.at("session_id").get<std::string>(), .lanes = {}};
  marks.incarnation = json.at("incarnation").get<std::string>();
  const auto restores = CountOf<uint64_t>(json, "restores");
  if (!restores.ok()) return restores.status();
  marks.restores = *restores;
  const auto generation = CountOf<uint64_t>(json, "generation");
  if (!generation.ok()) return generation.status();
  marks.generation = *generation;
  const Json& lanes = json.at("lanes");
  if (!lanes.is_array()) return absl::InvalidArgumentError("lanes is no array");
  for (const Json& lane : lanes) {
    const auto number = CountOf<int32_t>(lane, "lane");
    if (!number.ok()) return number.status();
    const auto accepted = CountOf<uint64_t>(lane, "accepted");
    if (!accepted.ok()) return accepted.status();
    const auto applied = CountOf<uint64_t>(lane, "applied");
    if (!applied.ok()) return applied.status();
    marks.lanes.push_back({.lane = *number, .accepted = *accepted, .applied = *applied});
  }
  return marks;
}

absl::StatusOr<SessionMarks> ParseMarks(const char* text) {
  try {
    return MarksOf(Json::parse(text));
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(error.what());
  }
}

}  // namespace

Json ToJson(const SessionMarks& marks) {
  Json lanes = Json::array();
  for (const LaneMarks& lane : marks.lanes) {
    lanes.push_back({{"lane", lane.lane}, {"accepted", lane.accepted}, {"applied", lane.applied}});
  }
  return {{"session_id", marks.session_id},
          {"lanes", lanes},
          {"incarnation", marks.incarnation},
          {"restores", marks.restores},
          {"generation", marks.generation}};
}

Json ToJson(const LanePlace& place) {
  return {{"target", place.target}, {"why_not_elsewhere", std::string(place.why_not_elsewhere.message())}};
}

Json ToJson(const HeadInfo& info) {
  return {{"config", ToJson(info.config)},
          {"weight_version", info.weight_version},
          {"generation", info.generation},
          {"window_state", Name(info.window_state)},
          {"window_tokens", info.window_tokens},
          {"sessions", ToJson(info.sessions)},
          {"open_sessions", info.open_sessions},
          {"memory", ToJson(info.memory)},
          {"optimizer_steps", info.optimizer_steps},
          {"staged_rows", info.staged_rows},
          {"flush_id", info.flush_id},
          {"flush_seconds", info.flush_seconds},
          {"parked_bytes", info.parked_bytes},
          {"steps_since_checkpoint",
           info.steps_since_checkpoint.has_value() ? Json(*info.steps_since_checkpoint) : Json()}};
}

Json ToJson(const ServerStatus& status) {
  Json ranks = Json::array();
  for (const RankStatus& rank : status.ranks) ranks.push_back(ToJson(rank));
  return {{"version", status.version},
          {"incarnation", status.incarnation},
          {"draining", status.draining},
          {"device", status.device},
          {"device_description", status.device_description},
          {"uptime_seconds", status.uptime_seconds},
          {"chunks_applied", status.chunks_applied},
          {"tokens_applied", status.tokens_applied},
          {"queued_chunks", status.queued_chunks},
          {"heads", ToJson(status.heads)},
          {"features", status.features},
          {"ranks", ranks},
          {"group_epoch", status.group_epoch},
          {"replicas", ToJson(status.replicas)}};
}

Json ToJson(const std::vector<ServerMemory::Head>& heads) {
  Json json = Json::array();
  for (const ServerMemory::Head& head : heads) {
    json.push_back({{"name", head.name},
                    {"items", ToJson(head.items)},
                    {"row_streams", head.row_streams},
                    {"row_stream_bytes", head.row_stream_bytes}});
  }
  return json;
}

Json ToJson(const ServerMemory::Rank& rank) {
  return {{"rank", rank.rank},
          {"limit_bytes", rank.limit_bytes},
          {"reserved_bytes", rank.reserved_bytes},
          {"process_resident_bytes", rank.process_resident_bytes},
          {"process_peak_bytes", rank.process_peak_bytes},
          {"heads", ToJson(rank.heads)},
          {"shared", ToJson(rank.shared)},
          {"device_total_bytes", rank.device_total_bytes},
          {"device_free_bytes", rank.device_free_bytes}};
}

Json ToJson(const ServerMemory& memory) {
  Json ranks = Json::array();
  for (const ServerMemory::Rank& rank : memory.ranks) ranks.push_back(ToJson(rank));
  return {{"limit_bytes", memory.limit_bytes},
          {"reserved_bytes", memory.reserved_bytes},
          {"process_resident_bytes", memory.process_resident_bytes},
          {"process_peak_bytes", memory.process_peak_bytes},
          {"heads", ToJson(memory.heads)},
          {"shared", ToJson(memory.shared)},
          {"device_total_bytes", memory.device_total_bytes},
          {"device_free_bytes", memory.device_free_bytes},
          {"head_quota_bytes", memory.head_quota_bytes},
          {"staging_limit_bytes", memory.staging_limit_bytes},
          {"staging_reserved_bytes", memory.staging_reserved_bytes},
          {"row_streams", memory.row_streams},
          {"row_stream_bytes", memory.row_stream_bytes},
          {"ranks", ranks}};
}

Json ToJson(const Traffic& traffic) {
  return {{"bytes_sent", traffic.bytes_sent}, {"bytes_received", traffic.bytes_received}};
}

Json ToJson(const CheckpointInfo& info) {
  return {{"head", info.head},
          {"tag", info.tag},
          {"generation", info.generation},
          {"weight_version", info.weight_version},
          {"optimizer_steps", info.optimizer_steps},
          {"window_tokens", info.window_tokens},
          {"bytes", info.bytes},
          {"saved_at", std::chrono::duration<double>(info.saved_at.time_since_epoch()).count()}};
}

Json ToJson(const SavedCheckpoint& saved) {
  return {{"info", ToJson(saved.info)}, {"bytes_written", saved.bytes_written}, {"deleted", saved.deleted}};
}

Json ToJson(const DeletedCheckpoint& deleted) {
  return {{"info", ToJson(deleted.info)}, {"bytes_freed", deleted.bytes_freed}};
}

Json ToJson(const LoadedWeights& loaded) {
  return {{"weight_version", loaded.weight_version}, {"tensor", loaded.tensor}};
}

std::string TextOf(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

absl::StatusOr<std::vector<SessionMarks>> MarksOf(const char* const* texts, size_t count) {
  std::vector<SessionMarks> marks;
  if (count == 0) return marks;
  if (texts == nullptr) return NullArgument("marks");
  for (size_t i = 0; i < count; ++i) {
    if (texts[i] == nullptr) return NullArgument(absl::StrCat("marks[", i, "]"));
    auto parsed = ParseMarks(texts[i]);
    if (!parsed.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "marks[", i, "] is not what lossd_session_marks returns: ", parsed.status().message()));
    }
    marks.push_back(*std::move(parsed));
  }
  return marks;
}

}  // namespace lossd::c_api
