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
using kernels::DataType;
using nlohmann::json;

constexpr std::array kKeys = {
    "name",    "vocab_size", "hidden_size", "weight_dtype",   "logit_scale",
    "softcap", "frozen",     "weights",     "weights_tensor", "weights_bias_tensor"};

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

absl::Status ReadNumber(const json& entry, const char* key, float* number) {
  if (!entry.contains(key)) return absl::OkStatus();
  if (!entry.at(key).is_number()) return Invalid(entry, key, "a number");
  *number = entry.at(key).get<float>();
  return absl::OkStatus();
}

absl::Status ReadFrozen(const json& entry, HeadConfig* head) {
  if (!entry.contains("frozen")) return absl::OkStatus();
  if (!entry.at("frozen").is_boolean()) return Invalid(entry, "frozen", "true or false");
  if (entry.at("frozen").get<bool>()) head->weight_gradients = engine::WeightGradients::kFrozen;
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

absl::Status ReadType(const json& entry, DataType* type) {
  if (!entry.contains("weight_dtype")) return absl::OkStatus();
  for (const DataType known : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32}) {
    if (entry.at("weight_dtype") != kernels::Name(known)) continue;
    *type = known;
    return absl::OkStatus();
  }
  return Invalid(entry, "weight_dtype", "one of: bfloat16, float16, float32");
}

// A misspelt key must not be a default in disguise.
absl::Status CheckKeys(const json& entry) {
  for (const auto& [key, value] : entry.items()) {
    if (std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--config: a head has no '", key, "'; it has ", absl::StrJoin(kKeys, ", ")));
  }
  return absl::OkStatus();
}

absl::Status Read(const json& entry, HeadConfig* head) {
  head->name = entry.at("name").get<std::string>();
  absl::Status status;
  status.Update(ReadSize(entry, "vocab_size", &head->vocab_size));
  status.Update(ReadSize(entry, "hidden_size", &head->hidden_size));
  status.Update(CheckKeys(entry));
  status.Update(ReadType(entry, &head->weight_type));
  status.Update(ReadNumber(entry, "logit_scale", &head->logit_scale));
  status.Update(ReadNumber(entry, "softcap", &head->softcap));
  status.Update(ReadFrozen(entry, head));
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
