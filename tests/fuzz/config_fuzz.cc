// The configuration file, with its heads.
#include <nlohmann/json.hpp>
#include <string>

#include "server/startup/config_file.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

using engine::HeadConfig;
using engine::OptimizerConfig;
using engine::OptimizerKind;
using nlohmann::json;

json ToJson(const OptimizerConfig& optimizer) {
  const char* const kind = optimizer.kind == OptimizerKind::kSgd    ? "sgd"
                           : optimizer.kind == OptimizerKind::kAdam ? "adam"
                                                                    : "adamw";
  return {{"kind", kind},
          {"weight_decay", optimizer.weight_decay},
          {"momentum", optimizer.momentum},
          {"dampening", optimizer.dampening},
          {"nesterov", optimizer.nesterov},
          {"beta1", optimizer.beta1},
          {"beta2", optimizer.beta2},
          {"eps", optimizer.eps},
          {"maximize", optimizer.maximize}};
}

json ToJson(const HeadEntry& head) {
  const HeadConfig& config = head.config;
  json entry = {{"name", config.name},
                {"vocab_size", config.vocab_size},
                {"hidden_size", config.hidden_size},
                {"weight_dtype", kernels::Name(config.weight_type)},
                {"logit_scale", config.logit_scale},
                {"softcap", config.softcap},
                {"frozen", config.weight_gradients == engine::WeightGradients::kFrozen},
                {"bias", config.bias},
                {"master_weights", config.master_weights},
                {"double_buffer", config.double_buffer},
                {"fixed_segments", config.fixed_segments}};
  if (config.optimizer.kind != OptimizerKind::kNone) entry["optimizer"] = ToJson(config.optimizer);
  if (!head.weights.empty()) {
    entry["weights"] = head.weights;
    entry["weights_tensor"] = head.weights_tensor;
    entry["weights_bias_tensor"] = head.weights_bias_tensor;
  }
  return entry;
}

void CheckHead(const HeadEntry& head) {
  Expect(engine::Validate(head.config).ok(), "a head that is accepted is one that there can be");
  Expect(head.weights_tensor.empty() || !head.weights.empty(), "a tensor is one of a file");
  const auto again = ReadHeadEntry(ToJson(head));
  Expect(again.ok(), "what is written is accepted");
  Expect(again->config == head.config && again->weights == head.weights &&
             again->weights_tensor == head.weights_tensor &&
             again->weights_bias_tensor == head.weights_bias_tensor,
         "what is written is read again");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text = lossd::fuzz::TextOf(data, size);
  const auto set_flag = [&](const std::string& name, const nlohmann::json& value) {
    lossd::fuzz::Expect(name != "heads" && value.dump().size() <= 8 * size, "flags are parts of the file");
    return absl::OkStatus();
  };
  const auto heads = lossd::ParseConfig({text.data(), text.size()}, "lossd.json", set_flag);
  if (!heads.ok()) return 0;
  for (const lossd::HeadEntry& head : *heads) lossd::fuzz::CheckHead(head);
  return 0;
}
