#include "server/head_entry.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd {
namespace {

using engine::HeadConfig;
using engine::OptimizerKind;
using kernels::DataType;
using nlohmann::json;

constexpr std::array<const char*, 14> kKeys = {
    "name",          "vocab_size", "hidden_size",    "weight_dtype",       "logit_scale",
    "softcap",       "frozen",     "bias",           "optimizer",          "master_weights",
    "double_buffer", "weights",    "weights_tensor", "weights_bias_tensor"};
constexpr std::array<const char*, 9> kOptimizerKeys = {
    "kind", "weight_decay", "momentum", "dampening", "nesterov", "beta1", "beta2", "eps", "maximize"};

// The library would make an integer of 2.5 and of true, and a number of true.
absl::Status Invalid(const json& entry, const char* key, const char* what_it_must_be) {
  return absl::InvalidArgumentError(absl::StrCat("--config: ", key, " of a head is ", entry.at(key).dump(),
                                                 "; it must be ", what_it_must_be));
}

absl::Status ReadSize(const json& entry, const char* key, int64_t* size) {
  if (!entry.at(key).is_number_integer()) return Invalid(entry, key, "an integer");
  *size = entry.at(key).get<int64_t>();
  return absl::OkStatus();
}

template <typename Number>
absl::Status ReadNumber(const json& entry, const char* key, Number* number) {
  if (!entry.contains(key)) return absl::OkStatus();
  if (!entry.at(key).is_number()) return Invalid(entry, key, "a number");
  *number = entry.at(key).get<Number>();
  return absl::OkStatus();
}

absl::Status ReadFlag(const json& entry, const char* key, bool* flag) {
  if (!entry.contains(key)) return absl::OkStatus();
  if (!entry.at(key).is_boolean()) return Invalid(entry, key, "true or false");
  *flag = entry.at(key).get<bool>();
  return absl::OkStatus();
}

absl::Status ReadFrozen(const json& entry, HeadConfig* head) {
  bool frozen = false;
  absl::Status status = ReadFlag(entry, "frozen", &frozen);
  if (frozen) head->weight_gradients = engine::WeightGradients::kFrozen;
  return status;
}

template <size_t kCount>
absl::Status CheckKeys(const json& entry, const std::array<const char*, kCount>& keys, const char* what) {
  // A misspelt key must not be a default in disguise.
  for (const auto& [key, value] : entry.items()) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--config: ", what, " has no '", key, "'; it has ", absl::StrJoin(keys, ", ")));
  }
  return absl::OkStatus();
}

absl::Status ReadText(const json& entry, const char* key, std::string* text) {
  if (!entry.contains(key)) return absl::OkStatus();
  if (!entry.at(key).is_string()) return Invalid(entry, key, "text");
  *text = entry.at(key).get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadWeights(const json& entry, HeadEntry* head) {
  absl::Status status = ReadText(entry, "weights", &head->weights);
  status.Update(ReadText(entry, "weights_tensor", &head->weights_tensor));
  status.Update(ReadText(entry, "weights_bias_tensor", &head->weights_bias_tensor));
  if (!status.ok() || !head->weights.empty()) return status;
  for (const char* key : {"weights", "weights_tensor", "weights_bias_tensor"}) {
    if (entry.contains(key)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--config: a head has '", key, "' and no file; 'weights' names one below --weights_dir"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadKind(const json& optimizer, engine::OptimizerConfig* config) {
  constexpr std::array<std::pair<const char*, OptimizerKind>, 3> kKinds = {
      {{"sgd", OptimizerKind::kSgd}, {"adam", OptimizerKind::kAdam}, {"adamw", OptimizerKind::kAdamW}}};
  for (const auto& [name, kind] : kKinds) {
    if (optimizer.at("kind") != name) continue;
    config->kind = kind;
    if (kind == OptimizerKind::kAdamW) config->weight_decay = 0.01;
    return absl::OkStatus();
  }
  return Invalid(optimizer, "kind", "one of: sgd, adam, adamw");
}

absl::Status ReadOptimizer(const json& entry, engine::OptimizerConfig* config) {
  if (!entry.contains("optimizer")) return absl::OkStatus();
  const json& optimizer = entry.at("optimizer");
  if (!optimizer.is_object() || !optimizer.contains("kind")) {
    return Invalid(entry, "optimizer", "an object with a kind: {\"kind\": \"adamw\"}");
  }
  absl::Status status = CheckKeys(optimizer, kOptimizerKeys, "an optimizer");
  status.Update(ReadKind(optimizer, config));
  status.Update(ReadNumber(optimizer, "weight_decay", &config->weight_decay));
  status.Update(ReadNumber(optimizer, "momentum", &config->momentum));
  status.Update(ReadNumber(optimizer, "dampening", &config->dampening));
  status.Update(ReadFlag(optimizer, "nesterov", &config->nesterov));
  status.Update(ReadNumber(optimizer, "beta1", &config->beta1));
  status.Update(ReadNumber(optimizer, "beta2", &config->beta2));
  status.Update(ReadNumber(optimizer, "eps", &config->eps));
  status.Update(ReadFlag(optimizer, "maximize", &config->maximize));
  return status;
}

absl::Status ReadType(const json& entry, DataType* type) {
  if (!entry.contains("weight_dtype")) return absl::OkStatus();
  for (const DataType known : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32}) {
    if (entry.at("weight_dtype") != kernels::Name(known)) continue;
    *type = known;
    return absl::OkStatus();
  }
  return Invalid(entry, "weight_dtype", "one of: bfloat16, float16, float32");
}

absl::Status Read(const json& entry, HeadConfig* head) {
  head->name = entry.at("name").get<std::string>();
  absl::Status status;
  status.Update(ReadSize(entry, "vocab_size", &head->vocab_size));
  status.Update(ReadSize(entry, "hidden_size", &head->hidden_size));
  status.Update(CheckKeys(entry, kKeys, "a head"));
  status.Update(ReadType(entry, &head->weight_type));
  status.Update(ReadNumber(entry, "logit_scale", &head->logit_scale));
  status.Update(ReadNumber(entry, "softcap", &head->softcap));
  status.Update(ReadFrozen(entry, head));
  status.Update(ReadFlag(entry, "bias", &head->bias));
  status.Update(ReadOptimizer(entry, &head->optimizer));
  status.Update(ReadFlag(entry, "master_weights", &head->master_weights));
  status.Update(ReadFlag(entry, "double_buffer", &head->double_buffer));
  return status;
}

}  // namespace

absl::StatusOr<HeadEntry> ReadHeadEntry(const json& entry) {
  HeadEntry head;
  try {
    absl::Status status = Read(entry, &head.config);
    status.Update(ReadWeights(entry, &head));
    if (!status.ok()) return status;
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("--config: a head needs name, vocab_size and hidden_size: ", error.what()));
  }
  if (absl::Status status = engine::Validate(head.config); !status.ok()) return status;
  return head;
}

}  // namespace lossd
