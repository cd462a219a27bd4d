#include "server/startup/start_heads.h"

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/services/weight_loader.h"

namespace lossd {

absl::Status StartHeads(const std::vector<HeadEntry>& heads, const std::string& weights_dir,
                        const std::function<bool()>& cancelled, engine::Engine* engine) {
  const rpc::WeightLoader loader(engine, weights_dir);
  for (const HeadEntry& entry : heads) {
    // What a drain has left parked stays so.
    const auto parked = engine->FindParked(entry.config.name);
    if (parked.has_value() && parked->config == entry.config) continue;
    const auto head = engine->CreateHead(entry.config);
    if (!head.ok()) return head.status();
    if (entry.weights.empty() || (*head)->weight_version() != 0) continue;
    const auto loaded = loader.Load({.head = entry.config.name,
                                     .path = entry.weights,
                                     .tensor = entry.weights_tensor,
                                     .bias_tensor = entry.weights_bias_tensor},
                                    cancelled);
    if (loaded.ok()) continue;
    return absl::Status(loaded.status().code(),
                        absl::StrCat("weights of head ", entry.config.name, ": ", loaded.status().message()));
  }
  return absl::OkStatus();
}

}  // namespace lossd
