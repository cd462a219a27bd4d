#include "server/startup/head_entry.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd {
namespace {

using engine::OptimizerConfig;
using engine::OptimizerKind;
using kernels::DataType;
using nlohmann::json;

// Keys of a head beside those of its configuration.
constexpr char kWeights[] = "weights";
constexpr char kWeightsTensor[] = "weights_tensor";
constexpr char kWeightsBiasTensor[] = "weights_bias_tensor";

template <typename Fields>
std::vector<std::string> NamesOf(const Fields& fields) {
  std::vector<std::string> names;
  engine::ForEachField(fields, [&names](const auto& field) { names.emplace_back(field.name); });
  return names;
}

// The library would make an integer of 2.5 and of true, and a number of true.
absl::Status Invalid(const json& entry, const char* key, const char* what_it_must_be) {
  return absl::InvalidArgumentError(absl::StrCat("--config: ", key, " of a head is ", entry.at(key).dump(),
                                                 "; it must be ", what_it_must_be));
}

absl::Status Read(const json& entry, const char* key, std::string* text) {
  *text = entry.at(key).get<std::string>();
  return absl::OkStatus();
}

absl::Status Read(const json& entry, const char* key, int64_t* size) {
  // The sizes of a matrix must be said; this one may be left out.
  if (!entry.contains(key) && absl::string_view(key) == "held_bytes") return absl::OkStatus();
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

absl::Status Read(const json& entry, const char* key, float* number) {
  return ReadNumber(entry, key, number);
}
absl::Status Read(const json& entry, const char* key, double* number) {
  return ReadNumber(entry, key, number);
}

absl::Status Read(const json& entry, const char* key, bool* flag) {
  if (!entry.contains(key)) return absl::OkStatus();
  if (!entry.at(key).is_boolean()) return Invalid(entry, key, "true or false");
  *flag = entry.at(key).get<bool>();
  return absl::OkStatus();
}

absl::Status Read(const json& entry, const char* key, engine::WeightGradients* gradients) {
  bool frozen = false;
  absl::Status status = Read(entry, key, &frozen);
  if (frozen) *gradients = engine::WeightGradients::kFrozen;
  return status;
}

absl::Status CheckKeys(const json& entry, const std::vector<std::string>& keys, const char* what) {
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
  absl::Status status = ReadText(entry, kWeights, &head->weights);
  status.Update(ReadText(entry, kWeightsTensor, &head->weights_tensor));
  status.Update(ReadText(entry, kWeightsBiasTensor, &head->weights_bias_tensor));
  if (!status.ok() || !head->weights.empty()) return status;
  for (const char* key : {kWeights, kWeightsTensor, kWeightsBiasTensor}) {
    if (entry.contains(key)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--config: a head has '", key, "' and no file; 'weights' names one below --weights_dir"));
    }
  }
  return absl::OkStatus();
}

absl::Status Read(const json& optimizer, const char* key, OptimizerKind* kind) {
  constexpr std::array<std::pair<const char*, OptimizerKind>, 3> kKinds = {
      {{"sgd", OptimizerKind::kSgd}, {"adam", OptimizerKind::kAdam}, {"adamw", OptimizerKind::kAdamW}}};
  for (const auto& [name, known] : kKinds) {
    if (optimizer.at(key) != name) continue;
    *kind = known;
    return absl::OkStatus();
  }
  return Invalid(optimizer, key, "one of: sgd, adam, adamw");
}

absl::Status Read(const json& entry, const char* key, DataType* type) {
  if (!entry.contains(key)) return absl::OkStatus();
  for (const DataType known : kernels::kDataTypes) {
    if (entry.at(key) != kernels::Name(known)) continue;
    *type = known;
    return absl::OkStatus();
  }
  return Invalid(entry, key, "one of: bfloat16, float16, float32");
}

template <typename Fields, typename Config>
absl::Status ReadFields(const json& entry, const Fields& fields, Config* config);

absl::Status Read(const json& entry, const char* key, OptimizerConfig* config) {
  if (!entry.contains(key)) return absl::OkStatus();
  const json& optimizer = entry.at(key);
  if (!optimizer.is_object() || !optimizer.contains("kind")) {
    return Invalid(entry, key, "an object with a kind: {\"kind\": \"adamw\"}");
  }
  if (optimizer.at("kind") == "adamw") config->weight_decay = 0.01;  // unless the file says otherwise
  absl::Status status = CheckKeys(optimizer, NamesOf(engine::kOptimizerFields), "an optimizer");
  status.Update(ReadFields(optimizer, engine::kOptimizerFields, config));
  return status;
}

// Fields that are left out keep their values, where they may be.
template <typename Fields, typename Config>
absl::Status ReadFields(const json& entry, const Fields& fields, Config* config) {
  absl::Status status;
  engine::ForEachField(
      fields, [&](const auto& field) { status.Update(Read(entry, field.name, &(config->*field.value))); });
  return status;
}

}  // namespace

std::vector<std::string> HeadKeys() {
  std::vector<std::string> keys = NamesOf(engine::kHeadFields);
  keys.insert(keys.end(), {kWeights, kWeightsTensor, kWeightsBiasTensor});
  return keys;
}

absl::StatusOr<HeadEntry> ReadHeadEntry(const json& entry) {
  HeadEntry head;
  try {
    absl::Status status = ReadFields(entry, engine::kHeadFields, &head.config);
    status.Update(CheckKeys(entry, HeadKeys(), "a head"));
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
