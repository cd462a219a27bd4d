#include "client/tools/lossctl/head_info.h"

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/tools/lossctl/context.h"
#include "client/tools/lossctl/head_options.h"
#include "client/tools/lossctl/table.h"
#include "nlohmann/json.hpp"

namespace lossd::tools {
namespace {

std::string DescribeWeights(const HeadInfo& head) {
  std::string text = head.weight_version == 0 ? "none" : absl::StrCat("version ", head.weight_version);
  if (head.optimizer_steps > 0) {
    absl::StrAppend(&text, ", ", head.optimizer_steps, head.optimizer_steps == 1 ? " step" : " steps");
    if (head.steps_since_checkpoint.has_value()) {
      absl::StrAppend(&text, " (", *head.steps_since_checkpoint, " not saved)");
    }
  }
  if (head.staged_rows == 0) return text;
  return absl::StrCat(text, ", next ", head.staged_rows * 100 / head.config.vocab_size, " %");
}

// What is not plain about each, for people.

std::vector<std::string> LossParts(const HeadConfig& config) {
  std::vector<std::string> parts;
  if (config.logit_scale != 1) parts.push_back(absl::StrCat("logit scale ", config.logit_scale));
  if (config.softcap != 0) parts.push_back(absl::StrCat("softcap ", config.softcap));
  if (config.bias) parts.emplace_back("bias");
  if (config.has_class_weights) parts.emplace_back("class weights");
  if (config.fixed_segments) parts.emplace_back("fixed segments");
  if (config.held_bytes > 0) parts.push_back(absl::StrCat("holds ", config.held_bytes, " bytes"));
  return parts;
}

std::vector<std::string> GradientParts(const HeadConfig& config) {
  std::vector<std::string> parts;
  if (config.double_buffer) parts.emplace_back("two gradients");
  return parts;
}

std::vector<std::string> OptimizerParts(const HeadConfig& config) {
  std::vector<std::string> parts;
  if (config.optimizer.kind != OptimizerKind::kNone) parts.push_back(DescribeOptimizer(config.optimizer));
  if (config.master_weights) parts.emplace_back("fp32 master");
  return parts;
}

nlohmann::ordered_json StepsSinceCheckpointOrNull(const HeadInfo& head) {
  if (!head.steps_since_checkpoint.has_value()) return nullptr;
  return *head.steps_since_checkpoint;
}

std::string DescribeWindow(const HeadInfo& head) {
  if (head.config.frozen) return "none (frozen)";
  std::vector<std::string> parts = {std::string(Name(head.window_state)),
                                    absl::StrCat("generation ", head.generation)};
  for (std::string& part : GradientParts(head.config)) parts.push_back(std::move(part));
  return absl::StrJoin(parts, ", ");
}

std::string DescribeMemory(const HeadInfo& head) {
  if (head.parked_bytes > 0) return absl::StrCat("parked, ", FormatBytes(head.parked_bytes));
  return FormatBytes(TotalBytes(head.memory));
}

// Null without one.
nlohmann::ordered_json OptimizerToJson(const OptimizerConfig& optimizer) {
  if (optimizer.kind == OptimizerKind::kNone) return nullptr;
  nlohmann::ordered_json json = {{"kind", Name(optimizer.kind)},
                                 {"weight_decay", optimizer.weight_decay.value_or(0)}};
  if (optimizer.kind == OptimizerKind::kSgd) {
    json["momentum"] = optimizer.momentum;
    json["dampening"] = optimizer.dampening;
    json["nesterov"] = optimizer.nesterov;
  } else {
    json["beta1"] = optimizer.beta1;
    json["beta2"] = optimizer.beta2;
    json["eps"] = optimizer.eps;
  }
  json["maximize"] = optimizer.maximize;
  return json;
}

nlohmann::ordered_json FlushIdOrNull(const HeadInfo& head) {
  return head.flush_id.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(head.flush_id);
}

// Below the table, since an id would make it too wide: which flush holds which window, and what ends it.
std::string DescribeFlushes(const std::vector<HeadInfo>& heads) {
  std::string text;
  for (const HeadInfo& head : heads) {
    if (head.flush_id.empty()) continue;
    absl::StrAppend(&text, "Flush ", head.flush_id, " has held the window of '", head.config.name, "' for ",
                    FormatSeconds(head.flush_seconds), ". If its client is gone: lossctl flush ",
                    head.config.name, " --abort\n");
  }
  return text.empty() ? "" : absl::StrCat("\n", text);
}

}  // namespace

nlohmann::ordered_json MemoryToJson(const std::vector<MemoryItem>& items) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  for (const MemoryItem& item : items) json[item.purpose] = item.bytes;
  return json;
}

int64_t TotalBytes(const std::vector<MemoryItem>& items) {
  return std::accumulate(items.begin(), items.end(), int64_t{0},
                         [](int64_t sum, const MemoryItem& item) { return sum + item.bytes; });
}

nlohmann::ordered_json HeadToJson(const HeadInfo& head) {
  nlohmann::ordered_json sessions = nlohmann::ordered_json::array();
  for (const SessionMarks& session : head.sessions) {
    nlohmann::ordered_json lanes = nlohmann::ordered_json::array();
    for (const LaneMarks& lane : session.lanes) {
      lanes.push_back({{"lane", lane.lane}, {"accepted", lane.accepted}, {"applied", lane.applied}});
    }
    sessions.push_back({{"session_id", session.session_id}, {"lanes", lanes}});
  }
  return {{"name", head.config.name},
          {"vocab_size", head.config.vocab_size},
          {"hidden_size", head.config.hidden_size},
          {"dtype", Name(head.config.weight_type)},
          {"logit_scale", head.config.logit_scale},
          {"softcap", head.config.softcap},
          {"frozen", head.config.frozen},
          {"bias", head.config.bias},
          {"class_weights", head.config.has_class_weights},
          {"optimizer", OptimizerToJson(head.config.optimizer)},
          {"optimizer_steps", head.optimizer_steps},
          {"master_weights", head.config.master_weights},
          {"double_buffer", head.config.double_buffer},
          {"fixed_segments", head.config.fixed_segments},
          {"held_bytes", head.config.held_bytes},
          {"weight_version", head.weight_version},
          {"staged_rows", head.staged_rows},
          {"generation", head.generation},
          {"window_state", Name(head.window_state)},
          {"window_tokens", head.window_tokens},
          {"flush_id", FlushIdOrNull(head)},
          {"flush_seconds", head.flush_seconds},
          {"open_sessions", head.open_sessions},
          {"sessions", sessions},
          {"memory", MemoryToJson(head.memory)},
          {"parked_bytes", head.parked_bytes},
          {"steps_since_checkpoint", StepsSinceCheckpointOrNull(head)}};
}

std::string HeadsTable(const std::vector<HeadInfo>& heads) {
  if (heads.empty()) {
    return "No heads. Create one with 'lossctl head create' or 'lossctl head load --create'.\n";
  }
  Table table({{"HEAD"},
               {"VOCAB", Align::kRight},
               {"HIDDEN", Align::kRight},
               {"DTYPE"},
               {"WEIGHTS", Align::kRight},
               {"WINDOW"},
               {"TOKENS", Align::kRight},
               {"SESSIONS", Align::kRight},
               {"MEMORY", Align::kRight},
               {"LOSS"},
               {"OPTIMIZER"}});
  for (const HeadInfo& head : heads) {
    table.AddRow({head.config.name, WithCommas(head.config.vocab_size), WithCommas(head.config.hidden_size),
                  Name(head.config.weight_type), DescribeWeights(head), DescribeWindow(head),
                  WithCommas(static_cast<int64_t>(head.window_tokens)), WithCommas(head.open_sessions),
                  DescribeMemory(head), absl::StrJoin(LossParts(head.config), ", "),
                  absl::StrJoin(OptimizerParts(head.config), ", ")});
  }
  return absl::StrCat(table.Render(), DescribeFlushes(heads));
}

std::string DescribeOptions(const HeadConfig& config, absl::string_view before) {
  std::vector<std::string> parts = LossParts(config);
  if (config.frozen) parts.emplace_back("frozen");
  for (const auto& more : {OptimizerParts(config), GradientParts(config)}) {
    parts.insert(parts.end(), more.begin(), more.end());
  }
  return parts.empty() ? "" : absl::StrCat(before, absl::StrJoin(parts, ", "));
}

std::string DescribeShape(int64_t rows, int64_t columns, DataType type) {
  return absl::StrCat(WithCommas(rows), " x ", WithCommas(columns), " ", Name(type));
}

}  // namespace lossd::tools
